"""Timeouts that do not count the time in which this process's event loop did not run.

An application may block its event loop, and a process may be stopped. The answers that come meanwhile wait in
the system's buffers. A timeout that passes then says nothing about who should answer.

A timer that fires late shows that the loop stood still. That time counts for no timeout. Once the loop runs
again, nothing is judged for `LOOK_INTERVAL_S`: the answers that wait are read first.

- `AwakeClock`: a clock that stands still with the loop.
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
_LEAST_S = 1e-6
"""Less than this is left by rounding. A timer for it would fire at the same time, again and again."""


class AwakeClock:
    """A clock that stands still while this process's event loop does.

    Of each time in which the loop stood still, up to `LOOK_INTERVAL_S` + `LATE_S` are not noticed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stood_still_s = 0.0
        self._woke_at = float("-inf")
        self._due_at = float("inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look at the event loop, until `stop`."""
        self._due_at = self._loop.time() + self._pause_s()
        self._timer = self._loop.call_at(self._due_at, self._look)

    def stop(self) -> None:
        """Look no more; from now on all time counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due_at = None, float("inf")

    def time(self) -> float:
        """Return the seconds for which the loop ran, from an arbitrary beginning."""
        return self._loop.time() - self._stood_still_s - self._late_s()

    @property
    def has_just_woken(self) -> bool:
        """Return whether the loop stood still just now: answers that have come may not be read yet."""
        return self._late_s() > 0 or self.time() < self._woke_at + LOOK_INTERVAL_S

    def _late_s(self) -> float:
        late_s = self._loop.time() - self._due_at
        return late_s if late_s >= LATE_S else 0.0

    def _pause_s(self) -> float:
        """Return how long to wait until the next look."""
        return LOOK_INTERVAL_S

    def _look(self) -> None:
        if late_s := self._late_s():
            self._woke_at = self.time()
            self._stood_still_s += late_s
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
        self._over: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._ends_at = self.time() + self._timeout_s
        if self._timeout_s != float("inf"):
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def left_s(self) -> float:
        """Return the seconds that are left; 0.0 at the end."""
        now = self.time()
        woke_at = now if self._late_s() else self._woke_at
        left_s = max(self._ends_at, woke_at + LOOK_INTERVAL_S) - now
        return left_s if left_s > _LEAST_S else 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the timeout is over."""
        return self._over.done() or self.left_s <= 0.0

    def shorten(self, left_s: float) -> None:
        """End in so many seconds, or when it would end anyway."""
        if self.time() + left_s < self._ends_at:
            self._ends_at = self.time() + left_s
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
