"""How a thread waits for what runs on the loop, so that an interrupt may strike at any instruction.

Python raises KeyboardInterrupt (and whatever else a signal's handler raises) between two bytecodes, also in
the few that `threading.Condition` runs after it has acquired its lock and before its caller's `with` is
entered. Then nobody releases that lock, and the loop, where it wants the lock as well, waits for ever with
everything that lives on it.

Invariant: a thread that may be interrupted takes a lock that the loop takes only where no bytecode lies
between the acquiring and the `with`. What it waits for is a bare lock of its own, which only the loop
releases; an interrupt leaves it behind, and nobody minds.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R")


def closed_gate() -> threading.Lock:
    """Give a lock that is locked: whoever acquires it waits until another thread releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Room:
    """Threads wait here until something is so that the loop brings about."""

    def __init__(self) -> None:
        self._gates: deque[threading.Lock] = deque()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so. Not on the loop."""
        while not is_so():
            self._gates.append(gate := closed_gate())
            if is_so():  # it became so before the loop could see that somebody waits
                return
            gate.acquire()

    def notify(self) -> None:
        """Let all that wait look again. On the loop."""
        for _ in range(len(self._gates)):  # who comes later looks after having come
            self._gates.popleft().release()


class _Condition(threading.Condition):
    """A condition whose `with` has no bytecode of its own: entering and leaving go straight to the lock."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class AddFuture(concurrent.futures.Future[R]):
    """A future that the loop can always complete, wherever a thread was interrupted that looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self._condition.__class__ = _Condition


def result_of(future: AddFuture[R]) -> R:
    """Wait for a future's result, or raise its exception."""
    gate = closed_gate()
    future.add_done_callback(lambda _: gate.release())
    gate.acquire()
    return future.result()
