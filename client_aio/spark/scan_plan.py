"""The plan of a query: partitions, and the end of a micro-batch. Pure.

A *stretch* is a run of readable entries of one ledger, as of the time of planning. Stretches, in the order of
the log, are cut into *pieces* at about the wanted size. They are also cut at the borders of fragments, since
other bookies hold the entries behind a border. Neighbouring small pieces share a partition.

A position names a record within a log: the id of its row in the log's list, and the entry. In a ledger that
is read by itself, the id is the ledger's. A position as text is `ID:ENTRY`, each with 19 digits, so that
texts sort as positions do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import pyarrow

from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Numbers = numpy.ndarray[Any, numpy.dtype[numpy.int64]]


_TEXT = re.compile(r"([0-9]{1,19}):([0-9]{1,19})")
_DIGITS = 19
_WIDTH = 2 * _DIGITS + 1
_GROUP = 4
_GROUPS = numpy.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), dtype="S4")


class Place(NamedTuple):
    """A position: the row's id and the entry."""

    row_id: int
    entry_id: int

    @property
    def text(self) -> str:
        """Return the text of the position, which sorts as the position does."""
        return f"{self.row_id:019d}:{self.entry_id:019d}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse a position; leading zeros may be left out. Raises InvalidArgumentError."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise InvalidArgumentError(f"{text!r} is no position: those are ID:ENTRY, two numbers")
        place = cls(int(found[1]), int(found[2]))
        if place.row_id > LEDGER_ID_MAX or place.entry_id > ENTRY_ID_MAX + 1:
            raise InvalidArgumentError(f"{text!r} is no position: it is out of range")
        return place


class Offset(NamedTuple):
    """The place of a stream: the next record to be read, and the log that it is in."""

    place: Place
    made: int | None
    """Distinguishes a log from an earlier one of its name: the time of creation, in milliseconds; of a ledger
    its id. None: not known, in a checkpoint of an older release."""

    def is_of(self, made: int) -> bool:
        """Return whether this is an offset in the log made at that time, as far as the offset tells."""
        return self.made is None or self.made == made

    def to_json(self) -> dict[str, int]:
        """Return the form that Spark keeps in a query's checkpoint."""
        made = {} if self.made is None else {"made": self.made}
        return {"id": self.place.row_id, "entry": self.place.entry_id, **made}

    @classmethod
    def of_json(cls, offset: Mapping[str, Any]) -> Offset:
        """Invert `to_json`; raises InvalidArgumentError for anything that is no offset."""
        try:
            made = offset.get("made")
            place = Place(int(offset["id"]), int(offset["entry"]))
            return cls(place, None if made is None else int(made))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"the checkpoint's offset {offset!r} is none of a ledger stream"
            ) from error


def position_column(row_id: int, entry_ids: Numbers) -> pyarrow.Array:
    """Return the positions of entries of one row as an Arrow array, without a Python string per entry."""
    count = len(entry_ids)
    text = numpy.empty((count, _WIDTH), dtype=numpy.uint8)
    text[:, : _DIGITS + 1] = numpy.frombuffer(f"{row_id:019d}:".encode(), dtype=numpy.uint8)
    rest, end = entry_ids, _WIDTH
    while end - _GROUP > _DIGITS:
        rest, low = numpy.divmod(rest, 10_000)
        text[:, end - _GROUP : end] = _GROUPS[low].view(numpy.uint8).reshape(count, _GROUP)
        end -= _GROUP
        if not rest.any():  # true for most entry ids from the third group on
            text[:, _DIGITS + 1 : end] = ord("0")
            break
    else:
        text[:, _DIGITS + 1 : end] = _GROUPS[rest].view(numpy.uint8).reshape(count, _GROUP)[:, 1:]
    places = numpy.arange(0, (count + 1) * _WIDTH, _WIDTH, dtype=numpy.int32)
    return pyarrow.Array.from_buffers(
        pyarrow.string(), count, [None, pyarrow.py_buffer(places), pyarrow.py_buffer(text)]
    )


PARTITION_BYTES_MIN, PARTITION_BYTES_MAX = 8 * 1024 * 1024, 64 * 1024 * 1024
PARTITIONS_WANTED = 32

OPENING_BYTES = 256 * 1024
"""The cost of opening one ledger, in bytes that could have been read meanwhile."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Readable entries of one ledger, from `first` to `last`; `first` is above `last` for none."""

    log: str | None
    row_id: int
    ledger_id: int
    first: int
    last: int
    created_ms: int
    entry_bytes: float = 1.0
    """The mean size of an entry."""
    borders: tuple[int, ...] = ()
    """The first entry of each fragment but the first."""
    is_complete: bool = True
    """Whether no entry will follow `last`."""
    has_loss: bool = False
    """Whether the ledger was closed with a loss: entries behind `last` may have been acknowledged."""

    @property
    def entries(self) -> int:
        """Return the number of entries."""
        return max(0, self.last - self.first + 1)

    @property
    def end(self) -> Place:
        """Return the position behind the last entry; of a complete ledger, the position behind the ledger."""
        return Place(self.row_id + 1, 0) if self.is_complete else Place(self.row_id, self.last + 1)


