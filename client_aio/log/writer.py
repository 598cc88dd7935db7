"""The writer's handle of a log.

Owns the current ledger, the records that are held back during a roll, and the first failure.
`client_aio.log.roller` rolls from ledger to ledger.

Invariants: futures complete in the order of the appends, each exactly once. No record is sent to a ledger
before all records of the ledger before it have been acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from client_aio.core.add_window import ENTRY_OVERHEAD_BYTES
from client_aio.core.log_chain import TAG, Listing, RollLimits
from client_aio.handles import ClosesOnExit
from client_aio.ledger.create import create_ledger
from client_aio.ledger.futures import fail_all
from client_aio.log.roller import Roller
from client_aio.log.takeover import LogLedger, discard, is_met, recovered
from client_aio.log.truncation import ensure_log
from metadata.errors import (
    BackpressureError,
    BookKeeperError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    NoSuchLogError,
    WriterAbortedError,
)
from metadata.model.log import LogRow, Position

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from client_aio.ledger.create import LedgerSettings
    from metadata.access.logs import LogStore

_HARD_LIMIT_FACTOR = 4


async def open_log(
    context: ClientContext,
    lists: LogStore,
    settings: LedgerSettings,
    limits: RollLimits,
    *,
    create: bool,
) -> LogWriter:
    """Take a log over, and open it for writing; see `Client.open_log`.

    Args:
        settings: of the log's ledgers; their custom metadata becomes the log's.
    """
    log = LogWriter(context, lists, settings, limits)
    while True:
        try:
            if create:
                await ensure_log(context, lists, settings.password)
            if await log._open():
                return log
        except NoSuchLogError:
            if not create:
                raise
        # Another client has changed the list meanwhile, or deleted the log: start again.


class LogWriter(ClosesOnExit):
    """Appends records to a log; made by `Client.open_log`.

    An async context manager. A normal exit flushes and closes the log's last ledger. An exception or a
    cancellation aborts the writer, and leaves the ledger to the next takeover of the log.
    """

    def __init__(
        self, context: ClientContext, lists: LogStore, settings: LedgerSettings, limits: RollLimits
    ) -> None:
        self._context = context
        self._lists = lists
        self._custom = settings.custom_metadata or {}
        self._settings = replace(settings, custom_metadata={TAG: lists.name.encode()})
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._opened: LogLedger | None = None
        self._roller: Roller | None = None
        self._failure: BookKeeperError | None = None
        self._is_closing = False
        self._is_closed = False
        self._held: deque[tuple[bytes, asyncio.Future[Position]]] = deque()
        self._held_bytes = 0
        self._is_holding = False
        self._switched = asyncio.Event()  # or failed
        # The last record acknowledged in a ledger before the current one:
        self._before: Position | None = None

    async def _open(self) -> bool:
        """Take over once: rule 12 for both ledgers, then list a new one; return False where it must retry."""
        context, lists = self._context, self._lists
        head, version = await recovered(context, lists, self._settings.password)
        make = partial(LogLedger, log_name=lists.name, on_progress=self.on_progress, on_failed=self.on_failed)
        ledger = await create_ledger(context, self._settings, make, id_min=head.id_min)
        row = LogRow(ledger.ledger_id, ledger.ledger_id, context.now_ms())
        listing = Listing(lambda found: found.append([row]).with_custom(self._custom), row.id)
        try:
            changed = await lists.change_now(head, version, listing.apply)
            is_listed = changed.is_done or await is_met(lists, listing, changed.head)
        except BaseException:
            await ledger.abort()  # Not discarded: the ledger may be listed, now or later.
            raise
        if not is_listed:
            await discard(context, ledger, self._settings.password)
            return False
        if changed.head.rows.last_key != row.id:
            await ledger.abort()  # The ledger is listed, and another writer has taken over since.
            return False
        self._opened = ledger
        self._roller = Roller(
            context, lists, changed.head, changed.version, self._settings, self._limits, self
        )
        context.keep(self)
        self._roller.start()
        if ledger.failure is not None:
            self.on_failed(ledger, ledger.failure)
        return True

    # --- what is known ---

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<LogWriter of log {self.name!r}: last position {self.last_add_confirmed}{state}>"

    @property
    def name(self) -> str:
        """Return the log's name."""
        return self._lists.name

    @property
    def ledger_id(self) -> int:
        """Return the id of the ledger that records go to now."""
        return self.current.ledger_id

    @property
    def rolls(self) -> int:
        """Return how often this writer has rolled to another ledger."""
        return self._roller.rolls if self._roller is not None else 0

    @property
    def last_add_confirmed(self) -> Position | None:
        """Return the position of the last acknowledged record of this writer, None for none."""
        # `current` is read once, and before `_before`: threads of the blocking adapter read this property.
        current = self.current
        lac = current.last_add_confirmed
        return Position(current.ledger_id, lac) if lac >= 0 else self._before

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of the records not acknowledged yet, with each record's overhead."""
        return self.current.bytes_in_flight + self._held_bytes

    @property
    def max_in_flight_bytes(self) -> int:
        """Return the bytes in flight above which `drain` waits."""
        return self._context.config.max_in_flight_bytes

    @property
    def is_held_up(self) -> bool:
        """Return whether records wait for a gap in the caller's ids: never, since a log assigns positions."""
        return False

    @property
    def is_closed(self) -> bool:
        """Return whether the handle takes no more records."""
        return self._is_closing or self._failure is not None

    # --- writing ---

    def append(self, data: bytes | bytearray | memoryview) -> asyncio.Future[Position]:
        """Append a record; never blocks.

        Returns:
            A future of the record's position, done when the record is acknowledged (rule 1). Futures complete
            in the order of the appends. Cancelling a future leaves its append running and the order intact.
            A future fails with LogFencedError once another writer has taken the log over. Then the record may
            or may not be in the log, as with every error whose `outcome` is *unknown*.

        Raises:
            InvalidArgumentError: `data` is not bytes. EntryTooLargeError: it is above the limit. Nothing was
                sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Nothing was sent.
        """
        if self._is_holding or self._is_closing:
            return self._append_otherwise(data)
        return self.current.append(data)

    def _append_otherwise(self, data: bytes | bytearray | memoryview) -> asyncio.Future[Position]:
        """Refuse a record, or hold it back for the next ledger."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"a record is bytes, not {type(data).__name__}")
        data = bytes(data)
        self.current.check_size(data)
        future: asyncio.Future[Position] = self._loop.create_future()
        if self._failure is not None or self._is_closing:
            closed = LedgerClosedError(f"log {self.name!r} has been closed by this writer")
            fail_all([future], self._failure or closed)
        elif self.bytes_in_flight > _HARD_LIMIT_FACTOR * self.max_in_flight_bytes:
            raise BackpressureError(
                f"{self.bytes_in_flight:,} bytes are in flight in log {self.name!r}, more than "
                f"{_HARD_LIMIT_FACTOR} × max_in_flight_bytes: await drain() between appends"
            )
        else:
            self._held.append((data, future))
            self._held_bytes += len(data) + ENTRY_OVERHEAD_BYTES
        return future

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        while self._failure is None and self.bytes_in_flight > self.max_in_flight_bytes:
            if self._is_holding:
                await self._switched.wait()
            else:
                await self.current.drain()
        self._check()

    async def flush(self) -> None:
        """Wait until all records appended so far are acknowledged.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        if self._is_holding:
            await self._switched.wait()
        self._check()
        await self.current.flush()

    async def roll(self) -> None:
        """Roll to another ledger, unless the current one is empty; a truncation can then drop the old one.

        Cancelling does not stop the roll.

        Raises:
            BookKeeperError: the writer's first failure. LedgerClosedError: the writer is closed.
        """
        self._check()
        assert self._roller is not None
        is_done = not self._is_closing and await self._roller.roll()
        self._check()
        if not is_done:
            raise LedgerClosedError(f"log {self.name!r} has been closed by this writer")

    async def close(self) -> None:
        """Flush, and close the log's last ledger. Calling it again does nothing.

        Cancelling leaves the ledger OPEN or CLOSED; the next takeover of the log closes it.

        Raises:
            BookKeeperError: the first failure of an append. LogFencedError: another writer took the log over.
        """
        if self._is_closed:
            return
        await self.flush()
        self._is_closing = True
        assert self._roller is not None
        try:
            await self._roller.stop()
            self._check()
            # The records held back while the roller ended have been sent to the current ledger by now.
            await self.current.flush()
            await self.current.close()
        except BookKeeperError as error:
            self._check_closed(error)
        self._is_closed = True
        self._context.forget(self)

    def _check_closed(self, error: BookKeeperError) -> None:
        """Raise the error that ended a call to `close`, unless another call has closed the log meanwhile."""
        if not self._is_closed:
            if isinstance(error, (LedgerFencedError, NoSuchLedgerError)):
                self.current.fail(error)  # which turns it into LogFencedError
            self._check()
            raise error

    async def abort(self) -> None:
        """End at once: outstanding futures fail as *unknown*, the ledgers are left to the next takeover."""
        if self._is_closed:
            return
        self._is_closing = True
        error = WriterAbortedError(f"the writer of log {self.name!r} was aborted", ledger_id=self.ledger_id)
        self.current.fail(error)
        if self._roller is not None:
            await self._roller.abort()
        await self.current.abort()
        self._context.forget(self)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    # --- for the roller (`RollTarget`) ---

    @property
    def current(self) -> LogLedger:
        """Return the ledger that records go to."""
        assert self._opened is not None
        return self._opened

    @property
    def failure(self) -> BookKeeperError | None:
        """Return the writer's first failure, None for none."""
        return self._failure

    def on_progress(self, ledger: LogLedger) -> None:
        """Hear that records of a ledger have been acknowledged."""
        if self._roller is not None and ledger is self._opened:
            self._roller.moved()

    def on_failed(self, ledger: LogLedger, error: BookKeeperError) -> None:
        """Hear that a ledger has failed; the log fails with it where the ledger is listed."""
        is_listed = ledger is self._opened or (self._roller is not None and self._roller.has(ledger))
        if self._failure is not None or not is_listed:
            return
        self._failure = error
        if ledger is not self._opened:
            self.current.fail(error)
        held, self._held, self._held_bytes = self._held, deque(), 0
        fail_all([future for _, future in held], error)
        self._switched.set()
        if self._roller is not None:
            self._roller.wake()

    def hold(self) -> None:
        """Hold back the records appended from now on."""
        self._is_holding = True
        self._switched.clear()

    def switch_to(self, ledger: LogLedger) -> None:
        """Write to this ledger from now on, first the records that were held back."""
        self._before = self.last_add_confirmed
        self._opened = ledger
        self._is_holding = False
        held, self._held, self._held_bytes = self._held, deque(), 0
        for data, future in held:
            ledger.take(data, future)
        self._switched.set()
