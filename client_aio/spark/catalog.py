"""The readable data of a query, asked of the cluster at planning: ledgers, their ends, their encodings.

Runs in the driver, through the async client. Owns the walk over a log's list and the ends of its ledgers.
`scan_plan` cuts the result into partitions. Never fences.

Invariants: of a ledger that is not closed, no entry above a verified LAC is returned. No entry of a ledger is
returned while an earlier ledger of the log may still grow. So the data read is a prefix of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import client_aio
from client_aio.log.add_ledgers import JOBS_LOG
from client_aio.spark.options import AWAY, Outage, check_distinct
from client_aio.spark.passwords import password_of, unlock
from client_aio.spark.provenance import APPLICATION, Written, as_meant
from client_aio.spark.row_reader import LOST
from client_aio.spark.scan_plan import Stretch, between
from metadata.errors import BookieUnavailableError, InvalidArgumentError, NoSuchLedgerError
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from client_aio.log.takeover import LogMetadata
    from client_aio.spark.options import ReadOptions
    from client_aio.spark.scan_plan import Place
    from metadata.model.ledger import LedgerMetadata

T = TypeVar("T")

logger = logging.getLogger(__name__)

_AT_ONCE = 32
_ATTEMPTS_MAX = 10
"""The number of attempts to plan a query while its logs are truncated in between."""
_SAMPLE_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Listed:
    """One ledger to be read, as a row of a log or by itself."""

    log: str | None
    row_id: int
    ledger_id: int
    first: int = 0
    """The first entry that has not been truncated."""
    created_ms: int | None = None
    """The time of listing; None: the time of creation in the ledger's metadata counts."""
    confirmed: int = NO_ENTRY
    """The last entry known to be acknowledged from an earlier plan, whatever LAC bookies answer now."""
    is_complete: bool = False
    """Whether an earlier plan has verified that no entry will follow, though the ledger may not be closed."""

    def as_of(self, end: Place) -> Listed:
        """Return the row with the facts that a micro-batch's end offset implies: they were verified then.

        A later handle may be told a lower LAC, or none; the batch must be the same.
        """
        if self.row_id < end.row_id:
            return replace(self, is_complete=True)
        return replace(self, confirmed=end.entry_id - 1) if self.row_id == end.row_id else self


@dataclass(frozen=True, slots=True)
class Found:
    """A stretch, and how its ledger was written (None where the ledger has no tag for that)."""

    stretch: Stretch
    written: Written | None


