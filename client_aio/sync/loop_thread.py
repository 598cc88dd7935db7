"""The event loop of this process, on its own thread, for callers that have none; and how threads wait for it.

One loop per process, made when it is first needed, identified by the process id. Owns the thread, the waits
of other threads for calls on the loop, and its handling of a fork and of the process's exit.

Interrupts. Python raises KeyboardInterrupt, and any exception of a signal's handler, between two bytecodes.
`threading.Condition` runs some bytecodes after it has acquired its lock and before its caller's `with` is
entered. An interrupt there leaves the lock acquired for ever. Where the loop wants the same lock, it blocks
for ever, and so does every client on it.

Invariants:

- A thread that may be interrupted shares a lock with the loop only where no bytecode lies between the
  acquisition and the `with`. It waits on a bare lock of its own, which only the loop releases. An interrupt
  leaves that lock unused.
- An interrupt cancels the coroutine of its call. The call returns only once the coroutine has ended, so no
  task of it runs beside the next call. A result that the interrupted call was about to return is closed.
- Tasks and asynchronous generators of a call that succeeds are freed on the loop. Those of a call that fails
  are freed with its traceback. The reason: asyncio keeps weak references to them, with callbacks in Python,
  and Python swallows an interrupt that strikes in such a callback.
- No callback of an application ends the loop, though it raises SystemExit or stops the loop. Else each thread
  that waits for the loop would wait for ever.
- A forked child never touches its parent's loop, not even by freeing it: both share the kernel's poll object.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from metadata.errors import ClientClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    import client_aio

T = TypeVar("T")


def closed_gate() -> threading.Lock:
    """Return a lock that is locked: a thread that acquires it waits until another thread releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Room:
    """Lets threads wait for a condition that the loop brings about."""

    def __init__(self) -> None:
        self._gates: deque[threading.Lock] = deque()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds. Not on the loop."""
        while not is_so():
            self._gates.append(gate := closed_gate())
            if is_so():  # The loop may have notified before the gate was there to be released.
                return
            gate.acquire()

    def notify(self) -> None:
        """Let all waiting threads check their condition again. On the loop."""
        for _ in range(len(self._gates)):  # A gate that is added later is checked after it was added.
            self._gates.popleft().release()


CANCEL_TIMEOUT_S = 10.0
"""How long an interrupted call waits for its coroutine to clean up."""

_EXIT_TIMEOUT_S = 2.0


class Closable(Protocol):
    """A client that is closed at the end of the process, unless it has been closed before."""

    async def close(self) -> None:
        """Close it."""


class LoopThread:
    """One event loop that runs on its own thread until the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = _new_loop()
        self.open_clients: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._has_stopped = False
        self._closing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="bookie-aio", daemon=True)
        self._thread.start()
        self._thread_id = self._thread.ident

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not (self._has_stopped or self.loop.is_closed()):
            try:
                self.loop.run_forever()
            except BaseException as error:
                context = {"message": "a callback on the loop of client_aio.sync failed", "exception": error}
                self.loop.call_exception_handler(context)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result.

        An interrupt of the waiting thread cancels the coroutine and waits until it has ended, for at most
        `CANCEL_TIMEOUT_S`. A result that it returns all the same is closed where it has a `close`.

        Raises:
            InvalidArgumentError: called on the loop's own thread. ClientClosedError: the process ends.
        """
        try:
            self.check_thread()
            self.check_running()
        except BaseException:
            coroutine.close()
            raise
        call: _Call[T] = _Call(coroutine)
        try:
            self.loop.call_soon_threadsafe(call.start, self.loop)
            call.wait()
        except BaseException:
            self._give_up(call)
            raise
        return call.result()

    @property
    def is_here(self) -> bool:
        """Return whether this is the loop's own thread."""
        return threading.get_ident() == self._thread_id

    def check_running(self) -> None:
        """Raise ClientClosedError at the end of the process, when the loop has stopped."""
        if self._has_stopped:
            raise ClientClosedError("the process ends, and client_aio.sync has ended already")

    def check_thread(self) -> None:
        """Raise InvalidArgumentError on the loop's own thread: a wait there would block the loop for ever."""
        if self.is_here:
            raise InvalidArgumentError("client_aio.sync must not be called from its own event loop")

    def _give_up(self, call: _Call[T]) -> None:
        self.loop.call_soon_threadsafe(call.cancel)
        if not call.wait(CANCEL_TIMEOUT_S):
            return
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            close = getattr(call.result(), "close", None)
            if inspect.iscoroutinefunction(close):
                self.run(close())

    def discard(self, items: list[AsyncGenerator[Any, None]]) -> None:
        """Close a generator that is no longer read.

        May be called in a fork, at the end of the process, or by the garbage collector on any thread, the
        loop's own included.

        Args:
            items: holds the only reference to the generator, which the loop removes.
        """
        if self.pid != os.getpid() or self._has_stopped:
            return

        async def close() -> None:
            try:
                await items[0].aclose()
            finally:
                items.clear()

        if self.is_here:
            self._closing.add(closing := self.loop.create_task(close()))
            closing.add_done_callback(self._closing.discard)
        else:
            self.run(close())

    def stop(self) -> None:
        """Close the open clients, and end the thread. For a process that ends in good order."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        self._has_stopped = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close_all(), self.loop).result(_EXIT_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_EXIT_TIMEOUT_S)

    async def _close_all(self) -> None:
        closing = [client.close() for client in list(self.open_clients)]
        await asyncio.gather(*closing, return_exceptions=True)


class _Call(Generic[T]):
    """A coroutine on the loop that another thread waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self._error: BaseException | None = concurrent.futures.CancelledError()
        self._result: T
        self._has_ended = False
        self._ending = closed_gate()

    # --- on the loop ---

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._coroutine)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._has_ended:  # The interrupt struck before `start` ran.
            self._coroutine.close()
            self._ended()

    def _ended(self, task: asyncio.Task[T] | None = None) -> None:
        self._task = None
        if task is not None and not task.cancelled():
            self._error = task.exception()
            if self._error is None:
                self._result = task.result()
        self._has_ended = True
        self._ending.release()

    # --- on the thread that waits ---

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the coroutine has ended; return False when it has not ended in time."""
        return self._has_ended or self._ending.acquire(timeout=timeout_s)

    def result(self) -> T:
        """Return the coroutine's result, or raise its exception. Once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # Else the error and this frame, which its traceback refers to, form a cycle.
        return self._result


