"""Ledgers, end to end: real bookie processes, real sockets, real fsyncs, real SIGKILLs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio import LedgerState
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 30


def payload(entry_id: int) -> bytes:
    return f"entry {entry_id} ".encode() * (entry_id % 7)


async def contents(reader: client_aio.LedgerReader) -> list[tuple[int, bytes]]:
    return [tuple(entry) async for entry in reader.read(0, reader.last_add_confirmed)]


@pytest.mark.parametrize("shape", [(3, 3, 2), (1, 1, 1), (3, 2, 2), (3, 2, 1)])
async def test_what_was_acknowledged_is_read_back(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    expected = [(entry_id, payload(entry_id)) for entry_id in range(1000)]
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(
            ensemble_size=shape[0],
            write_quorum=shape[1],
            ack_quorum=shape[2],
            custom_metadata={"app": b"test"},
        ) as ledger:
            done: list[int] = []
            futures = [ledger.add_entry(data) for _, data in expected[:500]]
            for future in futures:
                future.add_done_callback(lambda future: done.append(future.result()))
            assert await ledger.add_entries(data for _, data in expected[500:]) == (500, 999)
            assert done == list(range(500))
            assert ledger.last_add_confirmed == ledger.last_add_pushed == 999
            assert ledger.length == sum(len(data) for _, data in expected)
            assert [tuple(entry) async for entry in ledger.read(3, 9)] == expected[3:10]
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(ledger.ledger_id)
            assert reader.is_closed
            assert reader.metadata.custom == {"app": b"test"}
            assert await contents(reader) == expected
            assert [entry async for entry in reader.read(0, -1)] == []
            batches = [batch async for batch in reader.read_batches(10, 989)]
            assert [tuple(entry) for batch in batches for entry in batch] == expected[10:990]
            with pytest.raises(client_aio.NoSuchEntryError, match="1000"):
                reader.read(0, 1000)
            assert [ledger_id async for ledger_id in other.list_ledgers()] == [ledger.ledger_id]
            await other.delete_ledger(ledger.ledger_id)
            with pytest.raises(client_aio.NoSuchLedgerError):
                await other.open_ledger(ledger.ledger_id)


async def test_an_empty_ledger_is_legal(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            pass
        reader = await client.open_ledger(ledger.ledger_id)
        assert (reader.last_add_confirmed, reader.length, await contents(reader)) == (-1, 0, [])


async def test_writing_goes_on_over_a_killed_bookie_in_a_new_ensemble(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            first = ledger.metadata.last_fragment.bookies
            await ledger.add_entries(payload(entry_id) for entry_id in range(100))
            futures = [ledger.add_entry(payload(entry_id)) for entry_id in range(100, 200)]
            await cluster[first[1]].kill()
            assert await asyncio.gather(*futures) == list(range(100, 200))
            count = 200
            async with asyncio.timeout(WAIT_S):
                while len(ledger.metadata.fragments) == 1:  # acknowledged by two until another is found
                    count = await ledger.add_entry(payload(count)) + 1
            await ledger.add_entries(payload(entry_id) for entry_id in range(count, count + 100))
            fragments = ledger.metadata.fragments
        assert [fragment.bookies[0::2] for fragment in fragments] == [first[0::2]] * 2
        assert first[1] not in fragments[-1].bookies
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(ledger.ledger_id)
            assert reader.metadata.fragments == fragments
            assert await contents(reader) == [(number, payload(number)) for number in range(count + 100)]


async def test_without_a_spare_writing_goes_on_at_the_ack_quorum_and_below_it_fails(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        await ledger.add_entry(b"three")
        await cluster["b1"].kill()
        await asyncio.wait_for(ledger.add_entry(b"two"), WAIT_S)
        await cluster["b2"].kill()
        with pytest.raises(client_aio.NotEnoughBookiesError, match="b1"):
            await asyncio.wait_for(ledger.add_entry(b"one"), WAIT_S)
        with pytest.raises(client_aio.NotEnoughBookiesError):
            await ledger.close()
        await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
        reader = await client.open_ledger(ledger.ledger_id, recover=True)
        assert [data for _, data in await contents(reader)][:2] == [b"three", b"two"]


async def test_a_bookie_that_comes_back_takes_its_seat_again(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, replacement_retry_s=0.1) as client,
        client.create_ledger() as ledger,
    ):
        await ledger.add_entry(b"one")
        await cluster["b2"].kill()
        await asyncio.wait_for(ledger.add_entry(b"two"), WAIT_S)
        await cluster["b2"].start()
        async with asyncio.timeout(WAIT_S):
            while ledger.failed_bookies:
                await ledger.add_entry(b"more")
        await cluster["b1"].kill()  # what follows is acknowledged only if b2 stores again
        await asyncio.wait_for(ledger.add_entry(b"last"), WAIT_S)
        assert len(ledger.metadata.fragments) == 1


async def test_a_dead_writers_ledger_is_recovered_with_everything_acknowledged(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        for entry_id in range(50):
            await ledger.add_entry(payload(entry_id))
        await ledger.abort()
        assert (await client.ledger_metadata(ledger.ledger_id)).state is LedgerState.OPEN
        await cluster["b3"].kill()
        reader = await client.open_ledger(ledger.ledger_id, recover=True)
        assert reader.metadata.last_entry == 49
        assert await contents(reader) == [(entry_id, payload(entry_id)) for entry_id in range(50)]
        again = await client.open_ledger(ledger.ledger_id, recover=True)
        assert again.metadata == reader.metadata


async def test_a_displaced_writer_acknowledges_nothing_more(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entry(b"mine")
        reader = await other.open_ledger(ledger.ledger_id, recover=True)
        with pytest.raises(client_aio.LedgerFencedError):
            await asyncio.wait_for(ledger.add_entry(b"too late"), WAIT_S)
        with pytest.raises(client_aio.LedgerFencedError):
            await ledger.close()
        assert await contents(reader) == [(0, b"mine")]


async def test_recovery_says_which_bookies_are_missing_and_works_when_they_are_back(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        await ledger.add_entry(b"kept")
        await ledger.abort()
        await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())
        with pytest.raises(client_aio.LedgerRecoveryError, match=r"missing: (?=.*b1 )(?=.*b2 )"):
            await client.open_ledger(ledger.ledger_id, recover=True)
        await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
        reader = await client.open_ledger(ledger.ledger_id, recover=True)
        assert await contents(reader) == [(0, b"kept")]


async def test_a_tailing_reader_follows_ensemble_changes_and_ends_when_the_ledger_closes(
    tmp_path: Path,
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger()
        reader = await other.open_ledger(ledger.ledger_id)
        seen: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

        async def follow() -> None:
            async with aclosing(reader.tail()) as entries:
                async for entry in entries:
                    seen.put_nowait(tuple(entry))

        following = asyncio.create_task(follow())
        try:
            for entry_id in range(20):
                await ledger.add_entry(payload(entry_id))
                if entry_id == 10:
                    await cluster[ledger.metadata.last_fragment.bookies[0]].kill()
                # An idle writer's last entry is seen without another one behind it.
                assert await asyncio.wait_for(seen.get(), WAIT_S) == (entry_id, payload(entry_id))
            await ledger.close()
            await asyncio.wait_for(following, WAIT_S)
        finally:
            following.cancel()


async def test_a_damaged_replica_is_passed_over_and_reported(tmp_path: Path) -> None:
    data = b"precious" * 1000
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(ack_quorum=3) as ledger:
            await ledger.add_entry(data)
        for bookie_id in ("b1", "b2"):
            bookie = cluster[bookie_id]
            await bookie.kill()
            damaged = 0
            for path in bookie.directory.rglob("*"):
                if path.is_file() and data in (stored := path.read_bytes()):
                    path.write_bytes(stored.replace(data, data[:-1] + b"?"))
                    damaged += 1
            assert damaged == 1
            await bookie.start()
        for _ in range(3):  # each bookie is asked first once
            reader = await client.open_ledger(ledger.ledger_id)
            assert await contents(reader) == [(0, data)]


async def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        for shape, words in [
            ((3, 4, 2), "write_quorum 4"),
            ((3, 3, 0), "ack_quorum 0"),
            ((2, 2, 3), "ack_quorum 3"),
        ]:
            with pytest.raises(client_aio.InvalidArgumentError, match=words):
                client.create_ledger(ensemble_size=shape[0], write_quorum=shape[1], ack_quorum=shape[2])
        with pytest.raises(client_aio.NotEnoughBookiesError, match="5 bookies are needed"):
            await client.create_ledger(ensemble_size=5)
        async with client.create_ledger() as ledger:
            with pytest.raises(client_aio.EntryTooLargeError, match="4,194,305"):
                ledger.add_entry(bytes(4 * 1024 * 1024 + 1))
            with pytest.raises(client_aio.InvalidArgumentError, match="str"):
                ledger.add_entry("text")
            assert await ledger.add_entry(bytes(4 * 1024 * 1024)) == 0
        with pytest.raises(client_aio.LedgerClosedError):
            await ledger.add_entry(b"late")


async def test_a_closed_client_ends_its_tailing_readers_and_aborts_its_writers(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        client = await client_aio.connect(cluster.uri)
        ledger = await client.create_ledger()
        reader = await client.open_ledger(ledger.ledger_id)
        entries = reader.tail()
        await ledger.add_entry(b"one")
        assert (await anext(entries)).data == b"one"
        waiting = asyncio.create_task(anext(entries))
        await asyncio.sleep(0)  # it begins to wait
        await client.close()
        with pytest.raises(client_aio.BookKeeperError):
            await asyncio.wait_for(waiting, WAIT_S)
        with pytest.raises(client_aio.WriterAbortedError):
            await ledger.add_entry(b"two")
        with pytest.raises(client_aio.ClientClosedError):
            client.create_ledger()


async def test_a_bookie_that_lags_is_left_behind_and_a_full_window_is_no_lag(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, lag_bytes_max=100_000, connect_timeout_s=0.5) as client,
        client.create_ledger() as ledger,
    ):
        # Ten times the bound in flight at once, to each of them.
        await asyncio.gather(*[ledger.add_entry(bytes(10_000)) for _ in range(100)])
        assert ledger.failed_bookies == []
        stopped = ledger.metadata.last_fragment.bookies[0]
        cluster[stopped].stop()
        async with asyncio.timeout(WAIT_S):
            while not ledger.failed_bookies:
                await asyncio.gather(*[ledger.add_entry(bytes(1000)) for _ in range(10)])
        assert ledger.failed_bookies == [stopped]
        await ledger.add_entry(b"and on")
        cluster[stopped].resume()


async def test_a_client_whose_closing_was_cancelled_is_closed_by_the_next_call(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        before = asyncio.all_tasks()
        client = await client_aio.connect(cluster.uri)
        ledger = await client.create_ledger()
        await ledger.add_entry(b"0")
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await client.close()
        assert asyncio.all_tasks() <= before


async def test_a_bookie_that_takes_adds_again_is_found_without_being_told_of(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        directory = client._context.pool.directory
        # As a client sees it that connected while the bookie was full: nothing tells it of the change.
        full = {
            name: replace(record, is_writable=name != "b3") for name, record in directory.available.items()
        }
        directory._available = full
        async with client.create_ledger(ensemble_size=3) as ledger:
            assert await ledger.add_entry(b"x") == 0
