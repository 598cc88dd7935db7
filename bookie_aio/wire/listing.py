"""Listings of entries: the rows in the body of an answer to LIST_ENTRIES.

A row is 24 bytes, little-endian: u64 first entry, u64 content term, u32 count, u32 stride. Rows ascend by
first entry. They may overlap where entries were stored more than once.
"""

from __future__ import annotations

import struct
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.ranges import mark, meeting
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
