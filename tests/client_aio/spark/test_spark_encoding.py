"""Rows to entries and back: each encoding inverts itself, whatever the types and the cuts."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_aio.spark import encoding
from client_aio.spark.encoding import (
    Format,
    UndecodableEntryError,
    cut_into_runs,
    decode,
    make_encoder,
)
from client_aio.spark.fingerprint import Fingerprint
from client_aio.spark.json_rows import to_json_value
from metadata.errors import EntryTooLargeError, InvalidArgumentError

if TYPE_CHECKING:
    import random

LIMIT = 4 * 1024 * 1024
UTC = datetime.UTC

FLAT: dict[pyarrow.DataType, st.SearchStrategy[Any]] = {
    pyarrow.bool_(): st.booleans(),
    pyarrow.int8(): st.integers(-128, 127),
    pyarrow.int32(): st.integers(-(2**31), 2**31 - 1),
    pyarrow.int64(): st.integers(-(2**63), 2**63 - 1),
    pyarrow.float64(): st.floats(),
    pyarrow.float32(): st.floats(width=32),
    pyarrow.string(): st.text(max_size=20),
    pyarrow.binary(): st.binary(max_size=20),
    pyarrow.date32(): st.dates(),
    pyarrow.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(UTC)),
    pyarrow.timestamp("us"): st.datetimes(),
    pyarrow.decimal128(12, 3): st.decimals(-999_999_999, 999_999_999, places=3),
    pyarrow.duration("us"): st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999)),
}


def nested(
    child: st.SearchStrategy[tuple[pyarrow.DataType, st.SearchStrategy[Any]]],
) -> st.SearchStrategy[tuple[pyarrow.DataType, st.SearchStrategy[Any]]]:
    def a_list(inner: tuple[pyarrow.DataType, st.SearchStrategy[Any]]) -> Any:
        return pyarrow.list_(inner[0]), st.lists(st.none() | inner[1], max_size=3)

    def a_struct(inner: tuple[pyarrow.DataType, st.SearchStrategy[Any]]) -> Any:
        kind = pyarrow.struct([("first", inner[0]), ("second", pyarrow.string())])
        return kind, st.fixed_dictionaries({"first": st.none() | inner[1], "second": st.text(max_size=3)})

    def a_map(inner: tuple[pyarrow.DataType, st.SearchStrategy[Any]]) -> Any:
        pairs = st.dictionaries(st.integers(0, 9), st.none() | inner[1], max_size=3)
        return pyarrow.map_(pyarrow.int64(), inner[0]), pairs.map(lambda each: list(each.items()))

    return child.flatmap(lambda inner: st.sampled_from([a_list(inner), a_struct(inner), a_map(inner)]))


TYPES = st.recursive(st.sampled_from(list(FLAT.items())), nested, max_leaves=3)


@st.composite
def batches(draw: st.DrawFn) -> pyarrow.RecordBatch:
    columns = draw(st.lists(TYPES, min_size=1, max_size=4))
    rows = draw(st.integers(0, 8))
    schema = pyarrow.schema([(f"column {number}", kind) for number, (kind, _) in enumerate(columns)])
    arrays = [
        pyarrow.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), kind)
        for kind, values in columns
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def as_run(entries: list[bytes]) -> tuple[list[int], memoryview]:
    return list(accumulate(map(len, entries), initial=0)), memoryview(b"".join(entries))


def same(left: Any, right: Any) -> bool:
    """Compare cells; a NaN equals itself here."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


ROWS = pyarrow.schema([("a", pyarrow.int32()), ("b", pyarrow.string())])
TEXT = pyarrow.schema([("b", pyarrow.string())])
GOOD = b'{"a":1,"b":"x"}'


