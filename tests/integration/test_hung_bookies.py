"""Bookies that hang, connections that were forgotten, and clients that stand still: nobody waits for them.

The clients here have timeouts far beyond what a test may take. A call that ends in time has waited for none.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Info, Op
from tests.support.cluster import Cluster
from tests.support.healing import state_is
from tests.support.links import Links
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client_aio import Client, LedgerWriter

WAIT_S = 60.0
PATIENT = {
    "add_timeout_s": 500.0,
    "read_timeout_s": 500.0,
    "connect_timeout_s": 500.0,
    "metadata_timeout_s": 60.0,
}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as cluster:
        yield cluster


async def written(client: Client, **options: int) -> LedgerWriter:
    """Return the writer of a new ledger with one entry."""
    writer = await client.create_ledger(**options)
    await writer.add_entry(b"0")
    return writer


@pytest.mark.parametrize("is_connected", [False, True], ids=["fresh", "connected"])
async def test_a_recovery_goes_on_with_the_bookies_that_answer(cluster: Cluster, is_connected: bool) -> None:
    patient = client_aio.ClientConfig(**PATIENT, ping_timeout_s=500.0)
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, config=patient) as other,
        asyncio.timeout(WAIT_S),
    ):
        writer = await written(client)
        if is_connected:
            await (await other.open_ledger(writer.ledger_id)).close()
        cluster["b2"].stop()
        try:
            reader = await other.open_ledger(writer.ledger_id, recover=True)
            assert (reader.is_closed, reader.last_add_confirmed) == (True, 0)
            assert [entry.data async for entry in reader.read(0, 0)] == [b"0"]
            await writer.abort()
        finally:
            cluster["b2"].resume()


async def test_a_deletion_does_not_wait_for_a_bookie_that_hangs(cluster: Cluster) -> None:
    patient = client_aio.ClientConfig(**PATIENT, ping_timeout_s=500.0)
    async with client_aio.connect(cluster.uri, config=patient) as client, asyncio.timeout(WAIT_S):
        ledgers = []
        for _ in range(5):
            writer = await written(client)
            await writer.close()
            ledgers.append(writer.ledger_id)
        cluster["b2"].stop()
        try:
            for ledger_id in ledgers:
                await client.delete_ledger(ledger_id)
        finally:
            cluster["b2"].resume()


async def test_a_force_goes_on_without_a_bookie_that_hangs(cluster: Cluster) -> None:
    """Its answers are asked for no more often than they come, and count when they come."""
    patient = client_aio.ClientConfig(**PATIENT, ping_timeout_s=500.0)
    async with client_aio.connect(cluster.uri, config=patient) as client, asyncio.timeout(WAIT_S):
        writer = await client.create_ledger(deferred_sync=True)
        await writer.add_entry(b"0")
        await writer.force()
        cluster["b2"].stop()
        try:
            for entry_id in range(1, 20):
                await writer.add_entry(b"x")
                assert await writer.force() == entry_id
            hung = await client._context.pool.get("b2")
            assert sum(request[3] == Op.FORCE for request in hung._requests.values()) <= 1
        finally:
            cluster["b2"].resume()
        cluster["b1"].stop()  # Now b2 is needed.
        try:
            await writer.add_entry(b"x")
            assert await writer.force() == 20
            assert (await writer.close()).last_entry == 20
        finally:
            cluster["b1"].resume()


async def test_an_unbounded_ledger_is_left_without_a_bookie_that_hangs(cluster: Cluster) -> None:
    patient = client_aio.ClientConfig(**PATIENT, ping_timeout_s=500.0)
    async with client_aio.connect(cluster.uri, config=patient) as client, asyncio.timeout(WAIT_S):
        await client.create_unbounded_ledger("left")
        writer = await client.open_unbounded_ledger("left")
        await writer.add_entry(b"0")
        cluster["b2"].stop()
        try:
            await writer.close()
            async with client.open_unbounded_ledger("left") as following:
                assert following.last_add_confirmed == 0
                await following.add_entry(b"1")
        finally:
            cluster["b2"].resume()


async def test_tails_go_on_behind_a_minority_that_hangs(tmp_path: Path) -> None:
    patient = client_aio.ClientConfig(**PATIENT, ping_timeout_s=500.0)
    async with (
        Cluster(tmp_path, bookies=5) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, config=patient) as other,
        asyncio.timeout(WAIT_S),
    ):
        writers = [await written(client, ensemble_size=5, write_quorum=5, ack_quorum=3) for _ in range(5)]
        tails = [(await other.open_ledger(writer.ledger_id)).tail() for writer in writers]
        try:
            for tail in tails:
                assert (await anext(tail)).data == b"0"
            waiting = [asyncio.ensure_future(anext(tail)) for tail in tails]
            await asyncio.sleep(0)
            for name in ("b1", "b2"):  # every ledger is watched at two neighbours of the five
                cluster[name].stop()
            for writer in writers:
                await writer.add_entry(b"1")
            assert [entry.data for entry in await asyncio.gather(*waiting)] == [b"1"] * 5
        finally:
            for name in ("b1", "b2"):
                cluster[name].resume()
            for tail in tails:
                await tail.aclose()


async def test_connections_that_were_forgotten_on_the_way_hold_nothing_up(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("writer", **PATIENT, ping_timeout_s=1.0) as client,
        links.connect("reader", **PATIENT, ping_timeout_s=1.0) as other,
        asyncio.timeout(WAIT_S),
    ):
        writer = await written(client)
        reader = await other.open_ledger(writer.ledger_id)
        async with aclosing(reader.tail()) as tail:
            assert (await anext(tail)).data == b"0"
            waiting = asyncio.ensure_future(anext(tail))
            await asyncio.sleep(0)
            for name in ("writer", "reader"):
                for link in links.of(name).values():
                    link.forget()
            assert await writer.add_entry(b"1") == 1
            assert (await waiting).data == b"1"
        for link in links.of("reader").values():
            link.forget()
        assert [entry.data async for entry in reader.read(0, 1)] == [b"0", b"1"]
        await writer.close()


@pytest.mark.parametrize("is_cut_off", [False, True], ids=["stopped", "cut off"])
async def test_a_writer_waits_for_no_bookie_that_hangs_in_order_to_roll_or_to_replace_another(
    cluster: Cluster, is_cut_off: bool
) -> None:
    """The hanging bookie has a seat, and is looked for all the time; the writer goes on without it."""
    async with (
        Links(cluster.uri) as links,
        links.connect("writer", **PATIENT) as client,
        asyncio.timeout(WAIT_S / 2),
    ):
        if is_cut_off:
            links["writer", "b1"].black_hole()
        else:
            cluster["b1"].stop()
        writer = await client.open_unbounded_ledger("u")
        await writer.add_entry(b"0")
        assert await writer.roll() == 1
        await writer.add_entry(b"1")
        await cluster["b2"].kill()
        adding = writer.add_entry(b"2")
        await state_is(writer, client_aio.WriterState.HEALING)
        await asyncio.sleep(0.5)  # It has asked the bookies by then, and waits for the one that hangs.
        await cluster["b2"].start()
        assert await adding == 2
        await writer.close()
    cluster["b1"].resume()


async def test_a_client_that_stood_still_blames_no_bookie(cluster: Cluster) -> None:
    """The answers to its adds and reads waited in the system's buffers."""
    hasty = client_aio.ClientConfig(
        add_timeout_s=1.0, read_timeout_s=1.0, ping_timeout_s=1.0, connect_timeout_s=1.0
    )
    async with client_aio.connect(cluster.uri, config=hasty) as client, asyncio.timeout(WAIT_S):
        writer = await written(client)
        for _ in range(2):
            adding = [writer.add_entry(bytes(1_000_000)) for _ in range(5)]
            reading = asyncio.ensure_future(client.open_ledger(writer.ledger_id))
            await asyncio.sleep(0.01)
            _compute(3.0)
            await asyncio.gather(*adding)
            await (await reading).close()
            assert writer.failed_bookies == []
            assert list(client.quarantined_bookies) == []
        await writer.close()


