"""Streams out of logs: where they start, how they follow, and what truncation does to them."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

import client_aio
from client_aio.spark.options import parse_read
from client_aio.spark.stream import LedgerStreamReader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from tests.support.sparksession import Bookies

SCHEMA = StructType().add("value", "binary")


def collect(
    spark: SparkSession, bookies: Bookies, folder: Path, table: str, *, forever: bool = False, **options: str
) -> StreamingQuery:
    """Stream a log into a table in memory; up to its end, or on and on."""
    frame = spark.readStream.format("ledger").options(metadata=bookies.uri, columns="value", **options).load()
    writer = frame.writeStream.format("memory").queryName(table).option("checkpointLocation", str(folder))
    query = writer.trigger(processingTime="0 seconds") if forever else writer.trigger(availableNow=True)
    return query.start()


def values(spark: SparkSession, table: str) -> list[bytes]:
    return [bytes(row.value) for row in spark.table(table).collect()]


@pytest.fixture
def reader(bookies: Bookies) -> Iterator[object]:
    """Make stream readers as Spark's driver does, and stop them."""
    made: list[LedgerStreamReader] = []

    def make(**options: str) -> LedgerStreamReader:
        made.append(LedgerStreamReader(parse_read({"metadata": bookies.uri, **options}), SCHEMA))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def records_of(reader: LedgerStreamReader, start: dict, end: dict) -> list[bytes]:
    found = []
    for partition in reader.partitions(start, end):
        for batch in reader.read(partition):
            found += batch.column("value").to_pylist()
    return found


