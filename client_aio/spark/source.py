"""The data source "ledger" as Spark sees it.

Owns the class that is registered with a session. Everything here runs in processes that Spark starts: the
schema and the plan in the driver's, `read` in a task's. Only options and pieces are sent between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from client_aio.spark import schemas
from client_aio.spark.batch import LedgerReader, written_of
from client_aio.spark.options import ReadOptions, check_kind, parse_read
from client_aio.spark.passwords import settled

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


FORMAT = "ledger"


class LedgerDataSource(DataSource):
    """Reads and writes logs and ledgers; registered by `client_aio.spark.register`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(…)`."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the columns of the logs or ledgers that the options name, where the user gave none."""
        options = settled(parse_read(self.options))
        return schemas.schema_of(options, written_of(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Plan a batch read."""
        return LedgerReader(self._parse_options(schema, is_stream=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Begin a streaming read."""
        from client_aio.spark.stream import LedgerStreamReader

        return LedgerStreamReader(self._parse_options(schema, is_stream=True), schema)

    def _parse_options(self, schema: StructType, *, is_stream: bool) -> ReadOptions:
        options = parse_read(self.options)
        check_kind(self.options, is_stream=is_stream)
        schemas.check_columns(options, schema)
        return settled(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Plan a batch write."""
        from client_aio.spark.sink import BatchWriter

        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Begin a streaming write."""
        from client_aio.spark.sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite=overwrite)
