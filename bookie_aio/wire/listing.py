"""Listings of entries: the rows in the body of an answer to LIST_ENTRIES.

A row is 24 bytes, little-endian: u64 first entry, u64 content term, u32 count, u32 stride. Rows ascend by
first entry. They may overlap where entries were stored more than once.

`index_from`, `meeting`, `mark` and `runs_of` say which entries two ranges with strides share.
"""

from __future__ import annotations

import struct
from itertools import starmap
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from metadata.errors import MalformedFrameError

if TYPE_CHECKING:
    from collections.abc import Iterable


ROW = struct.Struct("<QQII")


class Row(NamedTuple):
    """Entries `first`, `first + stride`, …, held under one content term."""

    first: int
    content_term: int
    entries: int
    stride: int

    @property
    def entry_ids(self) -> range:
        """Return the ids of the entries."""
        return range(self.first, self.first + self.entries * self.stride, self.stride)


def parse_rows(body: memoryview) -> list[Row]:
    """Parse the rows of a body.

    Raises:
        MalformedFrameError: its length is not one of whole rows, or a row's stride is 0.
    """
    if len(body) % ROW.size:
        raise MalformedFrameError(f"a listing of {len(body)} bytes is not one of whole rows")
    rows = list(starmap(Row, ROW.iter_unpack(body)))
    if not all(row.stride for row in rows):
        raise MalformedFrameError("a listing has a row of stride 0")
    return rows


def listed(wanted: range, rows: Iterable[Row], content_term: int) -> bytearray:
    """Return a 1 for each wanted entry (ascending) that is listed, and a 0 for each other.

    Rows of lower content terms do not count: no reader takes their entries (rule 13).
    """
    found = bytearray(len(wanted))
    for row in rows:
        if row.content_term >= content_term:
            mark(found, meeting(wanted, row.entry_ids))
    return found


def index_from(ids: range, least: int) -> int:
    """Return the index of the first of these entries that is `least` or above; their number if none is.

    Args:
        ids: ascend.
    """
    return max(0, min(len(ids), -(-(least - ids.start) // ids.step)))


def meeting(wanted: range, other: range) -> range:
    """Return the indexes of the entries of `wanted` that are in `other`; both ascend.

    Arithmetic, at a cost that does not depend on the lengths. From their first common entry on, the ranges
    have one in common every lcm(strides) entries.
    """
    nowhere = range(0)
    if not wanted or not other:
        return nowhere
    gap, common = other.start - wanted.start, gcd(wanted.step, other.step)
    if gap % common:
        return nowhere
    period = other.step // common  # of indexes, from one meeting to the next
    meets = gap // common * pow(wanted.step // common, -1, period) % period
    lowest = index_from(wanted, other.start)
    first = meets + max(0, -((meets - lowest) // period)) * period
    end = min(len(wanted), (other[-1] - wanted.start) // wanted.step + 1)
    return range(first, end, period) if first < end else nowhere


def mark(marks: bytearray, indexes: range) -> None:
    """Set the marks at these indexes to 1, in one assignment."""
    marks[indexes.start : indexes.stop : indexes.step] = b"\1" * len(indexes)


def runs_of(wanted: range, marks: bytes | bytearray, value: int) -> list[range]:
    """Return the wanted entries whose mark has that value, as ranges of neighbours in `wanted`."""
    runs: list[range] = []
    start = marks.find(value)
    while start >= 0:
        stop = marks.find(1 - value, start)
        runs.append(wanted[start : stop if stop >= 0 else len(marks)])
        start = marks.find(value, stop) if stop >= 0 else -1
    return runs
