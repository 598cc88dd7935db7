"""Backpressure: the budgets that bound the memory of a bookie over all its connections.

Owns three budgets, and for each of them a queue of the connections that wait for room:

- `adds`: bytes on their way to the disk;
- `reads`: bytes of answers to reads. They have a budget of their own, so that slow readers block no writer;
- `running`: reads that are being computed. Their number is bounded, so that adds are handled in between.

Each connection keeps its own sums (`bookie_aio.server.connection`).

Invariant: connections are woken in the order in which they came, as soon as there is room. A connection that
needs more room than it found goes to the end of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from bookie_aio.config import Limits


class Waiting(Protocol):
    """A connection that waits for room."""

    def room_again(self) -> None:
        """Handle the frames that wait, as far as there is room. Called by the event loop."""


class Budget:
    """A limit on a number of bytes or of reads, shared by all connections."""

    __slots__ = ("_bytes_max", "_is_waking", "_loop", "_waiting", "used")

    def __init__(self, bytes_max: int, loop: asyncio.AbstractEventLoop) -> None:
        self._bytes_max = bytes_max
        self._loop = loop
        self._waiting: dict[Waiting, None] = {}
        self._is_waking = False
        self.used = 0

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return len(self._waiting)

    @property
    def is_exhausted(self) -> bool:
        """Return whether the limit is reached."""
        return self.used >= self._bytes_max

    def wait(self, waiting: Waiting) -> None:
        """Queue up for room. A connection that is queued already keeps its place."""
        self._waiting[waiting] = None

    def forget(self, waiting: Waiting) -> None:
        """Take a connection out of the queue."""
        self._waiting.pop(waiting, None)

    def count(self, change: int) -> None:
        """Add `change` to the number in use; below zero, this frees room and wakes the queue."""
        self.used += change
        assert self.used >= 0
        if change < 0 and self._waiting and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        # Connections that queue up again during this loop wait for the next call. It would not end otherwise.
        for _ in range(len(self._waiting)):
            if self.is_exhausted or not self._waiting:
                return
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.room_again()


class Backpressure:
    """The three budgets of a bookie."""

    __slots__ = ("adds", "reads", "running")

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self.adds = Budget(limits.bytes_pending_max, loop)
        self.reads = Budget(limits.reads_bytes_max, loop)  # bytes of answers
        self.running = Budget(limits.reads_max, loop)  # reads that are being computed

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return self.adds.waiting + self.reads.waiting + self.running.waiting

    @property
    def has_room_for_reads(self) -> bool:
        """Return whether another read may start."""
        return not self.reads.is_exhausted and not self.running.is_exhausted

    def wait_for_reads(self, waiting: Waiting) -> None:
        """Queue up for the budget that keeps reads from starting."""
        (self.reads if self.reads.is_exhausted else self.running).wait(waiting)

    def forget(self, waiting: Waiting) -> None:
        """Take a connection out of all queues."""
        self.adds.forget(waiting)
        self.reads.forget(waiting)
        self.running.forget(waiting)
