"""Rate → ledger → ledger → Parquet, while everything is killed at random and checkpoints are set back.

    python -m benchmarks.spark_chaos [--minutes 10] [--seed N] [--rate 50] [--master local-cluster[2,1,1024]]

Three queries run in one driver. At random, SIGKILL strikes the driver, an executor, a Python worker, a bookie
or the metadata store (a real ZooKeeper). Checkpoints of the first two queries are copied, and put back later.
A query on a checkpoint that was set back ends with StaleCheckpointError, or goes on rightly. After such an
error the newest checkpoint is put in place again. The file sink's checkpoint is never set back: Spark's own
file sink drops a batch by its number.

At the end both logs and the Parquet files have every id from 0 on exactly once. After a sweep no ledger is
left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import ROOT
from benchmarks.running import Workplace
from tests.support.sparksession import Bookies, start_spark
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

FIRST, SECOND = "chaos-first", "chaos-second"
SET_BACK = ("first", "second")
"""The queries whose checkpoints are copied and put back; both write to a log."""
EXIT_STALE = 3
_START_TIMEOUT_S, _END_TIMEOUT_S = 240.0, 600.0
_OUTAGES_S = (1.0, 4.0, 13.0)


# --- the driver, a process of its own ---


class Driver:
    """Runs the three queries, and starts again those that end with an error."""

    def __init__(self, uri: str, folder: Path, rate: int, master: str) -> None:
        self.folder, self.uri, self.rate = folder, uri, rate
        settings = {
            "spark.sql.streaming.stopTimeout": "60s",
            "spark.task.maxFailures": "20",
            "spark.python.authenticate.socketTimeout": "120s",  # of a worker that starts on a busy machine
        }
        self.spark: SparkSession = start_spark(master, folder, **settings)
        self.starts: dict[str, Callable[[], StreamingQuery]] = {
            "first": self.start_first,
            "second": self.start_second,
            "third": self.start_third,
        }

    def start_first(self) -> StreamingQuery:
        """Start rate → ledger."""
        rows = self.spark.readStream.format("rate").option("rowsPerSecond", self.rate).load()
        return self.write(rows.selectExpr("cast(cast(value as string) as binary) as value"), "first", FIRST)

    def start_second(self) -> StreamingQuery:
        """Start ledger → ledger."""
        return self.write(self.read(FIRST).where("value is not null"), "second", SECOND)

    def start_third(self) -> StreamingQuery:
        """Start ledger → Parquet."""
        rows = self.read(SECOND).selectExpr("cast(cast(value as string) as long) as id")
        writer = rows.writeStream.format("parquet").option("path", str(self.folder / "parquet"))
        return writer.option("checkpointLocation", str(self.folder / "third")).start()

    def read(self, log: str) -> DataFrame:
        """Follow a log."""
        return (
            self.spark.readStream.format("ledger").options(metadata=self.uri, log=log, columns="value").load()
        )

    def write(self, rows: DataFrame, name: str, log: str) -> StreamingQuery:
        """Write to a log."""
        writer = rows.writeStream.format("ledger").options(metadata=self.uri, log=log)
        return writer.option("checkpointLocation", str(self.folder / name)).start()

    def run(self) -> int:
        """Keep the queries running until the file `stop` is there; then read everything to its end."""
        queries = {name: start() for name, start in self.starts.items()}
        while not (self.folder / "stop").exists():
            time.sleep(0.5)
            for name, query in list(queries.items()):
                error = None if query.isActive else str(query.exception())
                if error is None:
                    continue
                self.note(name, error)
                if "StaleCheckpointError" in error:
                    return EXIT_STALE
                queries[name] = self.starts[name]()
        queries["first"].stop()
        for name in ("second", "third"):
            queries[name] = self.drained(name, queries[name])
        ids = self.spark.read.parquet(str(self.folder / "parquet")).groupBy("id").count()
        rows = [(row.id, row["count"]) for row in ids.collect()]
        (self.folder / "parquet.json").write_text(json.dumps(rows))
        return 0

    def drained(self, name: str, query: StreamingQuery) -> StreamingQuery:
        """Wait until a query has read all there is."""
        for _ in range(20):
            try:
                query.processAllAvailable()
                break
            except Exception as error:
                self.note(name, str(error))
                query = self.starts[name]()
        query.stop()
        return query

    def note(self, name: str, error: str) -> None:
        """Append to the file of errors: the line of the innermost exception."""
        lines = [line.strip() for line in error.splitlines() if "Error: " in line or "Exception: " in line]
        with (self.folder / "errors").open("a") as file:
            file.write(f"{name}: {(lines or [error.strip().partition(chr(10))[0]])[-1][:400]}\n")


# --- chaos ---


def descendants(root: int) -> dict[int, str]:
    """Return the processes below one, with their command lines."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    children: dict[int, list[tuple[int, str]]] = {}
    for line in listing.stdout.splitlines():
        pid, parent, command = line.split(None, 2)
        children.setdefault(int(parent), []).append((int(pid), command))
    found: dict[int, str] = {}
    left = [root]
    while left:
        for pid, command in children.get(left.pop(), []):
            found[pid] = command
            left.append(pid)
    return found


