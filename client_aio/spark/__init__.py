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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_aio.spark.archive import Archived, export, import_
    from client_aio.spark.commits import sweep_orphans
    from client_aio.spark.foreach import LedgerSink, ledger_sink
    from client_aio.spark.jobs import stats, verify
    from client_aio.spark.source import LedgerDataSource, register

_HOMES = {
    "Archived": "archive",
    "LedgerDataSource": "source",
    "LedgerSink": "foreach",
    "export": "archive",
    "import_": "archive",
    "ledger_sink": "foreach",
    "register": "source",
    "stats": "jobs",
    "sweep_orphans": "commits",
    "verify": "jobs",
}
_WITHOUT_SPARK = frozenset({"stats", "sweep_orphans"})
"""These ask the cluster only, and need neither pyspark nor Java."""

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


def check_extra(what: str) -> None:
    """Raise ImportError where the extra [spark] is not installed."""
    try:
        import pyarrow
        import pyspark
    except ImportError as error:
        raise ImportError(
            f"client_aio.spark: {what} needs {error.name}: install the extra, pip install '.[spark]' in a "
            "checkout"
        ) from error
    assert pyarrow
    assert pyspark


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_SPARK:
        check_extra(name)
    return getattr(import_module(f"{__name__}.{home}"), name)
