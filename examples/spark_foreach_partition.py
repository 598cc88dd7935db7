"""Write a DataFrame's partitions to ledgers from Spark's executors, and check them by reading back.

    bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI
    python examples/spark_foreach_partition.py sqlite:///tmp/cluster/metadata.db

Each partition writes a ledger of its own through the blocking adapter. The ledger's custom metadata says
which job and which attempt wrote it: a task may run more than once, and a ledger that its task did not close
does not count. Needs Java 17 and `pip install 'bookie-aio[spark]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import uuid
from typing import TYPE_CHECKING, Any

import client_aio.sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyspark.sql import Row


def partition_writer(metadata: str, job: str) -> Callable[[Iterable[Row]], None]:
    """Give the function that an executor runs on each partition. Only the two strings travel to it."""

    def write(rows: Iterable[Row]) -> None:
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        custom = {
            "job": job.encode(),
            "partition": str(task.partitionId()).encode(),
            "attempt": str(task.taskAttemptId()).encode(),
        }
        with (
            client_aio.sync.connect(metadata) as client,
            client.create_ledger(
                ensemble_size=3, write_quorum=3, ack_quorum=2, custom_metadata=custom
            ) as ledger,
        ):
            ledger.add_entries(f"{row.id},{row.square}".encode() for row in rows)

    return write


def ledgers_of(client: Any, job: str) -> dict[int, int]:
    """Find the job's ledgers: partition → ledger id, one closed ledger for each partition."""
    found: dict[int, int] = {}
    for ledger_id in client.list_ledgers():
        metadata = client.ledger_metadata(ledger_id)
        if metadata.custom.get("job") == job.encode() and metadata.is_closed:
            found[int(metadata.custom["partition"])] = ledger_id
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("metadata", help="URI of the metadata store")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--partitions", type=int, default=4)
    arguments = parser.parse_args()

    # The executors run the very interpreter, and so the very packages, that this one runs.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession, functions

    session = SparkSession.builder.master("local[2]").appName("foreachPartition to ledgers")
    spark = session.config("spark.ui.enabled", "false").getOrCreate()
    job = uuid.uuid4().hex
    try:
        frame = spark.range(0, arguments.rows, 1, arguments.partitions)
        frame = frame.select("id", (functions.col("id") * functions.col("id")).alias("square"))
        frame.foreachPartition(partition_writer(arguments.metadata, job))
    finally:
        spark.stop()

    seen, digest = 0, hashlib.sha256()
    with client_aio.sync.connect(arguments.metadata) as client:
        ledgers = ledgers_of(client, job)
        for partition, ledger_id in sorted(ledgers.items()):
            with client.open_ledger(ledger_id) as reader:
                entries = 0
                for entry in reader.read(0, reader.last_add_confirmed):
                    digest.update(bytes(entry.data) + b"\n")
                    entries += 1
            print(f"partition {partition}: ledger {ledger_id}, {entries:,} entries")
            seen += entries

    expected = hashlib.sha256(b"".join(b"%d,%d\n" % (n, n * n) for n in range(arguments.rows)))
    is_equal = digest.digest() == expected.digest() and len(ledgers) == arguments.partitions
    print(f"{'EQUAL' if is_equal else 'DIFFERENT'}: {seen:,} of {arguments.rows:,} rows read back")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
