"""Opening a log for its writer: by a takeover first, and again after a ledger of it has failed (healing).

`client_aio.core.healing` says why that is safe. The steps:

    a ledger fails ─▶ hold records back ─▶ read the list: is its last row ours?
      ─▶ recover the last two ledgers ─▶ complete the records that the recovered end holds
      ─▶ create a ledger and list it ─▶ send the other records there, in order

The list is watched meanwhile: an attempt that waits for bookies ends as soon as another writer has the log.

`Opener` owns these steps up to the new ledger, and the ids of the ledgers that this writer has made.
`Healer` owns the records that no ledger is replicating, the failure that ends the writer, and its state.
These records are the backlog, and behind it those that wait for room (`client_aio.ledger.waiting_adds`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from client_aio.core.healing import Backlog
from client_aio.core.log_chain import Listing, is_still_own
from client_aio.healing import Healing, is_final
from client_aio.ledger.create import create_ledger
from client_aio.ledger.futures import Failure, as_unknown, complete, fail_all
from client_aio.ledger.waiting_adds import WaitingAdds, check_room
from client_aio.log.ledger import LogLedger
from client_aio.log.takeover import LogTakeover, discard, is_met
from metadata.errors import (
    BookKeeperError,
    LedgerClosedError,
    LedgerRecoveryError,
    LogFencedError,
    NoSuchLedgerError,
    NoSuchLogError,
    OperationTimeoutError,
    RecordsLostError,
)
from metadata.model.log import LogRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.ledger.create import LedgerSettings
    from client_aio.log.ledger import RecordAdd
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, Position
    from metadata.store import Version

logger = logging.getLogger(__name__)


class Listed(NamedTuple):
    """A ledger that is the last one of the list, and the list as this writer wrote it."""

    ledger: LogLedger
    head: LogHead
    version: Version


class OpenedLog(Protocol):
    """The writer of a log, as the opener sees it."""

    def on_progress(self, ledger: LogLedger) -> None:
        """Hear that records of a ledger have been acknowledged."""

    def on_failed(self, ledger: LogLedger, error: BookKeeperError) -> None:
        """Hear that a ledger has failed."""


class Opener:
    """Opens one log for one writer.

    Args:
        custom: becomes the log's custom metadata at each opening.
        backlog: holds the records that wait for the end of a failed ledger.
    """

    def __init__(
        self,
        context: ClientContext,
        lists: LogStore,
        settings: LedgerSettings,
        custom: Mapping[str, bytes],
        log: OpenedLog,
        backlog: Backlog[RecordAdd],
    ) -> None:
        self._context = context
        self._lists = lists
        self._settings = settings
        self._custom = custom
        self._log = log
        self._backlog = backlog
        self._made: set[int] = set()

    def make(
        self, context: ClientContext, metadata: LedgerMetadata, version: Version, digest: Digest
    ) -> LogLedger:
        """Build the writer's handle of a new ledger, which may be listed from now on."""
        self._made.add(metadata.ledger_id)
        return LogLedger(
            context,
            metadata,
            version,
            digest,
            log_name=self._lists.name,
            on_progress=self._log.on_progress,
            on_failed=self._log.on_failed,
        )

    def forget_before(self, ledger_id: int) -> None:
        """Forget the ledgers before one that is listed: none of them can become the last row."""
        self._made = {each for each in self._made if each >= ledger_id}

    async def take_over(self) -> Listed | None:
        """Take the log over once; returns None if another client has changed the list meanwhile.

        Raises:
            NoSuchLogError: there is no such log. Otherwise as `Client.open_log`.
        """
        takeover = await LogTakeover.prepare(
            self._context, self._lists, self._settings.password, check=self._check_custom
        )
        ledger = await self._create(takeover.head)
        # Not before there is a ledger to go on in: else a healthy writer would be fenced in vain.
        try:
            await takeover.fence()
        except BookKeeperError:
            await discard(self._context, ledger, self._settings.password)
            raise
        except BaseException:
            await ledger.abort()
            raise
        return await self._list(ledger, takeover)

    async def try_again(
        self,
        on_settled: Callable[[LedgerMetadata], None],
        on_lost: Callable[[BookKeeperError], None],
    ) -> Listed | None:
        """Open the log again once; returns None if the list was changed meanwhile.

        Args:
            on_settled: called with the failed ledger, which is CLOSED, where records wait for its end.
            on_lost: called with the error of these records, where nobody can tell its end any more.

        Cancelling leaves the log to another call, or to the next takeover.

        Raises:
            LogFencedError: another writer has the log, or the log was deleted.
            BookKeeperError: as `take_over`; if `is_final` holds for it, another attempt is in vain.
        """
        try:
            try:
                takeover = await LogTakeover.prepare(
                    self._context, self._lists, self._settings.password, check=self._check_own
                )
                await takeover.fence()
            except BookKeeperError:
                # A takeover closes this writer's ledgers before it lists another. Half of one, this one too,
                # may have closed the failed ledger alone: what follows may wait, and that end is final.
                with suppress(BookKeeperError):
                    await self._settle(on_settled)
                raise
            try:
                await self._settle(on_settled)
            except NoSuchLedgerError as missing:
                # This writer has the log: somebody closed the ledger, and a truncation has deleted it since.
                error = _closed_and_deleted(self._lists.name, missing)
                logger.warning("%s", error)
                on_lost(error)
            return await self._list(await self._create(takeover.head), takeover)
        except NoSuchLogError as no_log:
            raise self._lost(str(no_log)) from no_log

    def changes(self) -> AsyncGenerator[None, None]:
        """Yield at once, then whenever another client may have taken the log."""
        return self._lists.watch()

    async def is_lost(self) -> bool:
        """Return whether another writer has the log, or the log was deleted."""
        try:
            head, _ = await self._lists.read()
        except NoSuchLogError:
            return True
        return not is_still_own(head, self._made)

    def _check_custom(self, head: LogHead) -> None:
        """Raise InvalidArgumentError if the log's custom metadata have no room for those of this writer."""
        head.with_custom(self._custom)

    def _check_own(self, head: LogHead) -> None:
        """Raise LogFencedError unless this writer still has the log. Nothing has been fenced yet."""
        if not is_still_own(head, self._made):
            raise self._lost(f"its last ledger is {head.rows.last_key} now")

    async def _settle(self, on_settled: Callable[[LedgerMetadata], None]) -> None:
        """Report the end of the failed ledger, which is CLOSED by now."""
        ledger_id = self._backlog.undecided
        if ledger_id is None:
            return
        metadata, _ = await self._context.ledgers.read(ledger_id)
        if metadata.last_entry is None:
            raise LedgerRecoveryError(
                f"ledger {ledger_id} is {metadata.state.value} yet: its recovery is tried again",
                ledger_id=ledger_id,
            )
        on_settled(metadata)

    async def _create(self, head: LogHead) -> LogLedger:
        return await create_ledger(self._context, self._settings, self.make, id_min=head.id_min)

    async def _list(self, ledger: LogLedger, takeover: LogTakeover) -> Listed | None:
        """List a new ledger behind the rows of a head that was read before the ledger was made.

        Returns:
            None if the list has been changed since.
        """
        context, lists = self._context, self._lists
        row = LogRow(ledger.ledger_id, ledger.ledger_id, context.now_ms())
        listing = Listing(lambda found: found.append([row]).with_custom(self._custom), row.id)
        try:
            changed = await lists.change_now(takeover.head, takeover.version, listing.apply)
            is_listed = changed.is_done or await is_met(lists, listing, changed.head)
        except BaseException:
            await ledger.abort()  # Not discarded: the ledger may be listed, now or later.
            raise
        if not is_listed:
            await discard(context, ledger, self._settings.password)
            return None
        if changed.head.rows.last_key != row.id:
            await ledger.abort()  # The ledger is listed, and another writer has taken over since.
            return None
        return Listed(ledger, changed.head, changed.version)

    def _lost(self, why: str) -> LogFencedError:
        return LogFencedError(f"log {self._lists.name!r} has been taken over by another writer: {why}")