@given(
    batches(),
    st.sampled_from(["json", "arrow"]),
    st.sampled_from(["none", "zstd", "lz4"]),
    st.integers(1, 999),
)
@settings(deadline=None)
def test_rows_come_back_equal(
    batch: pyarrow.RecordBatch, encoding: str, compression: str, entry_bytes: int
) -> None:
    format_ = Format(encoding, compression, batch.schema)
    entries = make_encoder(format_, entry_bytes=entry_bytes, entry_bytes_max=LIMIT)(batch)
    decoded = decode(format_, *as_run(entries))
    assert decoded.rows == batch.num_rows
    assert not decoded.errors
    if encoding == "arrow":
        assert decoded.counts is not None
        assert len(decoded.counts) == len(entries)
        assert decoded.counts.sum() == batch.num_rows
    else:
        assert len(entries) == batch.num_rows
    for column, original in zip(decoded.columns, batch.columns, strict=True):
        assert column.type == original.type
        assert same(column.to_pylist(), original.to_pylist())


@given(batches())
@settings(deadline=None)
def test_json_has_the_text_that_the_standard_library_writes(batch: pyarrow.RecordBatch) -> None:
    entries = make_encoder(Format("json"), entry_bytes=1, entry_bytes_max=LIMIT)(batch)
    kinds = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    ought = [
        json.dumps(
            {name: to_json_value(cell, kinds[name]) for name, cell in row.items()},
            ensure_ascii=False, allow_nan=False, separators=(",", ":"),
        ).encode()
        for row in batch.to_pylist()
    ]  # fmt: skip
    assert entries == ought


def test_json_of_each_character_is_what_the_standard_library_writes() -> None:
    texts = [chr(code) for code in range(0x180)] + ["\u2028", "\U0001f600", None]
    entries = []
    for text in texts:  # a batch for each: one that needs no escape is written in another way
        batch = pyarrow.RecordBatch.from_arrays([pyarrow.array([text], pyarrow.string())], schema=TEXT)
        entries += make_encoder(Format("json"), entry_bytes=1, entry_bytes_max=LIMIT)(batch)
    assert entries == [
        json.dumps({"b": text}, ensure_ascii=False, separators=(",", ":")).encode() for text in texts
    ]


@pytest.mark.parametrize(
    "bad", [[b'{"a":1,"b":"x"', b'"c":"y"}'], [b'{"a":[', b"]}"], [b'{"a":1.0}'], [b'{"a":true}'], [b"[]"]]
)
def test_json_is_read_entry_by_entry_and_strictly(bad: list[bytes]) -> None:
    decoded = decode(Format("json", schema=ROWS), *as_run([*bad, GOOD]), is_permissive=True)
    assert list(decoded.errors) == list(range(len(bad)))
    assert decoded.columns[0].to_pylist() == [None] * len(bad) + [1]


@given(st.lists(st.binary(max_size=40)), st.sampled_from(["none", "zstd", "lz4"]), st.data())
@settings(deadline=None)
def test_bytes_come_back_equal_from_any_slice(
    values: list[bytes], compression: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(values)))
    schema = pyarrow.schema([("other", pyarrow.int64()), ("value", pyarrow.binary())])
    arrays = [pyarrow.array(range(len(values)), pyarrow.int64()), pyarrow.array(values, pyarrow.binary())]
    batch = pyarrow.RecordBatch.from_arrays(arrays, schema=schema).slice(start, len(values))
    format_ = Format("binary", compression)
    encode = make_encoder(format_, entry_bytes=1000, entry_bytes_max=LIMIT, value="value")
    entries = encode(batch)
    if compression == "none":
        assert entries == values[start:]
    assert decode(format_, *as_run(entries)).columns[0].to_pylist() == values[start:]


def test_a_null_is_refused_and_its_row_named() -> None:
    batch = pyarrow.RecordBatch.from_pylist(
        [{"v": b"x"}, {"v": None}], schema=pyarrow.schema([("v", pyarrow.binary())])
    )
    encode = make_encoder(Format("binary"), entry_bytes=1000, entry_bytes_max=LIMIT, value="v")
    with pytest.raises(InvalidArgumentError, match="row 1 of a batch has a null in column 'v'"):
        encode(batch)


