"""DataFrames in and out of logs and ledgers, for PySpark.

    import client_aio.spark

    client_aio.spark.register(spark)
    frame.write.format("ledger").option("metadata", uri).option("log", "orders").mode("append").save()
    spark.read.format("ledger").option("metadata", uri).option("log", "orders").load()

Needs the extra: `pip install '.[spark]'` in a checkout. Executors need nothing but the same wheel.
docs/SPARK.md has the walk-through, the guarantees, and every option.

A newcomer reads, in this order:

- `source` and `sink`: the classes that Spark calls, and the exactly-once commit;
- `commits`: the compare-and-set of a commit, and the deletion of garbage;
- `scan_plan`, then `catalog`: how a query becomes partitions, and what it asks the cluster;
- `encoding`: how rows become entries.
"""

from __future__ import annotations

try:
    import pyarrow
    import pyspark
except ImportError as error:
    raise ImportError(
        f"client_aio.spark needs {error.name}: install the extra, pip install '.[spark]' in a checkout"
    ) from error

from client_aio.spark.archive import Archived, export, import_
from client_aio.spark.commits import sweep_orphans
from client_aio.spark.foreach import LedgerSink, ledger_sink
from client_aio.spark.jobs import stats, verify
from client_aio.spark.source import LedgerDataSource, register

__all__ = [
    "Archived",
    "LedgerDataSource",
    "LedgerSink",
    "export",
    "import_",
    "ledger_sink",
    "register",
    "stats",
    "sweep_orphans",
    "verify",
]

assert pyarrow
assert pyspark
