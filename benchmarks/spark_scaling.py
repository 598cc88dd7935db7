"""Scaling of reads: one executor and two, over four ledgers on four bookies.

    python -m benchmarks.spark_scaling [--rows 4000000] [--rounds 3] [--share 0.5]

A standalone cluster of one master and two workers of one core each. Each ledger has one copy (1/1/1), so its
entries come from one bookie. The rounds alternate between a session of one executor and one of two.

Measures twice. The first measurement is without limits, and reports the use of the machine's processors. An
executor's JVM, its Python and the bookies work at the same time. One executor alone therefore keeps more than
one processor busy, and on two processors a second executor gains little.

The second measurement uses control groups. They limit each executor (JVM and Python together) to a share of a
processor, and all bookies together to one processor. Executors and bookies then fit into the machine, and a
weight gives them this share before other work. The result shows whether the data source lets two executors
read twice as fast as one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cpu_groups import CpuGroup
from benchmarks.running import Workplace
from benchmarks.spark_cluster import SparkCluster
from benchmarks.watching import cpu_seconds
from tests.support.sparksession import Bookies, read, start_spark, write

if TYPE_CHECKING:
    from pathlib import Path

LOG = "scaling"


def processor_seconds() -> tuple[float, float]:
    """Return the processors' busy and idle time since the machine started, in seconds."""
    with open("/proc/stat") as stat:
        user, nice, system, idle, waiting, *rest = map(int, stat.readline().split()[1:])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + sum(rest[:3])) / tick, (idle + waiting) / tick


@dataclass
class Use:
    """Processor time so far, in seconds."""

    busy: float
    idle: float
    executors: float | None
    bookies: float

    def since(self, before: Use, seconds: float) -> str:
        """Return how much was in use since then."""
        busy, idle = self.busy - before.busy, self.idle - before.idle
        parts = [f"{busy / max(0.01, busy + idle):.0%} of the machine in use"]
        if self.executors is not None and before.executors is not None:
            parts.append(f"executors {(self.executors - before.executors) / seconds:.2f} processors")
        parts.append(f"bookies {(self.bookies - before.bookies) / seconds:.2f}")
        return ", ".join(parts)


@dataclass
class Bench:
    """The measured cluster, and its reads."""

    cluster: SparkCluster
    bookies: Bookies
    groups: list[CpuGroup]
    """Of each worker, with its executor; and of the bookies. Empty where there are none."""
    place: Path
    rows: int

    def use(self) -> Use:
        """Read the counters."""
        busy, idle = processor_seconds()
        executors = sum(group.seconds() for group in self.groups[:-1]) if self.groups else None
        pids = [bookie.pid for bookie in self.bookies.cluster.bookies.values()]
        return Use(busy, idle, executors, sum(map(cpu_seconds, pids)))

    def limit(self, share: float | None) -> None:
        """Limit each executor to that share of a processor, and the bookies to one; None for no limit."""
        for group in self.groups[:-1]:
            group.limit(share)
        for group in self.groups[-1:]:
            group.limit(None if share is None else 1.0)

    def measure(self, executors: int, share: float | None) -> tuple[float, str]:
        """Read everything with that many executors; returns the seconds, and the processor use meanwhile."""
        spark = start_spark(
            self.cluster.master, self.place, **self.cluster.settings,
            **{"spark.cores.max": str(executors), "spark.executor.instances": str(executors)},
        )  # fmt: skip
        try:
            frame = read(spark, self.bookies.uri, log=LOG, columns="value")
            frame.limit(10).collect()  # the executors and their Python are up
            spark.range(0, 100, 1, 2 * executors).mapInArrow(lambda batches: batches, "id long").count()
            for _ in range(executors):  # and each has compiled its code, over as many rows
                frame.write.format("noop").mode("overwrite").save()
            self.limit(share)
            before, start = self.use(), time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            taken = time.perf_counter() - start
            return taken, self.use().since(before, taken)
        finally:
            self.limit(None)
            spark.stop()

    def compare(self, rounds: int, share: float | None) -> None:
        """Measure one executor and two, in turns, and print the best of each."""
        best = {1: float("inf"), 2: float("inf")}
        for _ in range(rounds):
            for executors in best:
                taken, used = self.measure(executors, share)
                best[executors] = min(best[executors], taken)
                rate = self.rows / taken
                print(f"{executors} executor(s): {taken:6.2f} s, {rate:>9,.0f} rows/s; {used}", flush=True)
        print(f"two executors take {best[2] / best[1]:.0%} of the time of one; load {os.getloadavg()[0]:.1f}")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.5, help="of a processor, for each executor")
    arguments = parser.parse_args()
    with Workplace(None, "spark-scaling-") as place, ExitStack() as stack:
        why_not = CpuGroup.why_not()
        groups = []
        if why_not is None:
            names = ("worker-0", "worker-1", "bookies")
            groups = [stack.enter_context(CpuGroup(name)) for name in names]
        cluster = stack.enter_context(SparkCluster(place.path, groups=groups[:-1]))
        bookies = stack.enter_context(Bookies(place.path, bookies=4))
        for group in groups[-1:]:
            for bookie in bookies.cluster.bookies.values():
                group.take(bookie.pid)
        spark = start_spark(cluster.master, place.path, **cluster.settings)
        frame = spark.range(0, arguments.rows, 1, 4)
        frame = frame.selectExpr("cast(lpad(cast(id as string), 100, '.') as binary) as value")
        sizes = {"ensembleSize": "1", "writeQuorum": "1", "ackQuorum": "1"}
        write(frame, bookies.uri, log=LOG, **sizes)
        spark.stop()
        bench = Bench(cluster, bookies, groups, place.path, arguments.rows)
        print(f"as it is; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        bench.compare(arguments.rounds, None)
        if why_not is not None:
            print(f"not measured with executors held to a share of a processor: {why_not}")
            return 0
        print(
            f"each executor held to {arguments.share:.2f} of a processor (cpu.cfs_quota_us), the bookies to 1"
        )
        bench.compare(arguments.rounds, arguments.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
