"""A streaming query from log to log: its driver killed again and again, or a bookie and many rolls under way.

    python -m benchmarks.spark_streaming kills    [--batches 50] [--kills 5]
    python -m benchmarks.spark_streaming pipeline [--seconds 300] [--rolls 20]

`kills`: the driver is a process of its own (its JVM with it). It is killed with SIGKILL at random moments and
started again from its checkpoint, until all micro-batches are through. `pipeline`: a writer appends to the
source log and rolls it, while the query runs and a bookie is killed. Both compare the target log with the
source log: every row exactly once, transformed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import ROOT
from benchmarks.running import Workplace
from tests.support.sparksession import Bookies, start_spark
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

SOURCE, TARGET = "stream-source", "stream-target"


def start_query(
    spark: SparkSession, uri: str, checkpoint: Path, entries: int, *, available_now: bool
) -> StreamingQuery:
    """Copy a log to another one, every record marked by the way."""
    frame = (
        spark.readStream.format("ledger")
        .options(metadata=uri, log=SOURCE, columns="value", maxEntriesPerTrigger=entries)
        .load()
    )
    marked = frame.selectExpr("cast(concat('seen ', cast(value as string)) as binary) as value")
    writer = marked.writeStream.format("ledger").options(
        metadata=uri, log=TARGET, checkpointLocation=str(checkpoint)
    )
    trigger = (
        writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
    )
    return trigger.start()


def compare(bookies: Bookies, expected: Iterable[bytes]) -> bool:
    """Compare the target log with what should be in it, as multisets."""
    wanted = Counter(b"seen " + record for record in expected)
    found = Counter(bookies.records(TARGET))
    lost, more = sum((wanted - found).values()), sum((found - wanted).values())
    print(f"target: {sum(found.values()):,} rows; {lost:,} lost, {more:,} too many")
    return not lost and not more


def drive(uri: str, checkpoint: Path, entries: int) -> int:
    """Be the driver that is killed: run the query up to the end of the source."""
    spark = start_spark("local[2]", checkpoint.parent)
    query = start_query(spark, uri, checkpoint, entries, available_now=True)
    query.awaitTermination()
    spark.stop()
    return 0


def kills(arguments: argparse.Namespace) -> int:
    """Kill the driver at random moments, and start it again from its checkpoint."""
    rows, per_batch = arguments.batches * arguments.entries, arguments.entries
    chance = random.Random(arguments.seed)
    with (
        Workplace(None, "spark-kills-") as place,
        ZooKeeperServer(place.path / "zookeeper") as zookeeper,
        Bookies(place.path, bookies=3, uri=f"zk://{zookeeper.address}/ledgers") as bookies,
    ):
        records = [b"%d" % number for number in range(rows)]
        fill(bookies, records)
        checkpoint = place.path / "checkpoint"
        left, code, starts = arguments.kills, -1, 0
        begin = time.perf_counter()
        while code != 0:
            starts += 1
            driver = start_driver(bookies.uri, checkpoint, per_batch, place.path)
            if left:
                wait_for_batches(
                    checkpoint, chance.randrange(1, 1 + arguments.batches // arguments.kills), driver
                )
                time.sleep(chance.random() * 2)
                os.killpg(driver.pid, signal.SIGKILL)
                left -= 1
            code = driver.wait()
            print(
                f"driver {starts}: ended with {code}; {committed(checkpoint)} micro-batches committed",
                flush=True,
            )
            if code > 0:
                print((place.path / "driver.log").read_text()[-3000:])
                return 1
        taken = time.perf_counter() - begin
        print(
            f"{committed(checkpoint)} micro-batches in {taken:.0f} s, driver killed {arguments.kills} times"
        )
        is_good = compare(bookies, records)
        print(f"left over: {len(bookies.ledgers_of(TARGET)[1])} ledgers; load {os.getloadavg()[0]:.1f}")
        print("EXACTLY ONCE" if is_good else "NOT EXACTLY ONCE")
        return 0 if is_good else 1


def start_driver(uri: str, checkpoint: Path, entries: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the driver with its JVM in a process group of their own."""
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_streaming", "drive", uri, str(checkpoint), str(entries)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def committed(checkpoint: Path) -> int:
    """Count the micro-batches that Spark has noted as committed."""
    return len([path for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal()])


