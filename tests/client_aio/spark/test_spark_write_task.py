"""A task that fails deletes what it wrote, and waits once at most for servers that are away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from client_aio.spark import schemas, write_task
from client_aio.spark.fingerprint import Fingerprint
from client_aio.spark.options import parse_write
from client_aio.spark.provenance import Written
from client_aio.spark.write_task import Chunk, Job, encode_chunks, write_ledgers
from metadata.errors import BookKeeperError, InvalidArgumentError, MetadataUnavailableError, NoSuchLedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ledger:
    """A ledger that closes with one entry."""

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.metadata = SimpleNamespace(last_entry=0, length=1)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "deleted"),
    [(None, [1, 2, 3]), (NoSuchLedgerError("gone"), [1, 2, 3]), (MetadataUnavailableError("away"), [1])],
)
def test_what_a_failed_task_wrote_is_deleted_while_servers_answer(
    error: BookKeeperError | None, deleted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(range(1, 10))
    asked: list[int] = []

    class Client:
        def delete_ledger(self, ledger_id: int, *, password: bytes) -> None:
            asked.append(ledger_id)
            if error is not None:
                raise error

    def chunks() -> Iterator[Chunk]:
        for _ in range(3):
            yield Chunk([b"x"], 1)
        raise RuntimeError("made to fail")

    monkeypatch.setattr(write_task, "_create", lambda *_: Ledger(next(ids)))
    monkeypatch.setattr(write_task, "_add_batches", lambda _, batches: list(batches))
    options = parse_write({"metadata": "sqlite:///unused.db", "log": "a", "ledgerBytes": "1"})
    job = Job(options, Written(), "job", None, "value", ())
    with pytest.raises(RuntimeError, match="made to fail"):
        write_ledgers(cast("Any", Client()), job, chunks())
    assert asked == deleted


@pytest.mark.parametrize("encoding", ["json", "arrow"])
def test_a_string_of_a_stream_that_is_no_text_is_refused_as_that_of_a_batch_is(encoding: str) -> None:
    schema = StructType([StructField("text", StringType())])
    options = parse_write({"metadata": "sqlite:///unused.db", "log": "a"})
    job = Job(options, Written(encoding, schema=schemas.nullable_json(schema)), "job", 1, None, ())

    def write(text: bytes, content: Fingerprint | None) -> list[Chunk]:
        column = pyarrow.array([b"fine", text], pyarrow.binary()).view(pyarrow.string())
        batch = pyarrow.RecordBatch.from_arrays([column], ["text"])
        return list(encode_chunks(job, iter([batch]), content))

    assert [chunk.rows for chunk in write(b"fine", Fingerprint())] == [2]
    for content in (None, Fingerprint()):
        with pytest.raises(InvalidArgumentError, match="UTF-8"):
            write(b"\xff\xfe", content)
