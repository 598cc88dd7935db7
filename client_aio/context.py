"""The context of one client: the parts that all its handles share."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from asyncio.events import _get_running_loop
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from client_aio.core.digest import Digest, HmacDigest, check_root
from client_aio.lac_clock import LacClock
from client_aio.tails import Tails
from metadata.awake import AwakeClock
from metadata.errors import ClientClosedError, InvalidArgumentError
from metadata.metrics import FINE_SECONDS, Histogram
from metadata.model.passwords import SALT_BYTES, PasswordRecord, check_password, new_password
from metadata.owned_task import is_cancelled_alone

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from client_aio.bookies.ensemble_finder import EnsembleFinder
    from client_aio.bookies.pool import BookiePool
    from client_aio.config import ClientConfig
    from client_aio.handles import Handle
    from metadata.access.ledgers import LedgerStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.repeated_reports import RepeatedReports


def check_running(loop: asyncio.AbstractEventLoop) -> None:
    """Raise InvalidArgumentError unless this event loop is the running one."""
    if _get_running_loop() is not loop:
        raise InvalidArgumentError(
            "this client belongs to another event loop, or another thread: make a client in each, or use "
            "client_aio.sync from threads"
        )


class ClientCounters:
    """Counts of one client since it was opened, which `client_aio.metrics` shows. Times are in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns the time in seconds."""
        self.clock = clock
        self.add = Histogram(FINE_SECONDS)
        self.bytes_added = 0
        self.seats_failed = 0
        self.ensemble_changes = 0
        self.recoveries = {"completed": 0, "failed": 0}
        self.digest_mismatches = 0


class Flushes:
    """The writers that send what was added to them at the end of this event-loop iteration.

    One callback for all of them: with a thousand ledgers, one for each would cost as much as many an add.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """Call `flush` in this iteration's callback."""
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due.append(flush)

    def _flush(self) -> None:
        due, self._due = self._due, []
        done = 0
        try:
            for flush in due:
                done += 1
                try:
                    flush()
                except Exception as error:
                    # As for callbacks of their own: a fault of one writer keeps no other from sending.
                    context = {"message": "sending adds failed", "exception": error}
                    self._loop.call_exception_handler(context)
        finally:
            for flush in due[done:]:  # an interrupt has ended the loop above
                self.add(flush)