class Handle:
    """The base of client, writers and reader: runs their calls on the loop."""

    def __init__(self, background: LoopThread, handle: object) -> None:
        self._background = background
        self._handle = handle

    def __repr__(self) -> str:
        return f"<blocking {repr(self._handle).removeprefix('<')}"

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_process()
        except BaseException:
            coroutine.close()
            raise
        return self._background.run(coroutine)

    def _check_process(self) -> None:
        if self._background.pid != os.getpid():
            raise ClientClosedError(
                f"this {type(self).__name__} was opened in process {self._background.pid} and cannot be used "
                f"in its fork {os.getpid()}: connect there"
            )
        self._background.check_running()

    def _iterate(self, start: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
        self._check_process()
        items = [start()]

        async def advance() -> T | None:
            return await anext(items[0], None)

        try:
            while (item := self._run(advance())) is not None:
                yield item
        finally:
            self._background.discard(items)

    def _is_left_in_fork(self, kind: type[BaseException] | None) -> bool:
        """Return whether an exception leaves the context in a fork: closing would raise, and hide it."""
        return kind is not None and self._background.pid != os.getpid()

    def __reduce__(self) -> str:
        raise TypeError(
            f"a client_aio.sync.{type(self).__name__} cannot be pickled: send the metadata URI, and connect "
            "where it is used (in Spark: inside the function given to foreachPartition)"
        )


class ClientHandle(Handle):
    """What the client and the parts that it is made of have in common: one asynchronous client."""

    def __init__(self, background: LoopThread, client: client_aio.Client) -> None:
        super().__init__(background, client)
        self._client = client


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_lock = threading.Lock()
_background: LoopThread | None = None
_inherited: list[LoopThread] = []


def get_loop_thread() -> LoopThread:
    """Return this process's loop thread; make it where there is none, or only the parent process's."""
    global _background
    with _lock:
        if _background is None:
            _background = LoopThread()
            atexit.register(_background.stop)  # Nothing relies on it: Spark's workers end without it.
        return _background


def _start_afresh() -> None:
    """In the child of a fork: drop the parent's loop from use, without freeing it."""
    global _lock, _background
    _lock = threading.Lock()  # A thread of the parent may have held the old lock at the fork.
    if _background is not None:
        _inherited.append(_background)
        _background = None


os.register_at_fork(after_in_child=_start_afresh)