@pytest.mark.parametrize("encoding", ["binary", "json", "arrow"])
def test_a_row_above_the_limit_is_refused_and_named(encoding: str) -> None:
    schema = pyarrow.schema([("v", pyarrow.binary())])
    batch = pyarrow.RecordBatch.from_pylist([{"v": b"x"}, {"v": bytes(5000)}], schema=schema)
    encode = make_encoder(Format(encoding, schema=schema), entry_bytes=100, entry_bytes_max=1000, value="v")
    with pytest.raises(EntryTooLargeError, match="row 1 of a batch"):
        encode(batch)


@pytest.mark.parametrize(
    "bad",
    [b"", b"{", b"[1]", b'"a"', b'{"a":"one"}', b'{"a":2147483648}', b'{"a":true}', b'{"b":1}', b"\xff",
     b"[" * 9999],
)  # fmt: skip
def test_json_that_does_not_fit_is_named_or_set_aside(bad: bytes) -> None:
    format_ = Format("json", schema=ROWS)
    run = as_run([GOOD, bad, GOOD])
    with pytest.raises(UndecodableEntryError, match="cannot be decoded as json") as caught:
        decode(format_, *run)
    assert caught.value.entry_id == 1
    decoded = decode(format_, *run, is_permissive=True)
    assert [column.to_pylist() for column in decoded.columns] == [[1, None, 1], ["x", None, "x"]]
    assert list(decoded.errors) == [1]


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (pyarrow.string(), rb'{"a": "\ud800"}'),
        (pyarrow.struct([("b", pyarrow.string())]), rb'{"a": {"b": "\ud800"}}'),
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), b'{"a": [[null, 1]]}'),
        (pyarrow.duration("us"), b'{"a": 86399999913600000000}'),
    ],
)
def test_json_that_arrow_cannot_hold_is_named_or_set_aside(kind: pyarrow.DataType, bad: bytes) -> None:
    format_ = Format("json", schema=pyarrow.schema([("a", kind)]))
    run = as_run([b"{}", bad, b"{}"])
    with pytest.raises(UndecodableEntryError) as raised:
        decode(format_, *run)
    assert raised.value.entry_id == 1
    found = decode(format_, *run, is_permissive=True)
    assert found.columns[0].to_pylist() == [None, None, None]
    assert list(found.errors) == [1]


def test_json_may_leave_columns_out_and_have_others() -> None:
    decoded = decode(Format("json", schema=ROWS), *as_run([b' {"b": "y", "c": [1]}\n']))
    assert [column.to_pylist() for column in decoded.columns] == [[None], ["y"]]


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_bytes_that_are_no_arrow_message_never_decode_to_something_invalid(noise: bytes) -> None:
    good = make_encoder(Format("arrow", schema=ROWS), entry_bytes=1000, entry_bytes_max=LIMIT)(
        pyarrow.RecordBatch.from_pylist([{"a": 1, "b": "x"}, {"a": 2, "b": None}], schema=ROWS)
    )
    decoded = decode(Format("arrow", schema=ROWS), *as_run([*good, noise, *good]), is_permissive=True)
    assert decoded.columns[0].to_pylist()[:2] == [1, 2]
    assert decoded.columns[0].to_pylist()[-2:] == [1, 2]
    assert decoded.columns[1].to_pylist()[-2:] == ["x", None]


@given(st.integers(0, 10_000), st.integers(0, 255))
@settings(deadline=None)
def test_damage_within_an_arrow_message_is_found_or_harmless(at: int, value: int) -> None:
    format_ = Format("arrow", schema=ROWS)
    batch = pyarrow.RecordBatch.from_pylist([{"a": n, "b": str(n) * 9} for n in range(50)], schema=ROWS)
    (entry,) = make_encoder(format_, entry_bytes=10**6, entry_bytes_max=LIMIT)(batch)
    damaged = bytearray(entry)
    damaged[at % len(entry)] = value
    decoded = decode(format_, *as_run([bytes(damaged)]), is_permissive=True)
    for column in decoded.columns:
        column.validate(full=True)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize(
    "bad", [b"", b"\x01\x00", b"\x05\x00\x00\x00nonsense", b"\xff\xff\xff\xff" + bytes(20)]
)
def test_bytes_that_do_not_inflate_are_named_or_set_aside(compression: str, bad: bytes) -> None:
    format_ = Format("binary", compression)
    good = make_encoder(format_, entry_bytes=100, entry_bytes_max=LIMIT, value="v")(
        pyarrow.RecordBatch.from_pylist([{"v": b"fine"}], schema=pyarrow.schema([("v", pyarrow.binary())]))
    )
    with pytest.raises(UndecodableEntryError, match=compression):
        decode(format_, *as_run([bad]))
    decoded = decode(format_, *as_run([*good, bad]), is_permissive=True)
    assert decoded.columns[0].to_pylist() == [b"fine", None]


