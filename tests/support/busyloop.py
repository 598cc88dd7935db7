"""A busy application: asyncio's own event loop in virtual time, whose callbacks take as long as a test says.

`BusyLoop` polls as asyncio does. Bytes that have come lie in the system's buffer until a poll. Each poll
reads what came at once. `work` is the application: it computes for one slice after another, and lets the
loop run once in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    """Reads what has come into the buffer. Waits in virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, Callable[[], object]]] = []

    def come(self, at: float, read: Callable[[], object]) -> None:
        heapq.heappush(self._coming, (at, next(self._numbers), read))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ends = [] if timeout is None else [self.now + max(timeout, 0.0)]
        ends += [at for at, _, _ in self._coming[:1]]
        if not ends:
            raise AssertionError("nothing will ever happen again")
        self.now = max(self.now, min(ends))
        if not self._coming or self._coming[0][0] > self.now:
            return []
        _, _, read = heapq.heappop(self._coming)
        handle = asyncio.Handle(read, (), asyncio.get_running_loop())
        return [(selectors.SelectorKey(0, 0, selectors.EVENT_READ, (handle, None)), selectors.EVENT_READ)]


class BusyLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def come(self, at: float, read: Callable[[], object]) -> None:
        """Let bytes come at a time; `read` is called by a poll after that."""
        self._virtual.come(at, read)

    def compute(self, seconds: float) -> None:
        """Let the present callback take so long."""
        self._virtual.now += seconds

    async def work(self, slices: Sequence[float], until: float) -> None:
        """Compute for these slices, again and again, and let the loop run once after each."""
        for seconds in itertools.cycle(slices):
            if self.time() >= until:
                return
            self.compute(seconds)
            await asyncio.sleep(0)


def run_busy(main: Callable[[BusyLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine on a busy loop, to its end."""
    with asyncio.Runner(loop_factory=BusyLoop) as runner:
        return runner.run(main(cast("BusyLoop", runner.get_loop())))
