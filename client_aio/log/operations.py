"""The client's methods that concern logs.

Owns what may be asked for and what is documented about it; the work is done elsewhere in this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.context import ContextOwner
from client_aio.core.log_chain import ROLL_AGE_S, ROLL_BYTES, RollLimits
from client_aio.handles import AwaitableContext
from client_aio.ledger.create import LedgerSettings
from client_aio.log.add_ledgers import AddedToLog, Addition, add_to_log
from client_aio.log.metadata import LogMetadata, read_log_metadata
from client_aio.log.reader import LogReading, Start, check_start, records_of
from client_aio.log.truncation import SweepReport, delete_log, sweep, truncate_log
from client_aio.log.writer import LogWriter, open_log
from metadata.access.logs import LogStore, log_names
from metadata.model.ledger import check_custom
from metadata.model.log import LogRow, Position

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from client_aio.log.reader import LogBatchStream, RecordStream


class LogOperations(ContextOwner):
    """What a client does with logs; a part of `Client`."""

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
        ensemble_size: int = 3,
        write_quorum: int = 3,
        ack_quorum: int = 2,
        digest: str = "crc32c",
        password: bytes = b"",
        custom_metadata: Mapping[str, bytes] | None = None,
        guaranteed_write_quorum: bool = False,
    ) -> AwaitableContext[LogWriter]:
        """Open a log for writing. **Takes it over**: whoever writes to it now is shut out.

        The last two ledgers of the log are recovered and closed, and a new one is listed behind them; only
        then records are taken. The writer that was shut out gets LogFencedError.

        Args:
            name: 1 to 200 letters, digits, '_', '.', ':', '@', '+' or '-'.
            create: create the log where there is none.
            roll_bytes: go on to another ledger at about so many payload bytes; None: not by bytes.
            roll_entries: the same by records.
            roll_age_s: the same by the time since the last roll, if there was a record.
            ensemble_size: of the ledgers, as the following ones; see `create_ledger`.
            password: of all ledgers of the log.
            custom_metadata: kept with the log, at most 64 KiB; keys that are not given stay as they are.

        Raises:
            InvalidArgumentError: at once: something is not legal.
            NoSuchLogError: on opening, with `create=False`: there is no such log.
            LedgerRecoveryError: on opening: too few bookies of its last ledgers answered; try again later.
            NotEnoughBookiesError: on opening: fewer than `ensemble_size` bookies can be reached.
            UnauthorizedAccessError: on opening: the password is wrong. Nobody has been shut out.
        """
        lists = self._lists(name)
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
        return AwaitableContext(lambda: open_log(self._context, lists, settings, limits, create=create))

    def read_log(
        self, name: str, start: Start = None, *, follow: bool = False, password: bytes = b""
    ) -> RecordStream:
        """Read a log's records in order, across all its ledgers. Never fences.

        Without `follow` this ends behind the last record that was acknowledged when it began, or up to 20 ms
        before. With it, it goes on with what is appended later, across rolls and takeovers, and never ends.
        `aclose()` the iterator when it is not read to its end.

        Args:
            start: a position, or its text form: that record and those behind it; "end": what is appended from
                now on; a time, aware or in seconds since 1970: from the beginning of the ledger before the
                last one that was listed then (nothing of that time or later is missed, as far as the clocks
                of those who wrote agree); None: from the beginning.

        Raises:
            InvalidArgumentError: at once: no name or no start.
            NoSuchLogError: while iterating: there is no such log, or no longer.
            LogTruncatedError: while iterating: the records that come next have been truncated.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating: no bookie could
                give a record intact, or too few could tell where the log ends. Reading may be tried again
                from its position.
            MetadataCorruptError: while iterating: a part of the log's list of ledgers is damaged or missing.
        """
        return records_of(self.read_log_batches(name, start, follow=follow, password=password))

    def read_log_batches(
        self, name: str, start: Start = None, *, follow: bool = False, password: bytes = b""
    ) -> LogBatchStream:
        """Read as `read_log` does, in batches: one buffer and a list of offsets for many records."""
        lists, start = self._lists(name), check_start(start)
        return LogReading(self._context, lists, start, follow=follow, password=password).batches()

    async def truncate_log(
        self, name: str, before: Position | tuple[int, int] | str, *, password: bytes = b""
    ) -> list[LogRow]:
        """Drop a log's records before a position, and delete the ledgers that hold nothing else.

        The position given is the first one kept. Only CLOSED ledgers are deleted, and never the last one; a
        writer goes on undisturbed. Cancelling leaves the log truncated or not; ledgers not deleted then are
        by the next truncation, or `sweep_log_orphans`.

        Returns:
            The ledgers that were deleted.

        Raises:
            NoSuchLogError: there is no such log.
            InvalidArgumentError: the position lies behind the log's last ledger.
            UnauthorizedAccessError: the password is not that of its ledgers. Nothing was done.
            MetadataCorruptError: a part of the log's list of ledgers is damaged or missing.
        """
        position = Position.parse(before) if isinstance(before, str) else Position.check(before)
        return await truncate_log(self._context, self._lists(name), position, password)

    async def delete_log(self, name: str, *, password: bytes = b"") -> None:
        """Delete a log with all its ledgers. Who writes to it is shut out.

        Cancelling leaves it as it was, or partly deleted: then nobody can read it, and the next call, or one
        that creates it anew, finishes.

        Raises:
            NoSuchLogError: there is no such log.
            UnauthorizedAccessError: the password is not that of its ledgers. Nothing was done.
        """
        await delete_log(self._context, self._lists(name), password)

    async def list_logs(self) -> AsyncGenerator[str, None]:
        """Yield the names of all logs, sorted."""
        self._context.check_open()
        for name in await log_names(self._context.ledgers.store):
            yield name

    async def log_metadata(self, name: str) -> LogMetadata:
        """Read which ledgers a log is made of, and what else is kept with it.

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
        replace: bool = False,
        custom_metadata: Mapping[str, bytes] | None = None,
        password: bytes = b"",
    ) -> AddedToLog:
        """Make CLOSED ledgers a part of a log, all of them at once. **Takes it over**, as `open_log` does.

        The log is created where there is none. The ledgers then belong to it: truncating or deleting it
        deletes them. Cancelling leaves all of them added, or none.

        Args:
            ledger_ids: in the order in which the log is to have them. None of them may be in a log already.
            transaction: a query and the number of its batch, recorded with the ledgers in one step. Where
                that batch or a later one of the query has been recorded before, nothing is changed. The
                last 100 queries are remembered.
            replace: drop everything the log had, in the same step, and delete those ledgers afterwards.
            custom_metadata: set with the log; keys that are not given stay as they are.
            password: of the ledgers that the log has, and of those that are added.

        Raises:
            InvalidArgumentError: a ledger is not CLOSED, or given twice, or the log is found to have it; or
                another log may delete it, since its custom metadata say that it was made for that one.
            NoSuchLedgerError: a ledger does not exist.
            LedgerRecoveryError: too few bookies of the log's last ledgers answered; try again later.
            UnauthorizedAccessError: the password is not that of the log's last ledgers, or of one that is to
                be added. Nothing was done.
            MetadataUnavailableError: it may have been done; repeat it with its transaction.
        """
        addition = Addition.check(ledger_ids, transaction, replace, check_custom(custom_metadata or {}))
        return await add_to_log(self._context, self._lists(name), addition, password)

    async def sweep_log_orphans(self, *, older_than_s: float = 3600.0, password: bytes = b"") -> SweepReport:
        """Delete what crashes of log writers have left over: ledgers in no log, pages, unfinished deletions.

        And pages of deleted unbounded ledgers, and what deletions left an hour ago and more to keep names
        from being mistaken for their next owners'.
        Looks at the metadata of every ledger. Safe at any time, beside writers of any log; run it now and
        then. Cancelling leaves the rest to the next call.

        Args:
            older_than_s: leave younger ledgers alone; a writer that has just made one would have to make
                another.
            password: of ledgers that have one.

        Returns:
            What was deleted, and what could not be swept, of one log or another: that has stopped no other.

        Raises:
            MetadataUnavailableError: not all ledgers and logs could be listed. Nothing was deleted.
        """
        self._context.check_open()
        return await sweep(self._context, self._lists, older_than_s=older_than_s, password=password)
