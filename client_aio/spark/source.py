"""The data source "ledger" as Spark sees it.

Owns the class that is registered with a session, and the session of the commands. The class runs in
processes that Spark starts: the schema and the plan in the driver's, `read` in a task's. Only options and
pieces are sent between them.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader

from client_aio.spark import schemas
from client_aio.spark.batch import LedgerReader, written_of
from client_aio.spark.options import ReadOptions, check_kind, parse_read
from client_aio.spark.passwords import settled
from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        check_kind(self.options)
        return LedgerReader(self._parse_options(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Begin a streaming read."""
        from client_aio.spark.stream import LedgerStreamReader

        return LedgerStreamReader(self._parse_options(schema), schema)

    def _parse_options(self, schema: StructType) -> ReadOptions:
        options = parse_read(self.options)
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


def register(spark: SparkSession) -> None:
    """Register the format "ledger" with a session. Once per session."""
    spark.dataSource.register(LedgerDataSource)


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """Start Spark, and end it on exit; its workers run this very interpreter.

    Args:
        master: such as `local[*]`, `spark://host:7077`, or `sc://host` for a server of Spark Connect.

    Raises:
        InvalidArgumentError: Spark does not start; most often there is no Java.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    is_remote = master.startswith("sc://")
    builder = SparkSession.builder.remote(master) if is_remote else SparkSession.builder.master(master)
    builder = builder.appName("bookie-aio")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }.items():
        if not is_remote:
            builder = builder.config(name, value)
    try:
        started = builder.getOrCreate()
    except Exception as error:  # any error: pyspark raises several kinds when the JVM does not start
        raise InvalidArgumentError(
            f"Spark Connect at {master} cannot be used ({error}): it needs a server there, and the packages "
            "of pyspark[connect] here"
            if is_remote
            else f"Spark does not start ({error}): it needs Java 17 or newer on the PATH or under JAVA_HOME"
        ) from error
    register(started)
    try:
        yield started
    finally:
        started.stop()
