"""Timeouts that do not count the time in which this process's event loop did not run."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from metadata.awake import LOOK_INTERVAL_S, AwakeClock, Deadline, awake_timeout, awake_wait

HANG_S = 30.0


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


async def test_a_clock_stands_still_with_its_loop_and_says_that_it_has_just_woken() -> None:
    clock = AwakeClock()
    clock.start()
    try:
        await asyncio.sleep(0)
        begun = clock.time()
        stand_still(1.0)
        assert clock.has_just_woken  # Before any timer has fired.
        assert clock.time() - begun < 0.5
        await asyncio.sleep(0)
        assert clock.has_just_woken
        async with asyncio.timeout(HANG_S):
            while clock.has_just_woken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert clock.time() - begun >= LOOK_INTERVAL_S
    finally:
        clock.stop()


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


async def test_a_remainder_that_rounding_leaves_is_over() -> None:
    # At a large time of the loop, `end - now` may be positive and `now + (end - now)` be `now`.
    with Deadline(60.0) as deadline:
        deadline._ends_at = deadline.time() + 1e-9
        assert deadline.left_s == 0.0
        assert deadline.is_over
