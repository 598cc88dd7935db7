"""What all connections of a bookie share: the totals that bound its memory, and whose turn is next.

Owns the sums over all connections and the queues of connections that wait for room under them: one for adds
on their way to the disk, one for answers to reads, so that slow readers keep no writer waiting, and one for
reads being computed, so that a storm of them leaves the adds their turns. Each
connection keeps its own sums (`bookie_aio.server.connection`).

Invariant: a connection that waits is woken, in the order in which it came, as soon as there is room; it
goes to the end of the queue when it needs more than its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from bookie_aio.config import Limits


class Waiting(Protocol):
    """What waits for room."""

    def room_again(self) -> None:
        """Go on; called from the loop."""


class Budget:
    """A number, of bytes or of reads, that connections share."""

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
        """Return whether nothing more may be taken."""
        return self.used >= self._bytes_max

    def wait(self, waiting: Waiting) -> None:
        """Queue up for room; again is no harm."""
        self._waiting[waiting] = None

    def forget(self, waiting: Waiting) -> None:
        """Leave the queue."""
        self._waiting.pop(waiting, None)

    def count(self, change: int) -> None:
        """Take bytes, or (below zero) give them back."""
        self.used += change
        assert self.used >= 0
        if change < 0 and self._waiting and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        # Those that come back to the queue during this sweep wait for the next one.
        for _ in range(len(self._waiting)):
            if self.is_exhausted or not self._waiting:
                return
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.room_again()


class Backpressure:
    """The budgets of a bookie."""

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
        """Return whether another read may begin."""
        return not self.reads.is_exhausted and not self.running.is_exhausted

    def wait_for_reads(self, waiting: Waiting) -> None:
        """Queue up for what is used up."""
        (self.reads if self.reads.is_exhausted else self.running).wait(waiting)

    def forget(self, waiting: Waiting) -> None:
        """Leave all queues."""
        self.adds.forget(waiting)
        self.reads.forget(waiting)
        self.running.forget(waiting)
