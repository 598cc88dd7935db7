"""Batches: the queue of adds that wait, runs in the window, and what becomes of a batch's one future."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_aio.core.add_window import (
    BATCH_BYTES_MAX,
    BATCH_ENTRIES_MAX,
    ENTRY_OVERHEAD_BYTES,
    AddGroup,
    AddQueue,
    AddWindow,
)
from client_aio.core.healing import Intake
from client_aio.ledger.futures import BatchAdd, Failure, complete, complete_runs, fail_all, note_sent
from client_aio.ledger.waiting_adds import WaitingAdds
from metadata.errors import BookKeeperError, LedgerFencedError, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def window_of() -> AddWindow[Any]:
    return AddWindow(ledger_id=7, content_term=0, ensemble_size=1, write_quorum=1, ack_quorum=1)


def acknowledged(window: AddWindow[Any]) -> list[AddGroup[Any]]:
    return [group for send in window.flush() for group in window.acknowledged(send)]


def held_by(payloads: list[bytes]) -> int:
    return sum(map(len, payloads)) + ENTRY_OVERHEAD_BYTES * len(payloads)


# --- the queue ---

RUNS = st.lists(
    st.one_of(
        st.just([]),
        st.lists(st.sampled_from([0, 1, 1000, BATCH_BYTES_MAX // 3, BATCH_BYTES_MAX + 1]), max_size=6),
        st.sampled_from([[1] * BATCH_ENTRIES_MAX, [0] * (2 * BATCH_ENTRIES_MAX + 5)]),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=25)
@given(RUNS, st.sampled_from([1, 300, 1000, 10**6]))
def test_the_queue_gives_every_entry_once_in_order_and_in_small_pieces(
    sizes: list[list[int]], piece_bytes: int
) -> None:
    queue: AddQueue[int] = AddQueue(piece_bytes)
    if piece_bytes < 1000:
        sizes = [run[:50] for run in sizes]
    blocks = {size: bytes(size) for run in sizes for size in run}
    for token, run in enumerate(sizes):
        queue.put([blocks[size] for size in run], token)
    left = [(token, size) for token, run in enumerate(sizes) for size in run or [-1]]
    entries = [each for each in left if each[1] >= 0]
    assert queue.queued == len(entries)
    while queue:
        if (place := queue.take_place()) is not None:
            assert left.pop(0) == (place, -1)
            continue
        pieces = queue.take()
        taken = [data for piece, _ in pieces for data in piece]
        assert taken
        assert len(taken) == 1 or held_by(taken) <= min(piece_bytes, BATCH_BYTES_MAX)
        assert queue.is_piece(taken)
        got = [(token, len(data)) for piece, token in pieces for data in piece]
        assert got == left[: len(got)]
        del left[: len(got)]
        held = [size for _, size in left if size >= 0]
        assert queue.bytes_held == held_by([blocks[size] for size in held])
        assert queue.taken == queue.queued - len(held)
    assert not left


def test_what_waits_is_given_up_with_the_places_of_bulks() -> None:
    queue: AddQueue[str] = AddQueue(10**6)
    queue.put([b"x"] * (BATCH_ENTRIES_MAX + 1), "large")
    queue.put((), "bulk")
    queue.put([b"y"], "small")
    assert queue.take_place() is None
    assert [token for _, token in queue.take()] == ["large"]
    assert queue.give_up() == ["large", "bulk", "small"]
    assert not queue
    assert (queue.bytes_held, queue.taken) == (0, queue.queued)
    assert queue.take() == []


# --- the window, and the future ---


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 7), st.booleans()), max_size=12))
async def test_each_future_is_done_with_its_last_entry_and_in_order(
    calls: list[tuple[bool, int, bool]],
) -> None:
    window, loop = window_of(), asyncio.get_running_loop()
    adds: list[BatchAdd[int] | asyncio.Future[int]] = []
    wanted: list[object] = []
    at = 0
    for is_batch, count, flushes in calls:
        future: asyncio.Future[Any] = loop.create_future()
        if is_batch:
            adds.append(BatchAdd(future, count))
            window.add_run([b"%d" % (at + n) for n in range(count)], adds[-1])
            wanted.append((at, at + count - 1))
            at += count
        else:
            adds.append(future)
            window.add(b"%d" % at, future)
            wanted.append(at)
            at += 1
        if flushes:
            for group in acknowledged(window):
                if group.has_runs:
                    complete_runs(group.tokens, group.first_entry, int)
                else:
                    assert not any(isinstance(each, BatchAdd) for each in group.tokens)
                    for entry_id, token in enumerate(group.tokens, group.first_entry):
                        complete(token, entry_id)
            assert all(add.done() for add in adds)
    assert (
        window.bytes_held == sum(len(data) + ENTRY_OVERHEAD_BYTES for data, _ in window.abort().entries())
        or not window.bytes_held
    )
    results = [(each.future if isinstance(each, BatchAdd) else each) for each in adds if each.done()]
    assert [each.result() for each in results] == wanted[: len(results)]


async def test_a_batch_cut_into_groups_is_done_with_the_last_one() -> None:
    window, loop = window_of(), asyncio.get_running_loop()
    batch: BatchAdd[int] = BatchAdd(loop.create_future(), BATCH_ENTRIES_MAX + 2)
    behind = loop.create_future()
    window.add_run([b""] * batch.count, batch)
    window.add(b"", behind)
    first, second = [group for send in window.flush() for group in window.acknowledged(send)]
    complete_runs(first.tokens, first.first_entry, int)
    assert not batch.done()
    assert batch.left == 2
    complete_runs(second.tokens, second.first_entry, int)
    assert batch.future.result() == (0, BATCH_ENTRIES_MAX + 1)
    assert behind.result() == BATCH_ENTRIES_MAX + 2


async def test_a_failed_batch_is_not_done_only_where_nothing_of_it_was_sent() -> None:
    window, loop = window_of(), asyncio.get_running_loop()
    partly, sent, unsent = (BatchAdd[int](loop.create_future(), 3) for _ in range(3))
    window.add_run([b"a", b"b"], partly)
    for group in acknowledged(window):
        complete_runs(group.tokens, group.first_entry, int)
    window.add_run([b"c"], partly)
    window.add_run([b"d", b"e", b"f"], sent)
    window.flush()
    window.add_run([b"g", b"h", b"i"], unsent)
    error = LedgerFencedError("fenced", ledger_id=7)
    dropped = window.abort()
    note_sent(dropped.groups)
    own = fail_all(dropped.tokens(), error)
    assert [each.outcome for each in own] == [Outcome.UNKNOWN, Outcome.UNKNOWN, Outcome.NOT_DONE]
    assert [each.acknowledged for each in own] == [2, 0, 0]
    for batch, number in ((partly, 2), (sent, 0), (unsent, 0)):
        with pytest.raises(LedgerFencedError, match=f"fenced .of the 3 entries of this batch, {number} were"):
            await batch.future
    assert error.__traceback__ is None


async def test_a_cancelled_batch_counts_on() -> None:
    batch: BatchAdd[int] = BatchAdd(asyncio.get_running_loop().create_future(), 2)
    batch.future.cancel()
    batch.acknowledged(4, 4, 1)
    batch.acknowledged(5, 5, 1)
    assert fail_all([batch], BookKeeperError("late")) == []


async def test_an_application_that_a_batch_has_told_knows_the_failure() -> None:
    batch: BatchAdd[int] = BatchAdd(asyncio.get_running_loop().create_future(), 2)
    failure = Failure(BookKeeperError("gone"))
    failure.fail([batch, batch])
    assert not failure.is_known
    with pytest.raises(BookKeeperError):
        await batch.future
    assert failure.is_known


async def test_the_entries_of_a_batch_keep_together_over_healing() -> None:
    loop, window = asyncio.get_running_loop(), window_of()
    intake: Intake[Any] = Intake(window)
    batch: BatchAdd[int] = BatchAdd(loop.create_future(), 4)
    single = loop.create_future()
    intake.put_run([b"a", b"b", b"c"], batch)
    window.flush()
    note_sent(intake.hold_back().groups)
    assert batch.is_sent
    intake.put_run([b"d"], batch)
    intake.put(b"e", single)
    assert (intake.last_taken, intake.last_settled) == (4, -1)
    following = AddWindow[Any](
        ledger_id=7, content_term=1, ensemble_size=1, write_quorum=1, ack_quorum=1, next_entry=2
    )
    for entry_id, add in intake.go_on(following, 1):
        complete(add, entry_id)
    assert batch.left == 2
    for group in acknowledged(following):
        assert group.has_runs
        complete_runs(group.tokens, group.first_entry, int)
    assert batch.future.result() == (0, 3)
    assert single.result() == 4


# --- the task that takes what waits ---


async def soon(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never holds")


class Taker:
    """A writer with room for as long as `room` is set."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.room = asyncio.Event()
        self.is_direct = True
        self.failure: BookKeeperError | None = None

    def take(self, payloads: Sequence[bytes], add: Any) -> None:
        self.taken += payloads

    async def make_room(self) -> None:
        await self.room.wait()
        if self.failure is not None:
            raise self.failure

    def on_idle(self) -> None:
        self.is_direct = True


