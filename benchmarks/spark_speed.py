"""The speed of Spark's reads and writes of logs, beside a source that invents rows and a sink that drops any.

    python -m benchmarks.spark_speed [--rows 2000000] [--bytes 100] [--rounds 3]

One session in local[2], bookies on the same machine, embedded metadata store. Each round runs all
measurements in turn, so that other work of the machine affects all of them. The table has the best round of
each (and all rounds with --verbose), with the load of the machine before and after.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.running import Workplace
from tests.support.sparksession import Bookies, read, start_spark, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 4


@dataclass
class Measurement:
    """One line of the table."""

    name: str
    run: Callable[[], object]
    beside: str = ""
    rates: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Return the best rate, in rows per second."""
        return max(self.rates)


def payloads(spark: SparkSession, rows: int, size: int) -> DataFrame:
    """Return rows of bytes that differ, made inside the JVM."""
    frame = spark.range(0, rows, 1, PARTITIONS)
    return frame.selectExpr(f"cast(lpad(cast(id as string), {size}, '.') as binary) as value")


def drop(frame: DataFrame) -> None:
    """Evaluate a frame and throw its rows away inside the JVM."""
    frame.write.format("noop").mode("overwrite").save()


def measurements(spark: SparkSession, uri: str, rows: int, size: int) -> list[Measurement]:
    """Return what is measured, in order: each beside the limit that it is compared with."""
    from benchmarks.spark_null import throw_away
    from client_aio.spark import ledger_sink

    frame = payloads(spark, rows, size).cache()
    frame.count()
    null = spark.read.format("null").options(rows=rows, partitions=PARTITIONS, bytes=size)
    few = frame.limit(rows // 8).repartition(PARTITIONS).cache()
    few.count()

    def written(encoding: str, **options: str) -> Callable[[], None]:
        log = f"speed-{encoding}"
        return lambda: write(frame, uri, mode="overwrite", log=log, encoding=encoding, **options)

    def pickled(sink: Callable[..., None]) -> Callable[[], None]:
        return lambda: few.foreachPartition(sink)

    return [
        Measurement("sink that throws rows away", lambda: frame.write.format("null").mode("append").save()),
        Measurement("sink, arrow", written("arrow"), "sink that throws rows away"),
        Measurement("sink, binary", written("binary"), "sink that throws rows away"),
        Measurement("source that invents rows", lambda: drop(null.load())),
        Measurement(
            "source, binary, value", lambda: drop(read(spark, uri, log="speed-binary", columns="value")),
            "source that invents rows",
        ),
        Measurement(
            "source, binary, all columns", lambda: drop(read(spark, uri, log="speed-binary")),
            "source that invents rows",
        ),
        Measurement(
            "source, arrow", lambda: drop(read(spark, uri, log="speed-arrow")), "source that invents rows"
        ),
        Measurement("foreachPartition that throws rows away", pickled(throw_away)),
        Measurement(
            "foreachPartition, ledger_sink", pickled(ledger_sink(uri, log="speed-foreach", value="value")),
            "foreachPartition that throws rows away",
        ),
    ]  # fmt: skip


def show(found: list[Measurement], verbose: bool) -> None:
    """Print the table."""
    best = {one.name: one.best for one in found}
    for one in found:
        share = f"{one.best / best[one.beside]:>7.0%} of {one.beside}" if one.beside else ""
        print(f"{one.name:<40}{one.best:>12,.0f} rows/s  {share}")
        if verbose:
            print(f"{'':<40}{', '.join(f'{rate:,.0f}' for rate in one.rates)}")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bookies", type=int, default=3)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    with Workplace(None, "spark-speed-") as place, Bookies(place.path, bookies=arguments.bookies) as bookies:
        spark = start_spark("local[2]", place.path, **{"spark.driver.memory": "2g"})
        try:
            from benchmarks.spark_null import NullSource

            spark.dataSource.register(NullSource)
            found = measurements(spark, bookies.uri, arguments.rows, arguments.bytes)
            print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
            for _ in range(arguments.rounds):
                for one in found:
                    rows = arguments.rows // 8 if "foreach" in one.name else arguments.rows
                    start = time.perf_counter()
                    one.run()
                    one.rates.append(rows / (time.perf_counter() - start))
            show(found, arguments.verbose)
            print(f"load after: {os.getloadavg()[0]:.1f}")
        finally:
            spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
