"""What was written and is refused, or dropped as a repetition, leaves no ledger."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow
import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import client_aio
from client_aio.spark import commits, ledger_sink
from client_aio.spark.provenance import Written
from client_aio.spark.schemas import arrow_schema
from client_aio.spark.sink import BatchWriter, Partition
from client_aio.spark.write_task import Job, write_partition
from metadata.errors import InvalidArgumentError, LedgerRecoveryError
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from client_aio.spark.write_task import WrittenLedger
    from metadata.model.ledger import LedgerMetadata

BYTES = StructType([StructField("value", BinaryType())])
OLD, NEW = StructType([StructField("a", LongType())]), StructType([StructField("b", StringType())])


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("leftovers"), bookies=3) as running:
        yield running


@pytest.fixture
def log() -> str:
    """Name a log of the test's own."""
    return f"leftovers-{secrets.token_hex(8)}"


def written(job: Job, *rows: dict[str, Any]) -> tuple[WrittenLedger, ...]:
    """Write rows as a task does."""
    schema = arrow_schema(job.written.schema) if job.written.schema is not None else arrow_schema(BYTES)
    return write_partition(job, iter([pyarrow.RecordBatch.from_pylist(list(rows), schema)]))


@pytest.mark.parametrize("batch_id", [None, 4])
def test_rows_that_do_not_fit_the_log_at_the_commit_are_deleted(
    bookies: Bookies, log: str, batch_id: int | None
) -> None:
    """The log was overwritten with other columns while they were written."""
    given = {"metadata": bookies.uri, "log": log}
    late = BatchWriter(given, OLD, overwrite=False)
    job = replace(late._job, batch_id=batch_id)
    ledgers = written(job, {"a": 2})
    other = BatchWriter(given, NEW, overwrite=True)
    other.commit([Partition(0, written(other._job, {"b": "x"}))])
    ids = [ledger.ledger_id for ledger in ledgers]
    with pytest.raises(InvalidArgumentError, match="does not fit the log as it is now"):
        bookies.run(commits.commit(job, ids, replace=False, floor=late._floor))
    listed, left = bookies.ledgers_of(log)
    assert (len(listed), left) == (1, set())


def test_a_repetition_is_deleted_though_others_have_added_to_the_log_since(
    bookies: Bookies, log: str
) -> None:
    first = BatchWriter({"metadata": bookies.uri, "log": log}, BYTES, overwrite=False)
    query = replace(first._job, job_id="query", batch_id=3, content="1:0")

    def commit(job: Job, ledgers: tuple[WrittenLedger, ...]) -> bool:
        return bookies.run(commits.commit(job, [each.ledger_id for each in ledgers], replace=False))

    assert commit(query, written(query, {"value": b"1"}))
    again = written(query, {"value": b"1"})
    another = replace(query, job_id="another")
    assert commit(another, written(another, {"value": b"2"}))
    assert not commit(query, again)
    assert bookies.records(log) == [b"1", b"2"]
    assert bookies.ledgers_of(log)[1] == set()


def query_of(bookies: Bookies, log: str) -> Job:
    """Plan the first batch of a streaming query."""
    writer = BatchWriter({"metadata": bookies.uri, "log": log}, BYTES, overwrite=False)
    return replace(writer._job, job_id="query", batch_id=0, content="1:0")


class Asked:
    """The ledgers whose metadata are asked for, and how many questions were open at once at most."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.open = self.open_max = 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    noted, read = Asked(), client_aio.Client.ledger_metadata

    async def note(client: client_aio.Client, ledger_id: int) -> LedgerMetadata:
        noted.ids.append(ledger_id)
        noted.open += 1
        noted.open_max = max(noted.open_max, noted.open)
        try:
            return await read(client, ledger_id)
        finally:
            noted.open -= 1

    monkeypatch.setattr(client_aio.Client, "ledger_metadata", note)
    return noted


def others(bookies: Bookies, count: int) -> list[int]:
    """Make ledgers that no job wrote, by a client of their own: their ids are the highest."""

    async def make() -> list[int]:
        ids = []
        async with client_aio.connect(bookies.uri) as client:
            for _ in range(count):
                async with client.create_ledger() as ledger:
                    ids.append(ledger.ledger_id)
        return ids

    return bookies.run(make())


def test_a_first_commit_looks_for_leftovers_from_its_own_first_ledger_on(
    bookies: Bookies, log: str, asked: Asked
) -> None:
    older = others(bookies, 3)
    query = query_of(bookies, log)
    assert bookies.run(commits.commit(query, [], replace=False))
    assert asked.ids == [], "without ledgers nothing is looked for"
    first = replace(query, batch_id=1)
    ids = [ledger.ledger_id for ledger in written(first, {"value": b"1"})]
    dead = written(first, {"value": b"1"})
    assert bookies.run(commits.commit(first, ids, replace=False))
    assert asked.ids == [ledger.ledger_id for ledger in dead]
    assert max(older) < min(ids) < min(asked.ids)
    assert bookies.ledgers_of(log) == (set(ids), set())


def test_leftovers_are_looked_for_among_some_ledgers_at_once(
    bookies: Bookies, log: str, asked: Asked
) -> None:
    query = query_of(bookies, log)
    (kept,) = written(query, {"value": b"1"})
    others(bookies, 40)
    (dead,) = written(query, {"value": b"1"})
    asked.ids.clear()
    assert bookies.run(commits.commit(query, [kept.ledger_id], replace=False))
    assert len(asked.ids) == 41
    assert asked.open_max == 32
    assert dead.ledger_id in asked.ids
    assert bookies.ledgers_of(log) == ({kept.ledger_id}, set())


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("the log has columns"), LedgerRecoveryError("one of three")]
)
def test_a_partition_that_cannot_be_added_is_deleted(
    bookies: Bookies, log: str, error: client_aio.BookKeeperError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(commits, "_add_patiently", refuse)
    with pytest.raises(type(error)):
        ledger_sink(bookies.uri, log=log)([b"1", b"2"])
    assert bookies.ledgers_of(log) == (set(), set())


def test_a_partition_whose_addition_is_unknown_is_kept(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be listed by now."""

    async def lose_the_answer(*_: object) -> None:
        raise client_aio.MetadataUnavailableError("no answer")

    monkeypatch.setattr(commits, "_add_patiently", lose_the_answer)
    with pytest.raises(client_aio.MetadataUnavailableError):
        ledger_sink(bookies.uri, log=log)([b"1"])
    assert len(bookies.ledgers_of(log)[1]) == 1


def test_rows_of_bytes_do_not_become_rows_of_columns(bookies: Bookies, log: str) -> None:
    writer = BatchWriter({"metadata": bookies.uri, "log": log}, OLD, overwrite=False)
    writer.commit([Partition(0, written(writer._job, {"a": 1}))])
    with pytest.raises(InvalidArgumentError, match="encoding binary, in the log arrow"):
        ledger_sink(bookies.uri, log=log)([b"no row"])
    listed, left = bookies.ledgers_of(log)
    assert (len(listed), left) == (1, set())
    assert writer._job.written != Written()
