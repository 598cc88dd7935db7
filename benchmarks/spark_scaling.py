"""Whether reading scales: one executor and two, over four ledgers on four bookies.

    python -m benchmarks.spark_scaling [--rows 4000000] [--rounds 3]

A standalone cluster of one master and two workers of one core each. Each ledger has one copy (1/1/1), so its
entries come from one bookie. The rounds alternate between a session of one executor and one of two. Beside
the times stands how much of the machine's processors was in use: where bookies, executors and drivers share
two cores that are busy already, a second executor has nothing to gain.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.running import Workplace
from benchmarks.spark_cluster import SparkCluster
from tests.support.sparksession import Bookies, read, start_spark, write

if TYPE_CHECKING:
    from pathlib import Path

LOG = "scaling"


def processor_seconds() -> tuple[float, float]:
    """Give the processors' busy and idle time since the machine started, in seconds."""
    with open("/proc/stat") as stat:
        user, nice, system, idle, waiting, *rest = map(int, stat.readline().split()[1:])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(rest[:3])) / tick, (idle + waiting) / tick


def measure(
    master: str, settings: dict[str, str], place: Path, uri: str, executors: int
) -> tuple[float, float]:
    """Read everything with that many executors; gives the seconds, and the share of processors in use."""
    spark = start_spark(
        master, place, **settings,
        **{"spark.cores.max": str(executors), "spark.executor.instances": str(executors)},
    )  # fmt: skip
    try:
        frame = read(spark, uri, log=LOG, columns="value")
        frame.limit(10).collect()  # the executors and their Python are up
        spark.range(0, 100, 1, 2 * executors).mapInArrow(lambda batches: batches, "id long").count()
        busy, idle = processor_seconds()
        start = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        taken = time.perf_counter() - start
        busy_after, idle_after = processor_seconds()
        used = (busy_after - busy) / max(0.01, busy_after - busy + idle_after - idle)
        return taken, used
    finally:
        spark.stop()


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with Workplace(None, "spark-scaling-") as place, ExitStack() as stack:
        cluster = stack.enter_context(SparkCluster(place.path))
        bookies = stack.enter_context(Bookies(place.path, bookies=4))
        spark = start_spark(cluster.master, place.path, **cluster.settings)
        frame = spark.range(0, arguments.rows, 1, 4)
        frame = frame.selectExpr("cast(lpad(cast(id as string), 100, '.') as binary) as value")
        sizes = {"ensembleSize": "1", "writeQuorum": "1", "ackQuorum": "1"}
        write(frame, bookies.uri, log=LOG, **sizes)
        spark.stop()
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        best = {1: float("inf"), 2: float("inf")}
        for _ in range(arguments.rounds):
            for executors in best:
                taken, used = measure(cluster.master, cluster.settings, place.path, bookies.uri, executors)
                best[executors] = min(best[executors], taken)
                print(
                    f"{executors} executor(s): {taken:6.2f} s, {arguments.rows / taken:>10,.0f} rows/s, "
                    f"{used:.0%} of the processors in use",
                    flush=True,
                )
        print(f"two executors take {best[2] / best[1]:.0%} of the time of one; load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