def waiting_before(taker: Taker) -> WaitingAdds:
    return WaitingAdds(taker.take, lambda: None, taker.make_room, taker.on_idle, 1000, "test")


async def test_adds_and_bulks_are_taken_in_the_order_of_the_calls() -> None:
    taker = Taker()
    waiting = waiting_before(taker)
    waiting.put([b"1"], None)
    taker.is_direct = False

    async def bulk(data: bytes, *, is_cancelled: bool = False) -> None:
        async with waiting.turn():
            assert not waiting or waiting.is_busy
            taker.taken.append(data)
            await asyncio.sleep(0)
            taker.taken.append(data)

    first = asyncio.create_task(bulk(b"2"))
    cancelled = asyncio.create_task(bulk(b"never"))
    await asyncio.sleep(0)
    waiting.put([b"3"], None)
    passed = asyncio.create_task(waiting.passed())
    second = asyncio.create_task(bulk(b"4"))
    await asyncio.sleep(0)
    cancelled.cancel()
    waiting.put([b"5"], None)
    assert waiting
    taker.room.set()
    await asyncio.gather(first, second, passed)
    await waiting.passed()
    assert taker.taken == [b"1", b"2", b"2", b"3", b"4", b"4", b"5"]
    await soon(lambda: not waiting.is_busy)
    assert taker.is_direct


