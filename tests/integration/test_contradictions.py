"""One file of a real bookie is damaged, or of the past, between two lives. Then the bookie is asked for all.

Each acknowledged entry is given or is *unknown*. A ledger that was fenced or deleted takes no add. The bookie
tells of the loss in its log, and keeps the files that hold data.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Status, Stop
from tests.support.cluster import Cluster
from tests.support.rawclient import RawClient
from tests.support.smallstorage import variables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cluster import BookieProcess

SEGMENT_BYTES = 8 * 1024 * 1024
"""Of every bookie here: a life fills a part of one segment, and each state is copied and looked through."""
ONE = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}


@dataclass
class Gold:
    """The entries, fences and deletions that were acknowledged."""

    ledgers: dict[int, list[bytes]] = field(default_factory=dict)
    fenced: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)

    async def grow(self, uri: str) -> None:
        """Write ledgers in small groups, fence one under its writer, and delete one."""
        async with client_aio.connect(uri) as client:
            for number in range(4):
                writer = await client.create_ledger(**ONE)
                payloads = [b"%d-%d " % (writer.ledger_id, entry) * 60 for entry in range(25)]
                for payload in payloads:
                    await writer.add_entry(payload)
                self.ledgers[writer.ledger_id] = payloads
                if number == 0:
                    await client.open_ledger(writer.ledger_id, recover=True)
                    await writer.abort()
                    self.fenced.append(writer.ledger_id)
                else:
                    await writer.close()
                if number == 1:
                    await client.delete_ledger(writer.ledger_id)
                    del self.ledgers[writer.ledger_id]
                    self.deleted.append(writer.ledger_id)


def with_groups(directory: Path) -> list[Path]:
    """Return the segments that were written to, oldest first: another one is ready ahead of them."""
    segments = sorted(directory.glob("*.segment"))
    return [one for one in segments if one.read_bytes()[4096:].rstrip(b"\0")]


def newest(directory: Path) -> Path:
    """Return the segment that was written to last."""
    return with_groups(directory)[-1]


def at(share: float, change: Callable[[bytearray, int], object]) -> Callable[[Path], None]:
    """Return a damage in the page at that share of the used part of the newest segment."""

    def damage(directory: Path) -> None:
        segment = newest(directory)
        data = bytearray(segment.read_bytes())
        used = len(data.rstrip(b"\0"))
        change(data, int(used * share) // 4096 * 4096)
        segment.write_bytes(data)

    return damage


def _truncate(data: bytearray, page: int) -> None:
    del data[page:]


def _zero(data: bytearray, page: int) -> None:
    data[page:] = bytes(len(data) - page)


def _swap(data: bytearray, page: int) -> None:
    one, other = slice(page, page + 4096), slice(page - 8192, page - 4096)
    data[one], data[other] = data[other], data[one]


def _replace(name: str, by: Path) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        target = newest(directory).name if name == "segment" else name
        shutil.copy(newest(by) if name == "segment" else by / name, directory / target)

    return damage


def _remove_witness(directory: Path) -> None:
    (directory / "witness").unlink()


async def answers(bookie: BookieProcess, gold: Gold) -> list[str]:
    """Ask a running bookie for all, and try adds to fenced and deleted ledgers; returns the faults."""
    wrong = []
    async with await RawClient.connect(bookie.addresses[0]) as raw:
        for ledger_id, payloads in gold.ledgers.items():
            first = 0
            while first < len(payloads):
                found = await raw.call(Read(ledger_id, NO_TERM, 0, first, len(payloads) - 1, 1, 1 << 20))
                assert isinstance(found.message, ReadAnswer)
                wrong += [
                    f"{ledger_id}/{one} is wrong" for one, data in found.entries if data != payloads[one]
                ]
                if found.message.stop == Stop.END:
                    break
                first = found.message.stop_entry + 1
                if found.message.stop != Stop.UNKNOWN:
                    wrong.append(f"{ledger_id}/{first - 1} is denied")
        for ledger_id in gold.fenced + gold.deleted:
            added = await raw.add(ledger_id, 10**6, [b"late"])
            if added.status is Status.OK:
                wrong.append(f"{ledger_id} takes adds")
    return wrong


def keep(bookie: BookieProcess, state: Path) -> None:
    """Copy the directory of a bookie that does not run, and the metadata store of that moment."""
    shutil.copytree(bookie.directory, state)
    (state / "store").mkdir()
    for file in bookie.directory.parent.glob("metadata.db*"):
        shutil.copy(file, state / "store")


def bring_back(bookie: BookieProcess, state: Path) -> None:
    """Put a state in place of the bookie's directory and of the metadata store.

    Both must be of one moment. With a store of later, the age proves that the directory was set back, and
    this hides whether the damage is found.
    """
    shutil.rmtree(bookie.directory)
    shutil.copytree(state, bookie.directory)
    for file in bookie.directory.parent.glob("metadata.db*"):
        file.unlink()
    for file in (bookie.directory / "store").iterdir():
        shutil.copy(file, bookie.directory.parent)
    shutil.rmtree(bookie.directory / "store")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables({"segment_bytes": SEGMENT_BYTES}).items():
        monkeypatch.setenv(name, value)


async def lives(tmp_path: Path) -> tuple[Cluster, Gold]:
    """Have a bookie live three times; the copies are `old`, `killed` and `stopped`."""
    cluster, gold = Cluster(tmp_path, bookies=1), Gold()
    bookie = cluster["b1"]
    for copy in ("old", "killed"):
        await bookie.start()
        await gold.grow(cluster.uri)
        await (bookie.end() if copy == "old" else bookie.kill())
        keep(bookie, tmp_path / copy)
    await bookie.start()
    await bookie.end()
    keep(bookie, tmp_path / "stopped")
    return cluster, gold


async def another(tmp_path: Path) -> Path:
    """Return the directory of a killed bookie of another cluster."""
    (tmp_path / "other").mkdir()
    cluster = Cluster(tmp_path / "other", bookies=1)
    await cluster["b1"].start()
    await Gold().grow(cluster.uri)
    await cluster["b1"].kill()
    return cluster["b1"].directory


async def test_no_damage_between_two_lives_makes_a_bookie_deny_what_it_acknowledged(tmp_path: Path) -> None:
    cluster, gold = await lives(tmp_path)
    other, old, bookie = await another(tmp_path), tmp_path / "old", cluster["b1"]
    damages: dict[str, tuple[str, Callable[[Path], None]]] = {
        "truncated": ("killed", at(0.5, _truncate)),
        "truncated behind most": ("killed", at(0.98, _truncate)),
        "zeroed from there on": ("killed", at(0.5, _zero)),
        "the last page is zeroed": ("killed", at(0.999, _zero)),
        "pages swapped": ("killed", at(0.98, _swap)),
        "an older checkpoint": ("killed", _replace("checkpoint", old)),
        "an older checkpoint after a clean stop": ("stopped", _replace("checkpoint", old)),
        "a checkpoint of another bookie": ("killed", _replace("checkpoint", other)),
        "a segment of another bookie": ("killed", _replace("segment", other)),
        "a witness of another bookie": ("killed", _replace("witness", other)),
        "no witness": ("killed", _remove_witness),
    }
    wrong = {}
    for name, (state, damage) in damages.items():
        bring_back(bookie, tmp_path / state)
        damage(bookie.directory)
        segments = {one.name for one in with_groups(bookie.directory)}
        bookie.log.unlink()
        await bookie.start()
        found = await answers(bookie, gold)
        told = bookie.log.read_text()
        if "damage was found on the disk" not in told:
            found.append("nothing is told")
        if "was set back: ledgers" in told:
            found.append("the directory counts as one of the past")
        if "older" in name and not segments <= {one.name for one in bookie.directory.glob("*.segment")}:
            found.append("a segment was removed")
        await bookie.kill()
        if found:
            wrong[name] = found[:5]
    assert not wrong


async def test_an_untouched_directory_of_a_killed_bookie_is_right(tmp_path: Path) -> None:
    """The check itself: all is given, nothing is marked, and fences and deletions hold."""
    cluster, gold = await lives(tmp_path)
    bookie = cluster["b1"]
    bring_back(bookie, tmp_path / "killed")
    bookie.log.unlink()
    await bookie.start()
    async with await RawClient.connect(bookie.addresses[0]) as raw:
        for ledger_id, payloads in gold.ledgers.items():
            found = await raw.call(Read(ledger_id, NO_TERM, 0, 0, len(payloads) - 1, 1, 1 << 20))
            assert [data for _, data in found.entries] == payloads
    assert await answers(bookie, gold) == []
    assert "damage" not in bookie.log.read_text()
    await bookie.kill()
