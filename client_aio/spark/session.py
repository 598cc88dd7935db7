"""A Spark session for the commands, with the format "ledger" registered."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from client_aio.spark import register
from metadata.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """Start Spark, and end it on exit; its workers run this very interpreter.

    Args:
        master: such as `local[*]` or `spark://host:7077`.

    Raises:
        InvalidArgumentError: Spark does not start; most often there is no Java.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("bookie-aio")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }.items():
        builder = builder.config(name, value)
    try:
        started = builder.getOrCreate()
    except Exception as error:  # any error: pyspark raises several kinds when the JVM does not start
        raise InvalidArgumentError(
            f"Spark does not start ({error}): it needs Java 17 or newer on the PATH or under JAVA_HOME"
        ) from error
    register(started)
    try:
        yield started
    finally:
        started.stop()