class HealedLog(OpenedLog, Protocol):
    """The writer of a log, as the healer sees it."""

    @property
    def current(self) -> LogLedger:
        """Return the ledger that records go to, or that has failed."""
        ...

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of all records that are not acknowledged yet."""
        ...

    @property
    def max_in_flight_bytes(self) -> int:
        """Return the bytes above which `drain` waits."""
        ...

    async def withdraw(self) -> None:
        """Take no further step to another ledger; returns when none is under way."""

    def begin(self, listed: Listed) -> None:
        """Write to a ledger that has just been listed."""


class Healer:
    """The records of one log's writer that no ledger replicates, and what becomes of them.

    Args:
        timeout_s: how long an append may be outstanding; None for ever.
    """

    def __init__(
        self,
        context: ClientContext,
        lists: LogStore,
        settings: LedgerSettings,
        custom: Mapping[str, bytes],
        log: HealedLog,
        timeout_s: float | None,
    ) -> None:
        self._context = context
        self._name = lists.name
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.backlog: Backlog[RecordAdd] = Backlog()
        what = f"appends that wait in log {lists.name}"
        limit = context.config.max_in_flight_bytes
        self.waiting = WaitingAdds(
            self._take_run, self._send, self._make_room, lambda: None, limit, what
        )  # fmt: skip
        self.opener = Opener(context, lists, settings, custom, log, self.backlog)
        self.failure: BookKeeperError | None = None
        self._failure: Failure | None = None
        self.is_holding = False  # records are held back: the log rolls or heals
        self._switched = asyncio.Event()  # or failed
        self._is_closed = False
        self.completed: Position | None = None  # the last record that a recovered end has completed
        self.healing = Healing(context, f"log {lists.name!r}", self, timeout_s)
        self._loss: Failure | None = None  # not raised by `check_loss` yet

    # --- what is known ---

    @property
    def is_healing(self) -> bool:
        """Return whether the log is being opened again."""
        return self.healing.is_healing

    @property
    def settled(self) -> int:
        """Return how many of the appends have been acknowledged, or have failed."""
        return self.backlog.settled + (0 if self.is_healing else self._log.current.last_add_confirmed + 1)

    @property
    def appended(self) -> int:
        """Return how many appends there have been."""
        in_ledger = 0 if self.is_healing else self._log.current.last_add_pushed + 1
        return self.backlog.settled + len(self.backlog) + in_ledger

    def check(self) -> None:
        """Raise the failure that ended the writer."""
        if self._failure is not None:
            raise self._failure.to_raise()

    def check_loss(self) -> None:
        """Raise the failure that ended the writer, or, once, the error of overdue records."""
        self.check()
        loss, self._loss = self._loss, None
        if loss is not None:
            raise loss.to_raise()

    @property
    def told_failures(self) -> tuple[BookKeeperError, ...]:
        """Return the errors of the failure, and of overdue records, that the application has been told of."""
        both = (self._failure, self._loss)
        return tuple(each.error for each in both if each is not None and each.is_known)

    # --- taking, and holding back ---

    def put(self, records: Sequence[bytes], add: RecordAdd, *, is_closing: bool) -> None:
        """Refuse the records of one add, or take them now or in their turn.

        Raises:
            BackpressureError: as `LogWriter.append`.
        """
        if self._failure is not None:
            self._failure.fail([add])
        elif is_closing:
            fail_all([add], LedgerClosedError(f"log {self._name!r} has been closed by this writer"))
        else:
            check_room(self._log, f"log {self._name!r}")
            self._put(records, add)

    def _put(self, records: Sequence[bytes], add: RecordAdd) -> None:
        if self.waiting.must_hold(records):
            self.waiting.put(records, add)
        else:
            self._take_run(records, add)

    def _take_run(self, payloads: Sequence[bytes], add: RecordAdd) -> None:
        if not self.is_holding:
            self._log.current.take(payloads, add)
            return
        for data in payloads:
            self.backlog.hold(data, add)

    def _send(self) -> None:
        if not self.is_holding:
            self._log.current.send()

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight, of the records that wait, too.

        Raises as `_make_room`.
        """
        while self.waiting and self._log.bytes_in_flight > self._context.config.max_in_flight_bytes:
            self._context.check_loop()
            await self.waiting.moved()
        await self._make_room()

    async def _make_room(self) -> None:
        """Wait until at most `max_in_flight_bytes` of the records that do not wait are in flight.

        Raises:
            BookKeeperError: the failure that ended the writer; or an error of `LedgerWriter.drain` after
                which the ledger goes on.
        """
        limit = self._context.config.max_in_flight_bytes
        while self.failure is None:
            ledger = self._log.current
            if ledger.bytes_in_flight + self.backlog.bytes_held <= limit:
                break
            if self.is_holding:
                await self.switched()
                continue
            try:
                await ledger.drain()
            except BookKeeperError:
                if ledger.failure is None and ledger is self._log.current and not self.is_holding:
                    raise
                # The ledger has failed: the writer heals, or has ended. Or the log rolls to one with room.
        self.check()

    def hold(self) -> None:
        """Hold back the records appended from now on."""
        self.is_holding = True
        self._switched.clear()

    def release(self, ledger: LogLedger) -> None:
        """Send the records held back to a ledger."""
        self.is_holding = False
        for data, add in self.backlog.take():
            ledger.take((data,), add)
        self._switched.set()

    async def switched(self) -> None:
        """Wait until records are not held back any more, or fewer of them are, or the writer has failed."""
        await self._switched.wait()

    def _stir(self) -> None:
        self._switched.set()
        if self.is_holding and self.failure is None:
            self._switched.clear()

    # --- healing, and the end ---

    def failed(self, ledger: LogLedger, error: BookKeeperError, *, is_closing: bool) -> None:
        """Take over the outstanding records of the current ledger, which has failed; heal, or end.

        Args:
            is_closing: there is nothing to heal for if no record is outstanding.
        """
        self.backlog.cut_off(ledger.ledger_id, ledger.last_add_confirmed + 1, ledger.cut_off)
        if is_final(error) or (is_closing and not self.backlog):
            self.end(error)
            return
        what = "log=%s its ledger %d has failed, healing: %s"
        self._context.reports.warn(logger, ("healing", self._name), what, self._name, ledger.ledger_id, error)
        self.hold()
        self.healing.begin(lambda: self._open_again(ledger), self._opened)

    async def _open_again(self, failed: LogLedger) -> Listed:
        await self._log.withdraw()
        await failed.abort()
        opener = self.opener
        return await self.healing.try_until_open(
            lambda: opener.try_again(self._settled, self._lose), opener.changes, opener.is_lost
        )

    def _opened(self, listed: Listed) -> None:
        logger.info("log=%s is open again with ledger %d", self._name, listed.ledger.ledger_id)
        self._log.begin(listed)

    def _settled(self, metadata: LedgerMetadata) -> None:
        last_entry = metadata.last_entry
        assert last_entry is not None
        if metadata.given_up is not None:
            error = _closed_with_loss(self._name, metadata)
            logger.warning("%s", error)
            self._lose(error)
            return
        known = self.backlog.ended(last_entry)
        for position, add in known:
            complete(add, position)
        if known:
            self.completed = known[-1][0]
        logger.info(
            "log=%s the failed ledger ends at entry %d: %d outstanding records are in it, %d are sent again",
            self._name, last_entry, len(known), len(self.backlog),
        )  # fmt: skip
        self._stir()

    def end(self, error: BookKeeperError) -> None:
        """Fail for good, with all outstanding records. The first failure is that of the writer."""
        if self.failure is not None:
            return
        self._failure = Failure(error)
        self.failure = self._failure.error
        self._failure.fail([*self.backlog.give_up(), *self.waiting.give_up()])
        self.healing.cancel()
        self._switched.set()

    async def until_healed(self) -> None:
        """Wait, for a writer that closes, until it does not heal; give up after the timeout of appends."""
        await self.healing.until_healed()
        self.check()

    async def stop(self) -> None:
        """Release everything; the writer has been closed, or has failed."""
        self._is_closed = True
        await self.healing.stop()

    # --- the owner of the healing (`HealingOwner`) ---

    @property
    def _has_ended(self) -> bool:
        return self._is_closed

    @property
    def _first_failure(self) -> BookKeeperError | None:
        return self.failure

    def _counts(self) -> tuple[int, int]:
        return self.appended, self.settled

    def _fail(self, error: BookKeeperError) -> None:
        self.end(error)

    def _give_up(self, error: OperationTimeoutError) -> None:
        # Only the recovered end of their ledger keeps records that are on their way from coming later.
        self._log.current.fail(error)
        self._lose(error)

    def _lose(self, error: BookKeeperError) -> None:
        """Fail all outstanding records, which are sent no more: a younger one must not overtake these."""
        self._loss = Failure(error)
        self._loss.fail([*self.backlog.give_up(), *self.waiting.give_up()])
        self._stir()


def _closed_with_loss(name: str, metadata: LedgerMetadata) -> BookKeeperError:
    """Build the error of outstanding records whose ledger was closed with a loss.

    Its end proves nothing: entries before it may be lost, or lie on fewer than Qa bookies.
    """
    return as_unknown(
        RecordsLostError(
            f"log {name!r}: its ledger {metadata.ledger_id} was closed with a loss behind entry "
            f"{metadata.last_entry}. Appends that were outstanding may be there or not; later ones come "
            "behind them",
            ledger_id=metadata.ledger_id,
        )
    )


def _closed_and_deleted(name: str, missing: NoSuchLedgerError) -> BookKeeperError:
    """Build the error of outstanding records whose ledger was truncated away before its end was read."""
    return as_unknown(
        RecordsLostError(
            f"log {name!r}: its ledger {missing.ledger_id} was closed, and truncated away before this writer "
            "read its end. Appends that were outstanding may have been in it or not; later ones come behind "
            "them",
            ledger_id=missing.ledger_id,
        )
    )
