"""A large frame into a log while attempts fail, tasks are speculated on, a bookie dies; then read it back.

    python -m benchmarks.spark_exactly_once [--rows 2000000] [--fail 0.2] [--local]

A standalone cluster of one master and two workers, four bookies, a real ZooKeeper (--local: local[2] and the
embedded store). Every attempt of a task fails with the given probability at a random place. The last task's
first attempt crawls, so that Spark starts a second one beside it. One bookie is killed. The rows read back
must be the same multiset, and after the sweep no ledger may be left over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.running import Workplace
from benchmarks.spark_cluster import SparkCluster
from tests.support.sparksession import Bookies, read, start_spark, write
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

LOG = "exactly-once"
_KILL_TIMEOUT_S = 300.0


def misbehave(
    fail: float, last: int, seed: int, crawl_s: float
) -> Callable[[Iterable[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """Return a task's treatment of its rows: pass them on, crawl or fail."""

    def run(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        chance = random.Random(f"{seed}-{task.partitionId()}-{task.attemptNumber()}")
        fails_after = chance.randrange(3) if chance.random() < fail else None
        crawls = task.attemptNumber() == 0 and task.partitionId() == last
        number = -1
        for number, batch in enumerate(batches):
            if number == fails_after:
                raise RuntimeError("this attempt was made to fail")
            yield batch
            if crawls:
                time.sleep(crawl_s)
        if fails_after is not None and number < fails_after:
            raise RuntimeError("this attempt was made to fail behind its last row")

    return run


def rows_of(spark: SparkSession, rows: int, partitions: int, size: int = 100) -> DataFrame:
    """Return rows that differ."""
    text = f"cast(lpad(cast(id as string), {size}, '.') as binary) as value"
    return spark.range(0, rows, 1, partitions).selectExpr(text)


def multiset(frame: DataFrame) -> tuple[int, int, int, int]:
    """Return rows, distinct rows, the largest multiplicity, and a sum over hashes."""
    counted = frame.groupBy("value").count()
    row = counted.selectExpr(
        "sum(count) as rows", "count(*) as differing", "max(count) as most",
        "sum(cast(xxhash64(value) as decimal(38,0)) * count) as hashes",
    ).collect()[0]  # fmt: skip
    return int(row.rows), int(row.differing), int(row.most), int(row.hashes)


def attempts(spark: SparkSession) -> str:
    """Return how many attempts failed, and how many were second ones beside a slow one."""
    store = spark.sparkContext._jsc.sc().statusStore()
    no_quantiles = spark.sparkContext._gateway.new_array(spark._jvm.double, 0)
    stages = store.stageList(None, False, False, no_quantiles, None)
    failed = speculative = 0
    for index in range(stages.size()):
        stage = stages.apply(index)
        failed += stage.numFailedTasks()
        tasks = store.taskList(stage.stageId(), stage.attemptId(), 10_000)
        speculative += sum(tasks.apply(number).speculative() for number in range(tasks.size()))
    return f"{failed} attempts failed, {speculative} were speculative"


def kill_in_the_middle(bookies: Bookies, ledgers: int) -> threading.Thread:
    """Kill a bookie once tasks have made so many ledgers."""

    def kill() -> None:
        begin = time.monotonic()
        while sum(map(len, bookies.ledgers_of(LOG))) < ledgers:
            if time.monotonic() > begin + _KILL_TIMEOUT_S:
                print(f"no {ledgers} ledgers were made: no bookie is killed", flush=True)
                return
            time.sleep(0.1)
        bookies.run(bookies.cluster["b2"].kill())
        print(f"bookie b2 killed after {time.monotonic() - begin:.1f} s, at {ledgers} ledgers", flush=True)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--partitions", type=int, default=40)
    parser.add_argument("--fail", type=float, default=0.2)
    parser.add_argument("--crawl", type=float, default=10.0, help="seconds that a slow attempt adds")
    parser.add_argument("--encoding", default="binary")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--local", action="store_true")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, load {os.getloadavg()[0]:.1f}")
    with Workplace(None, "spark-exactly-") as place, ExitStack() as stack:
        uri = None
        master, settings = "local[2,20]", {}
        if not arguments.local:
            zookeeper = stack.enter_context(ZooKeeperServer(place.path / "zookeeper"))
            uri = f"zk://{zookeeper.address}/ledgers"
            cluster = stack.enter_context(SparkCluster(place.path))
            master, settings = cluster.master, cluster.settings
        bookies = stack.enter_context(Bookies(place.path, bookies=4, uri=uri))
        spark = start_spark(
            master, place.path,
            **settings,
            **{
                "spark.task.maxFailures": "20",
                "spark.speculation": "true",
                "spark.speculation.quantile": "0.5",
                "spark.speculation.multiplier": "1.5",
                "spark.speculation.interval": "200ms",
                "spark.speculation.efficiency.enabled": "false",
            },
        )  # fmt: skip
        stack.callback(spark.stop)
        return check(spark, bookies, arguments)


def check(spark: SparkSession, bookies: Bookies, arguments: argparse.Namespace) -> int:
    """Write, read back, sweep, and compare."""
    from client_aio.spark import sweep_orphans

    frame = rows_of(spark, arguments.rows, arguments.partitions)
    faulty = frame.mapInArrow(
        misbehave(arguments.fail, arguments.partitions - 1, arguments.seed, arguments.crawl), "value binary"
    )
    killing = kill_in_the_middle(bookies, arguments.partitions // 4)
    start = time.perf_counter()
    write(faulty, bookies.uri, log=LOG, encoding=arguments.encoding)
    taken = time.perf_counter() - start
    killing.join()
    print(f"{arguments.rows:,} rows written in {taken:.1f} s; {attempts(spark)}")
    found, wanted = multiset(read(spark, bookies.uri, log=LOG, columns="value")), multiset(frame)
    listed, left = bookies.ledgers_of(LOG)
    swept = asyncio.run(sweep_orphans(bookies.uri, log=LOG, grace_s=0))
    left_after = bookies.ledgers_of(LOG)[1]
    print(f"read back: {found[0]:,} rows, {found[1]:,} differing, none more often than {found[2]} times")
    print(f"{len(listed)} ledgers listed; {len(left)} left over after the commit, {len(swept)} swept")
    is_good = found == wanted and not left_after
    print(
        "EQUAL, and no ledger is left over"
        if is_good
        else f"DIFFERENT: {found} is not {wanted}, {left_after}"
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
