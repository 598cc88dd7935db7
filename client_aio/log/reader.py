"""Reading a log: records and batches, from ledger to ledger, without gap or duplicate. Never fences.

The shell around `client_aio.core.log_chain.LogCursor`. The reader leaves a ledger only when the ledger is
complete: it is CLOSED, or the next ledger has an entry. In the second case all its adds are acknowledged.
Then the entries above its last known LAC are read up to the first entry that no bookie has. Ledgers are
opened one after another, by their metadata alone. The next ledger's metadata are read ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from client_aio.core.log_chain import NOT_CLOSED_MAX, LogCursor, Step, check_begun, row_at_time
from client_aio.ledger.entry_reader import EntryBatch
from client_aio.ledger.reader import LedgerReader
from client_aio.log.gaps import Hole, LogGap, is_missing, read_past_loss
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    InvalidArgumentError,
    LogTruncatedError,
    MetadataUnavailableError,
    NoSuchKeyError,
    NoSuchLedgerError,
    NoSuchLogError,
    RecordsLostError,
)
from metadata.model.log import Position
from metadata.owned_task import is_cancelled_alone

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from client_aio.context import ClientContext
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, LogRow


class LogRecord(NamedTuple):
    """A record of a log."""

    position: Position
    data: bytes


class LogBatch:
    """A run of records that follow one another in one ledger, without an object per record.

    Record number i has the position (`ledger_id`, `first_entry_id + i`) and the bytes
    `buffer[offsets[i]:offsets[i + 1]]`. The buffer is read-only and stays valid while a reference to it
    exists.
    """

    __slots__ = ("_entries", "ledger_id")

    def __init__(self, ledger_id: int, entries: EntryBatch) -> None:
        self.ledger_id = ledger_id
        self._entries = entries

    @property
    def first_entry_id(self) -> int:
        """Return the entry id of the first record."""
        return self._entries.first_entry_id

    @property
    def last_entry_id(self) -> int:
        """Return the entry id of the last record."""
        return self._entries.last_entry_id

    @property
    def first_position(self) -> Position:
        """Return the position of the first record."""
        return Position(self.ledger_id, self._entries.first_entry_id)

    @property
    def last_position(self) -> Position:
        """Return the position of the last record."""
        return Position(self.ledger_id, self._entries.last_entry_id)

    @property
    def offsets(self) -> Sequence[int]:
        """Return the offset of each record in the buffer, and the end of the last record."""
        return self._entries.offsets

    @property
    def buffer(self) -> memoryview:
        """Return the bytes of all records."""
        return self._entries.buffer

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogRecord]:
        ledger_id = self.ledger_id
        for entry_id, data in self._entries:
            yield LogRecord(Position(ledger_id, entry_id), data)

    def __repr__(self) -> str:
        return f"LogBatch({self.first_position} to {self.last_position}, {len(self.buffer)} bytes)"


RecordStream = AsyncGenerator[LogRecord, None]
LogBatchStream = AsyncGenerator[LogBatch, None]
RecordOrGapStream = AsyncGenerator[LogRecord | LogGap, None]
BatchOrGapStream = AsyncGenerator[LogBatch | LogGap, None]


async def open_row(context: ClientContext, row: LogRow, password: bytes) -> LedgerReader:
    """Open a ledger for reading by its metadata alone; the LAC is not asked for.

    Raises:
        NoSuchLedgerError: there is no such ledger.
        UnauthorizedAccessError: the password is not that of the ledger.
    """
    metadata, version = await context.ledgers.read(row.ledger_id)
    digest = await context.unlock(metadata, password)
    return LedgerReader(context, metadata, version, digest)


async def ask_lac(reader: LedgerReader) -> None:
    """Ask the bookies for the LAC, unless the ledger is CLOSED; with too few answers take their highest."""
    try:
        await reader.read_last_add_confirmed()
    except BookieUnavailableError as error:
        logger.warning("ledger=%d its LAC is not known for now: %s", reader.ledger_id, error)


logger = logging.getLogger(__name__)

Start = Position | tuple[int, int] | datetime | float | str | None
"""The start of a read: a position, "end", a time (aware, or seconds since 1970), or None: the beginning."""

_RETRY_S = 0.2
_SILENCE_S, _SILENCE_MAX_S = 2.0, 60.0
"""A follower that got no record from a ledger for so long looks whether records go to the next ledger. It
backs off, from the first to the second interval."""


def check_start(start: Start) -> Start:
    """Return the start of a read, checked, or raise InvalidArgumentError."""
    if isinstance(start, str):
        return start if start == "end" else Position.parse(start)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidArgumentError(f"start {start!r} has no time zone")
        return start
    if isinstance(start, float) and not math.isfinite(start):
        raise InvalidArgumentError(f"start {start!r} is no time")
    if isinstance(start, bool):
        raise InvalidArgumentError(f"start {start!r} is no position and no time")
    if start is None or isinstance(start, (int, float)):
        return start
    return Position.check(start)


async def records_of(batches: BatchOrGapStream) -> RecordOrGapStream:
    """Return the records of batches, one by one, and the gaps between them."""
    async with contextlib.aclosing(batches):
        async for batch in batches:
            if isinstance(batch, LogGap):
                yield batch
                continue
            for record in batch:
                yield record


class LogReading:
    """One read of a log."""

    def __init__(
        self,
        context: ClientContext,
        lists: LogStore,
        start: Start,
        *,
        follow: bool,
        password: bytes,
        waits: bool = False,
        skips_gaps: bool = False,
    ) -> None:
        self._context = context
        self._lists = lists
        self._start = start
        self._follow = follow
        self._password = password
        self._waits = waits  # for a log that does not exist yet
        self._skips_gaps = skips_gaps
        self._ahead: tuple[int, asyncio.Task[LedgerReader]] | None = None
        self._incarnation: int | None = None  # of the log's list: another log of the name has another one
        self._behind: tuple[int, LedgerReader] | None = None  # the next ledger, for `_is_overtaken`
        self._doubt: BookieUnavailableError | None = None  # the log's end could not be determined

    async def batches(self) -> BatchOrGapStream:
        """Return the records, in batches, and gaps where these are skipped."""
        try:
            if self._waits:
                await self._await_log()
            end, cursor = await self._begun()
            while True:
                step = cursor.step()
                if step is None and self._follow:
                    await self._await_more(cursor)
                    continue
                if step is None:
                    await self._learn(cursor)
                    step = cursor.step()
                if step is None:
                    return
                if not self._follow and (end is None or step.row.id > end):
                    return
                cursor.enter(step)
                is_at_gap = False
                async with contextlib.aclosing(self._row(cursor, step)) as batches:
                    async for batch in batches:
                        is_at_gap = isinstance(batch, LogGap)
                        last = batch.last if isinstance(batch, LogGap) else batch.last_position
                        if last is not None:
                            cursor.given(step.row, last.entry_id)
                        yield batch
                if cursor.at.ledger_id == step.row.id and not self._follow and not is_at_gap:
                    if self._doubt is not None:
                        raise self._doubt
                    return  # The end of the log, at present.
        finally:
            if self._ahead is not None:
                self._ahead[1].cancel()
                await asyncio.gather(self._ahead[1], return_exceptions=True)

    # --- where to begin ---

    async def _await_log(self) -> None:
        """Wait until the log exists. Its end is then its beginning: whatever it has came later."""
        while True:
            try:
                async with (
                    contextlib.aclosing(self._lists.watch()) as watch,
                    contextlib.aclosing(self._context.while_open(watch)) as changes,
                ):
                    async for _ in changes:
                        with contextlib.suppress(NoSuchLogError):
                            await self._lists.read(sync=True)
                            return
                        if self._start == "end":
                            self._start = None
            except MetadataUnavailableError as error:
                self._warn("log=%s its list is not reachable: %s", self._lists.name, error)
            await asyncio.sleep(_RETRY_S)

    async def _begun(self) -> tuple[int | None, LogCursor]:
        """Return the id of the last row listed now, None for none, and a cursor at the start."""
        while True:
            head, version = await self._lists.read(sync=True)
            try:
                cursor = LogCursor(await self._begin(head))
            except NoSuchKeyError as error:
                await self._lists.check_changed(version, error)
            else:
                self._incarnation = version.incarnation
                try:
                    await self._learn(cursor)
                    return head.rows.last_key, cursor
                except LogTruncatedError:
                    if isinstance(self._start, (str, Position)):
                        raise  # Records between that position and the log's beginning may be lost.

    async def _begin(self, head: LogHead) -> Position:
        match self._start:
            case None:
                return head.begins_at
            case "end":
                return await self._end(head)
            case datetime():
                return await self._at_time(head, int(self._start.timestamp() * 1000))
            case int() | float():
                return await self._at_time(head, int(self._start * 1000))
            case Position():
                check_begun(head, self._start)
                return self._start
        raise AssertionError(f"start is {self._start!r}")

    async def _end(self, head: LogHead) -> Position:
        """Return the position behind the last record, by the bookies' present answers.

        A ledger that is CLOSED, or missing, gets no more records: the end lies behind it, and so behind what
        was lost there.
        """
        rows = head.newest[-NOT_CLOSED_MAX:]
        end = Position(rows[-1].id + 1, 0) if rows else head.begins_at
        for row in reversed(rows):
            try:
                reader = await self._open(row)
                await reader.read_last_add_confirmed()
            except NoSuchLedgerError:
                continue
            if not reader.is_closed:
                end = Position(row.id, reader.last_add_confirmed + 1)
            if reader.last_add_confirmed >= 0:
                break
            # An empty ledger is not the log's end, even if CLOSED: a takeover that died half-way closes the
            # ledger that is listed ahead, and the ledger before it still grows.
        return end

    async def _at_time(self, head: LogHead, time_ms: int) -> Position:
        """Return the beginning of a ledger; no record before it was written at that time or later."""
        low, high = 0, len(head.rows.pages)
        while low < high:  # Find the last page whose first row is old enough, or the head.
            middle = (low + high + 1) // 2
            rows = await self._lists.rows_at_page(head, middle)
            low, high = (middle, high) if rows and rows[0].created_ms <= time_ms else (low, middle - 1)
        rows = await self._lists.rows_at_page(head, low)
        if low and rows and row_at_time(rows, time_ms) is rows[0]:
            rows = [*await self._lists.rows_at_page(head, low - 1), *rows]
        row = row_at_time(rows, time_ms)
        return head.begins_at if row is None else max(head.begins_at, Position(row.id, 0))

    # --- the list ---

    async def _learn(self, cursor: LogCursor, *, sync: bool = False) -> LogHead:
        """Read the rows around the cursor."""
        while True:
            head, version = await self._lists.read(sync=sync)
            self._lists.check_same(version, self._incarnation)
            try:
                cursor.learn(head, await self._lists.rows_around(head, cursor.at.ledger_id))
                return head
            except NoSuchKeyError as error:
                await self._lists.check_changed(version, error)

    async def _await_more(self, cursor: LogCursor) -> None:
        """Wait until the list has a row at or behind the cursor."""
        while True:
            try:
                async with (
                    contextlib.aclosing(self._lists.watch()) as watch,
                    contextlib.aclosing(self._context.while_open(watch)) as changes,
                ):
                    async for _ in changes:
                        await self._learn(cursor)
                        if cursor.step() is not None:
                            return
            except MetadataUnavailableError as error:
                self._warn("log=%s its list is not reachable: %s", self._lists.name, error)
            await asyncio.sleep(_RETRY_S)

    def _warn(self, message: str, name: str | int, error: BookKeeperError) -> None:
        """Warn of what may happen again at each attempt."""
        self._context.reports.warn(logger, (message, name, type(error)), message, name, error)

    # --- one ledger ---

    async def _row(self, cursor: LogCursor, step: Step) -> BatchOrGapStream:
        """Return the records of one row; move the cursor past the row when its ledger is complete."""
        row, reader = step.row, None
        try:
            reader = await self._take_open(row)
            if step.is_last and reader.is_closed:
                await self._learn(cursor)  # The ledger is complete: another may be listed by now.
            self._open_ahead(cursor.after(row))
            source = self._source(reader, cursor, row, step.first_entry)
            async with contextlib.aclosing(source) as batches:
                async for batch in batches:
                    yield LogBatch(row.id, batch)
            is_finished = cursor.at.ledger_id > row.id
            if is_finished and reader.metadata.given_up is not None:
                yield self._given_up(row, reader.metadata)
        except MetadataUnavailableError as error:
            if not self._follow:
                raise
            self._warn("log=%s its metadata are not reachable: %s", self._lists.name, error)
            await asyncio.sleep(_RETRY_S)
        except BookKeeperError as error:
            # A truncation or a deletion of the log may have caused this: then `_learn` raises its own error.
            await self._learn(cursor, sync=True)
            if cursor.at.ledger_id > row.id:
                raise  # A loss at the end of the row. The rows around the cursor may begin behind it.
            if not cursor.knows(row):
                # The row was dropped, and the log does not begin behind the reader: no record is missed.
                cursor.finished(row)
                return
            if not self._skips_gaps:
                raise
            async with contextlib.aclosing(self._past_gap(cursor, row, reader, error)) as batches:
                async for each in batches:
                    yield each

    async def _past_gap(
        self, cursor: LogCursor, row: LogRow, reader: LedgerReader | None, error: BookKeeperError
    ) -> BatchOrGapStream:
        """Return what can be read before a gap, and the gap; raise the error where that is no sure loss."""
        if is_missing(error, row.ledger_id):
            yield LogGap(cursor.at, None, error)
            cursor.finished(row)
            return
        if reader is None:
            raise error
        past = read_past_loss(self._context, reader, cursor.at.entry_id, error)
        async with contextlib.aclosing(past) as found:
            async for each in found:
                if not isinstance(each, Hole):
                    yield LogBatch(row.id, each)
                elif each.last is None:
                    yield LogGap(Position(row.id, each.first), None, each.error)
                    cursor.finished(row)
                else:
                    yield LogGap(Position(row.id, each.first), Position(row.id, each.last), each.error)

    def _given_up(self, row: LogRow, metadata: LedgerMetadata) -> LogGap:
        """Return the gap behind a ledger that was closed with a loss; raise it where gaps are not skipped."""
        assert metadata.last_entry is not None
        begin = Position(row.id, metadata.last_entry + 1)
        error = RecordsLostError(
            f"log {self._lists.name!r} may have lost records from {begin} on: ledger {metadata.ledger_id} "
            'was closed with a loss. Read with on_gap="skip", or from the next ledger on',
            ledger_id=metadata.ledger_id,
            entry_id=metadata.last_entry + 1,
        )
        if not self._skips_gaps:
            raise error
        return LogGap(begin, None, error)

    async def _source(
        self, reader: LedgerReader, cursor: LogCursor, row: LogRow, first: int
    ) -> AsyncGenerator[EntryBatch, None]:
        is_complete = reader.is_closed or await self._is_overtaken(cursor, row)
        if not is_complete and not self._follow:
            try:
                await reader.read_last_add_confirmed()
            except BookieUnavailableError as error:
                self._doubt = error  # Too few answers do not prove that the log ends here.
        following, is_closed = first, reader.is_closed
        if self._follow and not is_complete:
            async with contextlib.aclosing(self._tail(reader, cursor, row, first)) as batches:
                async for batch in batches:
                    following = batch.last_entry_id + 1
                    yield batch
            is_complete, is_closed = True, reader.is_closed
        last = max(following - 1, reader.last_add_confirmed)
        async with contextlib.aclosing(reader.read_batches(following, last)) as batches:
            async for batch in batches:
                following = batch.last_entry_id + 1
                yield batch
        if is_complete and not is_closed:
            # The ledger takes no more adds, and every add was acknowledged: it ends before the first entry
            # that is absent. `read_rest` needs the present metadata: their ensembles decide about absence.
            await reader.refresh(sync=True)
            # Entries of earlier fragments have all been acknowledged: absence there is a loss, not the end.
            last = max(following - 1, reader.last_add_confirmed)
            async with contextlib.aclosing(reader.read_batches(following, last)) as batches:
                async for batch in batches:
                    following = batch.last_entry_id + 1
                    yield batch
            async with contextlib.aclosing(reader.read_rest(following)) as rest:
                async for entry in rest:
                    yield EntryBatch.of_payloads(entry.entry_id, [memoryview(entry.data)])
        if is_complete or self._follow:
            cursor.finished(row)

    async def _tail(
        self, reader: LedgerReader, cursor: LogCursor, row: LogRow, first: int
    ) -> AsyncGenerator[EntryBatch, None]:
        """Follow a ledger until it is CLOSED, or complete: its writer may die before it closes the ledger."""
        following: int | None = first
        while following is not None:
            async with contextlib.aclosing(self._tail_from(reader, cursor, row, following)) as batches:
                following = None
                async for batch in batches:
                    if isinstance(batch, int):
                        following = batch
                    else:
                        yield batch

    async def _tail_from(
        self, reader: LedgerReader, cursor: LogCursor, row: LogRow, first: int
    ) -> AsyncGenerator[EntryBatch | int, None]:
        """Follow as `_tail` does; yield an entry to begin anew from, where the application has cancelled us.

        A generator that was cancelled has ended, which must not be mistaken for the end of the ledger.
        """
        async with contextlib.aclosing(reader.tail_batches(first)) as batches:

            async def next_batch() -> EntryBatch | None:
                return await anext(batches, None)

            while True:
                coming, silence_s = asyncio.create_task(next_batch()), _SILENCE_S
                try:
                    while not (await asyncio.wait([coming], timeout=silence_s))[0]:
                        if await self._is_passed(cursor, row):
                            return  # The caller reads on from its position, so no batch is lost.
                        silence_s = min(2 * silence_s, _SILENCE_MAX_S)
                finally:
                    if not coming.done():
                        coming.cancel()
                        await asyncio.gather(coming, return_exceptions=True)
                if coming.cancelled():
                    yield first
                    return
                batch = coming.result()
                if batch is None:
                    return
                first = batch.last_entry_id + 1
                yield batch

    async def _is_passed(self, cursor: LogCursor, row: LogRow) -> bool:
        """Return whether a followed ledger is complete, by the present list."""
        try:
            await self._learn(cursor)
            return await self._is_overtaken(cursor, row)
        except (MetadataUnavailableError, NoSuchLedgerError) as error:
            logger.debug("log=%s whether ledger=%d is complete: %s", self._lists.name, row.ledger_id, error)
            return False

    async def _is_overtaken(self, cursor: LogCursor, row: LogRow) -> bool:
        """Return whether a ledger that is not CLOSED is complete: the next ledger has an entry."""
        following = cursor.after(row)
        if following is None:
            return False
        if self._behind is None or self._behind[0] != following.id:
            self._behind = following.id, await self._open(following)
        reader = self._behind[1]
        try:
            return await reader.read_last_add_confirmed() >= 0
        except BookieUnavailableError as error:
            if reader.last_add_confirmed >= 0:
                return True
            self._warn("ledger=%d its LAC is not known for now: %s", reader.ledger_id, error)
            self._doubt = error
            return False

    async def _open(self, row: LogRow) -> LedgerReader:
        return await open_row(self._context, row, self._password)

    def _open_ahead(self, row: LogRow | None) -> None:
        if row is not None and self._ahead is None:
            self._ahead = (row.id, asyncio.create_task(self._open(row)))

    async def _take_open(self, row: LogRow) -> LedgerReader:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] == row.id:
                try:
                    reader = await ahead[1]
                    if reader.is_closed:
                        return reader
                except BookKeeperError:
                    pass
                except asyncio.CancelledError:
                    if not is_cancelled_alone(ahead[1]):
                        raise
            else:
                ahead[1].cancel()
        return await self._open(row)