def test_decimals_are_exact_or_refused() -> None:
    schema = pyarrow.schema([("d", pyarrow.decimal128(5, 2))])
    decoded = decode(Format("json", schema=schema), *as_run([b'{"d":"123.45"}', b'{"d":"-1"}']))
    assert decoded.columns[0].to_pylist() == [decimal.Decimal("123.45"), decimal.Decimal("-1.00")]
    for bad in (b"1234.5", b"1.239", b"0.001", b"NaN", b"Infinity"):
        with pytest.raises(UndecodableEntryError):
            decode(Format("json", schema=schema), *as_run([b'{"d":"%s"}' % bad]))
    assert decode(Format("json", schema=schema), *as_run([b'{"d":"1.2300"}'])).columns[0].to_pylist() == [
        decimal.Decimal("1.23")
    ]


@pytest.mark.parametrize("kind", [pyarrow.float32(), pyarrow.float64(), pyarrow.list_(pyarrow.float64())])
def test_numbers_that_json_does_not_have_are_strings_there(kind: pyarrow.DataType) -> None:
    numbers = [math.nan, math.inf, -math.inf, 0.5]
    cells = [[number] for number in numbers] if pyarrow.types.is_list(kind) else numbers
    schema = pyarrow.schema([("d", kind)])
    batch = pyarrow.RecordBatch.from_arrays([pyarrow.array(cells, kind)], schema=schema)
    format_ = Format("json", schema=schema)
    entries = make_encoder(format_, entry_bytes=1, entry_bytes_max=LIMIT)(batch)
    texts = ['"NaN"', '"Infinity"', '"-Infinity"', "0.5"]
    wrap = "[{}]" if pyarrow.types.is_list(kind) else "{}"
    assert entries == [('{"d":' + wrap.format(text) + "}").encode() for text in texts]
    assert same(decode(format_, *as_run(entries)).columns[0].to_pylist(), cells)
    with pytest.raises(UndecodableEntryError, match="'nan' is no"):
        decode(format_, *as_run([entries[0].replace(b"NaN", b"nan")]))


