"""Timeouts that do not count the time in which this process's event loop did not run."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metadata.awake import (
    LOOK_INTERVAL_S,
    LOOKS_PER_PERIOD,
    AwakeClock,
    Deadline,
    Standstills,
    awake_timeout,
    awake_wait,
)
from tests.support.busyloop import BusyLoop, run_busy

HANG_S = 30.0


def latest_s(timeout_s: float, slice_s: float) -> float:
    """Return when a timeout has ended in a loop of which no iteration takes longer than a slice."""
    periods = 1 + timeout_s // ((LOOKS_PER_PERIOD - 1) * LOOK_INTERVAL_S)
    return timeout_s + periods * (2 * slice_s + LOOK_INTERVAL_S) + 8 * slice_s


def stand_still(seconds: float) -> None:
    """Block the event loop."""
    time.sleep(seconds)


async def test_a_wait_does_not_count_the_time_in_which_our_own_loop_stood_still() -> None:
    """The answer needs two more iterations of the loop, as a connection that is made needs its greeting."""
    loop = asyncio.get_running_loop()
    for is_a_wait in (True, False):
        answer: asyncio.Future[None] = loop.create_future()
        loop.call_soon(time.sleep, 0.5)  # All of the timeout passes meanwhile.
        loop.call_at(loop.time() + 0.5, partial(loop.call_later, 0.02, answer.set_result, None))
        if is_a_wait:
            assert await awake_wait([answer], 0.2) == ({answer}, set())
        else:
            async with awake_timeout(0.2):
                await answer


async def test_a_wait_ends_at_its_timeout() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert await awake_wait([answer], 0.01) == (set(), {answer})
    answer.cancel()


async def test_a_standstill_within_a_timeout_does_not_count_either() -> None:
    """The loop runs again before the timeout would have passed, with little time left to answer."""
    loop = asyncio.get_running_loop()
    for is_a_wait in (True, False):
        answer: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.05, time.sleep, 1.0)
        loop.call_at(loop.time() + 1.4, partial(loop.call_soon, answer.set_result, None))
        if is_a_wait:
            assert await awake_wait([answer], 1.2) == ({answer}, set())
        else:
            async with awake_timeout(1.2):
                await answer


async def test_a_timeout_that_is_over_raises_and_says_so() -> None:
    scope = None
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.01) as scope:
            await asyncio.Event().wait()
    assert scope is not None
    assert scope.expired()


async def test_a_clock_stands_still_with_its_loop() -> None:
    clock = AwakeClock()
    clock.start()
    try:
        await asyncio.sleep(0)
        begun = clock.time()
        stand_still(1.0)
        assert clock.time() - begun < LOOK_INTERVAL_S  # Before any timer has fired.
        await asyncio.sleep(0)
        assert clock.time() - begun < LOOK_INTERVAL_S
        async with asyncio.timeout(HANG_S):
            while clock.time() - begun < LOOK_INTERVAL_S:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        clock.stop()


def test_the_longest_standstill_of_a_period_is_excused() -> None:
    standstills = Standstills()
    assert [standstills.look(each) for each in (0.5, 0.4, 12.0, 3.0)] == [0.5, 0.0, 11.5, 0.0]
    assert standstills.excusable_s(13.0) == 1.0
    for _ in range(4, LOOKS_PER_PERIOD):
        standstills.look(0.0)
    assert standstills.look(3.0) == 3.0


async def test_a_deadline_that_passed_while_the_loop_stood_still_is_not_over() -> None:
    with Deadline(0.2) as deadline:
        stand_still(1.0)
        assert not deadline.is_over
        await asyncio.sleep(0)
        assert not deadline.is_over
        assert await deadline.wait([]) == (set(), set())
        assert deadline.is_over


async def test_a_deadline_is_shortened_and_never_made_longer() -> None:
    with Deadline(None) as deadline:
        assert deadline.left_s == float("inf")
        deadline.shorten(0.01)
        deadline.shorten(HANG_S)
        assert deadline.left_s <= 0.01
        await deadline.wait([])
        assert deadline.is_over


async def test_a_deadline_that_is_shortened_behind_a_standstill_ends_in_that_time() -> None:
    with Deadline(HANG_S) as deadline:
        stand_still(1.0)
        deadline.shorten(0.2)
        assert 0.1 < deadline.left_s <= 0.2


async def test_a_remainder_that_rounding_leaves_is_over() -> None:
    # At a large time of the loop, `end - now` may be positive and `now + (end - now)` be `now`.
    with Deadline(60.0) as deadline:
        deadline._ends_at = deadline.time() + 1e-9
        assert deadline.left_s == 0.0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8), st.floats(0.01, 6.0))
def test_a_deadline_ends_in_a_loop_that_is_busy_all_the_time(slices: list[float], timeout_s: float) -> None:
    """Each look is late there, so no deadline may wait for one that is on time."""
    bound_s = latest_s(timeout_s, max(slices))

    async def main(loop: BusyLoop) -> float:
        working = asyncio.create_task(loop.work(slices, 2 * bound_s))
        with pytest.raises(TimeoutError):
            async with awake_timeout(timeout_s):
                await asyncio.Event().wait()
        ended_at = loop.time()
        await working
        return ended_at

    assert timeout_s <= run_busy(main) <= bound_s


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(0.05, 12.0), min_size=1, max_size=8), st.floats(0.01, 6.0), st.floats(0.0, 1.0))
def test_no_deadline_ends_before_an_answer_is_read_that_came_in_time(
    slices: list[float], timeout_s: float, share: float
) -> None:
    """The answer came in time by the real clock, and lies in the buffer while the loop computes."""

    async def main(loop: BusyLoop) -> None:
        working = asyncio.create_task(loop.work(slices, 100.0))
        answer: asyncio.Future[None] = loop.create_future()
        loop.come(loop.time() + share * timeout_s, partial(answer.set_result, None))
        asking = asyncio.ensure_future(asyncio.wait([answer]))  # as a call is awaited, by a task of its own
        async with awake_timeout(timeout_s):
            await asyncio.wait([asking])
        assert (await awake_wait([answer], timeout_s))[0]
        working.cancel()

    run_busy(main)