class Catalog:
    """Answers for one query, of a batch or a stream; caches the metadata of closed ledgers."""

    def __init__(self, client: client_aio.Client, options: ReadOptions, *, is_stream: bool = False) -> None:
        self._client = client
        self._options = options
        self._is_stream = is_stream
        self._closed: dict[int, LedgerMetadata] = {}
        self._entry_bytes: dict[int, float] = {}
        self._password = password_of(options)
        self._is_right = not self._password

    async def ask(self, question: Callable[[Catalog], Awaitable[T]]) -> T:
        """Answer a question; ask again while servers are out of reach, up to the option outageTimeout.

        Raises:
            NoSuchLedgerError: a listed ledger is missing for good, or logs changed at every attempt.
            Exception: the errors of the question itself.
        """
        loop = asyncio.get_running_loop()
        outage = Outage(self._options.outage_timeout, logger.warning)
        while True:
            asked = loop.time()
            try:
                return await self._ask(question)
            except AWAY as error:
                await asyncio.sleep(outage.pause_s(error, loop.time(), asked))

    async def _ask(self, question: Callable[[Catalog], Awaitable[T]]) -> T:
        """Answer a question, and ask again from the start where what is read was listed and is gone.

        A log was truncated or replaced meanwhile, or one of all ledgers was deleted.
        """
        for _ in range(_ATTEMPTS_MAX - 1):
            try:
                return await question(self)
            except NoSuchLedgerError as error:
                is_named = bool(self._options.ledger)
                if is_named or error.ledger_id in {row.ledger_id for row in await self.listed()}:
                    raise
        return await question(self)

    async def listed(self) -> list[Listed]:
        """Return the ledgers named by the options, in order.

        Raises:
            NoSuchLogError, NoSuchLedgerError: no log or ledger has that name or id.
            InvalidArgumentError: an unbounded ledger is named by its name and by its id.
        """
        options = self._options
        if options.ledger is not None:
            ids: list[int] = []
            if not options.ledger:
                ids = [ledger_id async for ledger_id in self._client.list_ledgers()]
            for each in options.ledger:
                if isinstance(each, str):  # the name of an unbounded ledger
                    each = (await self._client.ledger_metadata(each)).ledger_id
                ids.append(each)
            check_distinct(ids, "the option ledger")  # A name and an id may be those of one ledger.
            return [Listed(None, ledger_id, ledger_id) for ledger_id in ids]
        found = []
        for name in options.log:
            found += rows_of(await self._client.log_metadata(name))
        return found

    def forget_but(self, rows: Iterable[Listed]) -> None:
        """Forget what is known of all ledgers but these: a stream lists more and more of them."""
        ids = {row.ledger_id for row in rows}
        for known in (self._closed, self._entry_bytes):
            for ledger_id in known.keys() - ids:
                del known[ledger_id]

    async def log_metadata(self, name: str) -> LogMetadata:
        """Read a log's metadata; raises NoSuchLogError."""
        return await self._client.log_metadata(name)

    def now_ms(self) -> int:
        """Return the time by this machine's clock, which also stamps rows that this client lists."""
        return self._client._context.now_ms()

    async def may_hold_since(self, row: Listed, start_ms: int, *, is_past: bool) -> bool:
        """Return whether a ledger that was listed before a time may hold a record written since.

        Args:
            is_past: whether that time has passed. A ledger that is CLOSED before it gets no record any more.
        """
        (metadata,) = await self._metadata_of([row])
        if metadata is None or not metadata.is_closed:
            return True
        created_ms = metadata.created_ms if row.created_ms is None else row.created_ms
        was_closed = row.log is not None and JOBS_LOG in metadata.custom
        return is_past and not (was_closed and created_ms < start_ms)

    async def written(self) -> Written | None:
        """Return the common encoding of all logs or ledgers of the options; None where untagged or different.

        Raises:
            NoSuchLogError, NoSuchLedgerError: no log or ledger has that name or id.
        """
        options = self._options
        if options.log:
            said = [Written.of_custom((await self._client.log_metadata(name)).custom) for name in options.log]
        else:
            metadata = await self._metadata_of(await self.listed())
            said = [Written.of_custom(one.custom) for one in metadata if one is not None]
        kinds = {(one.encoding, as_meant(one.schema)) if one is not None else None for one in said}
        return said[0] if len(kinds) == 1 else None

    async def stretches(self, listed: Sequence[Listed] | None = None) -> list[Found]:
        """Return the stretches that are readable now, in order; by default of all ledgers of the options.

        Raises:
            UnauthorizedAccessError: the password is not that of the ledgers.
        """
        rows = list(await self.listed() if listed is None else listed)
        metadata = await self._metadata_of(rows)
        await self._check_password([one for one in metadata if one is not None])
        found: list[Found] = []
        stopped: set[str] = set()
        for row, one in zip(rows, metadata, strict=True):
            if one is None or row.log in stopped:
                continue
            created_ms = one.created_ms if row.created_ms is None else row.created_ms
            stretch = await self._stretch_of(row, one, created_ms, rows)
            if row.log is not None and not stretch.is_complete:
                stopped.add(row.log)
            found.append(Found(stretch, Written.of_custom(one.custom) if stretch.entries else None))
        return found

    async def added_by(self, application: str, log: str, since: Place, before_ms: int) -> list[Found]:
        """Return what a log holds from a place on, up to the last ledger that an application added by a time.

        The answer is the same whenever it is asked, while nothing is truncated or replaced: that addition has
        closed all ledgers before it.
        """
        rows = [
            row
            for row in rows_of(await self.log_metadata(log))
            if row.row_id >= since.row_id and row.created_ms is not None and row.created_ms < before_ms
        ]
        name = application.encode()
        metadata = await self._metadata_of(rows)
        while metadata and (metadata[-1] is None or metadata[-1].custom.get(APPLICATION) != name):
            metadata.pop()
        found = []
        for each in await self.stretches(rows[: len(metadata)]):
            left = between([each.stretch], since)
            found += [replace(each, stretch=one) for one in left if one.entries or one.has_loss]
        return found

    async def _metadata_of(self, rows: Sequence[Listed]) -> list[LedgerMetadata | None]:
        """Read the metadata of many ledgers; None for a ledger of `all` that was deleted meanwhile."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def read(row: Listed) -> LedgerMetadata | None:
            known = self._closed.get(row.ledger_id)
            if known is not None:
                return known
            async with room:
                try:
                    metadata = await self._client.ledger_metadata(row.ledger_id)
                except NoSuchLedgerError:
                    if self._options.ledger == ():
                        return None
                    raise
            if metadata.is_closed:
                self._closed[row.ledger_id] = metadata
            return metadata

        return list(await asyncio.gather(*map(read, rows)))

    async def _check_password(self, metadata: Sequence[LedgerMetadata]) -> None:
        """Compare the password with one ledger, and check that all ledgers have one, or none.

        One comparison costs one scrypt, so not every ledger is compared.
        """
        for one in metadata:
            if not self._is_right or (one.password is not None) != bool(self._password):
                await unlock(self._client, one, self._options)
                self._is_right = True

    async def _stretch_of(
        self, row: Listed, metadata: LedgerMetadata, created_ms: int, rows: Sequence[Listed]
    ) -> Stretch:
        is_complete = metadata.is_closed
        if metadata.last_entry is not None and metadata.length is not None:
            last, mean = metadata.last_entry, metadata.length / max(1, metadata.last_entry + 1)
        else:
            async with self._client.open_ledger(row.ledger_id, password=self._password) as reader:
                last = max(row.confirmed, await self._lac_of(reader))
                is_complete = reader.is_closed
                if not is_complete and (row.is_complete or await self._is_overtaken(row, rows)):
                    # No writer adds to the ledger any more, and every entry is acknowledged. The metadata are
                    # read again, since they name the bookies to read the last entries from.
                    is_complete = True
                    await reader.refresh(sync=True)
                    async for entry in reader.read_rest(last + 1):
                        last = entry.entry_id
                metadata = reader.metadata
                mean = await self._sample(reader, max(row.first, metadata.first_entry), last)
        borders = tuple(fragment.first_entry for fragment in metadata.fragments[1:])
        first = max(row.first, metadata.first_entry)  # an unbounded ledger may have been trimmed
        return Stretch(
            log=row.log,
            row_id=row.row_id,
            ledger_id=row.ledger_id,
            first=first,
            last=max(last, first - 1),
            created_ms=created_ms,
            entry_bytes=mean,
            borders=borders,
            is_complete=is_complete,
            has_loss=row.log is not None and metadata.given_up is not None,
        )

    async def _is_overtaken(self, row: Listed, rows: Sequence[Listed]) -> bool:
        """Return whether a ledger that is not CLOSED is complete: the next ledger of its log has an entry."""
        index = rows.index(row) + 1
        if row.log is None or index == len(rows) or rows[index].log != row.log:
            return False
        async with self._client.open_ledger(rows[index].ledger_id, password=self._password) as reader:
            return await self._lac_of(reader) >= 0

    async def _lac_of(self, reader: client_aio.LedgerReader) -> int:
        """Ask the bookies for the LAC.

        Where too few bookies answer, a stream takes the LAC known so far, and the later entries with a later
        batch. A batch read raises BookieUnavailableError: it must return all entries.
        """
        try:
            return await reader.read_last_add_confirmed()
        except BookieUnavailableError:
            if not self._is_stream:
                raise
            return reader.last_add_confirmed

    async def _sample(self, reader: client_aio.LedgerReader, first: int, last: int) -> float:
        """Estimate the mean size of an open ledger's entries from its first ones."""
        known = self._entry_bytes.get(reader.ledger_id)
        if known is not None or last < first:
            return known or 1.0
        entries = size = 0
        until = min(last, first + _SAMPLE_ENTRIES - 1)
        # An entry may be trimmed meanwhile, damaged, or out of reach. The task that reads it reports that.
        with contextlib.suppress(*LOST, BookieUnavailableError):
            async for batch in reader.read_batches(first, until, known_lac=until):
                entries += len(batch)
                size += len(batch.buffer)
        mean = size / max(1, entries)
        if entries == _SAMPLE_ENTRIES:
            self._entry_bytes[reader.ledger_id] = mean
        return mean


