"""Write a DataFrame's partitions to a log from Spark's executors, and check them by reading back.

    bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI
    python examples/spark_foreach_partition.py sqlite:///tmp/cluster/metadata.db

The simple way: `ledger_sink` returns a function for `foreachPartition`. Each attempt of a partition writes a
ledger of its own, and adds it to the log when the partition is complete. Rows travel to Python one by one;
`df.write.format("ledger")` (spark_batch.py) is several times faster, and exactly once. Needs Java 17 and
`pip install '.[spark]'`, in a checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import uuid

import client_aio.sync


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("metadata", help="URI of the metadata store")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--partitions", type=int, default=4)
    arguments = parser.parse_args()

    # The executors run the very interpreter, and so the very packages, that this one runs.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession, functions

    from client_aio.spark import ledger_sink

    session = SparkSession.builder.master("local[2]").appName("foreachPartition to a log")
    spark = session.config("spark.ui.enabled", "false").getOrCreate()
    log = f"squares-{uuid.uuid4().hex[:8]}"
    try:
        frame = spark.range(0, arguments.rows, 1, arguments.partitions)
        text = functions.concat_ws(",", "id", functions.col("id") * functions.col("id"))
        frame = frame.select(text.cast("binary").alias("payload"))
        frame.foreachPartition(ledger_sink(arguments.metadata, log=log, value="payload"))
    finally:
        spark.stop()

    records: list[bytes] = []
    with client_aio.sync.connect(arguments.metadata) as client:
        for row in client.log_metadata(log).rows:
            with client.open_ledger(row.ledger_id) as reader:
                entries = [bytes(entry.data) for entry in reader.read(0, reader.last_add_confirmed)]
            print(f"ledger {row.ledger_id}: {len(entries):,} entries")
            records += entries

    records.sort(key=lambda record: int(record.partition(b",")[0]))
    digest = hashlib.sha256(b"".join(record + b"\n" for record in records))
    expected = hashlib.sha256(b"".join(b"%d,%d\n" % (n, n * n) for n in range(arguments.rows)))
    is_equal = digest.digest() == expected.digest()
    print(f"{'EQUAL' if is_equal else 'DIFFERENT'}: {len(records):,} of {arguments.rows:,} rows read back")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
