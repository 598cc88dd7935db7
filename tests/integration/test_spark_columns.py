"""Whose column is given under a name, and what becomes of a query whose log is overwritten under it."""

from __future__ import annotations

import datetime
import secrets
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from client_aio.spark.encoding import UndecodableEntryError
from client_aio.spark.schemas import arrow_schema
from client_aio.spark.sink import BatchWriter, Partition
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.write_task import write_partition
from metadata.errors import InvalidArgumentError
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("columns"), bookies=3) as running:
        yield running


@pytest.fixture
def given(bookies: Bookies) -> dict[str, str]:
    """Options that name a log of the test's own. The name of a passed test's folder is given again."""
    return {"metadata": bookies.uri, "log": f"columns-{secrets.token_hex(8)}"}


def struct(**columns: str) -> StructType:
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()
    ]
    return StructType.fromJson({"type": "struct", "fields": fields})


def save(given: dict[str, str], schema: StructType, *rows: tuple[Any, ...], overwrite: bool = False) -> None:
    """Write rows as Spark's driver and a task do, in this process."""
    batch = pyarrow.RecordBatch.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in rows], arrow_schema(schema)
    )
    writer = BatchWriter(given, schema, overwrite=overwrite)
    writer.commit([Partition(0, write_partition(writer._job, iter([batch])))])


def rows_of(reader: Any, *between: Any) -> list[dict[str, Any]]:
    parts = reader.partitions(*between)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def load(given: dict[str, str], schema: StructType | None = None) -> list[dict[str, Any]]:
    source = LedgerDataSource(given)
    return rows_of(source.reader(source.schema() if schema is None else schema))


OLD = struct(a="long", b="string")
OTHERS = [
    ("arrow", "arrow", struct(a="long", c="string"), "column 'b' is not in the log"),
    ("json", "json", struct(a="long", c="string"), "column 'b' is not in the log"),
    ("arrow", "arrow", struct(x="long", y="string"), "column 'a' is not in the log; column 'b' is not"),
    ("arrow", "arrow", struct(a="string", b="string"), "column 'a' is long, in the log string"),
    ("json", "json", struct(a="string", b="string"), "column 'a' is long, in the log string"),
    ("arrow", "json", struct(x="long", y="string"), "column 'a' is not|encoding json, and arrow is read"),
    ("json", "arrow", struct(x="long", y="string"), "column 'a' is not|encoding arrow, and json is read"),
]


def values_for(schema: StructType) -> tuple[Any, ...]:
    return tuple(7 if field.dataType.simpleString() == "bigint" else "7" for field in schema.fields)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(("old", "new", "columns", "said"), OTHERS)
def test_a_query_is_refused_the_rows_of_a_log_that_was_overwritten_with_other_columns(
    given: dict[str, str], old: str, new: str, columns: StructType, said: str, is_planned: bool
) -> None:
    """They came as nulls, or as what a cast made of them."""
    save({**given, "encoding": old}, OLD, (1, "x"))
    for mode in ("failfast", "permissive"):
        save({**given, "encoding": old}, OLD, (1, "x"), overwrite=True)
        source = LedgerDataSource({**given, "mode": mode})
        schema = source.schema()
        reader = source.reader(schema) if is_planned else None
        save({**given, "encoding": new}, columns, values_for(columns), overwrite=True)
        if mode == "failfast":
            # A query that is planned later is refused in the driver, and one that is planned in its tasks.
            with pytest.raises(UndecodableEntryError if is_planned else InvalidArgumentError, match=said):
                rows_of(source.reader(schema) if reader is None else reader)
        else:
            (row,) = rows_of(source.reader(schema) if reader is None else reader)
            assert (row["a"], row["b"]) == (None, None)
            assert row["_error"]


def test_a_stream_is_refused_the_rows_of_a_log_that_was_overwritten_with_other_columns(
    given: dict[str, str],
) -> None:
    save(given, OLD, (1, "x"))
    source = LedgerDataSource(given)
    stream: Any = source.streamReader(source.schema())
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert rows_of(stream, start, end) == [{"a": 1, "b": "x"}]
    save(given, struct(c="string", b="string", a="long"), ("new", "y", 2), overwrite=True)
    start, end = end, stream.latestOffset(end, ReadAllAvailable())
    assert rows_of(stream, start, end) == [{"a": 2, "b": "y"}], "its columns are there as they were"
    save(given, struct(a="long"), (3,), overwrite=True)
    start, end = end, stream.latestOffset(end, ReadAllAvailable())
    with pytest.raises(UndecodableEntryError, match=r"column 'b' is not in the log.* load it again"):
        rows_of(stream, start, end)
    stream.stop()