async def test_a_turn_that_is_granted_and_cancelled_at_once_ends() -> None:
    taker = Taker()
    waiting = waiting_before(taker)
    waiting.put([b"1"], None)

    async def bulk() -> None:
        async with waiting.turn():
            raise AssertionError("cancelled before")

    task = asyncio.create_task(bulk())
    await asyncio.sleep(0)
    taker.room.set()
    await soon(lambda: waiting._has_turn)
    task.cancel()
    await asyncio.wait([task])
    waiting.put([b"2"], None)
    async with asyncio.timeout(10):
        await waiting.passed()
    assert taker.taken == [b"1", b"2"]


async def test_what_waits_goes_on_after_the_application_has_cancelled_all_tasks() -> None:
    taker = Taker()
    waiting = waiting_before(taker)
    waiting.put([b"1"], None)
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    taker.room.set()
    async with asyncio.timeout(10):
        await waiting.passed()
    assert taker.taken == [b"1"]


async def test_without_room_for_good_everything_that_waits_fails() -> None:
    taker, loop = Taker(), asyncio.get_running_loop()
    waiting = waiting_before(taker)
    batch: BatchAdd[int] = BatchAdd(loop.create_future(), 2)
    waiting.put([b"1", b"2"], batch)
    taker.failure = BookKeeperError("no copies")
    taker.room.set()
    with pytest.raises(BookKeeperError, match="no copies"):
        async with waiting.turn():
            raise AssertionError("granted")
    assert isinstance(batch.future.exception(), BookKeeperError)
    with pytest.raises(BookKeeperError, match="no copies"):
        await waiting.passed()  # Who waits for what is dropped is told once.
    taker.failure = None
    waiting.put([b"3"], None)
    async with asyncio.timeout(10):
        await waiting.passed()
    assert taker.taken == [b"3"]
