"""The client's methods that concern logs: their arguments, their checks and their documentation.

The other modules of this package do the work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

from client_aio.config import check_flags, check_seconds
from client_aio.context import ContextOwner, on_own_loop
from client_aio.core.log_chain import ROLL_AGE_S, ROLL_BYTES, RollLimits
from client_aio.handles import AwaitableContext
from client_aio.healing import APPEND_TIMEOUT_S, check_timeout
from client_aio.ledger.create import LedgerSettings
from client_aio.log.add_ledgers import AddedToLog, Addition, add_to_log
from client_aio.log.gaps import OnGap, check_on_gap
from client_aio.log.reader import LogReading, Start, check_start, records_of
from client_aio.log.takeover import LogMetadata, read_log_metadata
from client_aio.log.truncation import SweepReport, create_log, delete_log, sweep, truncate_log
from client_aio.log.writer import LogWriter, open_log
from metadata.access.logs import LogStore, log_names
from metadata.errors import InvalidArgumentError
from metadata.model.ledger import check_custom
from metadata.model.log import LogRow, Position

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from client_aio.log.reader import BatchOrGapStream, LogBatchStream, RecordOrGapStream, RecordStream


@on_own_loop()
class LogOperations(ContextOwner):
    """The log operations of a client; a part of `Client`."""

    def _lists(self, name: str) -> LogStore:
        context = self._context
        context.check_open()
        return LogStore(
            context.ledgers.store,
            name,
            draw_token=context.draw_token,
            patience_s=context.config.ensemble_change_timeout_s,
        )

    def open_log(
        self,
        name: str,
        *,
        create: bool = True,
        roll_bytes: int | None = ROLL_BYTES,
        roll_entries: int | None = None,
        roll_age_s: float | None = ROLL_AGE_S,
        append_timeout_s: float | None = APPEND_TIMEOUT_S,
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest: str = "crc32c",
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
        ledger_metadata: Mapping[str, bytes] | None = None,
        guaranteed_write_quorum: bool = False,
    ) -> AwaitableContext[LogWriter]:
        """Open a log for writing. **Takes it over**: its present writer is fenced.

        The takeover makes a new ledger. It then recovers and closes the last two ledgers of the log, and
        lists the new one behind them. Only then the log takes records. The fenced writer gets LogFencedError.

        A writer that loses its bookies and not its log heals itself: it recovers its own last ledger, and
        appends go on in another one.

        Args:
            name: 1 to 200 letters, digits, '_', '.', ':', '@', '+' or '-'.
            create: create the log where there is none.
            roll_bytes: roll to another ledger at about so many payload bytes; None: not by bytes.
            roll_entries: roll at so many records; None: not by records.
            roll_age_s: roll so long after the last roll, if there was a record; None: not by time.
            append_timeout_s: how long an append may wait for its bookies. Then all outstanding appends fail
                as *unknown*, and the writer goes on trying for later ones. None: appends wait for ever.
            ensemble_size: of the log's ledgers, as are the settings that follow; see `create_ledger`.
            password: of all ledgers of the log.
            custom_metadata: kept with the log, at most 64 KiB; keys that are not given stay as they are.
            ledger_metadata: kept with each ledger that this writer makes, at most 64 KiB.

        Raises:
            InvalidArgumentError: at the call: an argument is not legal. On opening: the log has no room for
                the custom metadata. No writer has been fenced.
            NoSuchLogError: on opening, with `create=False`: there is no such log.
            LedgerRecoveryError: on opening: too few bookies of the log's last ledgers answer; try again
                later. The present writer goes on, unless bookies were lost during the takeover.
            NotEnoughBookiesError: on opening: too few bookies can be reached for the next ledger, as for
                `create_ledger`. The present writer goes on.
            UnauthorizedAccessError: on opening: the password is wrong. No writer has been fenced.
        """
        lists = self._lists(name)
        check_flags(create=create, guaranteed_write_quorum=guaranteed_write_quorum)
        settings = LedgerSettings(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest=digest,
            password=password,
            custom_metadata=custom_metadata,
            guaranteed_write_quorum=guaranteed_write_quorum,
        )
        limits = RollLimits(bytes=roll_bytes, entries=roll_entries, age_s=roll_age_s)
        check_timeout(append_timeout_s)
        tags = check_custom(ledger_metadata or {})
        start = partial(open_log, self._context, lists, settings, limits, create=create)
        return AwaitableContext(partial(start, append_timeout_s=append_timeout_s, ledger_metadata=tags))

    async def create_log(
        self,
        name: str,
        *,
        custom_metadata: Mapping[str, bytes] | None = None,
        exist_ok: bool = False,
        password: bytes = b"",
    ) -> None:
        """Create a log without a record. Disturbs no writer; `open_log` then opens it.

        Cancelling leaves the log created or not.

        Args:
            custom_metadata: kept with the log, at most 64 KiB.
            exist_ok: do nothing where the log exists.
            password: of a former log of the name, whose deletion was cut off and is finished first.

        Raises:
            InvalidArgumentError: an argument is not legal.
            LogExistsError: there is a log of that name.
        """
        custom = check_custom({} if custom_metadata is None else custom_metadata)
        check_flags(exist_ok=exist_ok)
        await create_log(self._context, self._lists(name), custom, password, exist_ok=exist_ok)

    @overload
    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["raise"] = "raise",
        password: bytes = b"",
    ) -> RecordStream: ...

    @overload
    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["skip"],
        password: bytes = b"",
    ) -> RecordOrGapStream: ...

    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: OnGap = "raise",
        password: bytes = b"",
    ) -> RecordStream | RecordOrGapStream:
        """Read a log's records in order, across all its ledgers. Never fences.

        Without `follow` the iterator ends behind the last record that was acknowledged when it began, or a
        short time before (rule 13). With `follow` it never ends: it goes on with later records, across rolls
        and takeovers. `aclose()` the iterator unless it is read to its end.

        Args:
            start: a position, or its text form: begin with that record. "end": begin with the next record
                appended. A time, aware or in seconds since 1970: begin with the ledger before the last one
                that was listed then. Then no record of that time or later is missed, as far as the writers'
                clocks agree. None: begin with the log's first record.
            wait: with `follow`: wait for a log that does not exist yet.
            on_gap: "skip": return a `LogGap` in the place of records that are lost, and go on behind it. A
                record is lost if its ledger is gone, if every bookie that should have it has answered and
                none returned it, or if its ledger was closed with a loss. "raise": raise instead.

        Raises:
            InvalidArgumentError: at the call: an argument is not legal.
            NoSuchLogError: while iterating: there is no such log, or no longer.
            LogTruncatedError: while iterating: the next records have been truncated.
            RecordsLostError, NoSuchLedgerError: while iterating: records are lost, or a whole ledger.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie
                returned a record intact, or too few bookies answered to find the log's end. Reading may be
                tried again from the record's position.
            MetadataCorruptError: while iterating: a part of the log's list of ledgers is damaged or missing.
        """
        return records_of(self._read(name, start, follow, wait, on_gap, password))

    @overload
    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["raise"] = "raise",
        password: bytes = b"",
    ) -> LogBatchStream: ...

    @overload
    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["skip"],
        password: bytes = b"",
    ) -> BatchOrGapStream: ...

    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: OnGap = "raise",
        password: bytes = b"",
    ) -> LogBatchStream | BatchOrGapStream:
        """Read as `read_log` does, in batches: one buffer and a list of offsets for many records."""
        return self._read(name, start, follow, wait, on_gap, password)

    def _read(
        self, name: str, start: Start, follow: bool, wait: bool, on_gap: OnGap, password: bytes
    ) -> BatchOrGapStream:
        check_flags(follow=follow, wait=wait)
        if wait and not follow:
            raise InvalidArgumentError("wait=True goes with follow=True: a reader that ends does not wait")
        reading = LogReading(
            self._context,
            self._lists(name),
            check_start(start),
            follow=follow,
            password=password,
            waits=wait,
            skips_gaps=check_on_gap(on_gap),
        )
        return reading.batches()

    async def truncate_log(
        self, name: str, before: Position | tuple[int, int] | str, *, password: bytes = b""
    ) -> list[LogRow]:
        """Drop a log's records before a position, and delete the ledgers that hold nothing else.

        `before` is the first position kept. Only CLOSED ledgers are deleted, and never the last one. A writer
        of the log goes on undisturbed. Cancelling leaves the log truncated or not. The next truncation, or
        `sweep_log_orphans`, deletes ledgers that are left over.

        Returns:
            The ledgers that were deleted.

        Raises:
            NoSuchLogError: there is no such log.
            InvalidArgumentError: the position lies behind the log's last ledger.
            UnauthorizedAccessError: the password is not that of the log's ledgers. Nothing was done.
            MetadataCorruptError: a part of the log's list of ledgers is damaged or missing.
        """
        position = Position.parse(before) if isinstance(before, str) else Position.check(before)
        return await truncate_log(self._context, self._lists(name), position, password)

    async def delete_log(self, name: str, *, password: bytes = b"") -> None:
        """Delete a log with all its ledgers. Its writer fails.

        Cancelling leaves the log as it was, or partly deleted. A partly deleted log cannot be read; the next
        deletion, or the creation of a log of this name, finishes it.

        Raises:
            NoSuchLogError: there is no such log.
            UnauthorizedAccessError: the password is not that of the log's ledgers. Nothing was done.
        """
        await delete_log(self._context, self._lists(name), password)

    async def list_logs(self) -> AsyncGenerator[str, None]:
        """Yield the names of all logs, sorted."""
        self._context.check_open()
        for name in await log_names(self._context.ledgers.store):
            yield name

    async def log_metadata(self, name: str) -> LogMetadata:
        """Read a log's list of ledgers, and the other metadata kept with it.

        Raises:
            NoSuchLogError: there is no such log.
            MetadataCorruptError: a part of the log's list of ledgers is damaged or missing.
        """
        return await read_log_metadata(self._lists(name))

    async def add_to_log(
        self,
        name: str,
        ledger_ids: Sequence[int],
        *,
        transaction: tuple[str, int] | None = None,
        content: str = "",
        replace: bool = False,
        custom_metadata: Mapping[str, bytes] | None = None,
        password: bytes = b"",
    ) -> AddedToLog:
        """Add CLOSED ledgers to a log, all at once. **Takes the log over**, as `open_log` does.

        The log is created where there is none. The ledgers then belong to the log: truncating or deleting it
        deletes them. Cancelling leaves all of them added, or none.

        Args:
            ledger_ids: in the order that they are to have in the log. None may be in a log already.
            transaction: a query and the number of its batch, recorded with the ledgers in one step. Nothing
                is changed where that batch is the last one recorded of the query. The log records the last
                batch of the 100 queries that added most recently.
            content: identifies the records of the batch, such as a fingerprint of at most 100 characters. The
                batch is then a repetition only with the same content. Without it, the number alone counts.
            replace: drop all former ledgers of the log in the same step, and delete them afterwards.
            custom_metadata: set with the log; keys that are not given stay as they are.
            password: of the log's ledgers, and of the ledgers to add.

        Raises:
            InvalidArgumentError: a ledger is not CLOSED, is given twice, or is found in the log. Or it
                belongs to another log, which may delete it.
            StaleTransactionError: the log has recorded a later batch of the query, or this batch with other
                content. Nothing was done.
            NoSuchLedgerError: a ledger does not exist.
            LedgerRecoveryError: too few bookies of the log's last ledgers answered; try again later.
            UnauthorizedAccessError: the password is not that of the log's last ledgers, or of a ledger to
                add. Nothing was done.
            MetadataUnavailableError: the ledgers may have been added; repeat the call with its transaction.
        """
        check_flags(replace=replace)
        custom = check_custom({} if custom_metadata is None else custom_metadata)
        addition = Addition.check(ledger_ids, transaction, replace, custom, content)
        return await add_to_log(self._context, self._lists(name), addition, password)

    async def sweep_log_orphans(self, *, older_than_s: float = 3600.0, password: bytes = b"") -> SweepReport:
        """Delete leftovers of crashed log writers: ledgers in no log, pages, unfinished deletions.

        A ledger that `add_to_log` was about to add, and did not, is kept. The sweep removes its owner.

        Deletes pages of deleted unbounded ledgers too. A deletion leaves a placeholder at the name of the log
        or ledger: no client then mistakes the name's next owner for the former one. Placeholders of an hour's
        age and more are deleted.

        Reads the metadata of every ledger. Safe at any time, beside writers of any log; run it now and then.
        Cancelling leaves the remaining leftovers to the next call.

        Args:
            older_than_s: keep younger ledgers: a writer that has just made one would have to make another.
                Ages are by the clock of the metadata store.
            password: of ledgers that have one.

        Returns:
            The ledgers and pages deleted, and the failures. A failure in one log does not stop the sweep of
            the others.

        Raises:
            MetadataUnavailableError: not all ledgers and logs could be listed. Nothing was deleted.
        """
        self._context.check_open()
        check_seconds("older_than_s", older_than_s)
        return await sweep(self._context, self._lists, older_than_s=older_than_s, password=password)
