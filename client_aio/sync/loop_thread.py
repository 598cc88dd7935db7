"""The event loop of this process, on its own thread, for callers that have none.

Owns the thread, the waiting of other threads for what runs on it, and what a fork and an exit do to it. One
loop per process, made when it is first needed, known by the process id.

Invariants: a call that is interrupted (KeyboardInterrupt, a task kill that raises) has its coroutine
cancelled, and returns only once that has ended, so that no task of an interrupted call goes on beside the
next one; what a call was about to hand out when it was interrupted is closed. Tasks and asynchronous
generators of a call that succeeds are freed on the loop (of one that fails, with its traceback): asyncio has
weak references to them, whose callbacks are Python, and an interrupt that strikes in one of those is
swallowed. A forked child never touches its parent's loop, not even by freeing it: the two share what the
kernel polls.

How a thread waits for what runs on the loop, so that an interrupt may strike at any instruction.

Python raises KeyboardInterrupt (and whatever else a signal's handler raises) between two bytecodes, also in
the few that `threading.Condition` runs after it has acquired its lock and before its caller's `with` is
entered. Then nobody releases that lock, and the loop, where it wants the lock as well, waits for ever with
everything that lives on it.

Invariant: a thread that may be interrupted takes a lock that the loop takes only where no bytecode lies
between the acquiring and the `with`. What it waits for is a bare lock of its own, which only the loop
releases; an interrupt leaves it behind, and nobody minds.
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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from metadata.errors import ClientClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    import client_aio

R = TypeVar("R")


def closed_gate() -> threading.Lock:
    """Return a lock that is locked: whoever acquires it waits until another thread releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Room:
    """Threads wait here until something is so that the loop brings about."""

    def __init__(self) -> None:
        self._gates: deque[threading.Lock] = deque()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so. Not on the loop."""
        while not is_so():
            self._gates.append(gate := closed_gate())
            if is_so():  # it became so before the loop could see that somebody waits
                return
            gate.acquire()

    def notify(self) -> None:
        """Let all that wait look again. On the loop."""
        for _ in range(len(self._gates)):  # who comes later looks after having come
            self._gates.popleft().release()


class _Condition(threading.Condition):
    """A condition whose `with` has no bytecode of its own: entering and leaving go straight to the lock."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class AddFuture(concurrent.futures.Future[R]):
    """A future that the loop can always complete, wherever a thread was interrupted that looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self._condition.__class__ = _Condition


def result_of(future: AddFuture[R]) -> R:
    """Wait for a future's result, or raise its exception."""
    gate = closed_gate()
    future.add_done_callback(lambda _: gate.release())
    gate.acquire()
    return future.result()


T = TypeVar("T")

CANCEL_TIMEOUT_S = 10.0
"""How long an interrupted call waits for its coroutine to clean up."""

_EXIT_TIMEOUT_S = 2.0


class Closable(Protocol):
    """What is closed at the end of the process where nobody has done so."""

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
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. An interrupt of the waiting thread cancels it, and waits for that.

        Where it ends all the same, with a result that has a `close`, that is closed: nobody will have it.
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
        """Raise ClientClosedError at the end of the process: nothing would ever answer."""
        if self._has_stopped:
            raise ClientClosedError("the process ends, and client_aio.sync has ended already")

    def check_thread(self) -> None:
        """Raise InvalidArgumentError on the loop's own thread: waiting there is for ever, and for all."""
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
        """Close a generator that nobody reads from any more, wherever and whenever that is found out.

        That may be in a fork, at the end of the process, or where garbage is collected, on the loop's own
        thread as well.

        Args:
            items: its only reference, which the loop takes out.
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
        """Close what is open, and end the thread. For the end of a process that has one in good order."""
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
        elif not self._has_ended:  # interrupted before it was handed over
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
        """Wait until it has ended; False when it has not in time."""
        return self._has_ended or self._ending.acquire(timeout=timeout_s)

    def result(self) -> T:
        """Return the result of what has ended, or raise its exception. Once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # which has this frame in its traceback
        return self._result


class Handle:
    """What client, writer and reader have in common: the loop they live on."""

    def __init__(self, background: LoopThread) -> None:
        self._background = background

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

    def __reduce__(self) -> str:
        raise TypeError(
            f"a client_aio.sync.{type(self).__name__} cannot be pickled: send the metadata URI, and connect "
            "where it is used (in Spark: inside the function given to foreachPartition)"
        )


class ClientHandle(Handle):
    """What the client and the parts that it is made of have in common: one asynchronous client."""

    def __init__(self, background: LoopThread, client: client_aio.Client) -> None:
        super().__init__(background)
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
    """Return this process's background loop, making it where there is none, or only a parent's."""
    global _background
    with _lock:
        if _background is None:
            _background = LoopThread()
            atexit.register(_background.stop)  # a nicety: nothing relies on it
        return _background


def _start_afresh() -> None:
    """In the child of a fork: forget the parent's loop, without freeing it."""
    global _lock, _background
    _lock = threading.Lock()  # a thread of the parent may have held it at the fork
    if _background is not None:
        _inherited.append(_background)
        _background = None


os.register_at_fork(after_in_child=_start_afresh)