# --- partitions ---


@dataclass(slots=True)
class _Pack:
    pieces: list[Stretch] = field(default_factory=list)
    size: float = 0.0


def cut_into_partitions(stretches: Iterable[Stretch], partition_bytes: int) -> list[list[Stretch]]:
    """Cut stretches into the pieces of each partition, in order; empty stretches are dropped.

    A loss is a piece of its own, without entries, behind those of its stretch.

    A partition holds about `partition_bytes`. It holds pieces of several fragments only where they are small
    enough to be read together.
    """
    packs: list[list[Stretch]] = []
    open_pack = _Pack()
    for stretch in stretches:
        for piece in _pieces(stretch, partition_bytes):
            size = max(piece.entries * piece.entry_bytes, OPENING_BYTES)
            if open_pack.pieces and open_pack.size + size > partition_bytes:
                packs.append(open_pack.pieces)
                open_pack = _Pack()
            open_pack.pieces.append(piece)
            open_pack.size += size
    if open_pack.pieces:
        packs.append(open_pack.pieces)
    return packs


def partition_size(stretches: Iterable[Stretch]) -> int:
    """Return the default of how much one task reads: a share of the whole read, within bounds.

    A task costs some 20 ms by itself, so that a large read needs large partitions. A small read needs small
    partitions, so that every executor has some.
    """
    size = sum(stretch.entries * stretch.entry_bytes for stretch in stretches)
    return int(min(max(size / PARTITIONS_WANTED, PARTITION_BYTES_MIN), PARTITION_BYTES_MAX))


def _pieces(stretch: Stretch, partition_bytes: int) -> Iterator[Stretch]:
    starts = [
        stretch.first,
        *(border for border in stretch.borders if stretch.first < border <= stretch.last),
    ]
    for start, following in zip(starts, [*starts[1:], stretch.last + 1], strict=True):
        entries = following - start
        if entries <= 0:
            continue
        count = max(1, min(entries, round(entries * stretch.entry_bytes / partition_bytes)))
        edges = [start + entries * number // count for number in range(count + 1)]
        for first, end in pairwise(edges):
            if first < end:
                yield replace(stretch, first=first, last=end - 1, borders=(), has_loss=False)
    if stretch.has_loss:
        yield replace(stretch, first=stretch.last + 1, borders=())


# --- streams ---


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a micro-batch may take; None is no limit."""

    entries: int | None = None
    size: int | None = None


def advance(start: Place, stretches: Sequence[Stretch], limit: Limit) -> Place:
    """Return the end of the micro-batch that begins at `start`: at most the limit, at least one entry.

    Behind a complete ledger the end is `Place(row_id + 1, 0)`. It records that the whole ledger was read, so
    that a truncation of the ledger loses no record.

    Args:
        stretches: the stretches that are readable from `start` on, in order; empty ones too.
    """
    entries_left = limit.entries
    bytes_left = None if limit.size is None else float(limit.size)
    end, is_first = start, True
    for stretch in stretches:
        take = stretch.entries
        if entries_left is not None:
            take = min(take, entries_left)
        if bytes_left is not None:
            take = min(take, int(bytes_left / max(stretch.entry_bytes, 1.0)))
        if take <= 0 and is_first and stretch.entries:
            take = 1  # an entry above the limit would block the stream for ever
        if take < stretch.entries or not stretch.is_complete:
            return Place(stretch.row_id, stretch.first + take) if take else end
        end = Place(stretch.row_id + 1, 0)
        is_first = is_first and not take
        if entries_left is not None:
            entries_left -= take
        if bytes_left is not None:
            bytes_left -= take * stretch.entry_bytes
    return end


def between(stretches: Iterable[Stretch], start: Place, end: Place | None = None) -> list[Stretch]:
    """Return the parts of stretches from `start` up to `end`, exclusive (None: to the end).

    A loss behind the last entry belongs to the part that passes that entry.
    """
    found = []
    for stretch in stretches:
        if stretch.row_id < start.row_id or (end is not None and stretch.row_id > end.row_id):
            continue
        first = max(stretch.first, start.entry_id) if stretch.row_id == start.row_id else stretch.first
        last, has_loss = stretch.last, stretch.has_loss
        if end is not None and stretch.row_id == end.row_id:
            has_loss = has_loss and end.entry_id - 1 > last
            last = min(last, end.entry_id - 1)
        found.append(replace(stretch, first=first, last=max(last, first - 1), has_loss=has_loss))
    return found
