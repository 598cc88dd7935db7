"""Count the words of a log that is being written: a streaming query over a tailed log.

    bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI
    python examples/spark_word_count.py sqlite:///tmp/cluster/metadata.db

This script writes the log itself, from a thread, so that there is something to count: lines of the standard
library's documentation. The query follows the log across rolls. Started again, it resumes at its checkpoint.
Needs Java 17 and `pip install '.[spark]'`, in a checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING

import client_aio.sync

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT = (re.__doc__ or "").splitlines()


def write(metadata: str, log: str, times: int) -> None:
    """Append the lines of the text, over and over, on to a new ledger every 500 lines."""
    with client_aio.sync.connect(metadata) as client, client.open_log(log, roll_entries=500) as writer:
        for _ in range(times):
            for line in TEXT:
                writer.append_nowait(line.encode())


def words_of(lines: Iterable[str]) -> Counter[str]:
    """Count words as the query does."""
    return Counter(word for line in lines for word in re.split("[^a-zA-Z]+", line) if word)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("metadata", help="URI of the metadata store")
    parser.add_argument("--log", help="the log's name; by default a new one")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument(
        "--checkpoint", help="a folder; by default a new one, which starts from the beginning"
    )
    arguments = parser.parse_args()
    log = arguments.log or f"lines-{uuid.uuid4().hex[:8]}"

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession, functions

    import client_aio.spark

    session = SparkSession.builder.master("local[2]").appName("words of a log")
    session = session.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    spark = session.getOrCreate()
    client_aio.spark.register(spark)
    with client_aio.sync.connect(arguments.metadata) as client:
        client.add_to_log(log, [])  # there must be a log; it may be empty
        before = words_of(bytes(record.data).decode() for record in client.read_log(log))

    lines = spark.readStream.format("ledger").option("metadata", arguments.metadata)
    lines = lines.options(log=log, columns="value", maxEntriesPerTrigger="1000").load()
    split = functions.expr("explode(split(cast(value as string), '[^a-zA-Z]+'))")
    words = lines.select(split.alias("word"))
    counts = words.where("word <> ''").groupBy("word").count()
    own = tempfile.TemporaryDirectory(prefix="word-count-")  # removed at the end
    checkpoint = arguments.checkpoint or own.name
    query = (
        counts.writeStream.outputMode("complete")
        .format("memory")
        .queryName("counts")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    writing = threading.Thread(target=write, args=(arguments.metadata, log, arguments.times))
    writing.start()
    try:
        writing.join()
        query.processAllAvailable()
        found = {row.word: row["count"] for row in spark.table("counts").collect()}
        for word, count in sorted(found.items(), key=lambda item: -item[1])[:5]:
            print(f"{count:>7,}  {word}")
    finally:
        query.stop()
        spark.stop()
        own.cleanup()
    expected = before + words_of(TEXT * arguments.times)
    print("EQUAL" if found == expected else "DIFFERENT")
    return 0 if found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
