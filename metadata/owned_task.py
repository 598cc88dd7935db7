"""Tasks that only their owner ends.

An application may cancel every task of its event loop: `asyncio.all_tasks()` at SIGTERM is a usual recipe.
Test frameworks do so too. A task of ours that ends this way leaves callers waiting for what it would have
done. `OwnedTask` starts it again.

Also `OwningLock`, whose work goes on without a cancelled caller, and `for_each`, `in_order` and `unless`,
whose tasks end with the call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from metadata.errors import BookieUnavailableError, MetadataUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_RESTART_S = 0.02
"""A timer, and not at once: a loop that is being closed calls no timers, so no task is left over in it."""


def is_cancelled_alone(task: asyncio.Task[Any]) -> bool:
    """Return whether somebody has cancelled a task, and not the caller's own task, which waits for it."""
    current = asyncio.current_task()
    return task.cancelled() and (current is None or not current.cancelling())


def cut_off(bookie_id: str) -> BookieUnavailableError:
    """Return the error of a bookie whose answer nobody waits for any more: its task was cancelled."""
    what = f"asking bookie {bookie_id} was cancelled by the application: try again"
    return BookieUnavailableError(what, bookie_id=bookie_id)


def failure_of(task: asyncio.Task[Any], bookie_id: str) -> BaseException | None:
    """Return the error with which a task that asked a bookie has ended; None where it has a result.

    A task that somebody has cancelled got no answer. Its CancelledError is not the caller's, who goes on.
    """
    return cut_off(bookie_id) if task.cancelled() else task.exception()


async def for_each(items: Iterable[_Item], work: Callable[[_Item], Awaitable[object]], at_once: int) -> None:
    """Do some work for each item, in the order of the items, for so many of them at once.

    Raises the first error of the work, after the work under way was cancelled. Cancelling cancels it, too.
    The work for an item is begun again where somebody else has cancelled its task: a task group takes such a
    task for one that is done.
    """
    waiting = iter(items)

    async def take_turns() -> None:
        nonlocal waiting
        for item in waiting:
            try:
                await work(item)
            except asyncio.CancelledError:
                waiting = itertools.chain([item], waiting)
                raise

    while True:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(take_turns())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        try:
            waiting = itertools.chain([next(waiting)], waiting)
        except StopIteration:
            return


async def in_order(
    items: AsyncIterator[_Item], work: Callable[[_Item], Coroutine[Any, Any, _Result]], at_once: int
) -> AsyncGenerator[tuple[_Item, _Result], None]:
    """Yield each item with the result of some work for it, in their order; so many are under way at once.

    Raises the first error in this order, of the work or of the items. Closing cancels what is under way. It
    leaves `items` to the caller. The work for an item is begun again where somebody else has cancelled its
    task.
    """
    ahead: deque[tuple[_Item, asyncio.Task[_Result]]] = deque()

    async def first() -> tuple[_Item, _Result]:
        while True:
            item, task = ahead[0]
            try:
                return item, await task
            except asyncio.CancelledError:
                if not is_cancelled_alone(task):
                    raise
                ahead[0] = item, asyncio.create_task(work(item))

    try:
        async for item in items:
            ahead.append((item, asyncio.create_task(work(item))))
            if len(ahead) >= at_once:
                yield await first()
                ahead.popleft()
        while ahead:
            yield await first()
            ahead.popleft()
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)


async def unless(event: Coroutine[Any, Any, object], work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return the result of some work; None if an event comes first. Then the work is cancelled.

    It is None also where somebody else has cancelled one of the two tasks.
    """
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event)
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() and not working.cancelled() else None
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


class OwnedTask:
    """A task that is started again when somebody else has cancelled it.

    Args:
        run: makes the coroutine. A second call goes on from the state that the owner has by then.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._run = run
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.is_cancelled = False  # by its owner
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None]
        self._start()

    def _start(self) -> None:
        self._timer = None
        self._task = self._loop.create_task(self._run(), name=self._name)
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self.is_cancelled:
            self._timer = self._loop.call_later(_RESTART_S, self._start)
        else:
            self._ended.set()

    def cancel(self) -> None:
        """End the task for good."""
        self.is_cancelled = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._ended.set()
        self._task.cancel()

    def done(self) -> bool:
        """Return whether the task has ended for good: at once, not only when its callbacks have run."""
        has_ended = self._task.done() and (self.is_cancelled or not self._task.cancelled())
        return has_ended or self._ended.is_set()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in this task."""
        return asyncio.current_task() is self._task

    async def wait(self) -> None:
        """Wait until the task has ended for good; its exception, if it has one, is not raised."""
        await self._ended.wait()
        if not self._task.cancelled():
            self._task.exception()  # retrieved

    def result(self) -> None:
        """Raise the exception with which the task has ended, if there is one."""
        if self.done() and not self._task.cancelled():
            self._task.result()


class OwningLock(asyncio.Lock):
    """A lock that runs work in a task of its own, and holds itself until that has ended.

    A caller that is cancelled leaves the work running: it is not half done, and its error is not lost on the
    way to whoever counts it. One that is cancelled while it waits for the lock leaves nothing behind.
    """

    _work: asyncio.Task[Any] | None = None
    _is_closed = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run some work under the lock, and raise its error. It must not take the lock itself.

        Raises:
            MetadataUnavailableError: somebody else has cancelled its task, or `end` was called before.
        """
        await self.acquire()
        if self._is_closed:
            self.release()
            raise MetadataUnavailableError("the work was not begun: its owner is closing")
        task = self._work = asyncio.create_task(work())
        task.add_done_callback(self._ended)
        await asyncio.wait([task])
        if task.cancelled():
            raise MetadataUnavailableError("the work was cancelled before it had ended")
        task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._work = None
        self.release()
        if not task.cancelled():
            task.exception()  # retrieved: the caller may be gone

    async def end(self) -> None:
        """Cancel the work that runs, and wait for its end; no other begins."""
        self._is_closed = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
