"""Reading a log, or a ledger, as a stream of micro-batches.

An offset is the position of the next record to be read, and identifies the log. The reader lives in the
driver for as long as the query runs, and keeps a connection. Tasks get pieces, as in a batch read.

Invariants: a batch ends at or below a LAC that the driver has verified. A batch passes the end of a ledger
only when no entry will follow in it. So the records between two offsets never change, and a batch that is
planned again after a crash holds the same records. Reading never fences.
"""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

import client_aio
from client_aio.spark import schemas
from client_aio.spark.batch import partitions_of, row_reader, written_of
from client_aio.spark.catalog import Catalog, Found, rows_of
from client_aio.spark.scan_plan import Limit, Offset, Place, advance, between
from client_aio.sync.loop_thread import get_loop_thread
from metadata.errors import InvalidArgumentError, LogTruncatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import pyarrow
    from pyspark.sql.types import StructType

    from client_aio.spark.catalog import Listed
    from client_aio.spark.options import ReadOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOCKS_DIFFER_MS = 60_000
"""A starting time may lie so far ahead: the clock that it comes from may be ahead of this machine's."""

_TAIL_ROWS = 3
"""An end depends on the last three ledgers of a log: the last two may be open, and the one before counts."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """The list of the log, or the ledger, when a batch is planned."""

    made: int
    """See `Offset.made`."""
    begin: Place
    rows: list[Listed]

    def is_beyond(self, place: Place) -> bool:
        """Return whether a place lies behind every row, where no offset of this log can be.

        Ids of rows only increase. Right behind the last row is the offset of a query that has read all.
        """
        behind = Place(self.rows[-1].row_id + 1, 0) if self.rows else self.begin
        return place > max(behind, self.begin)


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        count = len(options.log) if options.ledger is None else len(options.ledger)
        if count != 1:
            raise InvalidArgumentError(
                "a stream reads one log, or one ledger: start a query for each, and union them if need be"
            )
        self._options = options
        self._schema = schema
        self._starting = _parse_start(options.starting_position)
        self._target: Offset | None = None
        self._is_patient = True
        self._catalog: Catalog | None = None
        self._client: client_aio.Client | None = None
        # Over a connection that is closed again: Spark creates readers only for their schema, and never stops
        # those.
        self._written = written_of(options)
        schemas.check_declared(options, schema, self._written)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the reader for tasks without the connection."""
        return self.__dict__ | {"_client": None, "_catalog": None}

    # --- offsets ---

    def initialOffset(self) -> dict[str, int]:
        """Return where a new query starts."""
        return self._ask(lambda catalog: self._offset(catalog, self._first_place)).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that the options set."""
        if self._options.max_entries_per_trigger is not None:
            return ReadMaxRows(self._options.max_entries_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return where the next micro-batch ends.

        Raises:
            LogTruncatedError: records were truncated before they were read, and `failOnDataLoss` is set.
        """
        begin = Offset.of_json(start)
        end = self._ask(lambda catalog: self._end_of_batch(catalog, begin, limit))
        if self._target is not None and self._target.made == end.made:
            place = min(end.place, self._target.place)
            end = Offset(max(begin.place, place) if begin.made in (None, end.made) else place, end.made)
        return end.to_json()

    def reportLatestOffset(self) -> dict[str, int] | None:
        """Return the end of the readable records, for the query's progress report."""
        return self._ask(lambda catalog: self._offset(catalog, self._last_place)).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of a query that reads everything available now.

        From then on the reader raises where too few bookies answer, as a batch read does: no later batch
        would read the missing entries.
        """
        self._is_patient, self._catalog = False, None
        self._target = self._ask(lambda catalog: self._offset(catalog, self._last_place))

    async def _offset(self, catalog: Catalog, where: Callable[[Catalog], Awaitable[Place]]) -> Offset:
        # Read before the place, so that a log created meanwhile is noticed.
        listing = await self._read_listing(catalog)
        return Offset(await where(catalog), listing.made)

    async def _first_place(self, catalog: Catalog) -> Place:
        starting = self._starting
        if starting == "latest":
            return await self._last_place(catalog)
        listing = await self._read_listing(catalog)
        rows = listing.rows
        if isinstance(starting, Place):
            if listing.is_beyond(starting):
                end = (await self._last_place(catalog)).text
                raise InvalidArgumentError(
                    f"the option startingPosition is {starting.text}, and {self._what} ends at {end}: "
                    "records up to that position would be left out. Use a position of that log, or latest"
                )
            return starting
        if isinstance(starting, datetime.datetime):
            rows = await self._rows_since(catalog, starting, rows)
            if not rows:
                return await self._last_place(catalog)
        if not rows:
            return await self._begin(catalog)
        if self._options.ledger is not None:  # a trimmed unbounded ledger begins behind entry 0
            found = await catalog.stretches(rows[:1])
            return Place(rows[0].row_id, found[0].stretch.first)
        return Place(rows[0].row_id, rows[0].first)

    async def _rows_since(
        self, catalog: Catalog, start: datetime.datetime, rows: list[Listed]
    ) -> list[Listed]:
        """Return the rows that may hold a record written at a time or later, and all rows behind them.

        A ledger that was open then is read as a whole. That may be the last two listed by then: a log's next
        ledger is listed while records still go to the one before. A ledger of a job was closed when it was
        listed, and has no later record.

        Raises:
            InvalidArgumentError: the time is to come. Where the log will be then, nobody knows; records of
                before would be read.
        """
        start_ms, now_ms = int(start.timestamp() * 1000), catalog.now_ms()
        if start_ms > now_ms + _CLOCKS_DIFFER_MS:
            now = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC).isoformat(timespec="seconds")
            raise InvalidArgumentError(
                f"the option startingPosition is {self._options.starting_position}, a time to come: it is "
                f"{now} here. Use latest for the records from now on"
            )
        is_later = [(row.created_ms or 0) >= start_ms for row in rows]
        first = is_later.index(True) if True in is_later else len(rows)
        is_past = start_ms <= now_ms
        for number in range(max(0, first - 2), first):
            if await catalog.may_hold_since(rows[number], start_ms, is_past=is_past):
                return rows[number:]
        return rows[first:]

    async def _last_place(self, catalog: Catalog) -> Place:
        rows = await catalog.listed()
        found = await catalog.stretches(rows[-_TAIL_ROWS:])
        if not found:
            return await self._begin(catalog)
        growing = [one.stretch for one in found if not one.stretch.is_complete]
        return growing[0].end if growing else found[-1].stretch.end

    async def _begin(self, catalog: Catalog) -> Place:
        """Return where a log begins that lists no ledger, or none with a readable entry."""
        return Place(*(await catalog.log_metadata(self._options.log[0])).begins_at)

    async def _end_of_batch(self, catalog: Catalog, start: Offset, limit: ReadLimit) -> Offset:
        listing = await self._read_listing(catalog)
        first = self._first_of(start, listing)
        found = await self._found(catalog, listing, first)
        unread = [row for row in listing.rows if row.row_id >= first.row_id]
        catalog.forget_but([*unread, *listing.rows[-_TAIL_ROWS:]])
        ahead = between([one.stretch for one in found], first)
        return Offset(advance(first, ahead, self._limit_of(limit)), listing.made)

    def _limit_of(self, limit: ReadLimit) -> Limit:
        if isinstance(limit, ReadAllAvailable):
            return Limit()
        entries, size = self._options.max_entries_per_trigger, self._options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            entries = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        return Limit(entries, size)

    # --- batches ---

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Cut a micro-batch into the pieces that tasks read."""
        first, behind = Offset.of_json(start), Offset.of_json(end)
        if first.place == behind.place and first.made in (None, behind.made):
            return []
        parts = self._ask(lambda catalog: self._parts(catalog, first, behind))
        return list(partitions_of(parts, self._options.partition_bytes))

    async def _parts(self, catalog: Catalog, start: Offset, end: Offset) -> list[Found]:
        listing = await self._read_listing(catalog)
        if not end.is_of(listing.made):
            self._report_loss(start.place, listing.begin, is_anew=True)
            return []
        first = self._first_of(start, listing)
        found = await self._found(catalog, listing, first, end.place)
        said = {one.stretch.row_id: one for one in found}
        stretches = between([one.stretch for one in found], first, end.place)
        return [Found(one, said[one.row_id].written) for one in stretches]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read a partition of a micro-batch, in a task."""
        reader = row_reader(self._options, self._written, self._schema)
        return reader.read(partition.value or ())

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: records stay after they were read; only the log's owner truncates it."""

    def stop(self) -> None:
        """Close the connection."""
        client, self._client, self._catalog = self._client, None, None
        if client is not None:
            get_loop_thread().run(client.close())

    # --- asking the cluster ---

    async def _read_listing(self, catalog: Catalog) -> _Listing:
        if self._options.ledger is None:
            log = await catalog.log_metadata(self._options.log[0])
            return _Listing(log.created_ms, Place(*log.begins_at), rows_of(log))
        rows = await catalog.listed()
        return _Listing(rows[0].ledger_id, Place(rows[0].row_id, 0), rows)

    def _first_of(self, start: Offset, listing: _Listing) -> Place:
        """Return where a batch begins; raises LogTruncatedError where another log has the name by now."""
        if start.is_of(listing.made):
            return start.place
        self._report_loss(start.place, listing.begin, is_anew=True)
        return listing.begin

    async def _found(
        self, catalog: Catalog, listing: _Listing, start: Place, end: Place | None = None
    ) -> list[Found]:
        """Return the stretches readable from a place on; raises LogTruncatedError where some are gone.

        Args:
            end: the end of a batch that has been planned; all records up to it are returned, or an error is
                raised.
        """
        if self._options.ledger is None and start < listing.begin:
            self._report_loss(start, listing.begin)
        if listing.is_beyond(start):
            self._report_set_back(start, listing)
        rows = [row for row in listing.rows if row.row_id >= start.row_id]
        if end is not None:
            rows = [row.as_of(end) for row in rows if row.row_id <= end.row_id]
        found = await catalog.stretches(rows)
        if self._options.ledger is not None and found:
            stretch = found[0].stretch
            if stretch.row_id == start.row_id and stretch.first > start.entry_id:
                self._report_loss(start, Place(stretch.row_id, stretch.first))
        return found

    def _report_set_back(self, start: Place, listing: _Listing) -> None:
        """Raise LogTruncatedError for an offset behind the end of the log, or only log it, as `_report_loss`.

        The rows that follow will have lower ids than the offset: the query would pass them over.
        """
        last = listing.rows[-1].row_id if listing.rows else None
        message = (
            f"{self._what} has no ledger behind {last}, and the query's offset is {start.text}: the log has "
            "been set back to an earlier state, and records that were added since are not read"
        )
        if self._options.fail_on_data_loss:
            raise LogTruncatedError(
                f"{message}. Begin anew, with a new checkpoint and the option startingPosition",
                ledger_id=start.row_id,
            )
        logger.warning("%s: it goes on, since failOnDataLoss is false", message)

    @property
    def _what(self) -> str:
        options = self._options
        return f"log {options.log[0]!r}" if options.ledger is None else f"ledger {options.ledger[0]!r}"

    def _report_loss(self, start: Place, begin: Place, *, is_anew: bool = False) -> None:
        """Raise LogTruncatedError for unread records that are gone; only log it without `failOnDataLoss`.

        Args:
            is_anew: the records are gone because the log was deleted and created anew.
        """
        what = self._what
        message = (
            f"{what} begins at {begin.row_id}:{begin.entry_id}; what this query has "
            f"not read yet, from {start.row_id}:{start.entry_id} on, has been truncated before that"
        )
        if is_anew:
            message = (
                f"{what} has been deleted and made anew; what this query had not read yet of the one before, "
                f"from {start.row_id}:{start.entry_id} on, is gone"
            )
        if self._options.fail_on_data_loss:
            raise LogTruncatedError(
                f"{message}. To go on with what is left, set failOnDataLoss to false", ledger_id=start.row_id
            )
        logger.warning("%s: it goes on with what is left, since failOnDataLoss is false", message)

    def _ask(self, question: Callable[[Catalog], Awaitable[T]]) -> T:
        async def ask() -> T:
            if self._client is None:
                self._client = await client_aio.connect(
                    self._options.metadata, metadata_timeout_s=self._options.outage_timeout
                )
            if self._catalog is None:
                self._catalog = Catalog(self._client, self._options, is_stream=self._is_patient)
            return await self._catalog.ask(question)

        return get_loop_thread().run(ask())


def _parse_start(text: str) -> Place | datetime.datetime | str:
    """Parse `startingPosition`; raises InvalidArgumentError."""
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        return Place.parse(text)
    except InvalidArgumentError:
        pass
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"the option startingPosition is earliest, latest, a position ID:ENTRY, or a time such as "
            f"2026-01-31T12:00:00Z: not {text!r}"
        ) from error
    if moment.tzinfo is None:
        raise InvalidArgumentError(
            f"the option startingPosition is {text!r}, a time without a zone: write one with it, such as "
            "2026-01-31T12:00:00Z or 2026-01-31T12:00:00+01:00"
        )
    return moment