@pytest.mark.parametrize("encoding", ["json", "arrow"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_string_that_is_no_text_is_refused_when_it_is_written(encoding: str, is_nested: bool) -> None:
    """Spark's cast of bytes makes such strings; nobody could read the entry again."""

    def rows_of(*texts: bytes) -> pyarrow.RecordBatch:
        column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
        if is_nested:
            column = pyarrow.StructArray.from_arrays([column], ["inner"])
        return pyarrow.RecordBatch.from_arrays([column], ["text"])

    schema = rows_of(b"fine").schema
    encode = make_encoder(Format(encoding, schema=schema), entry_bytes=1000, entry_bytes_max=LIMIT)
    assert encode(rows_of(b"fine", "\u00fc".encode()))
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        encode(rows_of(b"fine", b"\xff\xfe"))


@given(
    TYPES.flatmap(lambda kind: st.tuples(st.just(kind[0]), st.lists(st.none() | kind[1], max_size=8))),
    st.randoms(),
)
def test_a_fingerprint_knows_rows_again_in_other_batches_and_in_another_order(
    given_cells: tuple[pyarrow.DataType, list[Any]], chance: random.Random
) -> None:
    kind, cells = given_cells

    def of(array: pyarrow.Array, *bounds: int) -> Fingerprint:
        print_ = Fingerprint()
        batch = pyarrow.RecordBatch.from_arrays([array], schema=pyarrow.schema([("v", kind)]))
        for start, end in pairwise((0, *bounds, len(array))):
            print_.add(batch.slice(start, end - start))
        return print_

    whole = of(pyarrow.array(cells, kind))
    order = chance.sample(range(len(cells)), len(cells))
    cut = chance.randint(0, len(cells))
    assert of(pyarrow.array([cells[each] for each in order], kind), cut) == whole
    more = of(pyarrow.array([*cells, None], kind))
    assert more != whole
    merged = of(pyarrow.array([None], kind))
    merged.merge(whole)
    assert merged == more


PAIR = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())])


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (pyarrow.int64(), [1, 2], [1, 3]),
        (pyarrow.string(), ["a", "b"], ["ab", ""]),
        (pyarrow.string(), ["", None], [None, None]),
        (pyarrow.list_(pyarrow.int64()), [[1, 2], []], [[2, 1], []]),
        (pyarrow.list_(pyarrow.int64()), [[1], [2]], [[1, 2], []]),
        (pyarrow.list_(pyarrow.int64()), [[None], []], [[], [None, None]]),
        (
            pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())]),
            [{"a": 1, "b": 2}],
            [{"a": 2, "b": 1}],
        ),
        (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [[("a", 1)]], [[("a", 2)]]),
        (pyarrow.float64(), [0.1 + 0.2], [0.3]),
    ],
)
def test_a_fingerprint_tells_other_rows(kind: pyarrow.DataType, one: list[Any], other: list[Any]) -> None:
    prints = []
    for cells in (one, other):
        print_ = Fingerprint()
        print_.add(pyarrow.RecordBatch.from_arrays([pyarrow.array(cells, kind)], ["v"]))
        prints.append(print_)
    assert prints[0].total != prints[1].total


def test_a_fingerprint_takes_times_that_python_does_not_have() -> None:
    far = pyarrow.array([[10**18]], pyarrow.list_(pyarrow.int64())).cast(
        pyarrow.list_(pyarrow.timestamp("us"))
    )
    print_ = Fingerprint()
    print_.add(pyarrow.RecordBatch.from_arrays([far], ["v"]))
    assert print_.rows == 1


@pytest.mark.parametrize("kind", [pyarrow.large_binary(), pyarrow.list_(pyarrow.large_binary())])
def test_a_fingerprint_is_that_of_the_values_where_spark_sends_large_types(kind: pyarrow.DataType) -> None:
    is_list = pyarrow.types.is_list(kind)
    plain = pyarrow.list_(pyarrow.binary()) if is_list else pyarrow.binary()
    cells: list[Any] = [b"\xff", None, b"x"]
    cells = [[cell] for cell in cells] if is_list else cells
    prints = []
    for each in (kind, plain):
        print_ = Fingerprint()
        print_.add(pyarrow.RecordBatch.from_arrays([pyarrow.array(cells, each)], ["v"]))
        prints.append(print_)
    assert prints[0] == prints[1]


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_entries_that_compress_well_are_decompressed_in_runs_of_bounded_size(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_RUN_BYTES", 1000)
    format_ = Format("binary", compression)
    values = [bytes(size) for size in (400, 600, 1, 5000, 999, 1, 1)]
    schema = pyarrow.schema([("v", pyarrow.binary())])
    batch = pyarrow.RecordBatch.from_pylist([{"v": value} for value in values], schema=schema)
    encode = make_encoder(format_, entry_bytes=100, entry_bytes_max=LIMIT, value="v")
    offsets, buffer = as_run(encode(batch))
    assert cut_into_runs(format_, offsets, buffer) == [(0, 1), (2, 2), (3, 3), (4, 5), (6, 6)]
    assert cut_into_runs(Format("binary"), offsets, buffer) == [(0, 6)]
    for claim in (b"", b"\x01\x00", b"\xff\xff\xff\xff"):
        assert cut_into_runs(format_, *as_run([claim, claim])) == [(0, 1)]