def test_a_query_follows_a_log_across_rolls_and_takeovers(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    first = [b"first %d" % number for number in range(60)]
    bookies.append("followed", first, roll_entries=25)
    query = collect(spark, bookies, tmp_path, "followed_table", forever=True, log="followed")
    try:
        query.processAllAvailable()
        second = [b"second %d" % number for number in range(60)]
        writer = bookies.run(bookies.open_log("followed", roll_entries=25))
        for record in second:
            bookies.run(writer_append(writer, record))
        query.processAllAvailable()
        third = [b"third"]
        bookies.append("followed", third)  # takes over from the writer that is still there
        query.processAllAvailable()
        assert values(spark, "followed_table") == [*first, *second, *third]
        bookies.run(writer.abort())
    finally:
        query.stop()


async def writer_append(writer: client_aio.LogWriter, record: bytes) -> None:
    await writer.append(record)


def test_micro_batches_keep_to_the_limits_and_lose_nothing(bookies: Bookies, reader: object) -> None:
    records = [b"%03d" % number * 10 for number in range(100)]
    bookies.append("limited", records, roll_entries=30)
    for limit, most in [(ReadMaxRows(7), 7), (ReadMaxBytes(300), 10), (ReadAllAvailable(), 100)]:
        stream = reader(log="limited", maxEntriesPerTrigger="7")
        assert stream.getDefaultReadLimit() == ReadMaxRows(7)
        if isinstance(limit, ReadMaxBytes):
            stream = reader(log="limited", maxBytesPerTrigger="300")
        place, seen = stream.initialOffset(), []
        while (end := stream.latestOffset(place, limit)) != place:
            batch = records_of(stream, place, end)
            assert len(batch) <= most
            assert records_of(stream, place, end) == batch, "a batch that is planned again is the same"
            seen += batch
            place = end
        assert seen == records


def test_a_stream_forgets_the_ledgers_that_it_has_read(bookies: Bookies, reader: object) -> None:
    records = [b"%d" % number for number in range(10)]
    ids = [bookies.append("forgotten", [record])[0][0] for record in records]
    assert len(set(ids)) == 10
    stream = reader(log="forgotten", maxEntriesPerTrigger="1")
    place, seen = stream.initialOffset(), []
    while (end := stream.latestOffset(place, stream.getDefaultReadLimit())) != place:
        seen += records_of(stream, place, end)
        stream.reportLatestOffset()
        known = stream._catalog._closed.keys() | stream._catalog._entry_bytes.keys()
        assert known <= {*ids[len(seen) - 1 :], *ids[-3:]}, "the end of a log is read anew for each report"
        place = end
    assert seen == records


def test_available_now_reads_what_there_was_when_it_began(bookies: Bookies, reader: object) -> None:
    bookies.append("now", [b"a", b"b"])
    stream = reader(log="now")
    stream.prepareForTriggerAvailableNow()
    bookies.append("now", [b"c"])
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert records_of(stream, start, end) == [b"a", b"b"]
    assert stream.latestOffset(end, ReadAllAvailable()) == end


def test_where_a_query_starts(bookies: Bookies, reader: object) -> None:
    positions = bookies.append("starts", [b"%d" % number for number in range(10)], roll_entries=4)

    def from_(text: str) -> list[bytes]:
        stream = reader(log="starts", startingPosition=text)
        start = stream.initialOffset()
        return records_of(stream, start, stream.latestOffset(start, ReadAllAvailable()))

    everything = [b"%d" % number for number in range(10)]
    assert from_("earliest") == everything
    assert from_("latest") == []
    assert from_(str(positions[7])) == everything[7:]
    assert from_("2020-01-01T00:00:00Z") == everything
    late = from_(datetime.datetime.now(datetime.UTC).isoformat())
    assert late == everything[-len(late) :], "the end of the log, from the beginning of a ledger"
    assert len(late) < 10, "ledgers that were closed long before are left out"
    for wrong in ("yesterday", "7:", "-1"):
        with pytest.raises(client_aio.InvalidArgumentError, match="startingPosition is earliest"):
            reader(log="starts", startingPosition=wrong)
    for wrong, said in (
        ("2999-01-01T00:00:00+01:00", "a time to come: it is"),
        ("999999999:0", "and log 'starts' ends at"),
    ):
        with pytest.raises(client_aio.InvalidArgumentError, match=said):
            from_(wrong)


def test_a_start_between_jobs_reads_the_later_jobs_only(bookies: Bookies, reader: object) -> None:
    """A job's ledgers are closed when they are listed: none was open at a later time."""
    list_job(bookies, "jobs", b"early")
    between = datetime.datetime.now(datetime.UTC) + datetime.timedelta(milliseconds=2)
    stream = reader(log="jobs", startingPosition=between.isoformat())
    assert stream.initialOffset() == reader(log="jobs", startingPosition="latest").initialOffset()
    soon = reader(
        log="jobs", startingPosition=(between + datetime.timedelta(seconds=40)).isoformat()
    ).initialOffset()
    assert records_of(stream, soon, stream.latestOffset(soon, ReadAllAvailable())) == []
    while datetime.datetime.now(datetime.UTC) <= between:
        pass
    list_job(bookies, "jobs", b"late")
    start = stream.initialOffset()
    assert records_of(stream, start, stream.latestOffset(start, ReadAllAvailable())) == [b"late"]


def list_job(bookies: Bookies, log: str, record: bytes) -> None:
    async def add() -> None:
        async with bookies.client.create_ledger(custom_metadata={"spark.log": log.encode()}) as ledger:
            await ledger.add_entry(record)
        await bookies.client.add_to_log(log, [ledger.ledger_id])

    bookies.run(add())


def test_an_offset_behind_the_end_of_the_log_is_told(bookies: Bookies, reader: object) -> None:
    """The log was set back: rows to come have lower ids, and would be passed over."""
    bookies.append("shorter", [b"0"])
    stream = reader(log="shorter")
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    beyond = {**end, "id": end["id"] + 5}
    with pytest.raises(client_aio.LogTruncatedError, match="has been set back to an earlier state"):
        stream.latestOffset(beyond, ReadAllAvailable())
    forgiving = reader(log="shorter", failOnDataLoss="false")
    assert forgiving.latestOffset(end, ReadAllAvailable()) == end


def test_a_log_that_is_empty_is_waited_for(bookies: Bookies, reader: object) -> None:
    bookies.run(bookies.client.add_to_log("not-yet", []))
    stream = reader(log="not-yet")
    start = stream.initialOffset()
    assert stream.latestOffset(start, ReadAllAvailable()) == start
    bookies.append("not-yet", [b"there"])
    end = stream.latestOffset(start, ReadAllAvailable())
    assert records_of(stream, start, end) == [b"there"]


def test_a_single_ledger_is_a_stream_too(bookies: Bookies, reader: object) -> None:
    async def make() -> client_aio.LedgerWriter:
        ledger = await bookies.client.create_ledger()
        await ledger.add_entries([b"0", b"1"])
        return ledger

    ledger = bookies.run(make())
    stream = reader(ledger=str(ledger.ledger_id))
    start = stream.initialOffset()
    for _ in range(500):  # a writer that idles says so within 20 ms
        end = stream.latestOffset(start, ReadAllAvailable())
        if end["entry"] == 2:
            break
        time.sleep(0.01)
    assert records_of(stream, start, end) == [b"0", b"1"]
    bookies.run(ledger.close())
    last = stream.latestOffset(end, ReadAllAvailable())
    assert records_of(stream, end, last) == []
    with pytest.raises(client_aio.InvalidArgumentError, match="one log, or one ledger"):
        reader(log="a,b")


def test_an_unbounded_ledger_is_followed_from_writer_to_writer(bookies: Bookies, reader: object) -> None:
    async def write(records: list[bytes]) -> None:
        async with bookies.client.open_unbounded_ledger("unbounded", fragment_bytes=50) as ledger:
            await ledger.add_entries(records)

    first, second = [b"a%d" % number for number in range(50)], [b"b%d" % number for number in range(50)]
    bookies.run(write(first))
    stream = reader(ledger="unbounded")
    start, seen = stream.initialOffset(), []
    for records in (first, second):
        if records is second:
            bookies.run(write(second))
        while len(seen) < len(first) or (records is second and len(seen) < 100):
            end = stream.latestOffset(start, ReadAllAvailable())
            seen += records_of(stream, start, end)
            start = end
    assert seen == first + second


def test_what_is_truncated_before_it_is_read_ends_the_query_or_is_passed_over(
    spark: SparkSession, bookies: Bookies, tmp_path: Path, reader: object
) -> None:
    records = [b"%d" % number for number in range(30)]
    positions = bookies.append("truncated", records, roll_entries=10)
    stream = reader(log="truncated", maxEntriesPerTrigger="5")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(5))
    assert records_of(stream, start, end) == records[:5]
    bookies.run(bookies.client.truncate_log("truncated", positions[12]))
    with pytest.raises(client_aio.LogTruncatedError, match="set failOnDataLoss to false"):
        stream.latestOffset(end, ReadAllAvailable())
    forgiving = reader(log="truncated", failOnDataLoss="false")
    assert records_of(forgiving, end, forgiving.latestOffset(end, ReadAllAvailable())) == records[12:]
    whole = reader(log="truncated")
    start = whole.initialOffset()
    assert records_of(whole, start, whole.latestOffset(start, ReadAllAvailable())) == records[12:]