def newest_batch(checkpoint: Path) -> int:
    """Return the last batch that a query has committed."""
    found = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdecimal()]
    return max(found, default=-1)


class Chaos:
    """Owns the driver's process, and does one thing after another to the whole."""

    def __init__(
        self, folder: Path, zookeeper: ZooKeeperServer, bookies: Bookies, arguments: argparse.Namespace
    ) -> None:
        self.folder, self.zookeeper, self.bookies, self.arguments = folder, zookeeper, bookies, arguments
        self.chance = random.Random(arguments.seed)
        self.done: Counter[str] = Counter()
        self.aside: Path | None = None
        self.driver = self.start_driver()

    def start_driver(self) -> subprocess.Popen[bytes]:
        """Start the driver, with its JVMs, in a session of their own."""
        given = [self.bookies.uri, str(self.folder), str(self.arguments.rate), self.arguments.master]
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.spark_chaos", "drive", *given],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def batches(self) -> int:
        """Return the last batch that the first query has committed."""
        return newest_batch(self.folder / "first")

    def wait_for_batch(self) -> None:
        """Wait until the first query commits a batch, or the driver ends."""
        before, give_up_at = self.batches(), time.monotonic() + _START_TIMEOUT_S
        while self.batches() <= before and self.driver.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.2)

    def kill_driver(self) -> None:
        """SIGKILL the driver with all below it, and wait until none is left."""
        below = descendants(self.driver.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.driver.pid, signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.driver.wait()

    def revive(self) -> None:
        """Start the driver again where it has ended; put back the newest checkpoint after an error."""
        code = self.driver.poll()
        if code is None:
            return
        self.kill_driver()
        self.done[f"driver ended with {code}"] += 1
        if code == EXIT_STALE and self.aside is not None:
            name = self.aside.name.partition(".")[0]
            shutil.rmtree(self.folder / name)
            self.aside.rename(self.folder / name)
            self.aside = None
        self.driver = self.start_driver()
        self.wait_for_batch()

    def driver_dies(self) -> None:
        """Kill the driver, now and then copy or put back a checkpoint, and start it again."""
        self.kill_driver()
        name = self.chance.choice(SET_BACK)
        here, copy = self.folder / name, self.folder / f"{name}.copy"
        what = self.chance.choice(("copy", "put back", "nothing"))
        if self.aside is not None:
            # Another one would lose the newest checkpoint. Once batches went past it, it is of no use.
            before = self.folder / self.aside.name.partition(".")[0]
            self.aside = None if newest_batch(before) > newest_batch(self.aside) else self.aside
            what = "nothing" if self.aside is not None else what
        if what == "copy" and here.exists():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(here, copy)
            self.done["checkpoint copied"] += 1
        elif what == "put back" and copy.exists() and here.exists():
            self.aside = self.folder / f"{name}.newest"
            shutil.rmtree(self.aside, ignore_errors=True)
            here.rename(self.aside)
            shutil.copytree(copy, here)
            self.done["checkpoint set back"] += 1
        self.driver = self.start_driver()
        self.wait_for_batch()
        self.revive()

    def process_dies(self, word: str) -> None:
        """Kill one process below the driver whose command has a word."""
        found = [pid for pid, command in descendants(self.driver.pid).items() if word in command]
        if found:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(found), signal.SIGKILL)

    def bookie_dies(self) -> None:
        """Kill one bookie, or sometimes all, and start them after a while."""
        names = list(self.bookies.cluster.bookies)
        chosen = names if self.chance.random() < 0.25 else [self.chance.choice(names)]
        for name in chosen:
            self.bookies.run(self.bookies.cluster[name].kill())
        time.sleep(self.chance.choice(_OUTAGES_S))
        for name in chosen:
            self.bookies.run(self.bookies.cluster[name].start())

    def metadata_die(self) -> None:
        """Kill ZooKeeper, and start it after a while."""
        self.zookeeper.kill()
        time.sleep(self.chance.choice(_OUTAGES_S))
        self.zookeeper.start()

    def run(self) -> int:
        """Do one thing after another for the time given, then let all of it come to an end."""
        actions: dict[str, Callable[[], None]] = {
            "driver killed": self.driver_dies,
            "executor killed": lambda: self.process_dies("CoarseGrainedExecutorBackend"),
            "Python worker killed": lambda: self.process_dies("pyspark.daemon"),
            "bookies killed": self.bookie_dies,
            "metadata killed": self.metadata_die,
        }
        self.wait_for_batch()
        end = time.monotonic() + 60 * self.arguments.minutes
        while time.monotonic() < end:
            name = self.chance.choice(list(actions))
            actions[name]()
            self.done[name] += 1
            print(f"{time.strftime('%H:%M:%S')} {name}; batch {self.batches()}", flush=True)
            self.revive()
            time.sleep(self.chance.random() * 6)
        (self.folder / "stop").touch()
        give_up_at = time.monotonic() + _END_TIMEOUT_S
        while (code := self.driver.poll()) != 0 and time.monotonic() < give_up_at:
            if code is not None:
                self.revive()
            time.sleep(0.5)
        self.kill_driver()
        return self.report()

    def report(self) -> int:
        """Compare what there is with every id once; sweep, and look for what is left over."""
        print(", ".join(f"{name} {count}×" for name, count in sorted(self.done.items())))
        errors = self.folder / "errors"
        if errors.exists():
            print("queries ended with:", *errors.read_text().splitlines(), sep="\n  ")
        is_good = True
        found = {log: Counter(map(int, self.bookies.records(log))) for log in (FIRST, SECOND)}
        result = self.folder / "parquet.json"
        found["parquet"] = Counter(dict(json.loads(result.read_text())) if result.exists() else {})
        wanted = Counter(range(max(found[FIRST], default=-1) + 1))
        for where, rows in found.items():
            lost, more = sum((wanted - rows).values()), sum((rows - wanted).values())
            is_good &= bool(wanted) and not lost and not more
            print(f"{where}: {sum(rows.values()):,} of {len(wanted):,} rows; {lost} lost, {more} too many")
        for log in (FIRST, SECOND):
            swept = asyncio.run(sweep(self.bookies.uri, log))
            left = self.bookies.ledgers_of(log)[1]
            is_good &= not left
            print(f"{log}: {swept} ledgers swept, {len(left)} left over")
        print("EXACTLY ONCE" if is_good else "NOT EXACTLY ONCE")
        return 0 if is_good else 1


async def sweep(uri: str, log: str) -> int:
    """Delete what dead drivers left for a log; return the number of ledgers."""
    from client_aio.spark import sweep_orphans

    return len(await sweep_orphans(uri, log=log, grace_s=0))


def main() -> int:
    """Run it."""
    if sys.argv[1:2] == ["drive"]:
        uri, folder, rate, master = sys.argv[2:]
        return Driver(uri, Path(folder), int(rate), master).run()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--rate", type=int, default=50, help="rows in a second")
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, load {os.getloadavg()[0]:.1f}", flush=True)
    with (
        Workplace(None, "spark-chaos-") as place,
        ZooKeeperServer(place.path / "zookeeper") as zookeeper,
        Bookies(place.path, bookies=4, uri=f"zk://{zookeeper.address}/ledgers") as bookies,
    ):
        bookies.run(bookies.client.add_to_log(FIRST, []))
        bookies.run(bookies.client.add_to_log(SECOND, []))
        folder = place.path / "spark"
        folder.mkdir()
        chaos = Chaos(folder, zookeeper, bookies, arguments)
        try:
            return chaos.run()
        finally:
            chaos.kill_driver()


if __name__ == "__main__":
    sys.exit(main())
