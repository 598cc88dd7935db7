"""What all connections of a bookie share: the totals that bound its memory, and whose turn is next.

Owns the sums over all connections and the queue of connections that wait for room under them. Each
connection keeps its own sums (`bookie_aio.server.connection`).

Invariant: a connection that waits here is woken, in the order in which it came, as soon as there is room;
it goes to the end of the queue when it needs more than its turn.
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


class Flow:
    """Bytes held for all connections, against the limits."""

    __slots__ = ("_is_waking", "_limits", "_loop", "_waiting", "bytes_pending", "reads_bytes")

    def __init__(self, limits: Limits, loop: asyncio.AbstractEventLoop) -> None:
        self._limits = limits
        self._loop = loop
        self._waiting: dict[Waiting, None] = {}
        self._is_waking = False
        self.bytes_pending = 0
        self.reads_bytes = 0

    @property
    def waiting(self) -> int:
        """Give the number of connections that wait."""
        return len(self._waiting)

    @property
    def is_exhausted(self) -> bool:
        """Tell whether no connection may be read."""
        return (
            self.bytes_pending >= self._limits.bytes_pending_max
            or self.reads_bytes >= self._limits.reads_bytes_max
        )

    def wait(self, waiting: Waiting) -> None:
        """Queue up for room; again is no harm."""
        self._waiting[waiting] = None

    def forget(self, waiting: Waiting) -> None:
        """Leave the queue."""
        self._waiting.pop(waiting, None)

    def release_bytes(self, count: int) -> None:
        """Take back what an add held."""
        self.bytes_pending -= count
        assert self.bytes_pending >= 0
        if self._waiting:
            self._wake_soon()

    def count_reads(self, change: int) -> None:
        """Count what answers to reads hold, up or down."""
        self.reads_bytes += change
        assert self.reads_bytes >= 0
        if change < 0 and self._waiting:
            self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._is_waking:
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