def test_what_was_read_whole_may_be_truncated(bookies: Bookies, reader: object) -> None:
    positions = bookies.append("read-whole", [b"%d" % number for number in range(20)], roll_entries=10)
    stream = reader(log="read-whole", maxEntriesPerTrigger="10")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(10))
    bookies.run(bookies.client.truncate_log("read-whole", positions[10]))
    last = stream.latestOffset(end, ReadAllAvailable())
    assert records_of(stream, end, last) == [b"%d" % number for number in range(10, 20)]


def test_a_query_on_a_truncated_log_says_so(spark: SparkSession, bookies: Bookies, tmp_path: Path) -> None:
    records = [b"%d" % number for number in range(30)]
    positions = bookies.append("gone", records, roll_entries=10)
    query = collect(spark, bookies, tmp_path, "gone_1", log="gone", startingPosition=str(positions[3]))
    query.awaitTermination(60)
    assert values(spark, "gone_1") == records[3:]
    bookies.run(bookies.client.truncate_log("gone", positions[25]))
    query = collect(
        spark, bookies, tmp_path / "new", "gone_2", log="gone", startingPosition=str(positions[3])
    )
    with pytest.raises(StreamingQueryException, match="has been truncated before that"):
        query.awaitTermination(60)


def test_a_micro_batch_without_partitions_is_committed(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    """All of a ledger had been read when it was closed: the offset moves on, and there is nothing to read."""

    def copy() -> None:
        frame = spark.readStream.format("ledger").options(
            metadata=bookies.uri, log="halting", columns="value"
        )
        query = (
            frame.load()
            .writeStream.format("ledger")
            .options(metadata=bookies.uri, log="halting-copy", checkpointLocation=str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    writer = bookies.run(bookies.open_log("halting"))
    bookies.run(writer_append(writer, b"1"))
    copy()
    bookies.run(writer.close())
    copy()
    bookies.append("halting", [b"2"])
    copy()
    assert bookies.records("halting-copy") == [b"1", b"2"]


def test_update_mode_ends_the_query_before_rows_are_written(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    """As docs/SPARK.md says; Spark asks a sink in Python about no mode at `start()`."""
    bookies.append("updated", [b"1"])
    counts = spark.readStream.format("ledger").options(metadata=bookies.uri, log="updated").load()
    writer = counts.groupBy("value").count().writeStream.outputMode("update").format("ledger")
    writer = writer.options(metadata=bookies.uri, log="updates", checkpointLocation=str(tmp_path))
    query = writer.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        query.awaitTermination(60)
    assert bookies.ledgers_of("updates") == (set(), set())
