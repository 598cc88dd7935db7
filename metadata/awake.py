"""Timeouts that do not count the time in which this process's event loop did not run.

An application may block its event loop, and a process may be stopped. The answers that come meanwhile wait in
the system's buffers. A timeout that passes then says nothing about who should answer. Two rules follow.

- *Read, then judge.* A timeout that has passed is judged once the loop has polled its selector and run what
  came of that (`Reading`). Answers that lay in the buffers are read by then. Nobody waits for a timer that is
  on time: the loop of a busy application may never have one.
- *The longest standstill is excused.* A timer that fires late shows that the loop stood still. The time since
  the look before counts for no timeout then. Of `LOOKS_PER_PERIOD` looks in a row, the longest standstill is
  excused (`Standstills`). The others count: a loop that is busy all the time polls in between.

So every timeout ends. Where no iteration of the loop takes longer than S seconds, a standstill lasts for
2 S + `LOOK_INTERVAL_S` at most. A timeout is longer by one standstill for each 1.75 s of it that have begun,
and by eight iterations, at most.

- `AwakeClock`: a clock that stands still with the loop. Who judges by it reads first, by `Reading`.
- `Deadline`: one timeout by such a clock. `awake_timeout` and `awake_wait` are its usual forms.

Not for promises by real time: a session or a leadership ends by the metadata store's clock, whatever this
process does.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

Waited = TypeVar("Waited", bound="asyncio.Future[Any]")

LOOK_INTERVAL_S = 0.25
"""How often the event loop is looked at, while somebody waits."""
LATE_S = 0.1
"""A timer that is later than this was held up. Smaller delays are of a busy loop, which does read answers."""
LOOKS_PER_PERIOD = 8
"""One standstill is excused in so many looks."""
_READING_ITERATIONS = 4
"""An answer that was read passes tasks on its way to its caller, one in each iteration."""
_LEAST_S = 1e-6
"""Less than this is left by rounding. A timer for it would fire at the same time, again and again."""


class Reading:
    """Calls back once the event loop has read what lay in the system's buffers, and has handled it.

    asyncio runs a timer behind the reads of its iteration, and uvloop may run it before them. So several
    iterations pass. They are at once, unless callbacks take their time.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._left = _READING_ITERATIONS
        self._go_on()

    def _go_on(self) -> None:
        if self._left:
            self._left -= 1
            self._handle = self._loop.call_later(0.0, self._go_on)
        else:
            self._callback()

    def cancel(self) -> None:
        """Do not call back."""
        self._handle.cancel()


async def until_read() -> None:
    """Wait as `Reading` does."""
    read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    reading = Reading(lambda: read.set_result(None))
    try:
        await read
    finally:
        reading.cancel()


class Standstills:
    """Decides how much of each standstill of a loop is excused. Pure.

    In each period of looks the longest standstill is excused: a longer one in place of a shorter one, which
    then counts after all.
    """

    __slots__ = ("_longest_s", "_looks")

    def __init__(self) -> None:
        self._looks = 0
        self._longest_s = 0.0

    def excusable_s(self, stood_s: float) -> float:
        """Return the time to excuse if a look came now, `stood_s` after the look before."""
        return max(0.0, stood_s - self._longest_s)

    def look(self, stood_s: float) -> float:
        """Note a look; return the time to excuse.

        Args:
            stood_s: the time since the look before; 0.0 for a look that is on time.
        """
        excused_s = self.excusable_s(stood_s)
        self._longest_s += excused_s
        self._looks += 1
        if self._looks == LOOKS_PER_PERIOD:
            self._looks, self._longest_s = 0, 0.0
        return excused_s


class AwakeClock:
    """A clock that stands still while this process's event loop does, as far as `Standstills` excuses it.

    The time since the last look counts until a look is late, and not any more then. So the clock may go back,
    by less than `LOOK_INTERVAL_S` + `LATE_S`, and never behind the last look.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._standstills = Standstills()
        self._excused_s = 0.0
        self._looked_at = self._loop.time()
        self._due_at = float("inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look at the event loop, until `stop`."""
        self._looked_at = self._loop.time()
        self._due_at = self._looked_at + self._pause_s()
        self._timer = self._loop.call_at(self._due_at, self._look)

    def stop(self) -> None:
        """Look no more; from now on all time counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_at = None, float("inf")

    def time(self) -> float:
        """Return the seconds for which the loop ran, from an arbitrary beginning."""
        return self._loop.time() - self._excused_s - self._standstills.excusable_s(self._stood_s())

    def _stood_s(self) -> float:
        """Return the time since the last look, if the next one is late."""
        now = self._loop.time()
        return now - self._looked_at if now - self._due_at >= LATE_S else 0.0

    def _pause_s(self) -> float:
        """Return how long to wait until the next look."""
        return LOOK_INTERVAL_S

    def _look(self) -> None:
        self._excused_s += self._standstills.look(self._stood_s())
        self.start()


class Deadline(AwakeClock):
    """The end of one timeout; a context manager, in which the timeout runs.

    Args:
        timeout_s: None for no end.
        on_over: called once, at the end.
    """

    def __init__(self, timeout_s: float | None, on_over: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._timeout_s = float("inf") if timeout_s is None else timeout_s
        self._ends_at = self.time() + self._timeout_s
        self._on_over = on_over
        self._reading: Reading | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._ends_at = self.time() + self._timeout_s
        if self._timeout_s != float("inf"):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End no more."""
        super().stop()
        if self._reading is not None:
            self._reading.cancel()

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; 0.0 at the end."""
        left_s = self._ends_at - self.time()
        return left_s if left_s > _LEAST_S else 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the timeout is over: what came in time has been read."""
        return self._over.done()

    def shorten(self, left_s: float) -> None:
        """End in so many seconds, or when it would end anyway."""
        ends_at = self.time() + left_s
        if ends_at < self._ends_at:
            self._ends_at = ends_at
            self._excused_s += self._standstills.look(self._stood_s())
            self.stop()
            self.start()

    async def wait(self, tasks: Collection[Waited]) -> tuple[set[Waited], set[Waited]]:
        """Wait until one is done, or the timeout is over; return those that are done, and the others."""
        futures: set[asyncio.Future[Any]] = {*tasks, self._over}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        done = {each for each in tasks if each.done()}
        return done, set(tasks) - done

    def _pause_s(self) -> float:
        return min(LOOK_INTERVAL_S, self.left_s)

    def _look(self) -> None:
        super()._look()
        if self.left_s > 0.0:
            return
        self.stop()
        self._reading = Reading(self._end)

    def _end(self) -> None:
        self._over.set_result(None)
        if self._on_over is not None:
            self._on_over()


async def awake_wait(tasks: Collection[Waited], timeout_s: float | None) -> tuple[set[Waited], set[Waited]]:
    """Wait as `Deadline.wait` does, with a timeout of its own."""
    with Deadline(timeout_s) as deadline:
        return await deadline.wait(tasks)


@contextlib.asynccontextmanager
async def awake_timeout(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Do as `asyncio.timeout`, by an `AwakeClock`.

    Raises:
        TimeoutError: at the end of the block, when the time is over.
    """
    scope, loop = asyncio.timeout(None), asyncio.get_running_loop()
    with Deadline(timeout_s, lambda: scope.reschedule(loop.time())):
        async with scope:
            yield scope
