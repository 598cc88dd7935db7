"""A writer and those who recover its ledger, met at every step: real bookies, links that hold and lose."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Op
from client_aio import LedgerState
from client_aio.ledger.recovery import Recovery
from metadata.errors import MetadataUnavailableError
from tests.support.cluster import Cluster
from tests.support.links import Links, is_fence

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    from client_aio.ledger.replication import Replication
    from tests.support.links import Frame

WAIT_S = 30


class Scene:
    """A cluster, and clients that reach it by links of their own."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self.cluster = cluster
        self.links = links
        self.writer: client_aio.Client
        self.other: client_aio.Client

    async def recover(self, ledger_id: int) -> list[bytes]:
        """Recover through the other client, and read everything."""
        reader = await asyncio.wait_for(self.other.open_ledger(ledger_id, recover=True), WAIT_S)
        return [entry.data async for entry in reader.read(0, reader.last_add_confirmed)]

    def meet_next_compare_and_set(self, client: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Hold a client's next compare-and-set: it is there, and it may go on."""
        reached, released = asyncio.Event(), asyncio.Event()
        store = self.links.store(client)

        async def meet(key: str) -> None:
            store.before_compare_and_set = None
            reached.set()
            await released.wait()

        store.before_compare_and_set = meet
        return reached, released


@asynccontextmanager
async def scene(tmp_path: Path, bookies: int = 3) -> AsyncGenerator[Scene, None]:
    async with Cluster(tmp_path, bookies=bookies) as cluster, Links(cluster.uri) as links:
        found = Scene(cluster, links)
        async with links.connect("writer") as found.writer, links.connect("other") as found.other:
            yield found


def numbered(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


# --- closing ---


async def test_a_close_after_a_recovery_that_found_the_same_end_succeeds(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        assert await on.recover(ledger.ledger_id) == numbered(10)
        assert (await ledger.close()).last_entry == 9


@pytest.mark.parametrize("adds", [False, True], ids=["idle", "an add was refused"])
async def test_a_close_after_a_refused_lac_succeeds_at_the_same_end_unless_an_add_has_failed(
    tmp_path: Path, adds: bool
) -> None:
    async with scene(tmp_path) as on:
        held = [on.links["writer", name].requests.hold(Op.WRITE_LAC) for name in ("b1", "b2", "b3")]
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        assert await on.recover(ledger.ledger_id) == numbered(10)
        for hold in held:
            await hold.reached()
            hold.release()
        while not ledger.is_closed:  # It looks at the metadata first, as this does.
            await on.writer.ledger_metadata(ledger.ledger_id)
        if adds:
            with pytest.raises(client_aio.LedgerFencedError):
                await ledger.add_entry(b"10")
            with pytest.raises(client_aio.LedgerFencedError):
                await ledger.close()
        else:
            closed = await asyncio.gather(ledger.close(), ledger.close())
            assert [metadata.last_entry for metadata in closed] == [9, 9]
            with pytest.raises(client_aio.LedgerClosedError):
                await ledger.add_entry(b"10")


async def test_a_close_that_meets_a_recovery_under_way_fails(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        held = [on.links["other", name].requests.hold(Op.READ_LAC, is_fence) for name in ("b1", "b2", "b3")]
        recovering = asyncio.create_task(on.recover(ledger.ledger_id))
        for hold in held:
            await hold.reached()
        with pytest.raises(client_aio.LedgerFencedError, match="IN_RECOVERY"):
            await ledger.close()
        for hold in held:
            hold.release()
        assert await recovering == numbered(10)


async def test_a_late_refusal_says_nothing_to_a_writer_that_has_closed_its_ledger(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        late = on.links["writer", "b3"].requests.hold(Op.ADD)
        await ledger.add_entry(b"0")
        assert await on.recover(ledger.ledger_id) == numbered(1)
        closed = await ledger.close()
        late.release()
        await on.writer.ledger_replicas(ledger.ledger_id)  # b3 answers it behind the refusal
        assert await ledger.close() == closed
        with pytest.raises(client_aio.LedgerClosedError):
            await ledger.add_entry(b"1")


async def test_of_two_closes_at_once_none_succeeds_where_the_other_is_displaced(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        held = [on.links["other", name].requests.hold(Op.READ_LAC, is_fence) for name in ("b1", "b2", "b3")]
        recovering = asyncio.create_task(on.recover(ledger.ledger_id))
        for hold in held:
            await hold.reached()
        tries, recovered = list[str](), asyncio.Event()
        store = on.links.store("writer")

        async def let_the_first_pass(key: str) -> None:
            tries.append(key)
            if len(tries) > 1:
                await recovered.wait()

        store.before_compare_and_set = let_the_first_pass
        closing = [asyncio.create_task(ledger.close()) for _ in range(2)]
        await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)  # it finds the recovery under way
        for hold in held:
            hold.release()
        assert await recovering == numbered(10)
        recovered.set()
        results = await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), WAIT_S)
        assert [type(each) for each in results] == [client_aio.LedgerFencedError] * 2


async def test_a_close_after_a_recovery_that_found_more_fails(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        # Stored everywhere, acknowledged nowhere: the answers are lost with their connections.
        names = ("b1", "b2", "b3")
        held = [on.links["writer", name].answers.hold(Op.ADD) for name in names]
        unknown = ledger.add_entry(b"10")
        for hold in held:
            await hold.reached()
        assert await on.recover(ledger.ledger_id) == numbered(11)
        for name in names:
            on.links["writer", name].reset()
        with pytest.raises(client_aio.BookKeeperError):
            await asyncio.wait_for(unknown, WAIT_S)
        with pytest.raises(client_aio.BookKeeperError):
            await ledger.close()
        metadata = await on.other.ledger_metadata(ledger.ledger_id)
        assert (metadata.state, metadata.last_entry) == (LedgerState.CLOSED, 10)


async def test_a_close_held_back_loses_against_a_recovery_and_adopts_its_end(tmp_path: Path) -> None:
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(5))
        reached, released = on.meet_next_compare_and_set("writer")
        closing = asyncio.create_task(ledger.close())
        await reached.wait()
        assert await on.recover(ledger.ledger_id) == numbered(5)
        released.set()
        assert (await asyncio.wait_for(closing, WAIT_S)).last_entry == 4


# --- changing the ensemble ---


async def begin_change(on: Scene, ledger: client_aio.LedgerWriter) -> list[asyncio.Future[int]]:
    """Lose a bookie with adds behind it; returns these adds, which the others have stored."""
    lost = ledger.metadata.last_fragment.bookies[0]
    await on.cluster[lost].kill()
    await on.links["writer", lost].cut()
    return [
        ledger.add_entry(b"%d" % n) for n in range(ledger.last_add_pushed + 1, ledger.last_add_pushed + 6)
    ]


async def test_a_change_that_meets_a_recovery_fails_the_adds_once_each_and_in_order(tmp_path: Path) -> None:
    async with scene(tmp_path, bookies=4) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        # Of the three only the one that is lost answers in time: nothing more is acknowledged.
        for name in ledger.metadata.last_fragment.bookies[1:]:
            on.links["writer", name].answers.block()
        reached, released = on.meet_next_compare_and_set("writer")
        adds = await begin_change(on, ledger)
        failed: list[int] = []
        for number, add in enumerate(adds):
            add.add_done_callback(lambda _, number=number: failed.append(number))
        await asyncio.wait_for(reached.wait(), WAIT_S)
        recovered = await on.recover(ledger.ledger_id)
        released.set()
        outcomes = await asyncio.wait_for(asyncio.gather(*adds, return_exceptions=True), WAIT_S)
        assert {type(outcome) for outcome in outcomes} == {client_aio.LedgerFencedError}
        assert failed == [0, 1, 2, 3, 4]
        assert recovered == numbered(len(recovered))
        assert len(recovered) >= 10
        with pytest.raises(client_aio.LedgerFencedError):
            await ledger.add_entry(b"more")
        metadata = await on.other.ledger_metadata(ledger.ledger_id)
        assert metadata.last_entry == len(recovered) - 1


async def test_a_change_whose_outcome_is_unknown_acknowledges_nothing_until_it_is_known(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path, bookies=4) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        store = on.links.store("writer")
        attempts = 0
        came_back = asyncio.Event()

        async def lose(key: str) -> None:
            nonlocal attempts
            attempts += 1
            for link in others:
                link.answers.unblock()
            if attempts < 4:
                raise MetadataUnavailableError("the test lost this request")
            came_back.set()

        store.before_compare_and_set = lose
        # What is acknowledged before the change begins is not in question: nothing is.
        others = [on.links["writer", name] for name in ledger.metadata.last_fragment.bookies[1:]]
        for link in others:
            link.answers.block()
        adds = await begin_change(on, ledger)
        known: list[bool] = []
        for add in adds:
            add.add_done_callback(lambda _: known.append(came_back.is_set()))
        assert await asyncio.wait_for(asyncio.gather(*adds), WAIT_S) == [10, 11, 12, 13, 14]
        assert known == [True] * 5
        assert (await ledger.close()).last_entry == 14
        assert await on.recover(ledger.ledger_id) == numbered(15)


# --- recovery that dies, or meets others, at each of its steps ---


async def until_entered(on: Scene) -> None:
    reached, _ = on.meet_next_compare_and_set("dying")
    await reached.wait()


def until_asked(
    op: Op, where: Callable[[Frame], bool] = lambda _: True
) -> Callable[[Scene], Awaitable[None]]:
    async def wait(on: Scene) -> None:
        held = [on.links["dying", name].requests.hold(op, where) for name in on.cluster.bookies]
        reached = [asyncio.create_task(hold.reached()) for hold in held]
        _, pending = await asyncio.wait(reached, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    return wait


async def until_closing(on: Scene) -> None:
    reached, released = on.meet_next_compare_and_set("dying")
    await reached.wait()
    reached_again, _ = on.meet_next_compare_and_set("dying")
    released.set()
    await reached_again.wait()


STEPS = {
    "entering": until_entered,
    "fencing": until_asked(Op.READ_LAC, is_fence),
    "reading": until_asked(Op.READ),
    "writing back": until_asked(Op.ADD),
    "closing": until_closing,
}


async def leave_unconfirmed(on: Scene, count: int) -> int:
    """Write entries that all bookies have, and none says to be acknowledged; the writer is gone."""
    ledger = await on.writer.create_ledger()
    await asyncio.gather(*[ledger.add_entry(data) for data in numbered(count)])
    await ledger.abort()
    return ledger.ledger_id


async def test_a_recovery_holds_no_more_than_a_writer_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes back may be a whole fragment, and reading is faster than writing."""
    limit, held, write_back = 50_000, list[int](), Recovery._write_back

    def noted(recovery: Recovery, replication: Replication[None], payload: bytes) -> None:
        write_back(recovery, replication, payload)
        held.append(replication.window.bytes_held)

    monkeypatch.setattr(Recovery, "_write_back", noted)
    async with scene(tmp_path) as on:
        ledger_id = await leave_unconfirmed(on, 2000)
        async with on.links.connect("last", max_in_flight_bytes=limit) as last:
            assert await asyncio.wait_for(_open(last, ledger_id), WAIT_S) == 1999
        assert len(held) == 2000
        assert 0 < max(held) <= limit + 1000
        assert await on.recover(ledger_id) == numbered(2000)


@pytest.mark.parametrize("step", STEPS)
async def test_a_recovery_that_dies_is_finished_by_another(tmp_path: Path, step: str) -> None:
    async with scene(tmp_path) as on:
        ledger_id = await leave_unconfirmed(on, 20)
        async with on.links.connect("dying") as dying:
            arrived = asyncio.create_task(STEPS[step](on))
            await asyncio.sleep(0)  # what it waits for is set up
            recovering = asyncio.create_task(_open(dying, ledger_id))
            await asyncio.wait_for(arrived, WAIT_S)
            recovering.cancel()
            await asyncio.gather(recovering, return_exceptions=True)
        assert await on.recover(ledger_id) == numbered(20)


async def _open(client: client_aio.Client, ledger_id: int) -> int:
    return (await client.open_ledger(ledger_id, recover=True)).last_add_confirmed


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", ["b1", "b2", "b3"])
async def test_a_bookie_that_dies_during_recovery_costs_nothing(
    tmp_path: Path, step: str, victim: str
) -> None:
    async with scene(tmp_path, bookies=4) as on:
        ledger_id = await leave_unconfirmed(on, 20)
        async with on.links.connect("dying") as client:
            arrived = asyncio.create_task(STEPS[step](on))
            await asyncio.sleep(0)  # what it waits for is set up
            recovering = asyncio.create_task(_open(client, ledger_id))
            await asyncio.wait_for(arrived, WAIT_S)
            await on.cluster[victim].kill()
            assert await on.recover(ledger_id) == numbered(20)
            recovering.cancel()
            await asyncio.gather(recovering, return_exceptions=True)


async def test_a_last_fragment_that_holds_nothing_hides_no_earlier_one(tmp_path: Path) -> None:
    # The writer changes to a wholly new ensemble at entry 2000 and dies at once. All of the new one say that
    # the LAC is −1, and one of them dies as well: recovery must not begin anywhere before 2000.
    async with scene(tmp_path, bookies=6) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(2000))
        former = ledger.metadata.last_fragment.bookies
        others = [name for name in on.cluster.bookies if name not in former]
        held = [on.links["writer", name].requests.hold(Op.ADD) for name in others]
        for name in former:
            await on.links["writer", name].cut()
        ledger.add_entry(b"nobody gets this")
        for hold in held:
            await hold.reached()
        await ledger.abort()
        metadata = await on.other.ledger_metadata(ledger.ledger_id)
        assert metadata.last_fragment.first_entry == 2000
        assert set(metadata.last_fragment.bookies) == set(others)
        await on.cluster[others[0]].kill()
        assert await on.recover(ledger.ledger_id) == numbered(2000)


async def test_an_add_that_reaches_a_bookie_after_the_fence_is_not_acknowledged(tmp_path: Path) -> None:
    # The add is on b2 only. The fence covers by b1 and b2, the recovery reads b1 and b3, which have nothing,
    # and closes the ledger. Then the add reaches b1 and b3: with b2 that would be an ack quorum.
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(5))
        b1, b2, b3 = ledger.metadata.last_fragment.bookies
        adds = [on.links["writer", name].requests.hold(Op.ADD) for name in (b1, b3)]
        add = ledger.add_entry(b"on b2 only")
        for hold in adds:
            await hold.reached()
        late = on.links["other", b3].requests.hold(Op.READ_LAC)
        first_read = on.links["other", b1].requests.see(Op.READ)
        on.links["other", b2].requests.hold(Op.READ)
        recovering = asyncio.create_task(on.recover(ledger.ledger_id))
        await first_read.reached()  # so b1 and b2 were enough
        late.release()
        recovered = await recovering
        for hold in adds:
            hold.release()
        with pytest.raises(client_aio.LedgerFencedError):
            await asyncio.wait_for(add, WAIT_S)
        assert recovered == numbered(5)
        assert (await on.other.ledger_metadata(ledger.ledger_id)).last_entry == 4


async def test_the_error_of_a_writer_that_failed_does_not_grow_with_each_time_it_is_raised(
    tmp_path: Path,
) -> None:
    """Its traceback would keep the frames of all who were told."""
    async with scene(tmp_path) as on:
        ledger = await on.writer.create_ledger()
        await ledger.add_entries(numbered(10))
        await on.recover(ledger.ledger_id)

        async def frames(call: Callable[[], Awaitable[object]]) -> int:
            with pytest.raises(client_aio.LedgerFencedError) as told:
                await call()
            return len(traceback.extract_tb(told.value.__traceback__))

        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: ledger.add_entry(b"x"), lambda: ledger.add_entries([b"x"]), ledger.drain, ledger.flush,
        ]  # fmt: skip
        for call in calls:
            await frames(call)
            counts = [await frames(call) for _ in range(5)]
            assert counts == counts[:1] * 5