def rows_of(log: LogMetadata) -> list[Listed]:
    """Return a log's ledgers, without truncated entries."""
    return [
        Listed(
            log.name,
            row.id,
            row.ledger_id,
            log.begins_at.entry_id if row.id == log.begins_at.ledger_id else 0,
            row.created_ms,
        )
        for row in log.rows
    ]


async def with_catalog(options: ReadOptions, ask: Callable[[Catalog], Awaitable[T]]) -> T:
    """Connect, ask a catalogue, and close."""
    async with client_aio.connect(options.metadata, metadata_timeout_s=options.outage_timeout) as client:
        return await Catalog(client, options).ask(ask)


def check_written(written: Written | None, options: ReadOptions) -> Written:
    """Return how a query decodes: as asked for, else as the data's own tags say, else not at all.

    Raises:
        InvalidArgumentError: columns are asked for, and neither the options nor the data describe them.
    """
    if options.encoding == "auto":
        return written or Written()
    if options.encoding in ("binary", "raw"):
        return Written()
    if written is not None and written.encoding == options.encoding:
        return written
    if options.encoding == "arrow":
        raise InvalidArgumentError(
            "the option encoding is 'arrow', and what is to be read was not written so: its metadata names "
            f"{'no encoding' if written is None else repr(written.encoding)}"
        )
    return Written(options.encoding)
