"""Backpressure: the budgets that bound the memory of a bookie over all its connections.

Owns the budgets, and for each of them a queue of the connections that wait for room:

- `adds`: bytes on their way to the disk;
- `reads`: bytes of answers to reads. They have a budget of their own, so that slow readers block no writer;
- `running`: reads that are being computed. Their number is bounded, so that adds are handled in between;
- `received`: receive buffers of connections that have stored an add;
- `received_of_others`: receive buffers of all other connections. A stranger's frames in part take no room
  from the frames of writers.

Owns the `SlowLane`, too. It bounds the time of all requests but adds.

Each connection keeps its own sums (`bookie_aio.server.connection`).

Invariant: connections are woken in the order in which they came, as soon as there is room. A connection that
needs more room than it found goes to the end of the queue.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Generator

    from bookie_aio.config import Limits
    from bookie_aio.wire.frames import FrameParser


_BUFFER_BYTES_SCARCE = 16 * 1024
"""The largest usual receive buffer while less than half of its budget is left."""
_TURN_S = 0.0002
"""The time of one connection's turn in the slow lane. It begins no further request after that."""
_REST_S_MIN = 0.001
"""The finest that timers have."""
_ADDS_RECENT_S = 0.25
"""Adds are being served for so long after the last one."""
_DEBT_S_MAX = 0.1
"""The longest rest."""

_T = TypeVar("_T")


class Waiting(Protocol):
    """A connection that waits for room."""

    def room_again(self) -> None:
        """Handle the frames that wait, as far as there is room. Called by the event loop."""


class Turns(Protocol):
    """A connection that waits for its turn in the slow lane, or the server that accepts connections."""

    def take_turn(self) -> None:
        """Handle the requests that wait, as far as `SlowLane.begin` allows, and send their answers."""


class Blocked(Waiting, Turns, Protocol):
    """A connection that waits for any of these."""


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
        if change < 0:
            self._wake_soon()

    @property
    def _may_wake(self) -> bool:
        return not self.is_exhausted

    def _wake_soon(self) -> None:
        if self._waiting and not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        # Connections that queue up again during this loop wait for the next call. It would not end otherwise.
        for _ in range(len(self._waiting)):
            if not self._may_wake or not self._waiting:
                return
            first = next(iter(self._waiting))
            del self._waiting[first]
            first.room_again()


class ReceiveBudget(Budget):
    """A limit on the bytes of receive buffers.

    `reservations`: the frames being read whose buffers are reserved. Each has a deadline.
    """

    __slots__ = ("reservations",)

    def __init__(self, bytes_max: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bytes_max, loop)
        self.reservations = 0

    @property
    def is_crowded(self) -> bool:
        """Return whether buffers have to be small: the limit is reached, or a frame waits for room."""
        return self.is_exhausted or bool(self._waiting)

    def begin_frame(self) -> None:
        """Note that a frame has its room."""
        self.reservations += 1

    def end_frame(self) -> None:
        """Note that such a frame is over."""
        self.reservations -= 1
        assert self.reservations >= 0
        self._wake_soon()

    @property
    def _may_wake(self) -> bool:
        return not self.reservations or not self.is_exhausted


