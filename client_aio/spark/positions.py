"""Positions as text: `ID:ENTRY`, each with 19 digits, so that they sort as text the way they sort as numbers.

Pure. A position names a record within a log: the id of its row in the log's list, and the entry. Where a
ledger is read by itself the id is the ledger's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import pyarrow

from metadata.errors import InvalidArgumentError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        """Give the form that sorts."""
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
    """Where a stream stands: the next record to be read, and in which log of that name."""

    place: Place
    made: int | None
    """Tells a log from another one that had its name before: when it was created, in milliseconds; of a
    ledger its id. None: not known, in a checkpoint of an older release."""

    def is_of(self, made: int) -> bool:
        """Tell whether it is, as far as is known, an offset in this log."""
        return self.made is None or self.made == made

    def to_json(self) -> dict[str, int]:
        """Give the form that Spark keeps in a query's checkpoint."""
        made = {} if self.made is None else {"made": self.made}
        return {"id": self.place.row_id, "entry": self.place.entry_id, **made}

    @classmethod
    def of_json(cls, offset: Mapping[str, Any]) -> Offset:
        """Invert `to_json`; raises InvalidArgumentError for an offset of something else."""
        try:
            made = offset.get("made")
            place = Place(int(offset["id"]), int(offset["entry"]))
            return cls(place, None if made is None else int(made))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"the checkpoint's offset {offset!r} is none of a ledger stream"
            ) from error


def position_column(row_id: int, entry_ids: Numbers) -> pyarrow.Array:
    """Give the positions of entries of one row as an Arrow array, without a Python string per entry."""
    count = len(entry_ids)
    text = numpy.empty((count, _WIDTH), dtype=numpy.uint8)
    text[:, : _DIGITS + 1] = numpy.frombuffer(f"{row_id:019d}:".encode(), dtype=numpy.uint8)
    rest, end = entry_ids, _WIDTH
    while end - _GROUP > _DIGITS:
        rest, low = numpy.divmod(rest, 10_000)
        text[:, end - _GROUP : end] = _GROUPS[low].view(numpy.uint8).reshape(count, _GROUP)
        end -= _GROUP
        if not rest.any():  # as most often from the third group on
            text[:, _DIGITS + 1 : end] = ord("0")
            break
    else:
        text[:, _DIGITS + 1 : end] = _GROUPS[rest].view(numpy.uint8).reshape(count, _GROUP)[:, 1:]
    places = numpy.arange(0, (count + 1) * _WIDTH, _WIDTH, dtype=numpy.int32)
    return pyarrow.Array.from_buffers(
        pyarrow.string(), count, [None, pyarrow.py_buffer(places), pyarrow.py_buffer(text)]
    )
