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
