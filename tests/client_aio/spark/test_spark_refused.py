"""What cannot be done, or would do nothing, is refused; what is only estimated is not."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, cast

import pyarrow
import pytest
from pyspark.sql.types import StructType

from client_aio.spark import batch, encoding, source, stream
from client_aio.spark.catalog import Catalog
from client_aio.spark.encoding import Format, make_encoder
from client_aio.spark.json_rows import to_json_rows
from client_aio.spark.options import parse_read
from client_aio.spark.provenance import Written
from client_aio.spark.schemas import schema_of
from client_aio.spark.source import LedgerDataSource
from metadata.errors import (
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    InvalidArgumentError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import client_aio

READ = {"metadata": "sqlite:///unused.db", "log": "orders"}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch, source, stream):
        monkeypatch.setattr(
            module, "written_of", lambda options: Written(options.encoding.replace("auto", "binary"))
        )


@pytest.mark.parametrize("kind", ["binary", "json", "arrow"])
def test_a_row_that_could_not_be_decompressed_again_is_refused_when_it_is_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_INFLATED_BYTES_MAX", 3000)
    schema = pyarrow.schema([("v", pyarrow.binary())])
    batch = pyarrow.RecordBatch.from_pylist([{"v": b"x"}, {"v": bytes(5000)}], schema=schema)
    format_ = Format(kind, "zstd", schema)
    encode = make_encoder(format_, entry_bytes=100, entry_bytes_max=4000, value="v")
    with pytest.raises(
        EntryTooLargeError,
        match=r"row 1 .* [5-7],\d+ bytes before compression, .* 'v', .* 3,000",
    ):
        encode(batch)
    assert len(encode(batch.slice(0, 1))) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("startingPosition", "latest"),
        ("maxEntriesPerTrigger", "1"),
        ("maxBytesPerTrigger", "1k"),
        ("failOnDataLoss", "false"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(name: str, value: str) -> None:
    given = LedgerDataSource({**READ, name.lower(): value})
    value_only = StructType().add("value", "binary")
    with pytest.raises(InvalidArgumentError, match=f"the option {name} is for "):
        given.reader(value_only)
    given.streamReader(value_only)


def test_columns_that_are_not_those_of_the_schema_given_are_refused() -> None:
    schema = StructType().add("a", "long").add("b", "string")
    for columns in ("a", "b,a", "a,b,c"):
        given = LedgerDataSource({**READ, "encoding": "json", "columns": columns})
        for read in (given.reader, given.streamReader):
            with pytest.raises(InvalidArgumentError, match="the schema that is given has a, b"):
                read(schema)
    LedgerDataSource({**READ, "encoding": "json", "columns": "a, b"}).reader(schema)
    given = LedgerDataSource({**READ, "encoding": "json", "mode": "permissive", "columns": "_error,a,b"})
    given.reader(schema.add("_error", "string"))


def test_the_column_of_reasons_is_refused_where_there_are_none() -> None:
    options = parse_read({**READ, "columns": "value,_error"})
    with pytest.raises(InvalidArgumentError, match="'_error', which there is with mode permissive only"):
        schema_of(options, Written())
    permissive = parse_read({**READ, "columns": "value,_error", "mode": "permissive"})
    assert schema_of(permissive, Written()).names == ["value", "_error"]


def test_a_time_without_a_zone_is_refused() -> None:
    for text in ("2026-01-31T12:00:00", "2026-01-31"):
        with pytest.raises(InvalidArgumentError, match=f"{text}'.* without a zone: .*T12:00:00Z or .*01:00"):
            LedgerDataSource({**READ, "startingPosition": text}).streamReader(StructType())
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00"):
        moment = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
        assert stream._parse_start(text) == moment


@pytest.mark.parametrize("error", [DigestMismatchError("damaged"), BookieUnavailableError("away")])
async def test_an_entry_that_cannot_be_read_does_not_keep_the_mean_size_from_being_estimated(
    error: Exception,
) -> None:
    class Batch:
        buffer = bytes(80)

        def __len__(self) -> int:
            return 4

    class Reader:
        ledger_id = 7

        async def read_batches(self, first: int, last: int, *, known_lac: int) -> AsyncIterator[Batch]:
            yield Batch()
            raise error

    catalog = Catalog(cast("client_aio.Client", None), parse_read(READ))
    assert await catalog._sample(cast("Any", Reader()), 0, 99) == 20


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pyarrow.timestamp("us", tz="UTC"), -62135596800000000 - 1),
        (pyarrow.timestamp("us"), 10**18),
        (pyarrow.date32(), 10**7),
        (pyarrow.list_(pyarrow.timestamp("us", tz="UTC")), [10**18]),
    ],
)
def test_a_time_that_python_does_not_have_is_refused_and_its_column_named(
    kind: pyarrow.DataType, number: Any
) -> None:
    plain = pyarrow.int32() if kind == pyarrow.date32() else pyarrow.int64()
    plain = pyarrow.list_(plain) if isinstance(number, list) else plain
    batch = pyarrow.RecordBatch.from_arrays(
        [pyarrow.array([1]), pyarrow.array([number], plain).cast(kind)], ["n", "at"]
    )
    with pytest.raises(InvalidArgumentError, match=r"column 'at' has a date or a time .* encoding arrow"):
        to_json_rows(batch)


def test_a_time_that_has_no_counterpart_in_utc_is_refused() -> None:
    cells = [datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)]
    array = pyarrow.array(cells, pyarrow.timestamp("us", tz="UTC"))
    batch = pyarrow.RecordBatch.from_arrays([array.cast(pyarrow.timestamp("us", tz="-05:00"))], ["at"])
    with pytest.raises(InvalidArgumentError, match="column 'at' has"):
        to_json_rows(batch)