@dataclass
class ClientContext:
    """The parts that one client's handles are built from."""

    config: ClientConfig
    ledgers: LedgerStore
    pool: BookiePool
    finder: EnsembleFinder
    tokens: random.Random
    now_ms: Callable[[], int]
    counters: ClientCounters
    handles: set[Handle] = field(default_factory=set)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    clock: AwakeClock = field(init=False)
    lac_clock: LacClock = field(init=False)
    tails: Tails = field(init=False)
    flushes: Flushes = field(init=False)
    reports: RepeatedReports = field(init=False)
    _closed: asyncio.Event = field(default_factory=asyncio.Event)
    _unawaited: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clock = AwakeClock()
        self.clock.start()
        self.flushes = Flushes(self.loop)
        self.lac_clock = LacClock(self.config.explicit_lac_delay_s)
        self.reports = self.pool.directory.reports
        self.tails = Tails(self.pool, self.ledgers, self.config)

    def close(self) -> None:
        """Mark the client as closed.

        All tails and the tasks of `finish_later` end, unless this is called from outside the event loop.
        """
        self._closed.set()
        if _get_running_loop() is self.loop:
            self.clock.stop()
            self.tails.close()
            for task in self._unawaited:
                task.cancel()

    @property
    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed.is_set()

    def check_loop(self) -> None:
        """Raise InvalidArgumentError outside the client's event loop, where calls would wait for ever."""
        check_running(self.loop)

    def check_running_loop(self) -> None:
        """Do as `check_loop` where an event loop runs. Without a loop nothing is begun yet."""
        if _get_running_loop() is not None:
            self.check_loop()

    def check_open(self) -> None:
        """Raise ClientClosedError when the client has been closed, InvalidArgumentError on another loop."""
        self.check_running_loop()
        if self._closed.is_set():
            raise ClientClosedError("the client is closed")

    async def while_open(self, changes: AsyncGenerator[None, None]) -> AsyncGenerator[None, None]:
        """Yield each time that a watch yields, until the client is closed. The caller closes the watch.

        Ends where the watch ends, and where somebody else has cancelled the tasks of this wait.

        Raises:
            ClientClosedError: the client has been closed. The watch does not end by that if its store belongs
                to the application.
        """

        async def change() -> bool:
            return await anext(changes, changes) is not changes

        closed = asyncio.create_task(self._closed.wait())
        waiting: list[asyncio.Task[Any]] = [closed]
        try:
            while True:
                coming = asyncio.create_task(change())
                waiting = [coming, closed]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self.check_open()
                if any(map(is_cancelled_alone, waiting)) or not coming.result():
                    return
                yield
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def draw_token(self) -> str:
        """Draw the token of one write to the metadata store."""
        return f"{self.tokens.getrandbits(64):016x}"

    def finish_later(self, task: asyncio.Task[Any]) -> None:
        """Let a task go on that nobody waits for any more; closing the client cancels it.

        The task must end by itself, and must not raise.
        """
        if self._closed.is_set():
            task.cancel()
        self._unawaited.add(task)
        task.add_done_callback(self._unawaited.discard)

    def keep(self, handle: Handle) -> None:
        """Register an open handle."""
        self.handles.add(handle)

    def forget(self, handle: Handle) -> None:
        """Remove a handle that has ended."""
        self.handles.discard(handle)

    async def lock(self, ledger_id: int, password: bytes) -> tuple[PasswordRecord | None, Digest]:
        """Return the password record of a new ledger's metadata (None for b""), and the ledger's digest."""
        if not password:
            return None, Digest(ledger_id)
        # On a thread: the key derivation, which makes guesses expensive, takes some 50 ms of a processor.
        salt = self.tokens.randbytes(SALT_BYTES)
        loop = asyncio.get_running_loop()
        record, root = await loop.run_in_executor(None, new_password, password, salt)
        return record, HmacDigest(ledger_id, root)

    async def unlock(self, metadata: LedgerMetadata, password: bytes) -> Digest:
        """Return a ledger's digest, if the password is right. No bookie is asked.

        Raises:
            InvalidArgumentError: the password is not legal.
            UnauthorizedAccessError: the password (b"" for none) is not that of the ledger.
        """
        root = None
        if password or not isinstance(password, bytes):
            password = check_password(password)
        if metadata.password is not None and password:
            loop = asyncio.get_running_loop()
            root = await loop.run_in_executor(None, metadata.password.stretch, password)
        return check_root(metadata, password, root)


class ContextOwner:
    """The base of `Client` and of the classes that it is made of: they share one context."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context


Owner = TypeVar("Owner", bound=type)


def on_own_loop(*exempt: str) -> Callable[[Owner], Owner]:
    """Have the public methods of a class check that they are called on their client's event loop.

    These are the coroutine methods, and those that return an asynchronous iterator. Classes of compiled
    modules check in each method instead: a decorated class is compiled without its attributes' places.

    Args:
        exempt: methods that check for themselves, since every add calls them, or that work anywhere.
    """

    def decorate(owner: Owner) -> Owner:
        for name, method in list(vars(owner).items()):
            if name.startswith("_") or name in exempt or not inspect.isfunction(method):
                continue
            if inspect.iscoroutinefunction(method):
                setattr(owner, name, _checking(method))
            elif _STREAM.search(str(method.__annotations__.get("return"))):
                setattr(owner, name, _checking_stream(method))
        return owner

    return decorate


_STREAM = re.compile(r"Stream\b|AsyncGenerator")


def _checking(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def checked(self: ContextOwner, *arguments: Any, **options: Any) -> Any:
        self._context.check_loop()
        return await method(self, *arguments, **options)

    return checked


def _checking_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: ContextOwner, *arguments: Any, **options: Any) -> Any:
        self._context.check_running_loop()
        return method(self, *arguments, **options)

    return checked
