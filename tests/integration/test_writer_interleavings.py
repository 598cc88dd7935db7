"""A writer's calls that run beside one another: nothing hangs, nothing is acknowledged behind the end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import Failure, Op, Status, encode_failure
from metadata.store import WRITERS_KEPT
from tests.support.cluster import Cluster
from tests.support.links import Frame, Links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

WAIT_S = 30


async def until_done(*awaitables: asyncio.Future[Any]) -> list[Any]:
    """Wait for all; a hang fails the test."""
    async with asyncio.timeout(WAIT_S):
        return await asyncio.gather(*awaitables, return_exceptions=True)


async def test_an_add_behind_a_bulk_is_in_the_closed_ledger_or_fails(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        is_taken, go_on = asyncio.Event(), asyncio.Event()

        async def entries() -> AsyncIterator[bytes]:
            yield bytes(1_000_000)  # large enough to be sent at once
            is_taken.set()
            await go_on.wait()
            yield b"second of the bulk"

        for bookie in cluster.bookies.values():
            bookie.stop()  # so that nothing is acknowledged before the close has begun
        bulk = asyncio.create_task(ledger.add_entries(entries()))
        await is_taken.wait()
        behind = ledger.add_entry(b"behind the bulk")
        acknowledged, closing = asyncio.create_task(ledger.flush()), asyncio.create_task(ledger.close())
        await asyncio.sleep(0)
        for bookie in cluster.bookies.values():
            bookie.resume()
        for _ in range(10):  # to let the close go on, if it does
            await asyncio.sleep(0)
        late = ledger.add_entry(b"while it closes")
        go_on.set()
        end, bulk_result, behind_result, _ = await until_done(closing, bulk, behind, acknowledged)
        assert (bulk_result, behind_result) == ((0, 1), 2)
        assert end.last_entry == 2
        assert isinstance(late.exception(), client_aio.LedgerClosedError)


async def test_entries_before_the_one_that_an_iterable_could_not_give_are_sent(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    def entries() -> Iterator[bytes]:
        yield b"first"
        yield b"second"
        raise OwnError

    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        for added in range(2, 7, 2):
            with pytest.raises(OwnError):
                await ledger.add_entries(entries())
            assert await until_done(asyncio.ensure_future(ledger.flush())) == [None]
            assert ledger.last_add_confirmed == added - 1


async def test_a_bulk_makes_room_for_itself_alone(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, max_in_flight_bytes=1_000_000) as client,
    ):
        for deferred_sync in (False, True):
            ledger = await client.create_ledger(deferred_sync=deferred_sync)
            bulk = asyncio.create_task(ledger.add_entries([bytes(100_000)] * 40))
            await asyncio.sleep(0)
            behind = [ledger.add_entry(bytes(100_000)) for _ in range(15)]  # more than there may be in flight
            assert await until_done(bulk, *behind) == [(0, 39), *range(40, 55)]
            await until_done(asyncio.ensure_future(ledger.drain()))
            assert (await ledger.close()).last_entry == 54


async def test_a_close_takes_no_adds_while_it_forces(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(deferred_sync=True)
        await ledger.add_entry(b"before")
        held = [links["writer", name].answers.hold(Op.FORCE) for name in cluster.bookies]
        closing = asyncio.create_task(ledger.close())
        await asyncio.gather(*(answer.reached() for answer in held))
        late = [ledger.add_entry(b"while it forces"), asyncio.ensure_future(ledger.add_entries([b"too"]))]
        for answer in held:
            answer.release()
        end, *refused = await until_done(closing, *late)
        assert end.last_entry == 0
        assert [type(each) for each in refused] == 2 * [client_aio.LedgerClosedError]


async def test_entries_that_trickle_into_a_bulk_are_sent_as_they_come(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()

        async def entries() -> AsyncIterator[bytes]:
            for entry_id in range(3):
                yield b"%d" % entry_id
                async with asyncio.timeout(WAIT_S):
                    await ledger.flush()
                assert ledger.last_add_confirmed == entry_id

        assert await ledger.add_entries(entries()) == (0, 2)
        await ledger.close()


async def test_what_waits_behind_a_gap_stops_nobody_from_closing_it(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, max_in_flight_bytes=100_000) as client,
    ):
        for deferred_sync in (False, True):
            ledger = await client.create_ledger(advanced=True, deferred_sync=deferred_sync)
            waiting = [ledger.add_entry(bytes(10_000), entry_id) for entry_id in range(1, 41)]
            with pytest.raises(client_aio.BackpressureError):
                ledger.add_entry(bytes(10_000), 41)
            await until_done(asyncio.ensure_future(ledger.drain()))
            first = ledger.add_entry(bytes(10_000), 0)
            assert await until_done(first, *waiting) == list(range(41))
            await ledger.close()


async def test_a_close_after_a_recovery_that_displaced_the_writer_raises_again_and_again(
    tmp_path: Path,
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger()
        bookies = ledger.metadata.last_fragment.bookies
        for name in bookies:
            links["writer", name].answers.block()
        added = ledger.add_entry(b"0")
        reader = await other.open_ledger(ledger.ledger_id, recover=True)
        assert reader.is_closed
        await links["writer", bookies[0]].cut()  # a change of ensembles finds the ledger closed
        assert [type(each) for each in await until_done(added)] == [client_aio.LedgerFencedError]
        for _ in range(2):
            with pytest.raises(client_aio.LedgerFencedError):
                await ledger.close()


async def test_a_creation_that_is_cancelled_leaves_no_writer_behind(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        held = [links["writer", name].answers.hold(Op.FORCE) for name in cluster.bookies]

        async def create() -> None:
            await client.create_ledger(digest="hmac-sha256", password=b"secret")

        creation = asyncio.create_task(create())
        await asyncio.gather(*(answer.reached() for answer in held))
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
        assert not client._context.handles


async def test_reading_unconfirmed_ends_with_a_closed_ledger(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entries([b"%d" % entry_id for entry_id in range(10)])
        reader = await client.open_ledger(ledger.ledger_id)
        for first, expected in ((0, range(10)), (10, range(0)), (50, range(0))):
            entries = [entry.entry_id async for entry in reader.read_unconfirmed(first, 100)]
            assert entries == list(expected)


async def test_a_close_goes_on_when_a_replacement_brings_all_to_their_write_set(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        ledger = await client.create_ledger(guaranteed_write_quorum=True)
        slow = links["writer", ledger.metadata.last_fragment.bookies[2]]
        slow.answers.block()
        await ledger.add_entry(b"acknowledged by two")
        closing = asyncio.create_task(ledger.close())
        await asyncio.sleep(0)
        # The copy is made before the compare-and-set: behind that nothing is left to be acknowledged.
        await slow.cut()
        (end,) = await until_done(closing)
        assert (end.last_entry, ledger.last_add_fully_replicated) == (0, 0)
        assert slow.bookie_id not in end.last_fragment.bookies


async def test_a_force_answered_during_a_change_counts_when_the_change_is_done(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as client,
    ):
        # Entry 0 is on the first two bookies: the third owes nothing, and its successor is sent nothing.
        ledger = await client.create_ledger(ensemble_size=3, write_quorum=2, ack_quorum=2, deferred_sync=True)
        await ledger.add_entry(b"0")
        *holders, other = [links["writer", name] for name in ledger.metadata.last_fragment.bookies]
        writing, written = asyncio.Event(), asyncio.Event()

        async def hold(key: str) -> None:
            writing.set()
            await written.wait()

        links.store("writer").before_compare_and_set = hold
        held = [link.answers.hold(Op.FORCE) for link in holders]
        forced = asyncio.create_task(ledger.force())
        await asyncio.gather(*(answer.reached() for answer in held))
        await other.cut()
        async with asyncio.timeout(WAIT_S):
            await writing.wait()
        for answer in held:
            answer.release()
        # Both of them have to answer this, behind their forces and over the same connections.
        await (await client.open_ledger(ledger.ledger_id)).read_last_add_confirmed()
        assert ledger.last_add_confirmed == -1
        written.set()
        assert await until_done(forced) == [0]
        await ledger.close()


class Refusal(Frame):
    """An answer that refuses what was asked for."""

    def encode_answer(self) -> bytes:
        failure = Failure(Status.READ_ONLY, "not today")
        return encode_frame(encode_failure(self.op, self.request_id, failure), 0)


async def test_a_bookie_that_refuses_again_and_again_is_not_seated_again_without_end(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", replacement_retry_s=20) as client,
    ):
        ledger = await client.create_ledger()
        refused: list[Frame] = []

        def refuse(frame: Frame) -> Frame | None:
            if frame.op is not Op.ADD:
                return None
            refused.append(frame)
            return Refusal(*frame)

        links["writer", "b2"].answers.forge = refuse  # there is no other bookie to take its place
        for entry_id in range(200):
            assert await ledger.add_entry(b"x") == entry_id
        assert 1 < len(refused) < 10
        await ledger.close()


async def test_a_recovery_whose_bookies_refuse_its_adds_ends(tmp_path: Path) -> None:
    """They take connections, fences and reads, so that each is taken back in its seat again and again."""
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as writer,
        links.connect("recovery", replacement_retry_s=0.1, ensemble_change_timeout_s=1) as client,
    ):
        ledger = await writer.create_ledger(ack_quorum=3)
        await ledger.add_entry(b"confirmed")
        held = links["writer", "b3"].answers.hold(Op.ADD)
        in_doubt = ledger.add_entry(b"on all, not acknowledged")
        await held.reached()
        for name in ("b2", "b3"):
            links["recovery", name].answers.forge = lambda frame: (
                Refusal(*frame) if frame.op is Op.ADD else None
            )
        with pytest.raises(client_aio.LedgerRecoveryError, match="came up, and stayed"):
            await asyncio.wait_for(client.open_ledger(ledger.ledger_id, recover=True), WAIT_S)
        for name in ("b2", "b3"):
            links["recovery", name].answers.forge = lambda _: None
        closed = await client.open_ledger(ledger.ledger_id, recover=True)
        assert closed.last_add_confirmed == 1
        held.release()
        assert await in_doubt == 1  # the bookies' answers of before the fence
        await ledger.abort()


async def test_a_writer_goes_on_after_others_have_changed_the_metadata_more_often_than_the_store_remembers(
    tmp_path: Path,
) -> None:
    """As a repair of a ledger of many fragments does, once for each of them."""
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, ensemble_change_timeout_s=3) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=3)
        ledgers, draw_token = other._context.ledgers, other._context.draw_token

        async def repair_often() -> None:
            for _ in range(WRITERS_KEPT + 4):
                metadata, version = await ledgers.read(ledger.ledger_id)
                await ledgers.compare_and_set(metadata, version, token=draw_token())

        await ledger.add_entry(b"0")
        await repair_often()
        await cluster[ledger.metadata.fragments[0].bookies[0]].kill()
        assert await asyncio.wait_for(ledger.add_entry(b"1"), WAIT_S) == 1
        await repair_often()
        assert (await asyncio.wait_for(ledger.close(), WAIT_S)).last_entry == 1
