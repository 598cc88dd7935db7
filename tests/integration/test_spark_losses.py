"""What was lost, trimmed or deleted under a query or a job is told, or left out; never passed over."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import client_aio
from client_aio.spark.options import parse_read
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.stream import LedgerStreamReader
from metadata.model.ledger import GivenUp
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Iterator


SCHEMA = StructType([StructField("value", BinaryType())])
WITH_ERROR = StructType([*SCHEMA.fields, StructField("_error", StringType())])
ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("losses"), bookies=3) as running:
        yield running


@pytest.fixture
def log() -> str:
    """Name a log of the test's own."""
    return f"losses-{secrets.token_hex(8)}"


def give_up(bookies: Bookies, ledger_id: int) -> None:
    """Have a closed ledger look as one that was closed with a loss."""

    async def change() -> None:
        ledgers = bookies.client._context.ledgers
        metadata, version = await ledgers.read(ledger_id)
        lost = GivenUp((metadata.last_entry or 0) + 5, ("b1", "b2"), 0)
        await ledgers.compare_and_set(replace(metadata, given_up=lost), version)

    bookies.run(change())


def rows(reader: Any, *between: Any) -> list[dict[str, Any]]:
    parts = reader.partitions(*between)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


# --- records that were given up ---


def test_a_batch_read_tells_of_a_ledger_that_was_closed_with_a_loss(bookies: Bookies, log: str) -> None:
    lost = bookies.append(log, [b"0", b"1"])[-1]
    bookies.append(log, [b"2"])
    give_up(bookies, lost[0])
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    with pytest.raises(client_aio.RecordsLostError, match=f"from {lost[0]}:2 on: .* set mode to permissive"):
        rows(LedgerDataSource(given).reader(SCHEMA))
    found = rows(LedgerDataSource({**given, "mode": "permissive"}).reader(WITH_ERROR))
    assert [row["value"] for row in found] == [b"0", b"1", None, b"2"]
    assert [row["_error"] is None for row in found] == [True, True, False, True]
    alone = {"metadata": bookies.uri, "ledger": str(lost[0]), "columns": "value"}
    assert len(rows(LedgerDataSource(alone).reader(SCHEMA))) == 2, "as a reader of the ledger itself does"


def test_an_empty_ledger_that_was_closed_with_a_loss_is_told(bookies: Bookies, log: str) -> None:
    writer = bookies.run(bookies.open_log(log))
    bookies.run(writer.close())
    give_up(bookies, writer.ledger_id)
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    with pytest.raises(client_aio.RecordsLostError):
        rows(LedgerDataSource(given).reader(SCHEMA))


def test_a_stream_tells_of_a_loss_with_the_batch_that_passes_it(bookies: Bookies, log: str) -> None:
    writer = bookies.run(bookies.open_log(log))
    bookies.append_by_ledgers(writer, [b"0", b"1", b"2"])
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    strict = LedgerStreamReader(parse_read(given), SCHEMA)
    lenient = LedgerStreamReader(parse_read({**given, "mode": "permissive"}), WITH_ERROR)
    start = strict.initialOffset()
    first = strict.latestOffset(start, ALL)
    assert first["entry"] == 3
    bookies.run(writer.close())
    give_up(bookies, start["id"])
    bookies.append(log, [b"3"])
    assert [row["value"] for row in rows(strict, start, first)] == [b"0", b"1", b"2"], "planned before"
    behind = strict.latestOffset(first, ALL)
    with pytest.raises(client_aio.RecordsLostError, match=f"from {start['id']}:3 on"):
        rows(strict, first, behind)
    assert [row["value"] for row in rows(lenient, first, behind)] == [None, b"3"]
    assert rows(lenient, behind, behind) == []
    further = first | {"entry": 9}  # Acknowledged and read, then lost.
    assert [row["value"] for row in rows(lenient, first, further)] == [None]
    assert [row["value"] for row in rows(lenient, further, behind)] == [None, b"3"]
    strict.stop()
    lenient.stop()
