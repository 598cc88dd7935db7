"""Losing data honestly (rules 4 to 6): what a bookie lost is *unknown*, to readers and to recoveries."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Done, Info, ListEntries, ListEntriesAnswer, Stop
from client_aio import LedgerState
from tests.support.cluster import BookieProcess, Cluster
from tests.support.links import Links
from tests.support.replicas import WAIT_S, everything, flip, stop_of, stored

if TYPE_CHECKING:
    from pathlib import Path

PRECIOUS = b"an entry that was acknowledged, and that two of three bookies cannot give"


async def fill(client: client_aio.Client, count: int = 50) -> int:
    """Write a ledger on three bookies; each holds all of it."""
    async with client.create_ledger(ack_quorum=3) as ledger:
        await ledger.add_entries(b"entry %d" % entry_id for entry_id in range(count))
    return ledger.ledger_id


async def ledgers_of(client: client_aio.Client, bookie_id: str) -> dict[str, object]:
    """Return what the bookie's figures say of its ledgers."""
    connection = await client._context.pool.get(bookie_id)
    _, body = await connection.call(Info(), Done, timeout_s=WAIT_S)
    figures: dict[str, object] = json.loads(bytes(body))["storage"]["ledgers"]
    return figures


async def is_damaged(client: client_aio.Client, bookie_id: str, ledger_id: int) -> bool:
    connection = await client._context.pool.get(bookie_id)
    answer, _ = await connection.call(ListEntries(ledger_id, 0), ListEntriesAnswer, timeout_s=WAIT_S)
    return answer.is_damaged


async def missing(client: client_aio.Client, ledger_id: int) -> dict[str, tuple[int | None, bool]]:
    """Give, by bookie, how many entries it lacks, and whether it lost any."""
    replicas = await client.ledger_replicas(ledger_id)
    return {replica.bookie_id: (replica.entries_missing, replica.is_damaged) for replica in replicas}


async def stop(bookie: BookieProcess, how: str) -> None:
    """Stop a bookie by that method of its process."""
    await getattr(bookie, how)()


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_a_corrupt_entry_never_truncates_a_ledger_at_recovery(tmp_path: Path, how: str) -> None:
    """One copy is damaged, one was never made, and the one that is left does not answer at first.

    Found by the replay after a SIGKILL, and by the read itself after a clean end. What is known before the
    fence keeps the recovery from fencing.
    """
    is_known = how == "kill"
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=60, add_timeout_s=60) as writer,
        links.connect("recoverer") as recoverer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger = await writer.create_ledger()
        damaged, sound, without = ledger.metadata.last_fragment.bookies
        await ledger.add_entries([b"x"] * 10)
        links["writer", without].requests.block()
        assert await ledger.add_entry(PRECIOUS) == 10
        await ledger.abort()
        await fill(client)  # the group with the entry is not the last one, which could be a torn tail
        await stop(cluster[damaged], how)
        flip(cluster[damaged].directory, PRECIOUS)
        await cluster[damaged].start()
        await links["recoverer", sound].cut()
        why = "Nothing was done" if is_known else "entry 10 "
        with pytest.raises(client_aio.LedgerRecoveryError, match=why) as caught:
            await recoverer.open_ledger(ledger.ledger_id, recover=True)
        assert damaged in str(caught.value)
        assert sound in str(caught.value)
        state = (await client.ledger_metadata(ledger.ledger_id)).state
        assert state is (LedgerState.OPEN if is_known else LedgerState.IN_RECOVERY)
        await links["recoverer", sound].restore()
        async with recoverer.open_ledger(ledger.ledger_id, recover=True) as reader:
            assert reader.last_add_confirmed == 10
        assert (await everything(client, ledger.ledger_id))[10] == (10, PRECIOUS)
        # The recovery wrote it back, also over the damaged copy; it waited for two of three.
        async with asyncio.timeout(WAIT_S):
            while await stop_of(client, damaged, ledger.ledger_id, 10) is not Stop.END:
                pass
        assert (await stored(client, damaged, ledger.ledger_id, range(10, 11)))[10].payload == PRECIOUS


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_a_damaged_entry_is_unknown_for_good_and_read_elsewhere(tmp_path: Path, how: str) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id, other_id = await fill(client), await fill(client)
        bookie_id = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[0]
        assert await stop_of(client, bookie_id, ledger_id, 50) is Stop.NO_SUCH_ENTRY
        await stop(cluster[bookie_id], how)
        path = cluster[bookie_id].directory
        flip_first(path, b"entry 31entry 32")
        await cluster[bookie_id].start()
        assert await stop_of(client, bookie_id, ledger_id, 31) is Stop.UNKNOWN
        # It lists all that it had, so whatever else it does not have, it never had.
        assert await stop_of(client, bookie_id, ledger_id, 50) is Stop.NO_SUCH_ENTRY
        assert await stop_of(client, bookie_id, other_id, 50) is Stop.NO_SUCH_ENTRY
        for one in (ledger_id, other_id):
            assert [data for _, data in await everything(client, one)] == [b"entry %d" % n for n in range(50)]
        await cluster[bookie_id].kill()
        await cluster[bookie_id].start()
        assert await is_damaged(client, bookie_id, ledger_id)
        assert not await is_damaged(client, bookie_id, other_id)
        assert (await ledgers_of(client, bookie_id))["damaged"] == 1
        assert await stop_of(client, bookie_id, ledger_id, 31) is Stop.UNKNOWN
        assert await stop_of(client, bookie_id, ledger_id, 50) is Stop.NO_SUCH_ENTRY


