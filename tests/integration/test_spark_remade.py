"""A log that is not the one it was when a query, or a write, looked at it before."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

import client_aio
from client_aio.spark.options import parse_read
from client_aio.spark.schemas import arrow_schema
from client_aio.spark.sink import BatchWriter, Partition
from client_aio.spark.stream import LedgerStreamReader
from client_aio.spark.write_task import write_partition
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA = StructType([StructField("value", BinaryType())])
OLD, NEW = [b"old %d" % number for number in range(8)], [b"new %d" % number for number in range(5)]
ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("remade"), bookies=3) as running:
        yield running


@pytest.fixture
def log() -> str:
    """Name a log of the test's own. The name of a passed test's folder is given again."""
    return f"remade-{secrets.token_hex(8)}"


@pytest.fixture
def reader(bookies: Bookies) -> Iterator[Callable[..., LedgerStreamReader]]:
    """Make stream readers as Spark's driver does, and stop them."""
    made: list[LedgerStreamReader] = []

    def make(**options: str) -> LedgerStreamReader:
        made.append(LedgerStreamReader(parse_read({"metadata": bookies.uri, **options}), SCHEMA))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def values(stream: LedgerStreamReader, start: dict[str, int], end: dict[str, int]) -> list[bytes]:
    parts: Any = stream.partitions(start, end)
    return [value for part in parts for batch in stream.read(part) for value in batch["value"].to_pylist()]


def make_anew(bookies: Bookies, log: str) -> None:
    bookies.run(bookies.client.delete_log(log))
    bookies.append(log, NEW)


def test_a_log_that_was_made_anew_ends_the_query_or_is_read_from_its_beginning(
    bookies: Bookies, log: str, reader: Callable[..., LedgerStreamReader]
) -> None:
    bookies.append(log, OLD)
    strict, lenient = reader(log=log), reader(log=log, failOnDataLoss="false")
    start = strict.initialOffset()
    read = strict.latestOffset(start, ReadMaxRows(5))
    planned = strict.latestOffset(read, ReadMaxRows(2))
    assert values(strict, start, read) == OLD[:5]
    make_anew(bookies, log)
    with pytest.raises(client_aio.LogTruncatedError, match=f"log {log!r} has been deleted and made anew"):
        strict.latestOffset(read, ALL)
    with pytest.raises(client_aio.LogTruncatedError, match="set failOnDataLoss to false"):
        strict.partitions(read, planned)
    assert lenient.partitions(read, planned) == []
    end = lenient.latestOffset(planned, ALL)
    assert values(lenient, planned, end) == NEW
    assert lenient.latestOffset(end, ALL) == end
    now = reader(log=log, failOnDataLoss="false")
    now.prepareForTriggerAvailableNow()
    bookies.append(log, [b"later"])
    assert values(now, planned, now.latestOffset(planned, ALL)) == NEW


def test_a_checkpoint_of_an_older_release_goes_on(
    bookies: Bookies, log: str, reader: Callable[..., LedgerStreamReader]
) -> None:
    positions = bookies.append(log, OLD)
    stream = reader(log=log)
    old = {"id": positions[3][0], "entry": positions[3][1]}
    end = stream.latestOffset(old, ALL)
    assert values(stream, old, end) == OLD[3:]
    assert values(stream, old, {"id": end["id"], "entry": end["entry"]}) == OLD[3:]
    make_anew(bookies, log)
    with pytest.raises(client_aio.LogTruncatedError):
        stream.latestOffset(end, ALL)


def test_an_unbounded_ledger_that_was_trimmed_unread_from_its_first_entry_on_is_reported(
    bookies: Bookies, log: str, reader: Callable[..., LedgerStreamReader]
) -> None:
    async def fill() -> client_aio.UnboundedLedgerWriter:
        ledger = await bookies.client.open_unbounded_ledger(log)
        for number in range(3):
            await ledger.add_entry(b"%d" % number)
            await ledger.roll()
        await ledger.add_entry(b"3")
        return ledger

    async def trim(ledger: client_aio.UnboundedLedgerWriter) -> None:
        await ledger.trim(2)
        await ledger.close()

    ledger = bookies.run(fill())
    strict, lenient = reader(ledger=log), reader(ledger=log, failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ReadMaxRows(3))
    assert (start["entry"], end["entry"]) == (0, 3)
    bookies.run(trim(ledger))
    with pytest.raises(client_aio.LogTruncatedError, match="has been truncated before that"):
        reader(ledger=log).partitions(start, end)
    assert values(lenient, start, end) == [b"2"]
    fresh = reader(ledger=log)
    start = fresh.initialOffset()
    assert values(fresh, start, fresh.latestOffset(start, ALL)) == [b"2", b"3"]


@pytest.mark.parametrize("if_exists", ["error", "ignore", "append"])
def test_a_write_that_found_the_log_empty_looks_again_when_it_commits(
    bookies: Bookies, log: str, if_exists: str
) -> None:
    given = {"metadata": bookies.uri, "log": log, "ifExists": if_exists}
    writers = [BatchWriter(given, SCHEMA, overwrite=False) for _ in range(2)]
    messages = []
    for writer in writers:
        batch = pyarrow.RecordBatch.from_pylist([{"value": b"x"}], arrow_schema(SCHEMA))
        messages.append(Partition(0, write_partition(writer._job, iter([batch]))))
    writers[0].commit([messages[0]])
    if if_exists == "error":
        with pytest.raises(client_aio.InvalidArgumentError, match=f"log {log!r} holds records that were"):
            writers[1].commit([messages[1]])
    else:
        writers[1].commit([messages[1]])
    assert bookies.records(log) == [b"x"] * (2 if if_exists == "append" else 1)
    _, left = bookies.ledgers_of(log)
    assert not left


def test_a_reader_that_is_asked_nothing_keeps_no_connection(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark makes one beside the one that it stops."""
    bookies.append(log, OLD)
    closed: list[client_aio.Client] = []
    close = client_aio.Client.close

    async def noted(client: client_aio.Client) -> None:
        closed.append(client)
        await close(client)

    monkeypatch.setattr(client_aio.Client, "close", noted)
    stream = LedgerStreamReader(parse_read({"metadata": bookies.uri, "log": log}), SCHEMA)
    assert stream._client is None
    assert len(closed) == 1
