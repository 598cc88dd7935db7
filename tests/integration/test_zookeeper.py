"""A cluster on real ZooKeeper servers, which are killed under it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from metadata.access.bookies import available_bookies
from metadata.backends.uri import open_store
from metadata.ids import KEY_AVAILABLE
from tests.support.cluster import Cluster
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from pathlib import Path

    from metadata.store import MetadataStore
    from tests.support.zookeeper import ZooKeeperEnsemble

WAIT_S = 40


def uri_of(addresses: str, tmp_path: Path) -> str:
    return f"zk://{addresses}/{tmp_path.name}"


async def contents(reader: client_aio.LedgerReader) -> list[bytes]:
    return [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]


async def test_ledgers_go_on_when_the_ensembles_leader_is_killed(
    tmp_path: Path, zookeeper_ensemble: ZooKeeperEnsemble
) -> None:
    uri = uri_of(zookeeper_ensemble.addresses, tmp_path)
    async with Cluster(tmp_path, bookies=4, uri=uri) as cluster, client_aio.connect(uri) as client:
        try:
            async with client.create_ledger() as ledger:
                await ledger.add_entries(b"%d" % n for n in range(100))
                await asyncio.to_thread(zookeeper_ensemble.leader().kill)
                assert await asyncio.wait_for(ledger.add_entry(b"100"), WAIT_S) == 100
                await cluster[ledger.metadata.last_fragment.bookies[0]].kill()
                count = 101
                async with asyncio.timeout(WAIT_S):
                    # The ensemble change waits for the election, and for nothing longer.
                    while len(ledger.metadata.fragments) < 2:
                        assert await ledger.add_entry(b"%d" % count) == count
                        count += 1
            async with client_aio.connect(uri) as other:
                reader = await other.open_ledger(ledger.ledger_id)
                assert await contents(reader) == [b"%d" % n for n in range(count)]
        finally:
            await asyncio.to_thread(zookeeper_ensemble.revive)


async def test_an_unbounded_ledger_is_taken_over_and_followed_when_the_ensembles_leader_is_killed(
    tmp_path: Path, zookeeper_ensemble: ZooKeeperEnsemble
) -> None:
    uri = uri_of(zookeeper_ensemble.addresses, tmp_path)
    async with Cluster(tmp_path, uri=uri), client_aio.connect(uri) as one, client_aio.connect(uri) as other:
        try:
            ledger = await one.open_unbounded_ledger("payments")
            await ledger.add_entries(b"%d" % n for n in range(10))
            async with aclosing(other.read_unbounded_ledger("payments")) as entries, asyncio.timeout(WAIT_S):
                assert [(await anext(entries)).data for _ in range(10)] == [b"%d" % n for n in range(10)]
                await asyncio.to_thread(zookeeper_ensemble.leader().kill)
                ledger = await other.open_unbounded_ledger("payments")
                assert (ledger.term, await ledger.add_entry(b"10")) == (2, 10)
                assert (await anext(entries)).data == b"10"
                assert await ledger.roll() == 11
                await ledger.add_entry(b"11")
                await ledger.close(seal=True)
                assert [entry.data async for entry in entries] == [b"11"]
        finally:
            await asyncio.to_thread(zookeeper_ensemble.revive)


async def test_open_ledgers_are_written_and_read_while_the_metadata_store_is_away(tmp_path: Path) -> None:
    server = ZooKeeperServer(tmp_path / "zookeeper")
    uri = uri_of(server.address, tmp_path)
    await asyncio.to_thread(server.start)
    try:
        async with Cluster(tmp_path, uri=uri), client_aio.connect(uri) as client:
            async with client.create_ledger() as ledger:
                reader = await client.open_ledger(ledger.ledger_id)
                await asyncio.to_thread(server.kill)
                async with asyncio.timeout(WAIT_S):
                    for n in range(200):
                        await ledger.add_entry(b"%d" % n)
                    async with aclosing(reader.tail()) as entries:
                        seen = [(await anext(entries)).data for _ in range(200)]
                assert seen == [b"%d" % n for n in range(200)]
                await asyncio.to_thread(server.start)
            assert (await client.ledger_metadata(ledger.ledger_id)).last_entry == 199
    finally:
        await asyncio.to_thread(server.kill)


async def test_a_log_is_written_while_the_metadata_store_is_away_and_rolled_when_it_is_back(
    tmp_path: Path,
) -> None:
    server = ZooKeeperServer(tmp_path / "zookeeper")
    uri = uri_of(server.address, tmp_path)
    await asyncio.to_thread(server.start)
    try:
        async with Cluster(tmp_path, uri=uri), client_aio.connect(uri) as client:
            async with client.open_log("a", roll_entries=10) as log, asyncio.timeout(WAIT_S):
                count = 0
                while log.rolls < 3:
                    await log.append(b"%d" % count)
                    count += 1
                await asyncio.to_thread(server.kill)
                for _ in range(100):
                    await log.append(b"%d" % count)
                    count += 1
                rolls = log.rolls
                assert rolls <= 4  # to the ledger that had been listed ahead
                await asyncio.to_thread(server.start)
                while log.rolls < rolls + 2:
                    await log.append(b"%d" % count)
                    count += 1
            async with client.open_log("a") as again:
                await again.append(b"%d" % count)
            read = [record.data async for record in client.read_log("a")]
            assert read == [b"%d" % n for n in range(count + 1)]
            rows = (await client.log_metadata("a")).rows
            assert len(await client.truncate_log("a", (rows[-1].id, 0))) == len(rows) - 1
            await client.delete_log("a")
            assert [ledger_id async for ledger_id in client.list_ledgers()] == []
    finally:
        await asyncio.to_thread(server.kill)


async def wait_until(store: MetadataStore, bookie_id: str, *, registered: bool) -> None:
    async with asyncio.timeout(WAIT_S), aclosing(store.watch(KEY_AVAILABLE)) as changes:
        async for _ in changes:
            if (bookie_id in await available_bookies(store)) == registered:
                return


async def test_a_bookie_registers_again_after_its_session_expired(
    tmp_path: Path, zookeeper_ensemble: ZooKeeperEnsemble
) -> None:
    uri = uri_of(zookeeper_ensemble.addresses, tmp_path)
    async with Cluster(tmp_path, bookies=1, uri=uri) as cluster, await open_store(uri) as store:
        await wait_until(store, "b1", registered=True)
        cluster["b1"].stop()
        await wait_until(store, "b1", registered=False)
        resumed_at = time.monotonic()
        cluster["b1"].resume()
        await wait_until(store, "b1", registered=True)
        print(f"registered again {time.monotonic() - resumed_at:.2f} s after it could run again")
        async with (
            client_aio.connect(uri) as client,
            client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as ledger,
        ):
            await asyncio.wait_for(ledger.add_entry(b"served"), WAIT_S)


async def test_bookies_go_on_where_the_servers_are_set_back(tmp_path: Path) -> None:
    """Without a restart of a bookie: they had seen transactions that the servers have forgotten."""

    async def make_ledger() -> int:
        async with client_aio.connect(uri) as client, client.create_ledger() as ledger:
            await ledger.add_entries(b"%d" % n for n in range(10))
        return ledger.ledger_id

    async def are_registered() -> None:
        """Wait for the bookies that run: the copy has their former registrations."""
        present = {name: each.addresses for name, each in cluster.bookies.items()}
        async with await open_store(uri) as store, aclosing(store.watch(KEY_AVAILABLE)) as changes:
            async for _ in changes:
                found = await available_bookies(store)
                if {name: each.addresses for name, each in found.items()} == present:
                    return

    with ZooKeeperServer(tmp_path / "zookeeper") as server:
        uri = uri_of(server.address, tmp_path)
        async with Cluster(tmp_path, uri=uri) as cluster, asyncio.timeout(4 * WAIT_S):
            before = await make_ledger()
            await asyncio.to_thread(server.copy_data)
            lost = await make_ledger()
            await cluster.end()
            await cluster.start()
            await asyncio.to_thread(server.set_back)
            await are_registered()
            new = await make_ledger()
            async with client_aio.connect(uri) as client:
                for ledger_id in (before, new):
                    reader = await client.open_ledger(ledger_id)
                    assert await contents(reader) == [b"%d" % n for n in range(10)]
                with pytest.raises(client_aio.NoSuchLedgerError):
                    await client.open_ledger(lost)
