"""A log that is truncated, or overwritten, while a query on it is being planned."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType

import client_aio
from client_aio.spark.catalog import Catalog, Listed
from client_aio.spark.options import parse_read
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.stream import LedgerStreamReader
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from metadata.model.ledger import LedgerMetadata

    Planning = Callable[[Callable[[client_aio.Client], Awaitable[object]]], None]

SCHEMA = StructType([StructField("value", BinaryType())])
RECORDS = [b"%d" % number for number in range(12)]


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("truncated"), bookies=3) as running:
        yield running


@pytest.fixture
def log() -> str:
    """Name a log of the test's own. The name of a passed test's folder is given again."""
    return f"truncated-{secrets.token_hex(8)}"


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Planning:
    """Let something happen whenever a query has the log's list, before it reads the ledgers' metadata."""
    read = Catalog._metadata_of

    def let(happen: Callable[[client_aio.Client], Awaitable[object]]) -> None:
        async def after(catalog: Catalog, rows: Sequence[Listed]) -> list[LedgerMetadata | None]:
            await happen(catalog._client)
            return await read(catalog, rows)

        monkeypatch.setattr(Catalog, "_metadata_of", after)

    return let


def written(bookies: Bookies, log: str) -> list[tuple[int, int]]:
    """Write the records to three ledgers; a roll that is due may come late, an opening does not."""
    return [at for start in range(0, 12, 4) for at in bookies.append(log, RECORDS[start : start + 4])]


def values(reader: Any, *between: Any) -> list[bytes]:
    parts = reader.partitions(*between)
    return [value for part in parts for batch in reader.read(part) for value in batch["value"].to_pylist()]


def test_a_batch_read_is_planned_again_when_the_log_is_truncated_meanwhile(
    bookies: Bookies, log: str, between: Planning
) -> None:
    positions = written(bookies, log)
    reader: Any = LedgerDataSource({"metadata": bookies.uri, "log": log}).reader(SCHEMA)
    between(lambda client: client.truncate_log(log, positions[9]))
    assert values(reader) == RECORDS[9:]


def test_a_batch_read_of_a_log_that_changes_with_every_look_ends_in_an_error(
    bookies: Bookies, log: str, between: Planning
) -> None:
    bookies.append(log, RECORDS)
    looks = []

    async def lose_another(client: client_aio.Client) -> None:
        looks.append(client)
        raise client_aio.NoSuchLedgerError("it was truncated", ledger_id=10**9 + len(looks))

    reader: Any = LedgerDataSource({"metadata": bookies.uri, "log": log}).reader(SCHEMA)
    between(lose_another)
    with pytest.raises(client_aio.NoSuchLedgerError):
        reader.partitions()
    assert len(looks) == 10


def test_a_ledger_that_is_listed_and_missing_is_an_error_at_once(
    bookies: Bookies, log: str, between: Planning
) -> None:
    positions = written(bookies, log)
    looks = []

    async def look(client: client_aio.Client) -> None:
        looks.append(client)

    bookies.run(bookies.client.delete_ledger(positions[5][0], force=True))
    between(look)
    reader: Any = LedgerDataSource({"metadata": bookies.uri, "log": log}).reader(SCHEMA)
    with pytest.raises(client_aio.NoSuchLedgerError, match=str(positions[5][0])):
        reader.partitions()
    assert len(looks) == 1


@pytest.mark.parametrize("step", ["latestOffset", "partitions"])
def test_a_stream_says_what_was_truncated_unread_while_it_was_planned_or_goes_on_behind_it(
    bookies: Bookies, log: str, between: Planning, step: str
) -> None:
    positions = written(bookies, log)
    given = {"metadata": bookies.uri, "log": log, "startingPosition": str(positions[2])}
    strict = LedgerStreamReader(parse_read(given), SCHEMA)
    lenient = LedgerStreamReader(parse_read({**given, "failOnDataLoss": "false"}), SCHEMA)
    start = strict.initialOffset()
    end = None if step == "latestOffset" else lenient.latestOffset(start, ReadAllAvailable())
    for stream in (strict, lenient):  # what was planned before is remembered: each knows no ledger yet
        stream.stop()
    between(lambda client: client.truncate_log(log, positions[9]))

    def plan(stream: LedgerStreamReader) -> object:
        if end is None:
            return stream.latestOffset(start, ReadAllAvailable())
        return stream.partitions(start, end)

    with pytest.raises(client_aio.LogTruncatedError, match="set failOnDataLoss to false"):
        plan(strict)
    if end is None:
        end = lenient.latestOffset(start, ReadAllAvailable())
    assert values(lenient, start, end) == RECORDS[9:]
    strict.stop()
    lenient.stop()


def test_a_stream_that_begins_at_the_end_does_so_though_the_log_is_truncated_meanwhile(
    bookies: Bookies, log: str, between: Planning
) -> None:
    positions = written(bookies, log)
    given = {"metadata": bookies.uri, "log": log, "startingPosition": "latest"}
    stream = LedgerStreamReader(parse_read(given), SCHEMA)
    between(lambda client: client.truncate_log(log, positions[9]))
    start = stream.initialOffset()
    assert start["id"] > positions[-1][0]
    assert stream.latestOffset(start, ReadAllAvailable()) == start
    stream.stop()
