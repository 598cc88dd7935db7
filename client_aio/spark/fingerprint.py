"""The fingerprint of a micro-batch's rows, which tells a replay from other rows under its number. Pure.

A replay has the same rows, but perhaps in other partitions, and in another order: shuffles give no order. So
a fingerprint is the number of rows, and the sum of a 64-bit hash of each row. Sums of parts are added up.

Invariant: equal rows have equal hashes in every process and on every machine; nothing is seeded at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.types as kinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    Hashes = numpy.ndarray[Any, numpy.dtype[numpy.uint64]]

_MASK = (1 << 64) - 1
_FACTOR, _MIX = numpy.uint64(0x9E3779B97F4A7C15), numpy.uint64(0xC2B2AE3D27D4EB4F)
_NULL = numpy.uint64(0x6A09E667F3BCC908)
_SHIFT = numpy.uint64(29)
_TEXTS = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary)
"""Types whose cells are hashed as they are. Spark sends the large ones where the session asks for them."""


@dataclass(slots=True)
class Fingerprint:
    """The number of rows, and the sum of their hashes modulo 2**64."""

    rows: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        """Return the form that is recorded with the batch."""
        return f"{self.rows}:{self.total:016x}"

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Count the rows of a batch in."""
        hashes = _combined(batch.num_rows, batch.columns)
        self.rows += batch.num_rows
        self.total = (self.total + int(hashes.sum(dtype=numpy.uint64))) & _MASK

    def merge(self, other: Fingerprint) -> None:
        """Count in the rows of another fingerprint."""
        self.rows += other.rows
        self.total = (self.total + other.total) & _MASK


def _mixed(hashes: Hashes) -> Hashes:
    return (hashes ^ (hashes >> _SHIFT)) * _MIX


def _combined(count: int, columns: Sequence[pyarrow.Array]) -> Hashes:
    """Return a hash for each row of columns."""
    hashes = numpy.full(count, len(columns), dtype=numpy.uint64)
    for column in columns:
        hashes = _mixed(hashes * _FACTOR + _hashes_of(column))
    return hashes


def _hashes_of(column: pyarrow.Array) -> Hashes:
    """Return a hash for each cell of a column, null or not."""
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    return numpy.where(is_null, _NULL, _hashes_of_values(column))


def _hashes_of_values(column: pyarrow.Array) -> Hashes:
    """Return a hash for each cell that is not null.

    No cell becomes a Python object by its type: Python has no times of the year 10000.
    """
    import pandas  # only tasks of streams hash rows, and pandas takes half a second to import

    kind = column.type
    if kinds.is_struct(kind):
        hashes = _combined(len(column), column.flatten())
    elif kinds.is_list(kind) or kinds.is_map(kind):
        hashes = _hashes_of_lists(column)
    else:
        if kinds.is_primitive(kind) and not kinds.is_decimal(kind):
            width = {1: pyarrow.int8(), 16: pyarrow.int16(), 32: pyarrow.int32(), 64: pyarrow.int64()}
            is_small = kind.bit_width < 16
            bits = column.cast(pyarrow.int8()) if is_small else column.view(width[kind.bit_width])
            column = bits.cast(pyarrow.int64()).fill_null(0)
        elif not any(is_kind(kind) for is_kind in _TEXTS):
            column = column.cast(pyarrow.string())
        hashes = pandas.util.hash_array(column.to_numpy(zero_copy_only=False), categorize=False)
    return hashes


def _hashes_of_lists(column: pyarrow.Array) -> Hashes:
    """Return a hash for each list, or map, of the hashes of its items and their places."""
    offsets = column.offsets.to_numpy(zero_copy_only=False).astype(numpy.int64)
    first, places = int(offsets[0]), offsets - offsets[0]
    lengths = numpy.diff(places)
    is_map = kinds.is_map(column.type)
    parts = [column.keys, column.items] if is_map else [column.values]
    items = [part.slice(first, int(places[-1])) for part in parts]
    within = numpy.arange(places[-1]) - numpy.repeat(places[:-1], lengths)
    hashes = _mixed(_combined(int(places[-1]), items) + within.astype(numpy.uint64) * _FACTOR)
    sums = numpy.concatenate([numpy.zeros(1, dtype=numpy.uint64), numpy.cumsum(hashes, dtype=numpy.uint64)])
    return _mixed(sums[places[1:]] - sums[places[:-1]] + lengths.astype(numpy.uint64))
