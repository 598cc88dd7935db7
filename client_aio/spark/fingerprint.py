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
    Hashes = numpy.ndarray[Any, numpy.dtype[numpy.uint64]]

_MASK = (1 << 64) - 1
_FACTOR, _MIX = numpy.uint64(0x9E3779B97F4A7C15), numpy.uint64(0xC2B2AE3D27D4EB4F)
_NULL = numpy.uint64(0x6A09E667F3BCC908)
_SHIFT = numpy.uint64(29)


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
        hashes = numpy.full(batch.num_rows, len(batch.columns), dtype=numpy.uint64)
        for column in batch.columns:
            hashes = _mixed(hashes * _FACTOR + _hashes_of(column))
        self.rows += batch.num_rows
        self.total = (self.total + int(hashes.sum(dtype=numpy.uint64))) & _MASK

    def merge(self, other: Fingerprint) -> None:
        """Count in the rows of another fingerprint."""
        self.rows += other.rows
        self.total = (self.total + other.total) & _MASK


def _mixed(hashes: Hashes) -> Hashes:
    return (hashes ^ (hashes >> _SHIFT)) * _MIX


def _hashes_of(column: pyarrow.Array) -> Hashes:
    import pandas  # only tasks of streams hash rows, and pandas takes half a second to import

    kind = column.type
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    if kinds.is_string(kind) or kinds.is_binary(kind) or kinds.is_large_string(kind):
        cells = column.to_numpy(zero_copy_only=False)
    elif kinds.is_primitive(kind) and not kinds.is_decimal(kind):
        width = {1: pyarrow.int8(), 8: pyarrow.int8(), 16: pyarrow.int16(), 32: pyarrow.int32()}
        bits = column if kinds.is_boolean(kind) else column.view(width.get(kind.bit_width, pyarrow.int64()))
        numbers = bits.cast(pyarrow.int64()).fill_null(0)
        cells = numbers.to_numpy(zero_copy_only=False)
    else:
        cells = numpy.array([repr(cell) for cell in column.to_pylist()], dtype=object)
    hashes: Hashes = pandas.util.hash_array(cells, categorize=False)
    return numpy.where(is_null, _NULL, hashes)
