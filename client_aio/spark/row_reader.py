"""Reading pieces of ledgers as Arrow batches, in a task.

Owns the way from a client's batches of entries to batches of rows. Where entries are bytes, there is no
Python object per entry. Owns also the treatment of an entry that cannot be read or decoded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow

import client_aio.sync
from client_aio.spark import provenance, schemas
from client_aio.spark.encoding import Decoded, Format, UndecodableEntryError, cut_into_runs, decode
from client_aio.spark.options import AWAY, OUTAGE_S, Outage
from client_aio.spark.scan_plan import position_column
from metadata.errors import (
    BookieUnavailableError,
    DigestMismatchError,
    EntryUnknownError,
    NoSuchEntryError,
    NoSuchLedgerError,
    RecordsLostError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from client_aio.ledger.entry_reader import EntryBatch
    from client_aio.spark.provenance import Written
    from client_aio.spark.scan_plan import Stretch

logger = logging.getLogger(__name__)

SETTINGS = {"read_ahead_bytes": 4 * 1024 * 1024, "read_ahead_requests": 2}
"""Settings of a task's client. Large requests cut fewer of the blocks that bookies store. A block that is
returned in part is checked entry by entry, at the bookie and here, which costs more than anything else."""

LOST = (DigestMismatchError, EntryUnknownError, NoSuchEntryError)
"""Errors that a permissive read turns into a row: the bookies answered, and none has the entry intact."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of entries, with everything that a task needs to turn it into rows."""

    stretch: Stretch
    written: Written


