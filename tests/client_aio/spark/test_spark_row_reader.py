"""From a batch of entries to batches of rows: runs of bounded size, and the entry that an error names."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow
import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from client_aio.ledger.entry_reader import EntryBatch
from client_aio.spark import encoding
from client_aio.spark.encoding import Format, UndecodableEntryError, make_encoder
from client_aio.spark.provenance import Written
from client_aio.spark.row_reader import Piece, RowReader
from client_aio.spark.scan_plan import Stretch
from client_aio.spark.schemas import BYTES, arrow_schema, nullable_json

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = StructType([StructField("value", BinaryType()), StructField("entry_id", LongType())])
WITH_ERROR = StructType([*SCHEMA.fields, StructField("_error", StringType())])
PIECE = Piece(Stretch("a", 7, 7, 0, 99, 0), Written("binary", "zstd"))
VALUES = [bytes([number]) * 600 for number in range(5)]


def reader(schema: StructType, *, is_permissive: bool) -> RowReader:
    value = nullable_json(StructType(SCHEMA.fields[:1]))
    return RowReader(
        "sqlite:///unused.db",
        arrow_schema(schema),
        "binary",
        BYTES,
        value,
        accepted=("binary",),
        is_permissive=is_permissive,
    )


def batch_of(entries: Sequence[bytes]) -> EntryBatch:
    return EntryBatch(40, list(accumulate(map(len, entries), initial=0)), memoryview(b"".join(entries)))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setattr(encoding, "_RUN_BYTES", 1200)
    encode = make_encoder(Format("binary", "zstd"), entry_bytes=100, entry_bytes_max=10_000, value="v")
    schema = pyarrow.schema([("v", pyarrow.binary())])
    return encode(pyarrow.RecordBatch.from_pylist([{"v": value} for value in VALUES], schema=schema))


def test_a_batch_that_is_large_when_it_is_decompressed_becomes_several(entries: list[bytes]) -> None:
    found = list(reader(SCHEMA, is_permissive=False)._batches(PIECE, batch_of(entries)))
    assert [batch.num_rows for batch in found] == [2, 2, 1]
    rows = [(row["entry_id"], row["value"]) for batch in found for row in batch.to_pylist()]
    assert rows == list(enumerate(VALUES, 40))


def test_an_entry_of_a_later_run_is_named_or_set_aside(entries: list[bytes]) -> None:
    entries[3] = entries[3][:9]
    with pytest.raises(UndecodableEntryError, match="entry 43 of ledger 7: it cannot be decoded") as raised:
        list(reader(SCHEMA, is_permissive=False)._batches(PIECE, batch_of(entries)))
    assert (raised.value.ledger_id, raised.value.entry_id) == (7, 43)
    found = list(reader(WITH_ERROR, is_permissive=True)._batches(PIECE, batch_of(entries)))
    rows = [row for batch in found for row in batch.to_pylist()]
    assert [row["entry_id"] for row in rows if row["_error"]] == [43]
    assert [row["value"] for row in rows] == [*VALUES[:3], None, VALUES[4]]


def test_a_ledger_of_another_encoding_is_refused_or_set_aside_as_a_whole(entries: list[bytes]) -> None:
    other = Piece(PIECE.stretch, Written("json"))
    with pytest.raises(
        UndecodableEntryError, match="entry 40 of ledger 7: it was written with encoding json"
    ):
        list(reader(SCHEMA, is_permissive=False)._batches(other, batch_of(entries)))
    (found,) = reader(WITH_ERROR, is_permissive=True)._batches(other, batch_of(entries))
    assert [row["value"] for row in found.to_pylist()] == [None] * 5
