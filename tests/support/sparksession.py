"""One Spark session for all tests that need one, and a cluster of bookies beside it that runs on a thread.

Spark's calls block. So these tests are plain functions, and what they ask of the cluster, or of the async
client, runs on the thread's loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self, TypeVar

import client_aio
from benchmarks.processes import ROOT
from tests.support.cluster import Cluster
from tests.support.zookeeper import find_java

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Coroutine, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

PASSWORD, PASSWORD_ENV = "an open secret of Spark's", "TESTS_LEDGER_PASSWORD"
"""Of ledgers in tests, and the variable in which the workers of the session for all tests find it."""


def start_spark(master: str, warehouse: Path, **settings: str) -> SparkSession:
    """Start a session that knows the format "ledger"; its workers run this very interpreter."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["JAVA_HOME"] = find_java().removesuffix("/bin/java")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    from pyspark.sql import SparkSession

    import client_aio.spark

    builder = SparkSession.builder.master(master).appName("bookie-aio tests")
    defaults = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(warehouse),
        "spark.local.dir": str(warehouse),
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={warehouse}",
    }
    for name, value in {**defaults, **settings}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    client_aio.spark.register(session)
    return session


class Bookies:
    """Bookies for Spark tests, on a thread of their own."""

    def __init__(self, directory: Path, *, bookies: int = 4, uri: str | None = None) -> None:
        self.cluster = Cluster(directory, bookies=bookies, uri=uri)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bookies")
        self._stack = AsyncExitStack()
        self.client: client_aio.Client

    @property
    def uri(self) -> str:
        """Return the metadata store's URI."""
        return self.cluster.uri

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(120)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._stack.enter_async_context(self.cluster))
            self.client = self.run(self._stack.enter_async_context(client_aio.connect(self.uri)))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- what tests ask ---

    def append(self, log: str, records: Iterable[bytes], **settings: Any) -> list[tuple[int, int]]:
        """Append records to a log as its writer, which closes it; gives their positions."""

        async def append() -> list[tuple[int, int]]:
            async with self.client.open_log(log, **settings) as writer:
                return [await writer.append(record) for record in records]

        return self.run(append())

    async def open_log(self, log: str, **settings: Any) -> client_aio.LogWriter:
        """Open a log for writing, for the caller to close."""
        return await self.client.open_log(log, **settings)

    def append_by_ledgers(self, writer: client_aio.LogWriter, *ledgers: Sequence[bytes]) -> None:
        """Append to one ledger of a log after another, of which the last stays open.

        Returns when all its bookies know that its records are acknowledged. No limit may roll it: of one that
        is closed nobody tells them.
        """

        async def append() -> None:
            for number, records in enumerate(ledgers):
                if number:
                    await writer.roll()
                last = [writer.append(record) for record in records][-1]
            await self.cluster.heard(self.client, await last)

        self.run(append())

    def records(self, log: str) -> list[bytes]:
        """Read all of a log, as its readers do."""

        async def read() -> list[bytes]:
            return [record.data async for record in self.client.read_log(log)]

        return self.run(read())

    def ledgers_of(self, log: str) -> tuple[set[int], set[int]]:
        """Return the ledgers that Spark made for a log: those it lists, and those it does not."""

        async def look() -> tuple[set[int], set[int]]:
            try:
                listed = {row.ledger_id for row in (await self.client.log_metadata(log)).rows}
            except client_aio.NoSuchLogError:
                listed = set()
            made = set()
            async for ledger_id in self.client.list_ledgers():
                try:
                    metadata = await self.client.ledger_metadata(ledger_id)
                except client_aio.NoSuchLedgerError:
                    continue
                if metadata.custom.get("spark.log") == log.encode():
                    made.add(ledger_id)
            return made & listed, made - listed

        return self.run(look())

    def leftovers(self, log: str) -> set[int]:
        """Return what Spark made for a log and nobody lists, when the attempts that failed have had their
        time.

        A failed attempt deletes what it made. Spark does not wait for that, so neither do job and commit.
        """
        for _ in range(200):
            if not (left := self.ledgers_of(log)[1]):
                break
            time.sleep(0.1)
        return left


def read(spark: SparkSession, uri: str, **options: str) -> DataFrame:
    """Load with options."""
    return spark.read.format("ledger").option("metadata", uri).options(**options).load()


def write(frame: DataFrame, uri: str, mode: str = "append", **options: str) -> None:
    """Save with options."""
    frame.write.format("ledger").option("metadata", uri).options(**options).mode(mode).save()
