"""Write a DataFrame to a log, read it back with a filter, and replace it: a batch job.

    bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI
    python examples/spark_batch.py sqlite:///tmp/cluster/metadata.db

Needs Java 17 and `pip install '.[spark]'`, in a checkout. docs/SPARK.md goes through it step by step.
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("metadata", help="URI of the metadata store")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--log", default="orders")
    arguments = parser.parse_args()

    # The executors run the very interpreter, and so the very packages, that this one runs.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession, functions

    import client_aio.spark

    session = SparkSession.builder.master("local[2]").appName("orders to a log")
    session = session.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    spark = session.getOrCreate()
    client_aio.spark.register(spark)
    cluster = {"metadata": arguments.metadata, "log": arguments.log}
    try:
        orders = spark.range(arguments.rows).select(
            functions.col("id").alias("order"),
            (functions.col("id") % 7).cast("int").alias("shop"),
            functions.expr("cast(id * 1.19 as decimal(18,2))").alias("price"),
        )
        # All rows become visible at once, or none. The mode is always named: Spark's default is an error.
        orders.write.format("ledger").options(**cluster, compression="zstd").mode("overwrite").save()

        back = spark.read.format("ledger").options(**cluster).load()
        print(f"columns {', '.join(back.columns)}; {back.count():,} rows")
        back.groupBy("shop").agg(functions.sum("price").alias("turnover")).orderBy("shop").show()

        where = spark.read.format("ledger").options(**cluster, columns="order,ledger_id,position").load()
        first = where.orderBy("position").first()
        print(f"the first order, {first.order}, lies in ledger {first.ledger_id} at {first.position}")
        is_equal = back.exceptAll(orders).isEmpty() and orders.exceptAll(back).isEmpty()
    finally:
        spark.stop()
    print("EQUAL" if is_equal else "DIFFERENT")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