def _compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_a_bookie_that_stands_still_for_two_seconds_has_not_failed(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(WAIT_S):
        writer = await written(client, ensemble_size=3, write_quorum=3, ack_quorum=3)
        cluster["b2"].stop()
        adding = writer.add_entry(b"1")
        await asyncio.sleep(1.5)  # the machine may be slow as well
        cluster["b2"].resume()
        assert await adding == 1
        assert writer.failed_bookies == []
        assert len(writer.metadata.fragments) == 1
        await writer.close()


async def test_a_writer_outlives_a_majority_that_stands_still(cluster: Cluster) -> None:
    """Their connections have ended, and the writer waits for the new ones before it gives up."""
    config = client_aio.ClientConfig(ping_timeout_s=0.5, connect_timeout_s=500.0)
    async with client_aio.connect(cluster.uri, config=config) as client, asyncio.timeout(WAIT_S):
        writer = await written(client)
        for name in ("b1", "b2"):
            cluster[name].stop()
        adding = writer.add_entry(b"1")
        while len(writer.failed_bookies) < 2:
            await asyncio.wait([adding], timeout=0.1)
            assert not adding.done()
        await asyncio.wait([adding], timeout=0.5)
        for name in ("b1", "b2"):
            cluster[name].resume()
        assert await adding == 1
        await writer.close()


async def test_hundreds_of_tails_cost_the_bookies_a_request_now_and_then(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(WAIT_S),
    ):
        writers = [await written(client) for _ in range(10)]
        seen, changed = [0] * 300, asyncio.Event()

        async def follow(number: int) -> None:
            reader = await other.open_ledger(writers[number % 10].ledger_id)
            async for _ in reader.tail():
                seen[number] += 1
                changed.set()

        async def all_have_seen(count: int) -> None:
            while min(seen) < count:
                changed.clear()
                await changed.wait()

        async with asyncio.TaskGroup() as group:
            tails = [group.create_task(follow(number)) for number in range(300)]
            await all_have_seen(1)
            before = await _asked(cluster)
            assert before["ledgers"] <= 2 * 10
            for round_ in range(2, 5):
                await asyncio.gather(*(writer.add_entry(b"x") for writer in writers))
                await all_have_seen(round_)
            after = await _asked(cluster)
            assert after["watch"] - before["watch"] < 300
            assert after["read_lac"] == before["read_lac"]
            for tail in tails:
                tail.cancel()
        while (await _asked(cluster))["ledgers"]:
            pass  # The timeout ends it.


async def _asked(cluster: Cluster) -> dict[str, int]:
    """Return how many requests the bookies were sent, and how many ledgers are watched at them."""
    sums = dict.fromkeys(("watch", "read_lac", "ledgers"), 0)
    for bookie in cluster.bookies.values():
        async with await RawClient.connect(bookie.addresses[0]) as asking:
            info = json.loads((await asking.call(Info())).body)
        for name in ("watch", "read_lac"):
            sums[name] += info["counters"]["requests"].get(name, 0)
        sums["ledgers"] += info["ledgers_watched"]
    return sums


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_takeover_that_too_few_bookies_answer_ends(cluster: Cluster, hangs: bool) -> None:
    """To find a bookie down is no news of it: nobody asks it again and again for that."""
    config = client_aio.ClientConfig(connect_timeout_s=1.0, read_timeout_s=1.0)
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, config=config) as other,
        asyncio.timeout(WAIT_S),
    ):
        writer = await client.open_unbounded_ledger("orders")
        await writer.add_entry(b"0")
        await cluster["b2"].kill()
        if hangs:
            cluster["b3"].stop()
        else:
            await cluster["b3"].kill()
        try:
            with pytest.raises((client_aio.LedgerRecoveryError, client_aio.NotEnoughBookiesError)):
                await other.open_unbounded_ledger("orders")
        finally:
            if hangs:
                cluster["b3"].resume()
        await writer.abort()
