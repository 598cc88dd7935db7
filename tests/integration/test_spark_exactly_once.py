"""Attempts that fail, batches that are replayed, drivers that die: every row is in the log exactly once."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

import client_aio
from client_aio.spark import commits, ledger_sink, sweep_orphans
from client_aio.spark.options import parse_write
from client_aio.spark.provenance import Written
from client_aio.spark.write_task import Job
from tests.support.sparkfaults import (
    die_at_the_first_attempt,
    fail_always_after,
    fail_first_attempts,
    wait_for,
)
from tests.support.sparksession import read, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from tests.support.sparksession import Bookies

ROWS = 400


def numbers(spark: SparkSession, partitions: int = 6) -> DataFrame:
    frame = spark.range(0, ROWS, 1, partitions)
    return frame.select(F.col("id").cast("string").cast("binary").alias("value"))


@pytest.mark.parametrize("fault", [fail_first_attempts, die_at_the_first_attempt])
def test_attempts_that_fail_leave_nothing_and_double_nothing(
    spark: SparkSession, bookies: Bookies, fault: object
) -> None:
    log = f"faulty-{fault.__name__}"
    write(numbers(spark).mapInArrow(fault, "value binary"), bookies.uri, log=log)
    assert Counter(bookies.records(log)) == Counter(b"%d" % number for number in range(ROWS))
    assert bookies.leftovers(log) == set(), "the commit and the failed attempts have deleted what these wrote"


def test_a_job_that_fails_leaves_nothing_of_what_its_tasks_had_written(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    flag = tmp_path / "the others are written"
    written: set[int] = set()

    async def closed() -> set[int]:
        found = set()
        async for ledger_id in bookies.client.list_ledgers():
            with contextlib.suppress(client_aio.NoSuchLedgerError):
                metadata = await bookies.client.ledger_metadata(ledger_id)
                if metadata.is_closed and metadata.custom.get("spark.log") == b"failed":
                    found.add(ledger_id)
        return found

    def watch() -> None:
        try:
            for _ in range(1200):
                written.update(bookies.run(closed()))
                if len(written) == 5:
                    break
                time.sleep(0.05)
        finally:
            flag.touch()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        frame = numbers(spark).mapInArrow(fail_always_after(str(flag)), "value binary")
        with pytest.raises(PySparkException, match="always"):
            write(frame, bookies.uri, log="failed")
    finally:
        watching.join()
    listed, left = bookies.ledgers_of("failed")
    assert len(written) == 5
    assert (listed, left & written) == (set(), set()), "nothing is visible, and the abort has deleted it"
    assert bookies.leftovers("failed") == set(), "the attempts that failed have deleted what they wrote"


def test_a_bookie_that_dies_in_mid_job_stops_nothing(spark: SparkSession, bookies: Bookies) -> None:
    lost = bookies.cluster["b2"]
    flag = lost.log.with_suffix(".dead")
    large = spark.range(0, 8000, 1, 2).select(F.expr("cast(lpad(id, 1000, '0') as binary)").alias("value"))
    frame = large.mapInArrow(wait_for(str(flag), 2000), "value binary")

    was_killed_between: list[bool] = []

    def kill() -> None:
        try:
            for _ in range(600):
                if len(bookies.ledgers_of("bookie-lost")[1]) == 2:
                    was_killed_between.append(True)
                    break
                time.sleep(0.05)
            bookies.run(lost.kill())
        finally:
            flag.touch()

    killing = threading.Thread(target=kill)
    killing.start()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")  # else a task waits for 10,000 rows
    try:
        write(frame, bookies.uri, log="bookie-lost")
    finally:
        killing.join()
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        bookies.run(lost.start())
    assert was_killed_between, (
        "both tasks have a ledger that is not listed yet, and wait for the bookie to die"
    )
    assert Counter(bookies.records("bookie-lost")) == Counter(b"%01000d" % number for number in range(8000))


# --- foreachPartition ---


def test_partitions_are_written_by_a_function_and_added_when_complete(
    spark: SparkSession, bookies: Bookies
) -> None:
    sink = ledger_sink(bookies.uri, log="foreach", value="payload")
    frame = numbers(spark).withColumnRenamed("value", "payload").withColumn("other", F.lit(1))
    frame.foreachPartition(sink)
    spark.sparkContext.parallelize([b"a", b"b"], 2).foreachPartition(ledger_sink(bookies.uri, log="foreach"))
    numbers(spark).where("value is null").foreachPartition(ledger_sink(bookies.uri, log="foreach"))
    expected = Counter(b"%d" % number for number in range(ROWS)) + Counter([b"a", b"b"])
    assert Counter(bookies.records("foreach")) == expected
    assert bookies.ledgers_of("foreach")[1] == set()


def test_bytes_are_not_added_to_a_log_of_columns(spark: SparkSession, bookies: Bookies) -> None:
    """Its readers would take them for rows, and fail at them for ever."""
    options = {"metadata": bookies.uri, "log": "foreach-columns", "encoding": "arrow"}
    frame = spark.range(3)
    frame.write.format("ledger").options(**options).mode("append").save()
    with pytest.raises(client_aio.InvalidArgumentError, match="encoding binary, in the log arrow"):
        ledger_sink(bookies.uri, log="foreach-columns")([b"no row"])
    read = spark.read.format("ledger").options(metadata=bookies.uri, log="foreach-columns").load()
    assert sorted(row.id for row in read.collect()) == [0, 1, 2]


def test_a_partition_whose_attempt_fails_is_written_once(spark: SparkSession, bookies: Bookies) -> None:
    sink = ledger_sink(bookies.uri, log="foreach-faulty")
    numbers(spark).mapInArrow(fail_first_attempts, "value binary").foreachPartition(sink)
    assert Counter(bookies.records("foreach-faulty")) == Counter(b"%d" % number for number in range(ROWS))
    assert bookies.leftovers("foreach-faulty") == set()


@pytest.mark.parametrize(
    ("rows", "value", "said"),
    [
        ([b"x", None], None, "row 1 of the partition has None"),
        (["text"], None, "has 'text', where there must be bytes"),
        ([(1, 2)], None, r"a row of 2 columns, where there must be bytes: name the column"),
        ([{"payload": 7}], "payload", "has 7 in column 'payload'"),
        ([bytes(5_000_000)], None, "row 0 of the partition has 5,000,000 bytes"),
    ],
)
def test_a_row_that_is_not_bytes_is_named(bookies: Bookies, rows: list, value: str | None, said: str) -> None:
    with pytest.raises(client_aio.InvalidArgumentError, match=said):
        ledger_sink(bookies.uri, log="refused", value=value)(rows)
    assert bookies.ledgers_of("refused") == (set(), set())


# --- micro-batches ---


def run_batches(
    spark: SparkSession, bookies: Bookies, folder: Path, source: str, log: str, **options: str
) -> StreamingQuery:
    """Copy a log to another one by a streaming query, up to what there is now."""
    frame = (
        spark.readStream.format("ledger")
        .option("metadata", bookies.uri)
        .options(log=source, columns="value", maxEntriesPerTrigger="150", **options)
        .load()
    )
    query = (
        frame.mapInArrow(fail_first_attempts, "value binary")
        .writeStream.format("ledger")
        .option("metadata", bookies.uri)
        .option("log", log)
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert query.exception() is None
    return query


def test_micro_batches_are_in_the_log_once_though_replayed(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    records = [b"%d" % number for number in range(450)]
    bookies.append("stream-in", records[:250], roll_entries=80)
    run_batches(spark, bookies, tmp_path, "stream-in", "stream-out")
    assert Counter(bookies.records("stream-out")) == Counter(records[:250])
    bookies.append("stream-in", records[250:], roll_entries=80)
    # The driver dies after the log's compare-and-set and before Spark notes the commit: Spark replays.
    forget_newest(tmp_path / "commits")
    run_batches(spark, bookies, tmp_path, "stream-in", "stream-out")
    assert Counter(bookies.records("stream-out")) == Counter(records)
    assert bookies.leftovers("stream-out") == set(), "what was replayed or failed is deleted"


def forget_newest(folder: Path) -> None:
    newest = max(folder.glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)


def test_other_rows_under_the_number_of_a_recorded_batch_are_not_dropped(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    """A checkpoint copied before the batch plans it anew, with the rows that have come meanwhile."""
    bookies.append("planned-in", [b"1"])
    run_batches(spark, bookies, tmp_path, "planned-in", "planned-out")
    shutil.copytree(tmp_path, tmp_path.with_suffix(".copy"))
    bookies.append("planned-in", [b"2"])
    run_batches(spark, bookies, tmp_path, "planned-in", "planned-out")
    bookies.append("planned-in", [b"3"])
    with pytest.raises(PySparkException, match=r"other records under .* checkpoint is older than the log"):
        run_batches(spark, bookies, tmp_path.with_suffix(".copy"), "planned-in", "planned-out")
    assert Counter(bookies.records("planned-out")) == Counter([b"1", b"2"]), "refused, and not half written"
    assert bookies.leftovers("planned-out") == set()
    run_batches(spark, bookies, tmp_path, "planned-in", "planned-out")
    assert Counter(bookies.records("planned-out")) == Counter([b"1", b"2", b"3"]), "the newest one goes on"


def test_a_stream_of_columns_comes_back_typed(spark: SparkSession, bookies: Bookies, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(number, f"word {number}") for number in range(50)], "n int, word string")
    write(frame, bookies.uri, log="typed-in")
    source = (
        spark.readStream.format("ledger").option("metadata", bookies.uri).option("log", "typed-in").load()
    )
    assert source.schema.simpleString() == "struct<n:int,word:string>"
    query = (
        source.where("n % 2 = 0")
        .writeStream.format("ledger")
        .options(metadata=bookies.uri, log="typed-out", checkpointLocation=str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    assert query.exception() is None
    rows = read(spark, bookies.uri, log="typed-out").collect()
    assert sorted(tuple(row) for row in rows) == [(n, f"word {n}") for n in range(0, 50, 2)]


# --- what a dead driver leaves ---


def job(bookies: Bookies, log: str, job_id: str, batch_id: int | None = None) -> Job:
    options = parse_write({"metadata": bookies.uri, "log": log})
    return Job(options, Written(), job_id, batch_id, "value", ())


def leave(bookies: Bookies, job_: Job, *, close: bool = True) -> int:
    """Make a ledger as a task does, and hand it to nobody."""

    async def make() -> int:
        ledger = await bookies.client.create_ledger(custom_metadata=job_.custom())
        await ledger.add_entry(b"left over")
        await (ledger.close() if close else ledger.abort())
        return ledger.ledger_id

    return bookies.run(make())


def test_the_sweep_finds_what_dead_drivers_left_and_nothing_else(bookies: Bookies) -> None:
    dead = job(bookies, "swept", "dead")
    left = {leave(bookies, dead), leave(bookies, dead, close=False)}
    kept = leave(bookies, job(bookies, "swept", "done"))
    bookies.run(bookies.client.add_to_log("swept", [kept]))
    others = leave(bookies, job(bookies, "another", "dead"))
    assert bookies.run(sweep_orphans(bookies.uri, log="swept", grace_s=3600)) == [], "they are too young"
    assert set(bookies.run(sweep_orphans(bookies.uri, log="swept", grace_s=0))) == left
    assert bookies.ledgers_of("swept") == ({kept}, set())
    assert bookies.ledgers_of("another") == (set(), {others})
    assert bookies.records("swept") == [b"left over"]


def test_a_ledger_that_a_sweep_has_condemned_can_be_committed_by_nobody(bookies: Bookies) -> None:
    slow = job(bookies, "condemned", "slow")
    ledger_id = leave(bookies, slow)

    async def condemn() -> None:
        await commits.condemn(bookies.client, ledger_id)

    bookies.run(condemn())
    with pytest.raises(client_aio.BookKeeperError, match="condemned"):
        bookies.run(commits.commit(slow, [ledger_id], replace=False, floor=0))


def test_a_commit_deletes_the_leftovers_of_its_own_job_only(bookies: Bookies) -> None:
    first, second = job(bookies, "query", "q", 6), job(bookies, "query", "q", 7)
    other = job(bookies, "query", "other", 6)
    committed, dead, later, foreign = (leave(bookies, each) for each in (first, first, second, other))
    assert bookies.run(commits.commit(first, [committed], replace=False))
    assert bookies.ledgers_of("query") == ({committed}, {later, foreign})
    replayed = leave(bookies, first)
    assert not bookies.run(commits.commit(first, [replayed], replace=False)), "the batch was committed before"
    assert bookies.ledgers_of("query") == ({committed}, {later, foreign})
    assert dead != replayed


def test_an_older_batch_than_the_recorded_one_is_refused_and_not_dropped(bookies: Bookies) -> None:
    """A checkpoint restored from a copy runs old batch numbers again, perhaps with other rows."""
    third, first = job(bookies, "set-back", "q", 3), job(bookies, "set-back", "q", 1)
    kept = leave(bookies, third)
    assert bookies.run(commits.commit(third, [kept], replace=False))
    old = leave(bookies, first)
    with pytest.raises(commits.StaleCheckpointError, match=r"batch 1 of query 'q' is not added: .* batch 3"):
        bookies.run(commits.commit(first, [old], replace=False, floor=0))
    assert bookies.ledgers_of("set-back") == ({kept}, set()), "the refused batch leaves nothing"
    assert not bookies.run(commits.commit(third, [leave(bookies, third)], replace=False))
    other = replace(third, content="1:00")
    with pytest.raises(commits.StaleCheckpointError, match="other records under that number"):
        bookies.run(commits.commit(other, [leave(bookies, third)], replace=False))
    dropped = replace(other, options=replace(other.options, if_replayed="drop"))
    assert not bookies.run(commits.commit(dropped, [leave(bookies, third)], replace=False))
    assert bookies.ledgers_of("set-back") == ({kept}, set())
