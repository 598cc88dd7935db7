"""Every way through the data source, and every job, on one kind of Spark cluster after another.

    python -m benchmarks.spark_masters [local-cluster] [standalone] [connect]

`local-cluster` is local-cluster[2,1,1024], and `standalone` a master with two workers. `connect` is a server
of Spark Connect in a process of its own, with a client that has no JVM; it needs pyspark[connect]. There the
commands run, too, by `--master`. Each runs in a process of its own, on three bookies and a real ZooKeeper.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import ROOT
from benchmarks.running import Workplace
from benchmarks.spark_cluster import SparkCluster
from tests.support.sparksession import Bookies, read, start_spark, write
from tests.support.zookeeper import ZooKeeperServer, find_java, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

KINDS = ("local-cluster", "standalone", "connect")
ROWS = 1000
_START_TIMEOUT_S = 180.0
_ATTEMPTS_MAX = 5


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Run a server of Spark Connect; the value is its address."""
    import pyspark

    home = Path(pyspark.__file__).parent
    port = free_ports(1)[0]
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.host": "127.0.0.1",
    }
    command = [
        str(home / "bin" / "spark-submit"), "--master", "local[2]",
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
        *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
        "spark-internal",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "JAVA_HOME": find_java().removesuffix("/bin/java"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "connect.log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while b"Spark Connect server started at" not in (folder / "connect.log").read_bytes():
            if server.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError((folder / "connect.log").read_text()[-3000:])
            time.sleep(0.1)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def session_of(kind: str, folder: Path) -> Iterator[tuple[SparkSession, str]]:
    """Start Spark in one of its ways; the values are a session, and the server's address with Connect."""
    with ExitStack() as stack:
        address = ""
        if kind == "connect":
            from pyspark.sql import SparkSession

            import client_aio.spark

            address = stack.enter_context(connect_server(folder))
            spark: Any = SparkSession.builder.remote(address).getOrCreate()
            client_aio.spark.register(spark)
        elif kind == "standalone":
            cluster = stack.enter_context(SparkCluster(folder))
            spark = start_spark(cluster.master, folder, **cluster.settings)
        else:
            spark = start_spark("local-cluster[2,1,1024]", folder)
        stack.callback(spark.stop)
        yield spark, address


def check_commands(uri: str, address: str, folder: Path) -> None:
    """Run the commands on a server of Spark Connect; raise AssertionError where one fails."""
    for arguments in (
        ["verify", "--log", "columns", "--master", address],
        ["export", "--log", "columns", str(folder / "by-command"), "--master", address],
        ["import", "--log", "by-command", str(folder / "by-command"), "--master", address],
        ["stats", "--log", "by-command"],
        ["sweep", "--log", "by-command"],
    ):
        command = [sys.executable, "-m", "client_aio.cli", "spark", *arguments, "--metadata", uri]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)


def check_refused(spark: SparkSession, bookies: Bookies) -> None:
    """Try what is refused before rows are written, and a table with the options in each statement."""
    options = {"metadata": bookies.uri, "log": "refused"}
    create = f"create table made using ledger options (metadata '{bookies.uri}', log 'refused')"
    for attempt in (
        lambda: spark.range(3).write.format("ledger").options(**options).mode("append").saveAsTable("made"),
        lambda: spark.range(3).writeTo("made").using("ledger").options(**options).create(),
        lambda: spark.sql(create).collect(),
    ):
        said = ""
        try:
            attempt()
        except Exception as error:
            said = str(error)
        assert " is refused: Spark gives the options of a table to no source" in said, said
        assert bookies.ledgers_of("refused") == (set(), set())
    given = f"with (metadata = '{bookies.uri}', log = 'columns')"
    spark.sql("create table declared (id bigint, word string) using ledger")
    spark.sql(f"insert into declared {given} values (-1, 'one more')").collect()
    (row,) = spark.sql(f"select count(*) from declared {given}").collect()
    assert row[0] == ROWS + 1
    spark.sql("drop table declared").collect()


def check_view(spark: SparkSession, uri: str) -> None:
    """Try that each statement on a view sees the rows of the statements before it."""
    options = f"(metadata '{uri}', log 'columns')"
    spark.sql(f"create temporary view over_log using ledger options {options}").collect()
    counts = []
    for number in range(3):
        counts += [row[0] for row in spark.sql("select count(*) from over_log").collect()]
        spark.sql(f"insert into over_log values (-{number}, 'one more')").collect()
    assert counts == [ROWS, ROWS + 1, ROWS + 2], counts
    spark.sql("drop view over_log").collect()


def copy(spark: SparkSession, uri: str, checkpoint: Path) -> None:
    """Stream one log to another; start again where Spark's Python did not start within its ten seconds."""
    stream = spark.readStream.format("ledger").options(metadata=uri, log="columns").load()
    writer = stream.writeStream.format("ledger").options(metadata=uri, log="copied")
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    for attempt in range(_ATTEMPTS_MAX):
        try:
            assert writer.start().awaitTermination(_START_TIMEOUT_S)
        except Exception as error:
            if "worker failed to connect back" not in str(error) or attempt == _ATTEMPTS_MAX - 1:
                raise
        else:
            break


def check(spark: SparkSession, bookies: Bookies, folder: Path) -> None:
    """Write, read, stream, and run every job; raise AssertionError where a result is wrong."""
    from client_aio.spark import export, import_, ledger_sink, stats, sweep_orphans, verify

    uri = bookies.uri
    frame = spark.range(0, ROWS, 1, 4).selectExpr("id", "concat('word ', cast(id as string)) as word")
    write(frame, uri, log="columns")
    check_refused(spark, bookies)
    write(frame, uri, "overwrite", log="columns")
    check_view(spark, uri)
    write(frame, uri, "overwrite", log="columns")
    assert read(spark, uri, log="columns").where("id % 2 = 0").count() == ROWS // 2
    write(frame.limit(3), uri, "overwrite", log="replaced")
    copy(spark, uri, folder / "checkpoint")
    assert read(spark, uri, log="copied").exceptAll(read(spark, uri, log="columns")).count() == 0
    assert read(spark, uri, log="copied").count() == ROWS
    bytes_ = frame.selectExpr("cast(word as binary) as value")
    bytes_.foreachPartition(ledger_sink(uri, log="bytes"))
    assert Counter(bookies.records("bytes")) == Counter(b"word %d" % number for number in range(ROWS))
    assert {row.status for row in verify(spark, uri).collect()} == {"ok"}
    done = export(spark, uri, str(folder / "export"), log="columns")
    again = import_(spark, uri, str(folder / "export"), log="imported")
    assert (again.entries, again.size) == (done.entries, done.size)
    assert read(spark, uri, log="imported").count() == ROWS
    rows = {row["log"]: row["rows"] for row in asyncio.run(stats(uri))}
    assert rows == {"columns": ROWS, "copied": ROWS, "replaced": 3, "bytes": ROWS, "imported": ROWS}
    for log in rows:
        asyncio.run(sweep_orphans(uri, log=log, grace_s=0))
        assert not bookies.ledgers_of(log)[1]


def run(kind: str) -> int:
    """Check one kind, in this process."""
    begin = time.perf_counter()
    with (
        Workplace(None, "spark-masters-") as place,
        ZooKeeperServer(place.path / "zookeeper") as zookeeper,
        Bookies(place.path, bookies=3, uri=f"zk://{zookeeper.address}/ledgers") as bookies,
        session_of(kind, place.path) as (spark, address),
    ):
        check(spark, bookies, place.path)
        if address:
            check_commands(bookies.uri, address, place.path)
    print(f"{kind}: all is right, {time.perf_counter() - begin:.0f} s", flush=True)
    return 0


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--here", action="store_true", help="in this process; one kind only")
    arguments = parser.parse_args()
    kinds = arguments.kinds or KINDS
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(KINDS)}")
    if arguments.here:
        return run(kinds[0])
    code = 0
    for kind in kinds:  # a process has one session, and it is classic or of Spark Connect
        command = [sys.executable, "-m", "benchmarks.spark_masters", "--here", kind]
        code |= subprocess.run(command, cwd=ROOT, check=False).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
