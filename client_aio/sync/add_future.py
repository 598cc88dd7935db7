"""The future of an add, which a thread waits for and the loop completes.

Applications give these futures to `concurrent.futures.wait` and `as_completed`. Both lock all futures in a
Python loop, and an interrupt there leaves some of them locked for ever. A signal's handler may also call a
client while its thread has a future locked.

Invariants:

- The loop never waits for a future's lock. What it cannot complete at once, it tries again.
- What `wait` and `as_completed` lock is locked for as long as they run, and no longer. An interrupt that
  ends them frees it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from collections import deque
from concurrent.futures._base import CANCELLED
from operator import attrgetter
from threading import Condition
from typing import TYPE_CHECKING, Any, TypeVar

from client_aio.sync.loop_thread import closed_gate

if TYPE_CHECKING:
    import asyncio
    import threading
    from types import FrameType

R = TypeVar("R")

_RETRY_S = 0.001
_RETRY_S_MAX = 0.1


class _Condition(Condition):
    """A future's condition. `with` locks it; `acquire` and `release` are for `wait` and `as_completed` alone.

    Its `with` has no bytecode of its own: it enters and leaves the lock itself.
    """

    _holders: tuple[FrameType, ...] = ()
    """The frames of `wait` and `as_completed` that have acquired it: the loop leaves the future to them."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))
    # A property comes before the attribute of that name, which `Condition` gives to each of its objects.
    acquire = property(attrgetter("_hold"))
    release = property(attrgetter("_let_go"))

    def _hold(self) -> bool:
        holder = sys._getframe(2)  # `wait` or `as_completed`, behind what acquires for it
        with self:
            self._holders += (holder,)
        return True

    def _let_go(self) -> None:
        holder = sys._getframe(2)
        with self:
            holders = list(self._holders)
            holders.remove(holder)
            self._holders = tuple(holders)

    def try_lock(self) -> bool:
        """Lock it for the loop, unless a thread has it; never waits."""
        lock: threading.RLock = self._lock  # type: ignore[attr-defined]
        if not lock.acquire(blocking=False):
            return False
        if self._holders:
            self._holders = tuple(holder for holder in self._holders if _is_running(holder))
            if self._holders:
                lock.release()
                return False
        return True

    def unlock(self) -> None:
        """Unlock it after `try_lock`."""
        self._lock.release()  # type: ignore[attr-defined]


def _is_running(frame: FrameType) -> bool:
    """Return whether a frame is on a thread's stack. The variables of one that has ended are cleared."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


class _Event:
    """What a thread waits for in `wait` and `as_completed`: as `threading.Event`, without a lock to leak."""

    def __init__(self) -> None:
        self._is_set = False
        self._gates: deque[threading.Lock] = deque()

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(IndexError):  # Other threads may set it for other futures.
            while True:
                self._gates.popleft().release()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._gates.append(gate := closed_gate())
        if not self._is_set:  # It may have been set before the gate was there to be released.
            gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        return self._is_set


class _Waiters(list[Any]):
    """The calls of `wait` and `as_completed` that a future tells of its end."""

    def append(self, waiter: Any) -> None:
        # Nobody waits for the event, or sets it, before its futures are locked no more.
        if not isinstance(waiter.event, _Event):
            waiter.event = _Event()
        super().append(waiter)


class AddFuture(concurrent.futures.Future[R]):
    """A future that the loop can always complete, wherever an interrupt struck a thread that read it."""

    _done_callbacks: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self._condition.__class__ = _Condition
        self._waiters = _Waiters()

    def complete(
        self, loop: asyncio.AbstractEventLoop, added: asyncio.Future[R], retry_s: float = _RETRY_S
    ) -> None:
        """Take over the result of an add that is done: now, or soon where a thread has the future locked.

        On the loop.
        """
        condition: _Condition = self._condition  # type: ignore[assignment]
        if not condition.try_lock():
            loop.call_later(retry_s, self.complete, loop, added, min(2 * retry_s, _RETRY_S_MAX))
            return
        try:
            if self._state == CANCELLED:
                self.set_running_or_notify_cancel()
                return
            # They are called behind the unlocking: a callback may wait for a thread that reads the future.
            callbacks, self._done_callbacks = self._done_callbacks, []
            error = added.exception()
            if error is None:
                self.set_result(added.result())
            else:
                self.set_exception(error)
        finally:
            condition.unlock()
        self._done_callbacks = callbacks
        self._invoke_callbacks()  # type: ignore[attr-defined]


def result_of(future: AddFuture[R]) -> R:
    """Wait for a future's result, or raise its exception."""
    gate = closed_gate()
    future.add_done_callback(lambda _: gate.release())
    gate.acquire()
    return future.result()