@pytest.mark.parametrize("how", ["kill", "end"])
async def test_a_damaged_entry_on_each_of_two_bookies_keeps_nobody_from_a_takeover(
    tmp_path: Path, how: str
) -> None:
    """Two of three bookies, each with one damaged entry, find the end together, and take adds again."""
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        assert await ledger.add_entries([b"entry %d" % n for n in range(20)]) == (0, 19)
        assert await ledger.add_entry(PRECIOUS) == 20
        assert await ledger.add_entries([b"entry %d" % n for n in range(21, 50)]) == (21, 49)
        await fill(client)  # acknowledged by all three, behind the ledger's entries
        await ledger.abort()
        hurt = {"b1": b"entry 7entry 8", "b2": b"entry 31entry 32"}
        for name, payload in hurt.items():
            await stop(cluster[name], how)
            flip_first(cluster[name].directory, payload)
            await cluster[name].start()
        for name, entry_id in (("b1", 7), ("b2", 31)):
            assert await stop_of(client, name, ledger.ledger_id, entry_id) is Stop.UNKNOWN
            assert await is_damaged(client, name, ledger.ledger_id)
        await cluster["b3"].kill()
        async with client.open_ledger(ledger.ledger_id, recover=True) as reader:
            assert reader.last_add_confirmed == 49
        entries = [data for _, data in await everything(client, ledger.ledger_id)]
        assert entries == [PRECIOUS if n == 20 else b"entry %d" % n for n in range(50)]


def flip_first(directory: Path, payload: bytes) -> None:
    """Turn a bit of the first copy of a payload only: that of the first ledger which has it."""
    for path in sorted(directory.glob("*.segment")):
        with path.open("r+b") as file:
            at = file.read().find(payload)
            if at >= 0:
                file.seek(at)
                file.write(bytes([payload[0] ^ 1]))
                return
    raise AssertionError(f"{payload!r} is in no segment of {directory}")


async def test_what_a_bookie_lost_does_not_tell_where_a_ledger_ends(tmp_path: Path) -> None:
    """One bookie has lost all, one never had anything, and the one that knows the LAC does not answer."""
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=60, add_timeout_s=60) as writer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger = await writer.create_ledger()
        damaged, sound, without = ledger.metadata.last_fragment.bookies
        links["writer", without].requests.block()
        for number in range(10):
            assert await ledger.add_entry(b"entry %d" % number) == number
        await ledger.abort()
        await cluster[damaged].end()
        for path in cluster[damaged].directory.iterdir():
            if path.name != "cookie.json":
                path.unlink()
        await cluster[damaged].start()
        await cluster[sound].kill()
        reader = await client.open_ledger(ledger.ledger_id)
        with pytest.raises(client_aio.BookieUnavailableError, match=f"{damaged} has lost data of the ledger"):
            await reader.read_last_add_confirmed()
        assert await reader.try_read_last_add_confirmed() == -1
        await cluster[sound].start()
        assert await reader.read_last_add_confirmed() == 8


