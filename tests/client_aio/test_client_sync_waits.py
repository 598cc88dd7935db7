"""Interrupts in `concurrent.futures.wait` and `as_completed`: the loop goes on, and so does every future."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from client_aio.sync.loop_thread import LoopThread
from client_aio.sync.submit_queue import SubmitQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    Futures = list[concurrent.futures.Future[int]]

TRACED = ("concurrent/futures/_base.py", "threading.py", "client_aio/sync/")


class Roomy:
    """A writer that has room."""

    bytes_in_flight, max_in_flight_bytes = 0, 1_000_000

    async def drain(self) -> None:
        raise AssertionError("there is room")


class Adds:
    """A queue whose adds are done when the test says so."""

    def __init__(self) -> None:
        self.background = LoopThread()
        self._adding: list[asyncio.Future[int]] = []
        self._queue: SubmitQueue[int] = SubmitQueue(
            self.background, cast("Any", Roomy()), self._add, cast("Any", None)
        )

    def _add(self, payload: bytes, entry_id: int | None) -> asyncio.Future[int]:
        self._adding.append(added := self.background.loop.create_future())
        return added

    def put(self, count: int) -> Futures:
        return [self._queue.put(b"x") for _ in range(count)]

    async def _finish(self) -> None:
        await self._queue.emptied()
        for number, added in enumerate(self._adding):
            added.set_result(number)
        self._adding.clear()

    def finish(self) -> None:
        """End all adds, on the loop, which completes their futures; and see that the loop goes on."""
        self.background.run(self._finish())
        self.background.run(asyncio.sleep(0))


@pytest.fixture
def adds() -> Iterator[Adds]:
    made = Adds()
    yield made
    made.background.stop()


def done_in_time(call: Callable[[], object]) -> None:
    """Call on a thread of its own, since a call that waits for ever would keep the test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def interrupted_at(step: int, call: Callable[[], object]) -> bool:
    """Call, and raise KeyboardInterrupt where Python may: step says at which such place. False: it has ended.

    Python raises it where a function begins, behind a call that it made, and where a loop goes on.
    """
    left = step

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        path = frame.f_code.co_filename
        if not any(part in path for part in TRACED):
            return None
        is_loop = path.endswith("_base.py") and frame.f_code.co_name in ("__enter__", "__exit__")
        if event in ("call", "return") or (event == "line" and is_loop):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def in_order_of_their_ends(futures: Iterable[concurrent.futures.Future[int]]) -> None:
    with pytest.raises(TimeoutError):
        for _ in concurrent.futures.as_completed(futures, timeout=0.01):
            pass


WAITS: dict[str, Callable[[Futures], object]] = {
    "wait": lambda futures: concurrent.futures.wait(futures, timeout=0),
    "first": lambda futures: concurrent.futures.wait(
        futures, timeout=0, return_when=concurrent.futures.FIRST_EXCEPTION
    ),
    "as_completed": in_order_of_their_ends,
}


@pytest.mark.parametrize("how", WAITS)
def test_a_wait_that_is_interrupted_anywhere_locks_no_future_for_the_loop(adds: Adds, how: str) -> None:
    step = 0
    is_interrupted = True
    while is_interrupted:
        done = adds.put(1)
        adds.finish()
        pending = adds.put(2)
        futures = done + pending if how == "as_completed" else pending
        is_interrupted = interrupted_at(step, lambda futures=futures: WAITS[how](futures))
        done_in_time(adds.finish)
        done_in_time(lambda futures=futures: [future.result() for future in futures])
        assert concurrent.futures.wait(futures, 30).not_done == set(), step
        step += 1
    assert step > 20, "the places of interrupts were met"


def test_a_thread_that_has_a_future_locked_holds_up_neither_the_loop_nor_another_future(adds: Adds) -> None:
    locked, other = adds.put(2)
    calls: list[concurrent.futures.Future[int]] = []
    locked.add_done_callback(calls.append)
    with locked._condition:  # as in the handler of a signal that struck in `locked.done()`
        done_in_time(adds.finish)
        assert (other.result(30), calls) == (1, [])
    assert locked.result(30) == 0
    done_in_time(lambda: adds.background.run(asyncio.sleep(0)))
    assert calls == [locked]


def test_a_future_that_was_cancelled_while_it_was_waited_for_ends_the_wait(adds: Adds) -> None:
    cancelled, other = adds.put(2)
    waits = threading.Thread(target=concurrent.futures.wait, args=([cancelled, other],), daemon=True)
    waits.start()
    assert cancelled.cancel()
    done_in_time(adds.finish)
    waits.join(30)
    assert not waits.is_alive()
