"""Batch reads: from a query to partitions, and from a partition to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceReader, InputPartition

from client_aio.spark import schemas
from client_aio.spark.catalog import Catalog, check_written, with_catalog
from client_aio.spark.options import ENCODINGS, ReadOptions
from client_aio.spark.passwords import password_of
from client_aio.spark.provenance import Written
from client_aio.spark.row_reader import Piece, RowReader
from client_aio.spark.scan_plan import cut_into_partitions, partition_size
from client_aio.spark.statements import Horizon, Statement
from client_aio.sync.loop_thread import get_loop_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pyarrow
    from pyspark.sql.types import StructType

    from client_aio.spark.catalog import Found


def written_of(options: ReadOptions) -> Written:
    """Return how the data to be read was written; raises as `check_written`. Opens its own connection."""

    async def ask(catalog: Catalog) -> Written:
        return check_written(await catalog.written(), options)

    return get_loop_thread().run(with_catalog(options, ask))


class Pieces(InputPartition):
    """The pieces that one task reads.

    `horizon`, of a plan's last partition: where the plan ended, for statements that use the plan again.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(tuple(pieces))
        self.horizon: Horizon | None = None

    def __repr__(self) -> str:
        return f"Pieces({len(self.value)})"


class LedgerReader(DataSourceReader):
    """A batch read: everything readable when the read was planned.

    A later statement that uses the plan again sees what the statements before it have added, too.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._written = written_of(options)
        schemas.check_declared(options, schema, self._written)

    def partitions(self) -> list[InputPartition]:
        """Ask the cluster for the readable stretches, and cut them into partitions."""

        async def ask(catalog: Catalog) -> tuple[int, list[Found]]:
            return catalog.now_ms(), await catalog.stretches()

        planned_ms, found = get_loop_thread().run(with_catalog(self._options, ask))
        partitions = list(partitions_of(found, self._options.partition_bytes)) or [Pieces(())]
        logs, stretches = self._options.log, [one.stretch for one in found]
        partitions[-1].horizon = Horizon.of(logs, stretches, planned_ms) if logs else None
        return [*partitions]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Read a partition, in a task."""
        assert isinstance(partition, Pieces)
        reader = row_reader(self._options, self._written, self._schema)
        return reader.read([*partition.value, *self._added_since(partition.horizon)])

    def _added_since(self, horizon: Horizon | None) -> list[Piece]:
        """Return what earlier statements have added, in a task of a statement that uses the plan again."""
        statement = Statement.of(TaskContext.get())
        if horizon is None or statement is None or statement.began_ms <= horizon.planned_ms:
            return []

        async def ask(catalog: Catalog) -> list[Found]:
            return await horizon.added_before(statement, catalog)

        found = get_loop_thread().run(with_catalog(self._options, ask))
        return [Piece(one.stretch, _written(one)) for one in found]


def row_reader(options: ReadOptions, written: Written, schema: StructType) -> RowReader:
    """Return the reader that turns pieces into rows of a schema."""
    decoded = written.schema
    if written.encoding == "binary":
        decoded = schemas.BYTES
    elif decoded is None:  # the user has given the columns
        decoded = schemas.nullable_json(schemas.without_error(schema))
    accepted: Collection[str] = (written.encoding,)
    if written.encoding == "json":
        accepted = ("json", "binary")  # other programs write JSON too, without a tag for the encoding
    elif written.encoding == "binary" and (options.encoding in ("binary", "raw") or len(options.log) != 1):
        accepted = ENCODINGS  # bytes were asked for, or several sources are read, each as bytes
    return RowReader(
        options.metadata,
        schemas.arrow_schema(schema),
        written.encoding,
        decoded,
        schemas.nullable_json(schemas.from_entries(schema, decoded)),
        accepted=accepted,
        is_permissive=options.mode == "permissive",
        is_raw=options.encoding == "raw",
        password=password_of(options),
        outage_timeout_s=options.outage_timeout,
    )


def partitions_of(found: Sequence[Found], partition_bytes: int | None) -> Iterator[Pieces]:
    """Cut the found stretches into partitions."""
    # By ledger id and not by row id: two logs may have the same row id for different ledgers.
    said = {one.stretch.ledger_id: _written(one) for one in found}
    all_stretches = [one.stretch for one in found]
    size = partition_size(all_stretches) if partition_bytes is None else partition_bytes
    for stretches in cut_into_partitions(all_stretches, size):
        yield Pieces([Piece(stretch, said[stretch.ledger_id]) for stretch in stretches])


def _written(found: Found) -> Written:
    return found.written or Written()
