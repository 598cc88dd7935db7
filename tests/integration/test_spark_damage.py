"""Entries that no bookie can give, or that do not decode: fatal and named, or rows with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import StructType

import client_aio
from client_aio.spark.encoding import UndecodableEntryError
from client_aio.spark.source import LedgerDataSource
from tests.support.replicas import flip
from tests.support.sparksession import Bookies, read, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def rows(uri: str, **options: str) -> list[dict[str, object]]:
    """Read as Spark's driver and tasks do, in this process."""
    source = LedgerDataSource({"metadata": uri, **options})
    reader = source.reader(source.schema())
    return [
        row
        for partition in reader.partitions()
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]


def test_a_damaged_entry_fails_the_task_or_becomes_a_row_that_says_why(tmp_path: Path) -> None:
    with Bookies(tmp_path, bookies=1) as bookies:
        payloads = [b"entry %05d of them" % number * 20 for number in range(300)]

        async def fill() -> int:
            sizes = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
            async with bookies.client.create_ledger(**sizes) as ledger:
                for payload in payloads:
                    await ledger.add_entry(payload)  # a block for each: damage stays within one
            return ledger.ledger_id

        ledger = str(bookies.run(fill()))
        bookies.run(bookies.cluster["b1"].kill())
        flip(bookies.cluster["b1"].directory, payloads[123])
        bookies.run(bookies.cluster["b1"].start())

        with pytest.raises(
            client_aio.BookKeeperError, match=rf"entry \d+ of ledger {ledger} could not be read"
        ):
            rows(bookies.uri, ledger=ledger)
        found = rows(bookies.uri, ledger=ledger, mode="permissive")
        assert [row["entry_id"] for row in found] == list(range(300))
        assert [row["value"] for row in found] == [*payloads[:123], None, *payloads[124:]]
        assert [number for number, row in enumerate(found) if row["_error"] is not None] == [123]
        assert "entry 123" in str(found[123]["_error"])


def test_entries_of_another_kind_are_named_or_set_aside(spark: SparkSession, bookies: Bookies) -> None:
    write(
        spark.createDataFrame([(1, "x"), (2, "y")], "n int, s string").coalesce(1), bookies.uri, log="mixed"
    )
    bookies.append("mixed", [b"not a batch of rows"])
    with pytest.raises(
        UndecodableEntryError, match=r"entry 0 of ledger \d+: it was written with encoding binary"
    ):
        rows(bookies.uri, log="mixed")
    found = rows(bookies.uri, log="mixed", mode="permissive")
    assert [(row["n"], row["s"]) for row in found] == [(1, "x"), (2, "y"), (None, None)]
    assert [row["_error"] is None for row in found] == [True, True, False]
    frame = read(spark, bookies.uri, log="mixed", mode="permissive")
    assert frame.where("_error is null").count() == 2
    assert [row["value"] for row in rows(bookies.uri, log="mixed", encoding="raw", columns="value")][-1] == (
        b"not a batch of rows"
    )


def test_json_of_other_programs_is_read_with_the_columns_that_the_user_names(bookies: Bookies) -> None:
    bookies.append("events", [b'{"n": 1, "s": "x"}', b'{"n": "one"}', b"nonsense"])
    source = LedgerDataSource(
        {"metadata": bookies.uri, "log": "events", "encoding": "json", "mode": "permissive"}
    )
    wanted = StructType.fromJson(
        {
            "type": "struct",
            "fields": [
                {"name": name, "type": kind, "nullable": True, "metadata": {}}
                for name, kind in (("n", "integer"), ("s", "string"), ("_error", "string"))
            ],
        }
    )
    reader = source.reader(wanted)
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [(row["n"], row["s"]) for row in found] == [(1, "x"), (None, None), (None, None)]
    assert [row["_error"] is None for row in found] == [True, False, False]