@pytest.mark.parametrize("is_said", [False, True])
def test_a_stream_of_bytes_is_refused_batches_of_rows_unless_it_asks_for_bytes(
    bookies: Bookies, given: dict[str, str], is_said: bool
) -> None:
    log = given["log"]
    bookies.append(log, [b"plain"])
    source = LedgerDataSource(given | ({"encoding": "binary"} if is_said else {}))
    stream: Any = source.streamReader(struct(value="binary"))
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert rows_of(stream, start, end) == [{"value": b"plain"}]
    save(given, OLD, (1, "x"), overwrite=True)
    start, end = end, stream.latestOffset(end, ReadAllAvailable())
    if is_said:
        assert [row["value"] for row in rows_of(stream, start, end)] == bookies.records(log)
    else:
        with pytest.raises(UndecodableEntryError, match="encoding arrow, and binary is read"):
            rows_of(stream, start, end)
    stream.stop()


@pytest.mark.parametrize("encoding", ["binary", "json", "arrow"])
def test_a_column_that_the_log_has_not_is_refused_in_a_schema_of_the_users(
    bookies: Bookies, given: dict[str, str], encoding: str
) -> None:
    if encoding == "binary":
        bookies.append(given["log"], [b"x"])
    else:
        save({**given, "encoding": encoding}, OLD, (1, "x"))
    for wrong, name in (
        (struct(nothing="string", entry_id="long"), "nothing"),
        (struct(value="string"), "value"),
        (struct(a="string"), "a"),
        (struct(entry_id="integer"), "entry_id"),
    ):
        for reader in (LedgerDataSource(given).reader, LedgerDataSource(given).streamReader):
            with pytest.raises(
                InvalidArgumentError, match=f"does not fit log .*: column '{name}' is "
            ) as raised:
                reader(wrong)
            assert "overwritten" not in str(raised.value), "nobody has overwritten this log"
    if encoding != "binary":
        assert load(given, struct(b="string", entry_id="long")) == [{"b": "x", "entry_id": 0}]


def test_metadata_and_collations_of_columns_stay(given: dict[str, str]) -> None:
    """Without its collation `c = 'aB'` finds no row "Ab" any more."""
    kept = {"comment": "a word", "unit": 7}
    schema = StructType(
        [
            StructField("c", StringType("UTF8_LCASE"), metadata=kept | {"spark.watermarkDelayMs": 5}),
            StructField("l", ArrayType(StringType("UNICODE"))),
            StructField("s", StructType([StructField("x", StringType(), metadata=kept)])),
        ]
    )
    save(given, schema, ("Ab", ["x"], {"x": "y"}))
    found = LedgerDataSource(given).schema()
    assert [found[name].dataType for name in "cl"] == [schema[name].dataType for name in "cl"]
    assert (found["c"].metadata, found["s"].dataType["x"].metadata) == (kept, kept), "no watermark of a query"
    assert load(given) == [{"c": "Ab", "l": ["x"], "s": {"x": "y"}}]
    save(given, struct(c="string", l=found["l"].dataType.jsonValue(), s=found["s"].dataType.jsonValue()))
    assert LedgerDataSource(given).schema() == found, "a later write has the log's columns"


MOMENT = datetime.datetime(2026, 2, 3, tzinfo=datetime.UTC)
LIKE_OURS = struct(log="long", ledger_id="string", entry_id="string", position="long", timestamp="timestamp")
THEIRS = {"log": 1, "ledger_id": "two", "entry_id": "three", "position": 4, "timestamp": MOMENT}


@pytest.mark.parametrize("encoding", ["json", "arrow"])
def test_a_users_columns_that_are_called_like_ours_are_the_users_in_every_row(
    bookies: Bookies, given: dict[str, str], encoding: str
) -> None:
    save({**given, "encoding": encoding}, LIKE_OURS, tuple(THEIRS.values()))
    assert load(given) == [THEIRS]
    assert load({**given, "columns": "timestamp,entry_id"}) == [{"timestamp": MOMENT, "entry_id": "three"}]
    bookies.append(given["log"], [b"no row"])
    found = load({**given, "mode": "permissive"})
    assert found[0] == {**THEIRS, "_error": None}
    assert {name: value for name, value in found[1].items() if name != "_error"} == dict.fromkeys(THEIRS)
    assert found[1]["_error"]
    ours = load({**given, "encoding": "binary", "columns": "log,entry_id"})
    assert ours == [{"log": given["log"], "entry_id": 0}] * 2


def test_where_a_row_that_is_lost_comes_from_is_said(bookies: Bookies, given: dict[str, str]) -> None:
    save(given, struct(timestamp="string"), ("theirs",))
    bookies.append(given["log"], [b"no row"])
    found = load({**given, "mode": "permissive", "columns": "timestamp,log,entry_id"})
    assert [(row["timestamp"], row["log"], row["entry_id"]) for row in found] == [
        ("theirs", given["log"], 0),
        (None, given["log"], 0),
    ]


@pytest.mark.parametrize("encoding", ["json", "arrow", "auto"])
@pytest.mark.parametrize("name", ["_error", "_Error"])
def test_a_column_that_is_called_like_the_reason_is_refused_when_it_is_written(
    given: dict[str, str], encoding: str, name: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"has a column '{name}'.*withColumnRenamed"):
        save({**given, "encoding": encoding}, struct(a="long", **{name: "string"}), (1, "x"))