async def test_a_missing_segment_marks_the_ledgers_in_its_index(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        lost_id = await fill(client)
        await cluster["b1"].end()  # which seals the segment
        segments = list(cluster["b1"].directory.glob("*.segment"))
        await cluster["b1"].start()
        await client._context.pool.directory.refresh()
        kept_id = await fill(client)
        await cluster["b1"].end()
        for segment in segments:
            segment.unlink()
        await cluster["b1"].start()
        assert await stop_of(client, "b1", lost_id, 0) is Stop.UNKNOWN
        assert await stop_of(client, "b1", kept_id, 0) is Stop.END
        assert await stop_of(client, "b1", kept_id, 50) is Stop.NO_SUCH_ENTRY
        assert await ledgers_of(client, "b1") == (await ledgers_of(client, "b1")) | {
            "damaged": 1, "all_damaged": False,
        }  # fmt: skip
        assert len(await everything(client, lost_id)) == 50
        assert await missing(client, lost_id) == {"b1": (50, True), "b2": (0, False), "b3": (0, False)}
        # Repaired in its place, the bookie has all of it again.
        await client.repair_ledger(lost_id, replace="b1", by="b1")
        assert len(await stored(client, "b1", lost_id, range(50))) == 50
        assert await missing(client, lost_id) == {"b1": (0, False), "b2": (0, False), "b3": (0, False)}


async def test_a_bookie_that_cannot_say_what_it_lost_takes_no_ordinary_adds(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(ack_quorum=3)
        await ledger.add_entries([b"x"] * 10)
        bookie_id = ledger.metadata.last_fragment.bookies[0]
        await cluster[bookie_id].end()
        for path in cluster[bookie_id].directory.glob("*.segment"):
            path.unlink()
            path.with_suffix(".index").unlink()
        await cluster[bookie_id].start()
        assert (await ledgers_of(client, bookie_id))["all_damaged"] is True
        assert await stop_of(client, bookie_id, ledger.ledger_id, 0) is Stop.UNKNOWN
        # It may have held a fence: nothing is acknowledged by it any more in a ledger of that time.
        await asyncio.wait_for(ledger.add_entries([b"y"] * 10), WAIT_S)
        assert bookie_id not in ledger.metadata.last_fragment.bookies
        await ledger.close()
        assert len(await everything(client, ledger.ledger_id)) == 20
        # Ledgers whose ids were given out later cannot have lost anything.
        assert client.bookies[bookie_id].is_writable
        async with client_aio.connect(cluster.uri) as other:
            ids = [await fill(other) for _ in range(5)]
        bookies = {name for one in ids for name in (await client.ledger_metadata(one)).last_fragment.bookies}
        assert bookie_id in bookies


async def test_an_empty_directory_under_an_old_id_has_forgotten_its_fences(tmp_path: Path) -> None:
    """It does not start; if it did, the writer of the past could go on at it and one other bookie."""
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, explicit_lac_delay_s=60) as writer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger = await writer.create_ledger()
        await ledger.add_entries([b"x"] * 10)
        forgetful, _, cut_off = ledger.metadata.last_fragment.bookies
        await cluster[cut_off].kill()  # so that it is not fenced
        async with client.open_ledger(ledger.ledger_id, recover=True) as reader:
            assert reader.last_add_confirmed == 9
        await cluster[forgetful].kill()
        shutil.rmtree(cluster[forgetful].directory)
        with pytest.raises(RuntimeError, match=f"knows bookie {forgetful}, but .* holds no cookie"):
            await cluster[forgetful].start()
        await cluster[cut_off].start()
        with pytest.raises(client_aio.BookKeeperError):
            await asyncio.wait_for(ledger.add_entry(b"late"), WAIT_S)
        # What is lost comes back under another id.
        spare = cluster.bookies["b4"] = BookieProcess("b4", tmp_path, cluster.uri)
        await spare.start()
        await client.repair_ledger(ledger.ledger_id, replace=forgetful, by=spare.bookie_id)
        await cluster[cut_off].kill()
        assert len(await everything(client, ledger.ledger_id)) == 10
