"""Backpressure: the budgets that bound the memory of a bookie over all its connections.

Owns the budgets, and for each of them a queue of the connections that wait for room:

- `adds`: bytes on their way to the disk;
- `reads`: bytes of answers to reads. They have a budget of their own, so that slow readers block no writer;
- `running`: reads that are being computed. Their number is bounded, so that adds are handled in between;
- `received`: receive buffers of connections that have stored an add;
- `received_of_others`: receive buffers of all other connections. A stranger's frames in part take no room
  from the frames of writers.

Owns the `SlowLane`, too. It bounds the time of all requests but adds in one event-loop iteration.

Each connection keeps its own sums (`bookie_aio.server.connection`).

Invariant: connections are woken in the order in which they came, as soon as there is room. A connection that
needs more room than it found goes to the end of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from bookie_aio.config import Limits
    from bookie_aio.wire.frames import FrameParser


_BUFFER_BYTES_SCARCE = 16 * 1024
"""The largest usual receive buffer while less than half of its budget is left."""


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

    @property
    def free(self) -> int:
        """Return how much is left; 0 where the limit is passed."""
        return max(0, self._bytes_max - self.used)

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


class ReceiveRoom:
    """The room that the receive buffer of one connection takes up in the shared budgets.

    `is_writer`: an add of the connection has become durable, so its frames use the budget of writers.

    A frame that needs a larger buffer first reserves room for all of it. Otherwise frames in part could use
    up the budget, and none of them would ever be complete.
    """

    __slots__ = ("_backpressure", "_budget", "_counted", "_limits", "_parser", "_reserved", "is_writer")

    def __init__(self, parser: FrameParser, limits: Limits, backpressure: Backpressure) -> None:
        self._parser = parser
        self._limits = limits
        self._backpressure = backpressure
        self._budget = backpressure.received_of_others
        self._counted = 0
        self._reserved = 0
        self.is_writer = False

    def count(self) -> None:
        """Count the buffer as it is now."""
        size = max(self._parser.buffer_bytes, self._reserved)
        if size == self._counted:
            return
        budget = self._budget
        budget.count(size - self._counted)
        self._counted = size
        is_scarce = budget.free < budget.used
        self._parser.buffer_bytes_max = _BUFFER_BYTES_SCARCE if is_scarce else self._parser.frame_bytes_max

    def reserve(self, connection: Waiting) -> bool:
        """Reserve room for the frame that has begun, if there is one.

        Where there is none, return False. The connection is queued then, and has to leave its bytes unread.
        """
        if not self._parser.is_mid_frame:
            self._reserved = 0
            return True
        claimed = self._parser.claimed_bytes
        if claimed <= self._reserved:
            return True
        if self.is_writer and self._budget is not self._backpressure.received:
            self.close()
            self._budget = self._backpressure.received
            self.count()
        budget = self._budget
        if claimed - self._counted > budget.free and budget.used > self._counted:
            budget.wait(connection)
            return False
        self._reserved = claimed
        self.count()
        return True

    @property
    def frame_timeout_s(self) -> float:
        """Return the time in which the frame has to be complete; shorter while others wait for its room."""
        limits = self._limits
        if self._reserved and self._budget.waiting:
            return min(1.0 + self._reserved / limits.received_rate_min, limits.frame_progress_timeout_s)
        return limits.frame_progress_timeout_s

    def close(self) -> None:
        """Return the room."""
        self._budget.count(-self._counted)
        self._counted = 0


class SlowLane:
    """The time in each event-loop iteration for all requests but adds.

    A connection whose request finds no time left waits. It is woken in a later iteration, after the bytes
    that have arrived in between were handled, and the adds among them.
    """

    __slots__ = ("_clock", "_is_due", "_is_waking", "_loop", "_seconds", "_spent", "_waiting")

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._loop = loop
        self._clock = clock
        self._waiting: dict[Waiting, None] = {}
        self._spent = 0.0
        self._is_due = False
        self._is_waking = False

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return len(self._waiting)

    def begin(self, connection: Waiting) -> float | None:
        """Return the time at which a request begins; None where the connection has to wait for its turn."""
        if self._spent >= self._seconds or (self._waiting and not self._is_waking):
            self._waiting[connection] = None
            self._arm()
            return None
        self._is_waking = False  # one request each: the next one goes to the end of the queue
        return self._clock()

    def end(self, began: float) -> None:
        """Count the time of a request that ends now."""
        self._spent += self._clock() - began
        self._arm()

    def forget(self, connection: Waiting) -> None:
        """Take a connection out of the queue."""
        self._waiting.pop(connection, None)

    def _arm(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._is_due = False
        self._spent = 0.0
        for _ in range(len(self._waiting)):
            if self._spent >= self._seconds or not self._waiting:
                break
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._is_waking = True
            first.room_again()
            self._is_waking = False
        if self._waiting:
            self._arm()


class Backpressure:
    """The budgets of a bookie."""

    __slots__ = ("adds", "reads", "received", "received_of_others", "running", "slow_lane")

    def __init__(
        self, limits: Limits, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock` measures the time that requests take, in seconds; None stands for the loop's."""
        self.adds = Budget(limits.bytes_pending_max, loop)
        self.reads = Budget(limits.reads_bytes_max, loop)  # bytes of answers
        self.running = Budget(limits.reads_max, loop)  # reads that are being computed
        self.received = Budget(limits.received_bytes_max, loop)
        self.received_of_others = Budget(limits.received_bytes_max, loop)
        self.slow_lane = SlowLane(limits.slow_lane_turn_s, loop, clock or loop.time)

    @property
    def _queues(self) -> tuple[Budget | SlowLane, ...]:
        return (
            self.adds, self.reads, self.running, self.received, self.received_of_others, self.slow_lane,
        )  # fmt: skip

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return sum(queue.waiting for queue in self._queues)

    @property
    def has_room_for_reads(self) -> bool:
        """Return whether another read may start."""
        return not self.reads.is_exhausted and not self.running.is_exhausted

    def wait_for_reads(self, waiting: Waiting) -> None:
        """Queue up for the budget that keeps reads from starting."""
        (self.reads if self.reads.is_exhausted else self.running).wait(waiting)

    def forget(self, waiting: Waiting) -> None:
        """Take a connection out of all queues."""
        for queue in self._queues:
            queue.forget(waiting)
