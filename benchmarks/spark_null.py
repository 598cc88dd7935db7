"""The limits of Spark itself: a source that invents its rows, and a sink that throws rows away.

The shape is that of the data source "ledger": Arrow batches of one column of bytes, a task per partition. No
Python data source can be faster. `spark_speed` measures the data source "ledger" beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql.types import StructType

ROWS_PER_BATCH = 9000
"""About what one answer of a bookie holds, at 100 bytes a row."""


class NullSource(DataSource):
    """Rows of zeros; options: rows, partitions, bytes."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "null"

    def schema(self) -> str:
        """Return the one column."""
        return "value binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Plan a read."""
        return NullReader(
            int(self.options["rows"]), int(self.options["partitions"]), int(self.options["bytes"])
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Plan a write."""
        return NullWriter()


class NullReader(DataSourceReader):
    """Yields batches that are made once per task."""

    def __init__(self, rows: int, partitions: int, size: int) -> None:
        self.rows, self.count, self.size = rows, partitions, size

    def partitions(self) -> list[InputPartition]:
        """Cut the rows evenly."""
        return [InputPartition(self.rows // self.count) for _ in range(self.count)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of a partition."""
        left = partition.value
        payload = pyarrow.py_buffer(bytes(ROWS_PER_BATCH * self.size))
        while left:
            rows = min(left, ROWS_PER_BATCH)
            offsets = numpy.arange(0, (rows + 1) * self.size, self.size, dtype=numpy.int32)
            column = pyarrow.Array.from_buffers(
                pyarrow.binary(), rows, [None, pyarrow.py_buffer(offsets), payload]
            )
            yield pyarrow.RecordBatch.from_arrays([column], names=["value"])
            left -= rows


class NullWriter(DataSourceArrowWriter):
    """Counts rows."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Let a partition's batches go."""
        for batch in iterator:
            assert batch.num_rows >= 0
        return WriterCommitMessage()


def throw_away(rows: Iterable[Any]) -> None:
    """Take rows as `foreachPartition` gives them, pickled one by one."""
    for row in rows:
        assert row is not None