class ReceiveRoom:
    """The room that the receive buffer of one connection takes up in the shared budgets.

    `is_writer`: an add of the connection has become durable, so its frames use the budget of writers.

    A frame that needs a larger buffer first reserves room for all of it. Otherwise frames in part could use
    up the budget, and none of them would ever be complete.

    Invariant: a frame waits only while another has room. What the connections have received in part may use
    up the budget by itself. So a frame gets room beyond the limit where no other has any: one at a time, each
    with its deadline. Buffers that no frame needs are let go meanwhile, so that they add up to nothing.
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
        self._let_go()
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
        self._let_go()
        if not self._parser.is_mid_frame:
            return True
        claimed = self._parser.claimed_bytes
        if claimed <= self._reserved:
            return True
        if self.is_writer and self._budget is not self._backpressure.received:
            self.close()
            self._budget = self._backpressure.received
            self.count()
        budget = self._budget
        if claimed - self._counted > budget.free and budget.reservations:
            budget.wait(connection)
            self._parser.shrink(0)
            return False
        self._reserved = claimed
        budget.begin_frame()
        self.count()
        return True

    def end_frame(self) -> None:
        """Give up the reservation: the frame was handled."""
        if self._reserved:
            self._reserved = 0
            self._budget.end_frame()

    def _let_go(self) -> None:
        if not self._reserved and self._budget.is_crowded:
            self._parser.shrink()

    @property
    def frame_timeout_s(self) -> float:
        """Return the time in which the frame has to be complete; shorter while others wait for its room."""
        limits = self._limits
        if self._reserved and self._budget.waiting:
            return min(1.0 + self._reserved / limits.received_rate_min, limits.frame_progress_timeout_s)
        return limits.frame_progress_timeout_s

    def close(self) -> None:
        """Return the room."""
        self.end_frame()
        self._budget.count(-self._counted)
        self._counted = 0


class SlowLane:
    """The time for all requests but adds. It keeps the event loop free for adds, whoever asks for what.

    It is a token bucket of time. While adds are served, the other requests run in slices of `slice_s`. The
    rest after a slice is their processor time, times their price. In a rest the event loop sleeps.
    The journal's thread finds the interpreter lock free then, and writers on the same machine find a
    processor. While no adds come, the slices follow one another, one in each event-loop iteration.

    Turns are counted in time. A turn ends after `_TURN_S`, and the connection goes to the end of the queue.
    So a connection whose requests are dear gets fewer of them. Writers have a queue of their own, which goes
    first: the adds of a writer wait behind its own reads.
    """

    __slots__ = (
        "_adds_at", "_adds_seen", "_began", "_clock", "_credit", "_credited_at", "_effort", "_is_armed",
        "_loop", "_others", "_price", "_slice_s", "_turn_of", "_turn_until", "_turns", "_writers", "adds",
    )  # fmt: skip

    def __init__(
        self,
        slice_s: float,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        effort: Callable[[], float],
    ) -> None:
        """`effort` returns the processor time of this thread. `clock` returns the time."""
        self._slice_s = slice_s
        self._loop = loop
        self._clock = clock
        self._effort = effort
        self._writers: dict[Turns, None] = {}
        self._others: dict[Turns, None] = {}
        self._credit = slice_s
        self._credited_at = self._adds_at = clock()
        self._adds_seen = 0
        self._is_armed = False
        self._turn_of: Turns | None = None
        self._turn_until: float | None = None
        self._turns = 0
        self._began = 0.0
        self._price = 1.0
        self.adds = 0
        """How many adds, or records of many adds, became durable."""

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return len(self._writers) + len(self._others)

    def begin(self, connection: Turns, price: float, *, is_writer: bool) -> bool:
        """Return whether a request may be handled now. Where it may not, its connection is queued."""
        now = self._clock()
        if self._turn_of is connection:
            if self._turn_until is None:
                self._turn_until = now + _TURN_S
            is_due = now < self._turn_until
        else:
            is_due = not self._writers and not self._others and self._has_credit(now)
        if not is_due:
            (self._writers if is_writer else self._others)[connection] = None
            self._arm(now)
            return False
        self.begin_at_once(price)
        return True

    def begin_at_once(self, price: float) -> None:
        """Begin a request that does not wait. The others wait for longer in its place."""
        self._price = price
        self._began = self._effort()

    def end(self) -> None:
        """Count the time of the request that began last, unless it is a part of a turn, which is counted."""
        if self._turn_of is None:
            self._spend(self._began, self._price)

    async def timed(self, work: Coroutine[object, object, _T], price: float) -> _T:
        """Do this work, and count the time that the event loop spends on it."""
        return await _in_slow_lane(work, self._effort, lambda began: self._spend(began, price))

    def forget(self, connection: Turns) -> None:
        """Take a connection out of the queue."""
        self._writers.pop(connection, None)
        self._others.pop(connection, None)

    def _spend(self, began: float, price: float) -> None:
        spent = self._effort() - began
        now = self._clock()
        self._has_credit(now - spent)
        self._credit = max(self._credit - spent * price, -_DEBT_S_MAX)
        self._credited_at = now

    def _are_adds_served(self, now: float) -> bool:
        if self.adds != self._adds_seen:
            self._adds_seen, self._adds_at = self.adds, now
        return now - self._adds_at < _ADDS_RECENT_S

    def _has_credit(self, now: float) -> bool:
        rested = max(0.0, now - self._credited_at)
        self._credited_at = max(now, self._credited_at)
        self._credit = min(self._credit + rested, self._slice_s)
        return self._credit > 0

    def _arm(self, now: float) -> None:
        if self._is_armed:
            return
        self._is_armed = True
        if self._are_adds_served(now):
            self._loop.call_later(max(self._slice_s - self._credit, _REST_S_MIN), self._run_slice)
        else:
            self._credit = max(self._credit, 0.0)
            self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        self._is_armed = False
        try:
            self._give_turns()
        finally:
            if self.waiting:
                self._arm(self._clock())

    def _give_turns(self) -> None:
        now = self._clock()
        if not self._are_adds_served(now):
            self._credit = self._slice_s
        left = self.waiting  # a connection that queues up again in this loop waits for the next slice
        while self._has_credit(now) and left > 0 and self.waiting:
            left -= 1
            self._turns += 1
            # Every fourth turn is one of the others, so that readers go on beside any number of writers.
            is_of_writers = self._writers and (self._turns % 4 or not self._others)
            queue = self._writers if is_of_writers else self._others
            self._turn_of = first = next(iter(queue))
            del queue[first]
            self._turn_until = None
            self._price = 1.0
            began = self._effort()
            try:
                first.take_turn()
            finally:
                self._turn_of = None
            self._spend(began, self._price)
            now = self._credited_at


@types.coroutine
def _in_slow_lane(
    work: Coroutine[object, object, _T], effort: Callable[[], float], spend: Callable[[float], None]
) -> Generator[object, object, _T]:
    step: Callable[[Any], object] = work.send
    argument: object = None
    while True:
        began = effort()
        try:
            waited_for = step(argument)
        except StopIteration as end:
            return cast("_T", end.value)
        finally:
            spend(began)
        try:
            step, argument = work.send, (yield waited_for)
        except BaseException as error:  # a cancellation, which belongs to the work
            step, argument = work.throw, error


class Backpressure:
    """The budgets of a bookie."""

    __slots__ = ("adds", "clock", "reads", "received", "received_of_others", "running", "slow_lane")

    def __init__(
        self,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] | None = None,
        effort: Callable[[], float] | None = None,
    ) -> None:
        """Make the budgets.

        Args:
            clock: the time in seconds; None stands for the loop's, which may stand still in an iteration.
            effort: the processor time of this thread in seconds; None stands for `clock`.
        """
        self.adds = Budget(limits.bytes_pending_max, loop)
        self.reads = Budget(limits.reads_bytes_max, loop)  # bytes of answers
        self.running = Budget(limits.reads_max, loop)  # reads that are being computed
        self.received = ReceiveBudget(limits.received_bytes_max, loop)
        self.received_of_others = ReceiveBudget(limits.received_bytes_max, loop)
        self.clock = clock = clock or loop.time
        self.slow_lane = SlowLane(limits.slow_lane_slice_s, loop, clock, effort or clock)

    @property
    def _budgets(self) -> tuple[Budget, ...]:
        return self.adds, self.reads, self.running, self.received, self.received_of_others

    @property
    def waiting(self) -> int:
        """Return the number of connections that wait."""
        return sum(budget.waiting for budget in self._budgets) + self.slow_lane.waiting

    @property
    def has_room_for_reads(self) -> bool:
        """Return whether another read may start."""
        return not self.reads.is_exhausted and not self.running.is_exhausted

    @property
    def may_read_at_once(self) -> bool:
        """Return whether another read may start, and takes the room of no connection that waits for it."""
        return self.has_room_for_reads and not self.reads.waiting and not self.running.waiting

    def wait_for_reads(self, waiting: Waiting) -> None:
        """Queue up for the budget that keeps reads from starting."""
        is_for_bytes = self.reads.is_exhausted or self.reads.waiting  # both budgets wake when a read ends
        (self.reads if is_for_bytes else self.running).wait(waiting)

    def forget(self, blocked: Blocked) -> None:
        """Take a connection out of all queues."""
        for budget in self._budgets:
            budget.forget(blocked)
        self.slow_lane.forget(blocked)
