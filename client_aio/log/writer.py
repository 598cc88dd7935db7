"""The writer's handle of a log.

Owns the current ledger. `client_aio.log.roller` rolls from ledger to ledger. `client_aio.log.healing` has the
records that no ledger replicates, and opens the log again when a ledger has failed.

Invariants: futures complete in the order of the appends, each exactly once. No record is sent to a ledger
before each record of the ledger before it has been acknowledged, or lies behind its end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from client_aio.core.log_chain import TAG
from client_aio.handles import ClosesOnExit
from client_aio.healing import APPEND_TIMEOUT_S
from client_aio.ledger.futures import BatchAdd
from client_aio.ledger.waiting_adds import as_batch
from client_aio.log.healing import Healer
from client_aio.log.roller import Roller
from client_aio.log.truncation import ensure_log
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    NoSuchLogError,
    WriterAbortedError,
)
from metadata.model.log import Position

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.log_chain import RollLimits
    from client_aio.healing import WriterState
    from client_aio.ledger.create import LedgerSettings
    from client_aio.log.healing import Listed
    from client_aio.log.ledger import LogLedger
    from metadata.access.logs import LogStore


async def open_log(
    context: ClientContext,
    lists: LogStore,
    settings: LedgerSettings,
    limits: RollLimits,
    *,
    create: bool,
    append_timeout_s: float | None,
    ledger_metadata: Mapping[str, bytes] | None = None,
) -> LogWriter:
    """Take a log over, and open it for writing; see `Client.open_log`.

    Args:
        settings: of the log's ledgers; their custom metadata becomes the log's.
        ledger_metadata: custom metadata of each ledger that the writer makes.
    """
    log = LogWriter(context, lists, settings, limits, append_timeout_s, ledger_metadata)
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


@mypyc_attr(allow_interpreted_subclasses=True)
class LogWriter(ClosesOnExit):
    """Appends records to a log; made by `Client.open_log`.

    A writer that loses its bookies, but not its log, opens the log again by itself once enough bookies
    answer. Its appends only take longer: each of them takes effect once, in order.

    An async context manager. A normal exit flushes and closes the log's last ledger. An exception or a
    cancellation aborts the writer, and leaves the ledger to the next takeover of the log.
    """

    def __init__(
        self,
        context: ClientContext,
        lists: LogStore,
        settings: LedgerSettings,
        limits: RollLimits,
        append_timeout_s: float | None = APPEND_TIMEOUT_S,
        ledger_metadata: Mapping[str, bytes] | None = None,
    ) -> None:
        self._context = context
        self._lists = lists
        custom = settings.custom_metadata or {}
        self._settings = replace(
            settings, custom_metadata={**(ledger_metadata or {}), TAG: lists.name.encode()}
        )
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._healer = Healer(context, lists, self._settings, custom, self, append_timeout_s)
        self._waiting = self._healer.waiting
        self._opened: LogLedger | None = None
        self._roller: Roller | None = None
        self._rolls = 0  # of former rollers, and by healing
        self._is_closing = False
        self._closes = 0  # calls that wait for the last records, or have begun to close
        self._is_closed = False
        # The last record acknowledged in a ledger before the current one:
        self._before: Position | None = None

    async def _open(self) -> bool:
        """Take over once: rule 12 for both ledgers, then list a new one; return False where it must retry."""
        listed = await self._healer.opener.take_over()
        if listed is None:
            return False
        self._context.keep(self)
        self.begin(listed)
        self._healer.healing.watch_ages()
        return True

    # --- what is known ---

    def __repr__(self) -> str:
        return f"<LogWriter of log {self.name!r}: last position {self.last_add_confirmed}, {self.state}>"

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
        """Return how often this writer has gone on in another ledger, by a roll or by healing."""
        return self._rolls + (self._roller.rolls if self._roller is not None else 0)

    @property
    def last_add_confirmed(self) -> Position | None:
        """Return the position of the last acknowledged record of this writer, None for none."""
        # `current` is read once, and before `_before`: threads of the blocking adapter read this property.
        current = self.current
        lac = current.last_add_confirmed
        known = [Position(current.ledger_id, lac)] if lac >= 0 else []
        known += [each for each in (self._before, self._healer.completed) if each is not None]
        return max(known, default=None)

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of the records not acknowledged yet, with each record's overhead."""
        healer = self._healer
        return self.current.bytes_in_flight + healer.backlog.bytes_held + healer.waiting.bytes_held

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
        """Return whether the handle takes no records; a close under way may yet fail, and leave it open."""
        return self._closes > 0 or self._healer.failure is not None

    @property
    def told_failures(self) -> tuple[BookKeeperError, ...]:
        """Return the failures, of this writer or of overdue records, that a call or a future has raised."""
        return self._healer.told_failures

    @property
    def state(self) -> WriterState:
        """Return whether this writer is writing, healing, fenced or closed."""
        return self._healer.healing.state

    def states(self) -> AsyncGenerator[WriterState, None]:
        """Yield the state now, and each later state; ends behind a final one.

        A state that lasts only until the consumer comes back is passed over.
        """
        self._context.check_running_loop()
        return self._healer.healing.states()

    # --- writing ---

    def append(self, data: bytes | bytearray | memoryview) -> asyncio.Future[Position]:
        """Append a record; never blocks.

        Returns:
            A future of the record's position, done when the record is acknowledged (rule 1). Futures complete
            in the order of the appends. Cancelling a future leaves its append running and the order intact.
            While the writer heals, futures wait. A future fails with OperationTimeoutError after
            `append_timeout_s`, and all behind it with it: none overtakes another. It fails with
            LogFencedError once another writer has taken the log over. Then the record may or may not be in
            the log, as with every error whose `outcome` is *unknown*.

        Raises:
            InvalidArgumentError: `data` is not bytes. EntryTooLargeError: it is above the limit. Nothing was
                sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Nothing was sent.
        """
        has_ended = self._healer.failure is not None  # `__aexit__` asks the healer who was told of it
        if self._healer.is_holding or has_ended or self._closes or self._waiting.is_busy:
            self._context.check_loop()
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise InvalidArgumentError(f"a record is bytes, not {type(data).__name__}")
            data = bytes(data)
            self.current.check_size(data)
            future: asyncio.Future[Position] = self._loop.create_future()
            self._healer.put((data,), future, is_closing=self._closes > 0)
            return future
        return self.current.append(data)

    def append_batch(self, records: Sequence[bytes]) -> asyncio.Future[tuple[Position, Position]]:
        """Append many records, with one future for all of them; never blocks.

        The cheapest way to append small records: nothing is done for each of them in Python. A batch that is
        larger than a frame or than the room in flight is sent piece by piece. Appends made meanwhile come
        behind it.

        Args:
            records: a list, or another sequence, of at least one record. It may be changed after the call.

        Returns:
            A future of the first and the last position, done when the last record is acknowledged, and so are
            all before it (rule 1). The records lie one behind the other, with no other record between them.
            The log may roll within a batch: then the two positions name different ledgers. Cancelling leaves
            all appends of the batch running. While the writer heals, futures wait, as those of `append`.

            When it fails, records from the start of the batch may be in the log, without gaps: the error's
            `acknowledged` says how many are acknowledged. Its outcome is *not done* only where no record of
            the batch was sent.

        Raises:
            InvalidArgumentError: not a sequence of bytes, or an empty one. EntryTooLargeError: a record is
                above the limit. Nothing was sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Nothing was sent.
        """
        self._context.check_loop()
        payloads = as_batch(records, self._context.config.entry_bytes_max, None)
        future: asyncio.Future[tuple[Position, Position]] = self._loop.create_future()
        self._healer.put(payloads, BatchAdd(future, len(payloads)), is_closing=self._closes > 0)
        return future

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight.

        Raises:
            BookKeeperError: the failure that ended the writer.
            NotEnoughBookiesError: with guaranteed write quorum, as `LedgerWriter.drain`.
        """
        await self._healer.drain()

    async def flush(self) -> None:
        """Wait until all records appended so far are acknowledged.

        Raises:
            BookKeeperError: the failure that ended the writer.
            OperationTimeoutError: records have failed after `append_timeout_s` since the last call that
                raised this. Later records go on.
        """
        self._context.check_loop()
        healer = self._healer
        await self._waiting.passed()
        appended = healer.appended
        while healer.failure is None and healer.settled < appended:
            if healer.is_holding:
                await healer.switched()
            else:
                with suppress(BookKeeperError):
                    await self.current.flush()
        healer.check_loss()

    async def roll(self) -> None:
        """Roll to another ledger, unless the current one is empty; a truncation can then drop the old one.

        Cancelling does not stop the roll.

        Raises:
            BookKeeperError: the failure that ended the writer. LedgerClosedError: the writer is closed.
        """
        self._context.check_loop()
        healer = self._healer
        healer.check()
        await self._waiting.passed()
        while not self._is_closing:
            roller = self._roller
            if healer.is_healing or roller is None:
                await healer.switched()
                healer.check()
                continue
            is_done = await roller.roll()
            healer.check()
            if is_done:
                return
            if roller is self._roller and not healer.is_healing:
                break
        raise LedgerClosedError(f"log {self.name!r} has been closed by this writer")

    async def close(self, *, at_ack_quorum: bool = False) -> None:
        """Flush, and close the log's last ledger. Calling it again does nothing.

        Records appended while this waits are refused. A writer that heals has `append_timeout_s` to close.
        Cancelling leaves the ledger OPEN or CLOSED; the next takeover of the log closes it.

        Args:
            at_ack_quorum: with guaranteed write quorum, do not wait for more than Qa copies of each record.
                The ledger's metadata then record from which entry on there may be fewer than Qw.

        Raises:
            BookKeeperError: the failure that ended the writer. LogFencedError: another writer took the log
                over.
            NotEnoughBookiesError: with guaranteed write quorum, as `LedgerWriter.close`.
            MetadataUnavailableError: a ledger could not be closed. As behind the error before, calling this
                again tries it again.
            OperationTimeoutError: records have failed, as for `flush`.
        """
        self._context.check_loop()
        if self._is_closed:
            return
        self._closes += 1
        try:
            await self.flush()
        except BaseException:
            self._closes -= 1
            raise
        self._is_closing = True
        while not self._is_closed:
            await self._healer.until_healed()
            roller = self._roller
            assert roller is not None
            try:
                await roller.stop(at_ack_quorum=at_ack_quorum)
                self._healer.check()
                if roller is self._roller and not self._healer.is_healing:
                    # The records held back while the roller ended have been sent to this ledger by now.
                    await self.current.flush()
                    await self.current.close(at_ack_quorum=at_ack_quorum)
                    self._is_closed = True
            except BookKeeperError as error:
                if roller is self._roller and not self._healer.is_healing:
                    self._check_closed(error)
        self._context.forget(self)
        await self._healer.stop()
        self._healer.check_loss()

    def _check_closed(self, error: BookKeeperError) -> None:
        """Raise the error that ended a call to `close`, unless another call has closed the log meanwhile."""
        if not self._is_closed:
            if isinstance(error, (LedgerFencedError, NoSuchLedgerError)):
                self.current.fail(error)  # which turns it into LogFencedError
            self._healer.check()
            raise error

    async def abort(self) -> None:
        """End at once: outstanding futures fail as *unknown*, the ledgers are left to the next takeover."""
        self._context.check_loop()
        if self._is_closed:
            return
        self._is_closing, self._closes = True, self._closes + 1
        error = WriterAbortedError(f"the writer of log {self.name!r} was aborted", ledger_id=self.ledger_id)
        self.current.fail(error)
        self._healer.end(error)
        await self._healer.stop()
        if self._roller is not None:
            await self._roller.abort()
        await self.current.abort()
        self._context.forget(self)

    # --- for the roller (`RollTarget`) and the opener (`OpenedLog`) ---

    @property
    def current(self) -> LogLedger:
        """Return the ledger that records go to."""
        assert self._opened is not None
        return self._opened

    @property
    def failure(self) -> BookKeeperError | None:
        """Return the writer's first failure, None for none."""
        return self._healer.failure

    def on_progress(self, ledger: LogLedger) -> None:
        """Hear that records of a ledger have been acknowledged."""
        if self._roller is not None and ledger is self._opened:
            self._roller.moved()

    def on_failed(self, ledger: LogLedger, error: BookKeeperError) -> None:
        """Hear that a ledger has failed; where it is listed, the writer heals, or ends."""
        is_listed = ledger is self._opened or (self._roller is not None and self._roller.has(ledger))
        healer = self._healer
        if healer.failure is not None or healer.is_healing or not is_listed:
            return
        if ledger is not self._opened:
            self.current.fail(error)  # which calls this again
            return
        if self._roller is not None:
            self._roller.end()
        healer.failed(ledger, error, is_closing=self._is_closing)

    def hold(self) -> None:
        """Hold back the records appended from now on."""
        self._healer.hold()

    def switch_to(self, ledger: LogLedger) -> None:
        """Write to this ledger from now on, first the records that were held back."""
        self._before = self.last_add_confirmed
        self._healer.backlog.settled += self.current.last_add_pushed + 1
        self._opened = ledger
        self._healer.opener.forget_before(ledger.ledger_id)
        self._healer.release(ledger)

    async def withdraw(self) -> None:
        """Take no further step to another ledger; return when none is under way."""
        if self._roller is not None:
            await self._roller.abort()
            self._rolls, self._roller = self._rolls + self._roller.rolls, None

    def begin(self, listed: Listed) -> None:
        """Write to a ledger that has just been listed, first the records that wait for it."""
        ledger = listed.ledger
        if self._opened is not None:
            self._before = self.last_add_confirmed
            self._rolls += 1  # by healing
        self._opened = ledger
        opener = self._healer.opener
        opener.forget_before(ledger.ledger_id)
        self._roller = Roller(
            self._context, self._lists, listed.head, listed.version, self._settings, self._limits, self,
            opener.make,
        )  # fmt: skip
        self._roller.start()
        if ledger.failure is not None:
            self.on_failed(ledger, ledger.failure)  # It failed before it was listed.
        else:
            self._healer.release(ledger)
