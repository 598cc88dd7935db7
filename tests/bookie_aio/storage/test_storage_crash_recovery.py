"""Restart: what was acknowledged is there, whatever a crash left of what was not."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c

from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.ledgers.checkpoint import CHECKPOINT_MAGIC
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import index_name, segment_name, spare_name
from bookie_aio.wire.blocks import LacStatement, statement_crc
from bookie_aio.wire.messages import Stop
from metadata.errors import CorruptRecordError
from tests.support.storage import SMALL, FaultyDisk, Store, copy_as_a_crash_leaves_it, lose_claims, make_block

if TYPE_CHECKING:
    from pathlib import Path

LEDGERS = (1, 2, 3)


@dataclass
class Acknowledged:
    """What has been acknowledged."""

    entries: dict[tuple[int, int], bytes] = field(default_factory=dict)
    terms: dict[int, int] = field(default_factory=dict)
    lacs: dict[int, int] = field(default_factory=dict)
    locks: dict[int, bytes] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)

    def copy(self) -> Acknowledged:
        return Acknowledged(
            dict(self.entries), dict(self.terms), dict(self.lacs), dict(self.locks), set(self.deleted)
        )


async def assert_holds_exactly(store: Store, acknowledged: Acknowledged) -> None:
    """Check everything the engine says about the ledgers of these tests."""
    assert {one for one in range(100) if store.engine.is_deleted(one)} == acknowledged.deleted
    assert set(store.engine.list_ledgers(0, 100)[0]) <= set(LEDGERS)
    for ledger_id in LEDGERS:
        assert store.engine.lock(ledger_id) == acknowledged.locks.get(ledger_id, b"")
        assert store.engine.term(ledger_id) == acknowledged.terms.get(ledger_id, 0)
        assert not store.engine.is_damaged(ledger_id)
        statement = store.engine.statement(ledger_id)
        assert (statement.lac if statement else -1) == acknowledged.lacs.get(ledger_id, -1)
        mine = {entry: data for (owner, entry), data in acknowledged.entries.items() if owner == ledger_id}
        last = max(mine, default=-1)
        assert store.engine.last_entry(ledger_id) == last
        found: dict[int, bytes] = {}
        at = 0
        while at <= last + 1:
            part, stop, at = await store.read(ledger_id, at, last + 1)
            found |= part
            assert stop == Stop.NO_SUCH_ENTRY
            at += 1
        assert found == mine


async def act(store: Store, number: int, acknowledged: Acknowledged) -> None:
    """Do the n-th thing of a fixed story, alone in its group, and note it when it is acknowledged."""
    ledger_id = LEDGERS[number % 3]
    if number % 7 == 3:
        await store.fence(ledger_id, number)
        acknowledged.terms[ledger_id] = number
        return
    if number % 7 == 5:
        lac = 100_000 + number
        statement = LacStatement(0, lac, -1, statement_crc(ledger_id, 0, lac, -1), bytes(32))
        await store.wait(lambda done: store.engine.append_statement(ledger_id, statement, done))
        acknowledged.lacs[ledger_id] = lac
        return
    if number % 14 == 6:
        gone = 50 + number
        await store.wait(lambda done: store.engine.append_tombstone(gone, done))
        acknowledged.deleted.add(gone)
        return
    if number % 14 == 13:
        lock = bytes([number]) * 32
        await store.wait(lambda done: store.engine.append_lock(ledger_id, lock, done))
        acknowledged.locks[ledger_id] = lock
        return
    first = number * 4
    payloads = [b"%d:%d " % (ledger_id, entry) * 5 for entry in range(first, first + 3)]
    await store.add(make_block(ledger_id, first, payloads))
    acknowledged.entries |= {(ledger_id, first + n): data for n, data in enumerate(payloads)}
    acknowledged.lacs[ledger_id] = max(acknowledged.lacs.get(ledger_id, -1), first - 1)


async def fill(store: Store, count: int, acknowledged: Acknowledged) -> None:
    """Store much in ledger 1, so that segments are sealed."""
    for number in range(count):
        first = 200 + number * 10
        payloads = [b"fill %d" % entry * 20 for entry in range(first, first + 10)]
        await store.add(make_block(1, first, payloads))
        acknowledged.entries |= {(1, first + n): data for n, data in enumerate(payloads)}
        acknowledged.lacs[1] = max(acknowledged.lacs.get(1, -1), first - 1)


async def test_a_clean_close_leaves_nothing_to_replay(tmp_path: Path) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    for number in range(20):
        await act(store, number, acknowledged)
    await fill(store, 100, acknowledged)
    await store.close()
    names = os.listdir(tmp_path / "b1")
    segments = sorted(name[:16] for name in names if name.endswith(".segment"))
    assert segments == sorted(name[:16] for name in names if name.endswith(".index"))
    for _ in range(3):
        store = await Store.open(tmp_path / "b1")
        assert not store.engine.notes
        await assert_holds_exactly(store, acknowledged)
        await store.close()
    assert sorted(n[:16] for n in os.listdir(tmp_path / "b1") if n.endswith(".segment")) == segments


@pytest.mark.parametrize("fillers", [0, 60, 200])
async def test_a_crash_loses_nothing_that_was_acknowledged(tmp_path: Path, fillers: int) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    for number in range(20):
        await act(store, number, acknowledged)
    await fill(store, fillers, acknowledged)
    path = tmp_path / "b1"
    for life in range(4):  # crash, restart, crash again with nothing new, or with a little more
        path = await store.crash_into(tmp_path / f"crash{life}")
        again = await Store.open(path)
        await assert_holds_exactly(again, acknowledged)
        if life % 2:
            await act(again, 20 + life, acknowledged)
        await store.close()
        store = again
    await store.close()


async def test_a_restart_reads_what_was_written_not_what_was_reserved(tmp_path: Path) -> None:
    reserved = 256 * 1024 * 1024
    config = StorageConfig(segment_bytes=reserved, space=SMALL.space)
    store, acknowledged = await Store.open(tmp_path / "b1", config), Acknowledged()
    for number in range(20):
        await act(store, number, acknowledged)
    await store.settled()
    path = tmp_path / "crash"
    path.mkdir()
    for name in set(os.listdir(tmp_path / "b1")) - {"lock"}:
        # The same file, since a copy would turn what was reserved into data.
        (path / name).hardlink_to(tmp_path / "b1" / name)
    disk = FaultyDisk()
    again = await Store.open(path, config, disk)
    assert disk.bytes_read < reserved // 10
    await assert_holds_exactly(again, acknowledged)
    await again.close()
    await store.close()


def last_group(path: Path) -> tuple[Path, int, int]:
    """Return the segment written last, and where its last group begins and ends."""
    for name in sorted((n for n in os.listdir(path) if n.endswith(".segment")), reverse=True):
        data = (path / name).read_bytes()
        header = form.parse_segment_header(data)
        start, end = 0, form.DATA_OFFSET
        while group := form.peek_group_header(data[end:], header, end, len(data)):
            start, end = end, group.end
        if start:
            return path / name, start, end
    raise AssertionError("no group anywhere")


GARBAGE = random.Random(5).randbytes(128 * 1024)


@pytest.mark.parametrize("what_is_behind", ["zeros", "garbage", "old data"])
@pytest.mark.parametrize("last", [6, 7, 10, 12, 13])  # tombstone, block, fence, statement with code, lock
async def test_a_torn_last_group_was_never_acknowledged(
    tmp_path: Path, last: int, what_is_behind: str
) -> None:
    store, before = await Store.open(tmp_path / "b1"), Acknowledged()
    await store.settled()
    for number in range(last):
        await act(store, number, before)
    after = before.copy()
    await act(store, last, after)
    whole = lose_claims(await store.crash_into(tmp_path / "whole"))
    await store.close()
    segment, start, end = last_group(whole)
    data = segment.read_bytes()
    old = data[form.DATA_OFFSET : start] * 50  # groups of this very segment, at other offsets
    behind = {"zeros": bytes(len(data)), "garbage": GARBAGE, "old data": old}
    first = start + 7 * list(behind).index(what_is_behind)
    for cut in sorted({*range(first, end, 21), start, start + 1, end - 1, end}):
        rest = behind[what_is_behind][: len(data) - cut]
        case = tmp_path / f"cut{cut}"
        shutil.copytree(whole, case)
        (case / segment.name).write_bytes(data[:cut] + rest)
        is_whole = (data[:cut] + rest)[start:end] == data[start:end]
        expected = after if is_whole else before
        torn = await Store.open(case)
        await assert_holds_exactly(torn, expected)
        twice = await Store.open(await torn.crash_into(tmp_path / f"twice{cut}"))
        await assert_holds_exactly(twice, expected)
        await torn.close()
        await twice.close()


async def test_a_crash_while_the_tail_is_rewritten_loses_nothing(tmp_path: Path) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    await store.settled()
    for number in range(3):
        await act(store, number, acknowledged)
    before = lose_claims(await store.crash_into(tmp_path / "before"))
    await store.close()
    shutil.copytree(before, tmp_path / "restarted")
    again = await Store.open(tmp_path / "restarted")
    after = await again.crash_into(tmp_path / "after")
    segment, start, end = last_group(after)
    await again.close()
    data = segment.read_bytes()
    for cut in range(start, end, 5):
        # The rewritten group came this far. Of the restart, only the checkpoint before it had happened yet.
        case = tmp_path / f"cut{cut}"
        shutil.copytree(before, case)
        shutil.copy(after / form.CHECKPOINT, case)
        (case / segment.name).write_bytes(data[:cut] + bytes(len(data) - cut))
        twice = await Store.open(case)
        await assert_holds_exactly(twice, acknowledged)
        assert not twice.engine.notes
        await twice.close()


async def test_a_crash_between_an_index_and_a_checkpoint_keeps_the_fences(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store, acknowledged = await Store.open(tmp_path / "b1", disk=disk), Acknowledged()
    await store.settled()
    store.engine._allocator._is_closed = True  # or preparing a segment would write a checkpoint too

    def crash(what: str, path: str) -> None:
        if what == "rename" and path.endswith(index_name(1)):
            copy_as_a_crash_leaves_it(store.path, tmp_path / "crashed")

    disk.on_step = crash
    await act(store, 3, acknowledged)
    await fill(store, 25, acknowledged)
    await store.settled()
    await store.close()
    (tmp_path / "crashed" / "checkpoint.new").write_bytes(b"half a checkpo")
    again = await Store.open(tmp_path / "crashed")
    # An index on disk means that its segment is not replayed, so the checkpoint has to know the fence.
    assert again.engine.term(1) == 3
    await again.close()
    assert not (tmp_path / "crashed" / "checkpoint.new").exists()


async def test_a_segment_without_an_index_is_replayed_and_sealed(tmp_path: Path) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    for number in range(20):
        await act(store, number, acknowledged)
    await fill(store, 200, acknowledged)
    await store.close()
    for name in os.listdir(tmp_path / "b1"):
        if name.endswith(".index"):
            (tmp_path / "b1" / name).unlink()
    again = await Store.open(tmp_path / "b1")
    await assert_holds_exactly(again, acknowledged)
    await again.settled()
    segments = again.engine._segments.by_id.items()
    assert all(segment.index is None for number, segment in segments if number < 5)
    await again.close()


async def test_a_segment_that_was_created_and_never_used_is_removed(tmp_path: Path) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    await store.settled()
    await act(store, 0, acknowledged)
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    assert (crashed / segment_name(2)).exists()
    (crashed / segment_name(3)).write_bytes(b"")  # the crash came while it was created
    again = await Store.open(crashed)
    await assert_holds_exactly(again, acknowledged)
    await again.settled()
    assert not (crashed / segment_name(2)).exists()
    assert not (crashed / segment_name(3)).exists()
    assert not again.engine.notes
    await again.close()


@pytest.mark.parametrize("is_used", [True, False])
async def test_a_damaged_header_is_an_interrupted_creation_only_before_zeros(
    tmp_path: Path, is_used: bool
) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    await act(store, 0, acknowledged)
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    content = bytearray(SMALL.segment_bytes)  # a start may have made the segment without listing it
    content[8] = 1  # no header
    if is_used:
        content[-1] = 1  # a group, or a part of one
    path = crashed / segment_name(3)
    path.write_bytes(content)
    again = await Store.open(crashed)
    await again.settled()
    assert again.engine.marking.concerns_all is is_used
    assert path.with_name(path.name + ".damaged").exists() is is_used
    assert not path.exists()
    await again.close()


async def test_the_id_of_a_spare_file_is_one_that_was_used(tmp_path: Path) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    await act(store, 0, acknowledged)
    await store.close()
    spare = tmp_path / "b1" / spare_name(9)  # of a segment that nothing else says anything of
    spare.write_bytes(bytes(SMALL.segment_bytes))
    (tmp_path / "b1" / "checkpoint").unlink()
    again = await Store.open(tmp_path / "b1")
    await again.settled()
    assert again.engine._journal.segment.segment_id > 9
    await again.close()


@pytest.mark.parametrize(("name", "at"), [("checkpoint", 8), (segment_name(1), 8)])
async def test_another_format_version_is_refused(tmp_path: Path, name: str, at: int) -> None:
    store, acknowledged = await Store.open(tmp_path / "b1"), Acknowledged()
    await act(store, 0, acknowledged)
    await store.close()
    path = tmp_path / "b1" / name
    data = bytearray(path.read_bytes())
    data[at] = 9
    covered = len(data) if name == "checkpoint" else 56
    data[4:8] = crc32c(data[8:covered]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match="version 9"):
        await Store.open(tmp_path / "b1")


async def test_a_checkpoint_of_another_version_is_refused_though_its_head_is_shorter(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.close()
    covered = (3).to_bytes(4, "little") + bytes(36)
    data = CHECKPOINT_MAGIC + crc32c(covered).to_bytes(4, "little") + covered
    (tmp_path / "b1" / "checkpoint").write_bytes(data)
    with pytest.raises(CorruptRecordError, match="version 3"):
        await Store.open(tmp_path / "b1")
    assert (tmp_path / "b1" / "checkpoint").read_bytes() == data
