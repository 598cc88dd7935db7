"""Ids assigned by the application, deferred sync, guaranteed write quorum: real bookies, real deaths."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Op, WriteLac
from client_aio import LedgerState
from tests.support.cluster import Cluster
from tests.support.links import Links

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 30


async def contents(client: client_aio.Client, ledger_id: int) -> list[bytes]:
    reader = await client.open_ledger(ledger_id, recover=True)
    return [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]


# --- ids assigned by the application ---


async def test_entries_given_in_any_order_are_acknowledged_in_that_of_their_ids(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(advanced=True) as ledger:
            done: list[int] = []
            late = [ledger.add_entry(b"%d" % entry_id, entry_id) for entry_id in (3, 1, 2)]
            for future in late:
                future.add_done_callback(lambda future: done.append(future.result()))
            held = ledger.bytes_in_flight
            assert held > 3
            for wrong in (1, 3):
                with pytest.raises(client_aio.InvalidArgumentError, match=f"{wrong} was added before"):
                    ledger.add_entry(b"again", wrong)
            with pytest.raises(client_aio.InvalidArgumentError, match="add_entry"):
                ledger.add_entry(b"no id")
            with pytest.raises(client_aio.InvalidArgumentError, match="add_entry"):
                await ledger.add_entries([b"no id"])
            assert ledger.bytes_in_flight == held
            assert ledger.last_add_pushed == -1
            assert await ledger.add_entry(b"0", 0) == 0
            assert await asyncio.gather(*late) == [3, 1, 2]
            assert done == [1, 2, 3]
        assert await contents(client, ledger.ledger_id) == [b"0", b"1", b"2", b"3"]


async def test_an_entry_behind_a_gap_fails_when_the_ledger_is_closed(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(advanced=True)
        await ledger.add_entry(b"0", 0)
        behind = ledger.add_entry(b"2", 2)
        assert (await ledger.close()).last_entry == 0
        with pytest.raises(client_aio.LedgerClosedError, match="before entry 1 came"):
            await behind
        with pytest.raises(client_aio.LedgerClosedError):
            await ledger.add_entry(b"1", 1)


async def test_what_waits_behind_a_gap_counts_against_the_limit(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, max_in_flight_bytes=100_000) as client,
    ):
        ledger = await client.create_ledger(advanced=True)
        waiting = [ledger.add_entry(bytes(10_000), entry_id) for entry_id in range(1, 41)]
        with pytest.raises(client_aio.BackpressureError):
            ledger.add_entry(bytes(10_000), 41)
        await ledger.abort()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {client_aio.WriterAbortedError}


async def test_an_id_is_refused_where_the_ledger_assigns_them(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri) as client,
        client.create_ledger() as ledger,
    ):
        with pytest.raises(client_aio.InvalidArgumentError, match="advanced=True"):
            ledger.add_entry(b"x", 0)
        assert await ledger.add_entry(b"y") == 0


# --- deferred sync ---


async def test_only_a_force_acknowledges(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(deferred_sync=True) as ledger:
            assert [await ledger.add_entry(b"%d" % n) for n in range(5)] == [0, 1, 2, 3, 4]
            assert ledger.last_add_confirmed == -1
            assert await ledger.force() == 4
            assert ledger.last_add_confirmed == 4
            await ledger.add_entry(b"5")  # and closing forces it
        assert ledger.metadata.last_entry == 5
        assert await contents(client, ledger.ledger_id) == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_received_add_is_answered_before_it_is_forced(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(deferred_sync=True)
        forces = [links["writer", name].requests.hold(Op.FORCE) for name in ("b1", "b2", "b3")]
        await ledger.add_entry(b"x")
        forcing = asyncio.create_task(ledger.force())
        for force in forces:
            await force.reached()
        assert ledger.last_add_confirmed == -1
        assert not forcing.done()
        for force in forces:
            force.release()
        assert await forcing == 0
        await ledger.close()


async def test_what_a_killed_bookie_had_received_is_forced_elsewhere(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(deferred_sync=True)
        for n in range(100):
            await ledger.add_entry(b"%d" % n)
        ensemble = ledger.metadata.last_fragment.bookies
        await cluster[ensemble[0]].kill()
        assert await asyncio.wait_for(ledger.force(), WAIT_S) == 99
        # What was acknowledged is durable at an ack quorum that does not need the dead one.
        await cluster[ensemble[1]].kill()
        await cluster[ensemble[1]].start()
        await ledger.abort()
        assert await contents(client, ledger.ledger_id) == [b"%d" % n for n in range(100)]


async def test_the_same_bookie_restarted_owes_everything_that_was_not_forced(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, replacement_retry_s=0.1, connect_timeout_s=1) as client,
    ):
        ledger = await client.create_ledger(deferred_sync=True)
        for n in range(50):
            await ledger.add_entry(b"%d" % n)
        ensemble = ledger.metadata.last_fragment.bookies
        for name in ensemble[:2]:  # one after the other: an ack quorum of receipts is gone then
            await cluster[name].kill()
            await cluster[name].start()
            async with asyncio.timeout(WAIT_S):
                # Each add lets the loop run; a flush of nothing would not, and this would spin for ever.
                while await ledger.add_entry(b"more") < 0 or name in ledger.failed_bookies:
                    pass
        last = await asyncio.wait_for(ledger.force(), WAIT_S)
        assert last == ledger.last_add_pushed
        await cluster[ensemble[2]].kill()
        await ledger.abort()
        kept = await contents(client, ledger.ledger_id)
        assert kept[:50] == [b"%d" % n for n in range(50)]
        assert len(kept) == last + 1


async def test_drain_forces_what_is_held(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, max_in_flight_bytes=50_000) as client,
        client.create_ledger(deferred_sync=True) as ledger,
    ):
        for _ in range(100):
            await ledger.add_entry(bytes(10_000))
            await asyncio.wait_for(ledger.drain(), WAIT_S)
        assert ledger.bytes_in_flight <= 50_000
        assert ledger.last_add_confirmed >= 94


# --- guaranteed write quorum ---


async def test_an_acknowledged_entry_survives_the_bookie_that_held_it_and_the_writer(tmp_path: Path) -> None:
    # The entry is acknowledged by two, the third is slow; one of the two is replaced, and the writer dies
    # before its replacement has a copy: were it in the metadata by then, recovery would take the two answers
    # "no such entry", of the replacement and the slow one, for the end.
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        first, second, slow = ledger.metadata.last_fragment.bookies
        held = links["writer", slow].requests.hold(Op.ADD)
        assert await asyncio.wait_for(ledger.add_entry(b"acknowledged"), WAIT_S) == 0
        await held.reached()
        assert ledger.last_add_fully_replicated == -1
        await cluster[first].kill()
        await links["writer", first].cut()
        (spare,) = {"b1", "b2", "b3", "b4"} - {first, second, slow}
        copy = links["writer", spare].requests.hold(Op.ADD)
        ledger.add_entry(b"notices that it is gone")
        await copy.reached()
        await ledger.abort()
        await cluster[second].kill()
        await cluster[first].start()
        async with client_aio.connect(cluster.uri) as other:
            assert (await contents(other, ledger.ledger_id))[0] == b"acknowledged"


async def test_a_closed_ledger_has_every_entry_on_its_whole_write_set(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True, ack_quorum=1)
        names = ledger.metadata.last_fragment.bookies
        holds = [links["writer", name].requests.hold(Op.ADD) for name in names[1:]]
        assert await asyncio.wait_for(ledger.add_entry(b"x"), WAIT_S) == 0
        closing = asyncio.create_task(ledger.close())
        for hold in holds:
            await hold.reached()
        assert not closing.done()
        for hold in holds:
            hold.release()
        assert (await asyncio.wait_for(closing, WAIT_S)).state is LedgerState.CLOSED
        assert ledger.last_add_fully_replicated == 0
        for name in names[:2]:
            await cluster[name].kill()
        assert await contents(client, ledger.ledger_id) == [b"x"]


async def test_recovery_brings_every_entry_to_its_whole_write_set(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True, ack_quorum=1)
        names = ledger.metadata.last_fragment.bookies
        for name in names[1:]:
            links["writer", name].requests.block()
        for n in range(20):
            assert await asyncio.wait_for(ledger.add_entry(b"%d" % n), WAIT_S) == n
        await ledger.abort()
        async with client_aio.connect(cluster.uri) as other:
            await other.open_ledger(ledger.ledger_id, recover=True)
            for name in names[:2]:
                await cluster[name].kill()
            assert await contents(other, ledger.ledger_id) == [b"%d" % n for n in range(20)]


async def test_a_replacement_that_dies_before_it_holds_its_copies_stops_nobody(tmp_path: Path) -> None:
    # Nobody else is to be had then. The writer would give up after ensemble_change_timeout_s.
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", ensemble_change_timeout_s=1.0, replacement_retry_s=0.2) as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        named = ledger.metadata.last_fragment
        first = named.bookies[0]
        (spare,) = {"b1", "b2", "b3", "b4"} - set(named.bookies)
        held, copy = (links["writer", name].requests.hold(Op.ADD) for name in (first, spare))
        assert await asyncio.wait_for(ledger.add_entry(b"0"), WAIT_S) == 0
        await held.reached()
        await cluster[first].kill()
        await links["writer", first].cut()
        await asyncio.wait_for(copy.reached(), WAIT_S)
        await cluster[spare].kill()
        await links["writer", spare].cut()
        for n in range(1, 31):
            assert await asyncio.wait_for(ledger.add_entry(b"%d" % n), WAIT_S) == n
            await asyncio.sleep(0.1)
        assert ledger.last_add_fully_replicated == -1
        closing = asyncio.create_task(ledger.close())
        held.release()
        await cluster[first].start()
        await links["writer", first].restore()
        metadata = await asyncio.wait_for(closing, WAIT_S)
        assert (metadata.state, metadata.fragments) == (LedgerState.CLOSED, (named,))
        for name in named.bookies[1:]:
            await cluster[name].kill()
        assert await contents(client, ledger.ledger_id) == [b"%d" % n for n in range(31)]


async def test_adds_go_on_while_one_of_three_is_stopped_in_an_orderly_way(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, ensemble_change_timeout_s=1.0, replacement_retry_s=0.2) as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        stopping = asyncio.create_task(cluster["b2"].end())
        for n in range(150):
            assert await asyncio.wait_for(ledger.add_entry(b"%d" % n), WAIT_S) == n
            await asyncio.sleep(0.01)
        await stopping
        assert await asyncio.wait_for(ledger.add_entry(b"150"), WAIT_S) == 150
        await cluster["b2"].start()
        metadata = await asyncio.wait_for(ledger.close(), WAIT_S)
        assert len(metadata.fragments) == 1
        await cluster["b1"].kill()
        await cluster["b3"].kill()
        assert await contents(client, ledger.ledger_id) == [b"%d" % n for n in range(151)]


async def test_both_at_once_are_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, client_aio.connect(cluster.uri) as client:
        with pytest.raises(client_aio.InvalidArgumentError, match="choose one"):
            client.create_ledger(deferred_sync=True, guaranteed_write_quorum=True)


# --- the add-quorum timeout ---


async def test_adds_that_no_quorum_acknowledges_in_time_fail_in_order(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", add_quorum_timeout_s=2) as client,
    ):
        ledger = await client.create_ledger()
        assert await ledger.add_entry(b"0") == 0
        for name in ledger.metadata.last_fragment.bookies[:2]:
            links["writer", name].answers.block()
        failed: list[int] = []
        futures = [ledger.add_entry(b"%d" % n) for n in (1, 2, 3)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: failed.append(number))
        with pytest.raises(client_aio.OperationTimeoutError, match="entry 1 of ledger"):
            await asyncio.wait_for(asyncio.shield(futures[0]), WAIT_S)
        await asyncio.gather(*futures, return_exceptions=True)
        assert failed == [0, 1, 2]
        await ledger.abort()


async def test_a_force_goes_on_with_who_is_left(tmp_path: Path) -> None:
    # Received by b1 and b2; b1 is lost, there is no spare, and b3 receives it late: b2 and b3 will do.
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(deferred_sync=True)
        first, _, late = ledger.metadata.last_fragment.bookies
        held = links["writer", late].requests.hold(Op.ADD)
        assert await asyncio.wait_for(ledger.add_entry(b"x"), WAIT_S) == 0
        await held.reached()
        await cluster[first].kill()
        await links["writer", first].cut()
        forcing = asyncio.create_task(ledger.force())
        held.release()
        assert await asyncio.wait_for(forcing, WAIT_S) == 0
        await asyncio.wait_for(ledger.close(), WAIT_S)


async def test_an_idle_writer_states_a_lafr_that_comes_behind_the_lac(tmp_path: Path) -> None:
    # Else a recovery with one bookie away would have to write back what all three have, and could not.
    async with Cluster(tmp_path) as cluster:
        async with Links(cluster.uri) as links, links.connect("writer") as client:
            ledger = await client.create_ledger(guaranteed_write_quorum=True)
            first, _, late = ledger.metadata.last_fragment.bookies
            told = links["writer", first].requests.see(Op.WRITE_LAC)
            held = links["writer", late].answers.hold(Op.ADD)
            assert await asyncio.wait_for(ledger.add_entry(b"x"), WAIT_S) == 0
            message = (await told.reached()).message
            assert isinstance(message, WriteLac)
            assert message.statement is not None
            assert (message.statement.lac, message.statement.lafr) == (0, -1)
            held.release()
            await cluster.heard(client, client_aio.Position(ledger.ledger_id, 0))
            await cluster[late].kill()
            await ledger.abort()
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            reader = await client.open_ledger(ledger.ledger_id, recover=True)
            assert reader.last_add_confirmed == 0