class RowReader:
    """Turns pieces into batches of rows of one schema.

    Args:
        schema: the columns wanted, as Spark exchanges them.
        encoding: the encoding that the decoded columns come from; `binary` for the entries as they are.
        decoded: the schema that the query decodes to, in Spark's JSON, for a ledger that names none.
        wanted: the wanted columns that come from the entries, in Spark's JSON; the others are columns of
            origin.
        accepted: the encodings of ledgers that may be read as `encoding`.
        is_raw: leave compressed entries compressed.
        password: the ledgers' password.
        outage_timeout_s: how long bookies or the metadata store may be out of reach.
    """

    def __init__(
        self,
        metadata: str,
        schema: pyarrow.Schema,
        encoding: str,
        decoded: str,
        wanted: str,
        *,
        accepted: Collection[str],
        is_permissive: bool = False,
        is_raw: bool = False,
        password: bytes = b"",
        outage_timeout_s: float = OUTAGE_S,
    ) -> None:
        self._password = password
        self._outage_timeout_s = outage_timeout_s
        self._accepted = accepted
        self._is_raw = is_raw
        self._metadata = metadata
        self._schema = schema
        self._encoding = encoding
        self._decoded = decoded
        self._wanted = wanted
        self._wanted_fields = schemas.arrow_schema(wanted)
        self._is_permissive = is_permissive
        self._formats: dict[Written, Format] = {}

    def read(self, pieces: Sequence[Piece]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of the pieces, in order.

        Raises:
            DigestMismatchError, EntryUnknownError, NoSuchEntryError, UndecodableEntryError: an entry cannot
                be read or decoded, and the read is not permissive.
            RecordsLostError: a ledger of a log was closed with a loss, and the read is not permissive.
            NoSuchLedgerError: a ledger was deleted since the read was planned.
            BookKeeperError: bookies or the metadata store were out of reach for too long.
        """
        settings = {**SETTINGS, "metadata_timeout_s": self._outage_timeout_s}
        with client_aio.sync.connect(self._metadata, **settings) as client:
            for piece in pieces:
                if piece.stretch.has_loss:
                    yield self._lost(piece, self._loss_of(piece.stretch))
                    continue
                for item in self._entries_of(client, piece.stretch):
                    yield from self._batches(piece, item)

    def _loss_of(self, stretch: Stretch) -> _Lost:
        """Return the row for entries lost behind a ledger's end; raise where the read is not permissive."""
        reason = (
            f"log {stretch.log!r} may have lost records from {stretch.row_id}:{stretch.first} on: ledger "
            f"{stretch.ledger_id} was closed with a loss"
        )
        if not self._is_permissive:
            raise RecordsLostError(
                f"{reason}. To go on without them, set mode to permissive",
                ledger_id=stretch.ledger_id,
                entry_id=stretch.first,
            )
        return _Lost(stretch.first, 1, reason)

    def _entries_of(self, client: client_aio.sync.Client, stretch: Stretch) -> Iterator[EntryBatch | _Lost]:
        """Yield a stretch's entries; go on behind the last one while bookies are out of reach."""
        following, outage = stretch.first, Outage(self._outage_timeout_s, logger.warning)
        while True:
            asked = time.monotonic()
            try:
                with client.open_ledger(stretch.ledger_id, password=self._password) as reader:
                    for item in self._entries(reader, following, stretch.last, stretch.last):
                        yield item
                        following = item.last_entry_id + 1
                        asked = time.monotonic()
                        outage.ended()
                return
            except AWAY as error:
                time.sleep(outage.pause_s(error, time.monotonic(), asked))
            except NoSuchLedgerError as error:
                if stretch.log is None:
                    raise
                raise NoSuchLedgerError(
                    f"ledger {stretch.ledger_id} is gone: log {stretch.log!r} was overwritten or truncated "
                    "since the read was planned. Load the log again, or create the view again",
                    ledger_id=stretch.ledger_id,
                ) from error

    def _entries(
        self, reader: client_aio.sync.LedgerReader, first: int, last: int, known_lac: int
    ) -> Iterator[EntryBatch | _Lost]:
        """Yield the entries first to last; where permissive, a `_Lost` for an entry that cannot be read."""
        following = first
        try:
            with contextlib.closing(reader.read_batches(first, last, known_lac=known_lac)) as batches:
                for batch in batches:
                    yield batch
                    following = batch.last_entry_id + 1
            return
        except LOST as error:
            if not self._is_permissive:
                raise
            if error.is_unanswered:  # it may be intact at a bookie that did not say: the outage is waited out
                raise BookieUnavailableError(str(error), ledger_id=error.ledger_id) from error
            if following == last:
                yield _Lost(last, 1, str(error))
                return
        # An answer with one damaged entry is refused as a whole: the range is halved until it is alone.
        middle = (following + last) // 2
        yield from self._entries(reader, following, middle, known_lac)
        yield from self._entries(reader, middle + 1, last, known_lac)

    def _batches(self, piece: Piece, item: EntryBatch | _Lost) -> Iterator[pyarrow.RecordBatch]:
        if isinstance(item, _Lost):
            yield self._lost(piece, item)
            return
        try:
            format_ = self._format_of(piece.written)
        except UndecodableEntryError as error:  # the whole ledger has another encoding, or other columns
            if not self._is_permissive:
                raise _named(error, piece, item.first_entry_id) from error
            yield self._lost(piece, _Lost(item.first_entry_id, len(item), str(error)))
            return
        for first, last in cut_into_runs(format_, item.offsets, item.buffer):
            offsets, first_id = item.offsets[first : last + 2], item.first_entry_id + first
            try:
                decoded = decode(format_, offsets, item.buffer, is_permissive=self._is_permissive)
            except UndecodableEntryError as error:
                raise _named(error, piece, first_id) from error
            entry_ids = numpy.arange(first_id, item.first_entry_id + last + 1)
            yield self._assemble(piece, entry_ids, decoded, format_)

    def _lost(self, piece: Piece, lost: _Lost) -> pyarrow.RecordBatch:
        fields = self._wanted_fields
        reasons = dict.fromkeys(range(lost.count), lost.reason)
        columns = [pyarrow.nulls(lost.count, kind) for kind in fields.types]
        decoded = Decoded(columns, lost.count, errors=reasons)
        format_ = Format("lost", schema=fields)
        entry_ids = numpy.arange(lost.first_entry_id, lost.first_entry_id + lost.count)
        return self._assemble(piece, entry_ids, decoded, format_)

    def _format_of(self, written: Written) -> Format:
        """Return how to decode a ledger's entries, for the encoding and the columns that the query reads.

        Raises:
            UndecodableEntryError: the ledger was written in another encoding, or with other columns.
        """
        if written not in self._formats:
            if written.encoding not in self._accepted:
                raise UndecodableEntryError(
                    f"it was written with encoding {written.encoding}, and {self._encoding} is read",
                    entry_id=0,
                )
            is_binary = self._encoding == "binary"
            # Entries are decoded by the schema that they were written under.
            known = self._decoded if is_binary else written.schema or self._decoded
            said = provenance.misfits(self._wanted, known)
            if said:
                raise UndecodableEntryError(
                    f"it was written with other columns than are read: {'; '.join(said)}. Where the log was "
                    "overwritten since, load it again",
                    entry_id=0,
                )
            compression = "none" if self._is_raw else written.compression
            schema = None if is_binary else schemas.arrow_schema(known)
            self._formats[written] = Format(self._encoding, compression, schema)
        return self._formats[written]

    def _assemble(
        self, piece: Piece, entry_ids: Any, decoded: Decoded, format_: Format
    ) -> pyarrow.RecordBatch:
        """Build the wanted columns: the decoded ones, and the columns of origin."""
        reasons: list[str | None] | None = None
        if schemas.ERROR in self._schema.names:
            reasons = [None] * len(entry_ids)
            for place, reason in decoded.errors.items():
                reasons[place] = reason
        if decoded.counts is not None:
            if reasons is not None:
                counts = decoded.counts.tolist()
                reasons = [why for why, count in zip(reasons, counts, strict=True) for _ in range(count)]
            entry_ids = numpy.repeat(entry_ids, decoded.counts)
        names = [schemas.VALUE] if format_.schema is None else format_.schema.names
        ready = dict(zip(names, decoded.columns, strict=True))
        columns = []
        for field in self._schema:
            if field.name in self._wanted_fields.names:
                column = ready[field.name]
            elif field.name == schemas.ERROR:
                column = pyarrow.array(reasons, pyarrow.string())
            else:
                column = _own_column(field.name, piece.stretch, entry_ids)
            columns.append(column if column.type == field.type else column.cast(field.type))
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Entries that cannot be read, and the reason."""

    first_entry_id: int
    count: int
    reason: str

    @property
    def last_entry_id(self) -> int:
        return self.first_entry_id + self.count - 1


def _named(error: UndecodableEntryError, piece: Piece, first_entry_id: int) -> UndecodableEntryError:
    """Return the error with the entry that it concerns, in a run that begins with an entry, and a remedy."""
    entry_id, ledger_id = first_entry_id + (error.entry_id or 0), piece.stretch.ledger_id
    return UndecodableEntryError(
        f"entry {entry_id} of ledger {ledger_id}: {error}. To go on without such entries, set mode "
        "to permissive; to read their bytes, encoding to binary",
        ledger_id=ledger_id,
        entry_id=entry_id,
    )


def _own_column(name: str, stretch: Stretch, entry_ids: Any) -> pyarrow.Array:
    count = len(entry_ids)
    if name == "entry_id":
        return pyarrow.array(entry_ids)
    if name == "position":
        return position_column(stretch.row_id, entry_ids)
    if name == "ledger_id":
        return pyarrow.repeat(pyarrow.scalar(stretch.ledger_id, pyarrow.int64()), count)
    if name == "timestamp":
        moment = pyarrow.scalar(stretch.created_ms * 1000, pyarrow.timestamp("us", tz="UTC"))
        return pyarrow.repeat(moment, count)
    assert name == "log"
    return pyarrow.repeat(pyarrow.scalar(stretch.log, pyarrow.string()), count)
