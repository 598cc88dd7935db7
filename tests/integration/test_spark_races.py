"""What a later look at a cluster must not change: a batch that was planned, columns that were written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import client_aio
from client_aio.spark import export, import_
from client_aio.spark.options import parse_read
from client_aio.spark.provenance import Written, check_fit
from client_aio.spark.schemas import arrow_schema
from client_aio.spark.sink import BatchWriter, Partition
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.stream import LedgerStreamReader
from client_aio.spark.write_task import write_partition
from metadata.errors import BookKeeperError, InvalidArgumentError, LogTruncatedError
from tests.support.sparksession import Bookies, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.support.cluster import Cluster


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_batch_holds_all_up_to_its_offset_or_fails_where_bookies_are_gone_when_it_is_cut(
    cluster: Cluster, is_restarted: bool
) -> None:
    """Between `latestOffset` and `partitions` (or the restart of a driver) the bookies go away."""
    options = parse_read({"metadata": cluster.uri, "log": "a"})
    async with client_aio.connect(cluster.uri) as client, client.open_log("a") as log:
        for number in range(10):
            position = await log.append(b"%d" % number)
        await cluster.heard(client, position)
        stream = await asyncio.to_thread(LedgerStreamReader, options, StructType())
        start = await asyncio.to_thread(stream.initialOffset)
        end = await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
        assert end["entry"] == 10
        await cluster.kill()
        if is_restarted:
            await asyncio.to_thread(stream.stop)
            stream = await asyncio.to_thread(LedgerStreamReader, options, StructType())
        try:
            parts: Any = await asyncio.to_thread(stream.partitions, start, end)
        except BookKeeperError:
            pass  # the query ends, and goes on there when it is started again
        else:
            assert sum(piece.stretch.entries for part in parts for piece in part.value) == 10
        await asyncio.to_thread(stream.stop)
        await cluster.start()
        stream = await asyncio.to_thread(LedgerStreamReader, options, StructType())
        parts = await asyncio.to_thread(stream.partitions, start, end)
        assert sum(piece.stretch.entries for part in parts for piece in part.value) == 10
        await asyncio.to_thread(stream.stop)


@pytest.mark.parametrize("starting", ["earliest", "latest"])
@pytest.mark.parametrize("is_emptied", [False, True])
async def test_what_is_truncated_unread_is_reported_though_the_log_was_empty_when_the_query_began(
    cluster: Cluster, starting: str, is_emptied: bool
) -> None:
    given = {"metadata": cluster.uri, "log": "a"}
    options = parse_read({**given, "startingPosition": starting})
    schema = StructType([StructField("value", BinaryType())])
    async with client_aio.connect(cluster.uri) as client:
        if is_emptied:
            async with client.open_log("a") as log:
                await log.append(b"x")
        writer = await asyncio.to_thread(BatchWriter, given, schema, overwrite=is_emptied)
        await asyncio.to_thread(writer.commit, [Partition(0, ())])
        stream = await asyncio.to_thread(LedgerStreamReader, options, schema)
        start = await asyncio.to_thread(stream.initialOffset)
        async with client.open_log("a") as log:
            first = await log.append(b"lost")
            second = await log.append(b"kept")
        end = await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
        parts: Any = await asyncio.to_thread(stream.partitions, start, end)
        assert sum(piece.stretch.entries for part in parts for piece in part.value) == 2
        await client.truncate_log("a", second)
        assert first < second
        with pytest.raises(LogTruncatedError):
            await asyncio.to_thread(stream.latestOffset, start, ReadAllAvailable())
        await asyncio.to_thread(stream.stop)


async def test_an_append_that_was_planned_before_an_overwrite_does_not_bring_the_old_columns_back(
    cluster: Cluster,
) -> None:
    given = {"metadata": cluster.uri, "log": "a"}
    old, new = StructType([StructField("a", LongType())]), StructType([StructField("b", StringType())])

    def save(writer: BatchWriter, *rows: dict[str, Any]) -> None:
        batch = pyarrow.RecordBatch.from_pylist(list(rows), arrow_schema(writer._job.written.schema or ""))
        writer.commit([Partition(0, write_partition(writer._job, iter([batch])))])

    def work() -> list[Any]:
        save(BatchWriter(given, old, overwrite=False), {"a": 1})
        late = BatchWriter(given, old, overwrite=False)
        save(BatchWriter(given, new, overwrite=True), {"b": "x"}, {"b": "y"})
        refused = False
        try:
            save(late, {"a": 2})
        except InvalidArgumentError:
            refused = True
        source = LedgerDataSource(given)
        reader: Any = source.reader(source.schema())
        rows = [batch.to_pylist() for part in reader.partitions() for batch in reader.read(part)]
        return [refused, *(row for batch in rows for row in batch)]

    assert await asyncio.to_thread(work) == [True, {"b": "x"}, {"b": "y"}]


def test_an_import_does_not_give_a_log_other_columns(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    write(spark.createDataFrame([(1,), (2,)], "a long"), bookies.uri, log="of-a")
    write(spark.createDataFrame([("x",)], "b string"), bookies.uri, log="of-b")
    export(spark, bookies.uri, str(tmp_path / "export"), log="of-b")
    with pytest.raises(InvalidArgumentError, match="does not fit"):
        import_(spark, bookies.uri, str(tmp_path / "export"), log="of-a")
    rows = spark.read.format("ledger").option("metadata", bookies.uri).option("log", "of-a").load().collect()
    assert sorted(row.asDict()["a"] for row in rows) == [1, 2]


async def test_an_open_ledger_that_was_trimmed_is_read_from_where_it_begins(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.open_unbounded_ledger("payments")
        for number in range(3):
            await ledger.add_entry(b"%d" % number)
            await ledger.roll()
        await ledger.add_entry(b"3")
        await ledger.trim(2)
        source = LedgerDataSource({"metadata": cluster.uri, "ledger": str(ledger.ledger_id)})
        reader: Any = await asyncio.to_thread(source.reader, source.schema())
        parts = await asyncio.to_thread(reader.partitions)
        assert min(piece.stretch.first for part in parts for piece in part.value) == 2
        await ledger.close()


def test_columns_do_not_fit_a_log_of_plain_bytes_that_appeared_meanwhile() -> None:
    arrow = Written("arrow", schema=StructType([StructField("a", LongType())]).json()).to_custom()
    check_fit(arrow, {}, is_used=False)
    check_fit({}, {}, is_used=True)
    check_fit(arrow, arrow, is_used=True)
    with pytest.raises(InvalidArgumentError, match="encoding arrow, in the log binary"):
        check_fit(arrow, {}, is_used=True)