def wait_for_batches(checkpoint: Path, more: int, driver: subprocess.Popen[bytes]) -> None:
    """Wait until so many further micro-batches are committed, or the driver has ended."""
    goal = committed(checkpoint) + more
    while committed(checkpoint) < goal and driver.poll() is None:
        time.sleep(0.05)


def fill(bookies: Bookies, records: list[bytes]) -> None:
    """Write the source log, in several ledgers."""

    async def write() -> None:
        async with bookies.client.open_log(SOURCE, roll_entries=len(records) // 7 + 1) as log:
            for record in records:
                log.append(record)
                await log.drain()

    bookies.run(write())


def pipeline(arguments: argparse.Namespace) -> int:
    """Run the query while the source grows and rolls and a bookie dies."""
    with (
        Workplace(None, "spark-pipeline-") as place,
        ZooKeeperServer(place.path / "zookeeper") as zookeeper,
        Bookies(place.path, bookies=4, uri=f"zk://{zookeeper.address}/ledgers") as bookies,
    ):
        bookies.run(bookies.client.add_to_log(SOURCE, []))
        spark = start_spark("local[2]", place.path)
        query = start_query(spark, bookies.uri, place.path / "checkpoint", 200_000, available_now=False)
        try:
            writing = bookies.start(grow(bookies, arguments.seconds, arguments.rolls, arguments.rate))
            time.sleep(arguments.seconds / 2)
            bookies.run(bookies.cluster["b2"].kill())
            print("bookie b2 killed", flush=True)
            written, rolls = writing.result(arguments.seconds + 120)
            query.processAllAvailable()
            batches = query.lastProgress["batchId"] + 1
        finally:
            query.stop()
            spark.stop()
        print(
            f"source: {written:,} rows in {arguments.seconds} s, rolled {rolls} times; "
            f"{batches} micro-batches"
        )
        is_good = compare(bookies, (b"%d" % number for number in range(written)))
        print(f"load {os.getloadavg()[0]:.1f}")
        print("EQUAL" if is_good else "DIFFERENT")
        return 0 if is_good else 1


async def grow(bookies: Bookies, seconds: float, rolls: int, rate: int) -> tuple[int, int]:
    """Append records at a steady rate, and roll evenly over the time."""
    loop = asyncio.get_running_loop()
    number = 0
    async with bookies.client.open_log(SOURCE) as log:
        begin = loop.time()
        while (passed := loop.time() - begin) < seconds:
            for _ in range(rate // 10):
                log.append(b"%d" % number)
                number += 1
            await log.drain()
            if log.rolls < int(passed / seconds * (rolls + 1)):
                await log.roll()
            await asyncio.sleep(0.1)
        await log.flush()
        return number, log.rolls


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_subparsers(dest="what", required=True)
    killing = what.add_parser("kills")
    killing.add_argument("--batches", type=int, default=50)
    killing.add_argument("--entries", type=int, default=1000, help="per micro-batch")
    killing.add_argument("--kills", type=int, default=5)
    killing.add_argument("--seed", type=int, default=random.randrange(10**6))
    flowing = what.add_parser("pipeline")
    flowing.add_argument("--seconds", type=float, default=300)
    flowing.add_argument("--rolls", type=int, default=20)
    flowing.add_argument("--rate", type=int, default=5000, help="rows per second")
    driving = what.add_parser("drive")
    driving.add_argument("uri")
    driving.add_argument("checkpoint", type=Path)
    driving.add_argument("entries", type=int)
    arguments = parser.parse_args()
    if arguments.what == "drive":
        return drive(arguments.uri, arguments.checkpoint, arguments.entries)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    return kills(arguments) if arguments.what == "kills" else pipeline(arguments)


if __name__ == "__main__":
    sys.exit(main())
