"""Work in the background: one task that works in small steps, and ends between two steps.
Owns the task and its pauses. A step is never cancelled in the middle. So closing leaves the disk in the state
that the end of a step leaves. The states that a crash can leave are many more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.health import StorageHealth


class ClosedError(Exception):
    """The engine is being closed, and the work has to end."""


class BackgroundTask:
    """One kind of work, at most one task at a time."""

    def __init__(self, work: Callable[[], Awaitable[None]], health: StorageHealth) -> None:
        """Take the work, which calls `pause` now and then; an error that it raises stops the engine."""
        self._work = work
        self._health = health
        self._waiting: list[asyncio.Future[None]] = []
        self._is_closed = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task unless it is running, or closed."""
        if self.task is None and not self._is_closed:
            self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._work()
        except ClosedError:
            return
        except Exception as error:
            self._health.fail(error, "the work in the background")
        finally:
            self.task = None

    async def pause(self, seconds: float) -> None:
        """Sleep for so many seconds; 0 for one event-loop iteration. `close` ends the sleep.

        Raises:
            ClosedError: the engine is being closed.
        """
        if not self._is_closed:
            if seconds > 0:
                loop = asyncio.get_running_loop()
                waiting: asyncio.Future[None] = loop.create_future()
                self._waiting.append(waiting)
                timer = loop.call_later(seconds, _wake, waiting)
                try:
                    await waiting
                finally:
                    timer.cancel()
                    self._waiting.remove(waiting)
            else:
                await asyncio.sleep(0)
        if self._is_closed:
            raise ClosedError

    async def close(self) -> None:
        """Wait for the step under way, and let no other begin."""
        self._is_closed = True
        for waiting in self._waiting:
            _wake(waiting)
        if self.task is not None:
            await asyncio.wait([self.task])


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
