"""Options and tags: what is asked for is understood, and what is not is said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_aio.spark import provenance
from client_aio.spark.options import COMPRESSIONS, ENCODINGS, Outage, parse_read, parse_write
from client_aio.spark.provenance import Written
from metadata.errors import BookieUnavailableError, InvalidArgumentError

URI = "sqlite:///tmp/metadata.db"
READ = {"metadata": URI, "log": "orders"}
WRITE = {"metadata": URI, "log": "orders"}


def test_names_are_known_whatever_their_case_and_sizes_take_units() -> None:
    read = parse_read(
        {**READ, "PARTITIONBYTES": "3m", "maxentriespertrigger": "10", "FailOnDataLoss": "False"}
    )
    assert (read.partition_bytes, read.max_entries_per_trigger, read.fail_on_data_loss) == (
        3 << 20,
        10,
        False,
    )
    assert parse_read({"metadata": URI, "ledger": "7, 8"}).ledger == (7, 8)
    assert parse_read({"metadata": URI, "ledger": "payments,9"}).ledger == ("payments", 9)
    assert parse_read({"metadata": URI, "ledger": "ALL"}).ledger == ()
    assert parse_read({**READ, "log": "a,b", "columns": "value, position"}).columns == ("value", "position")
    write = parse_write({**WRITE, "encoding": "Arrow", "compression": "ZSTD", "ensemblesize": "5"})
    assert (write.encoding, write.compression, write.ensemble_size) == ("arrow", "zstd", 5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log": "x"}, "metadata is needed"),
        ({"metadata": URI}, "one of the options log and ledger is needed; there is neither"),
        ({**READ, "ledger": "1"}, "there is both"),
        ({**READ, "encodnig": "json"}, "'encodnig' is unknown; did you mean encoding\\?"),
        ({}, "no options, .* CREATE TEMPORARY VIEW"),
        ({**READ, "option.log": "orders", "provider": "ledger"}, "CREATE TABLE .* is refused: .* VIEW"),
        ({**READ, "pushFilters": "true"}, "use where\\(\\)"),
        ({**READ, "startingposition_": "x"}, "did you mean startingPosition"),
        ({**READ, "zzz": "1"}, "there is none like it. The options of a read: columns, "),
        ({**READ, "path": "/x"}, "call save\\(\\) and load\\(\\) without a path"),
        ({**READ, "metadata": "http://x"}, "its scheme is unknown"),
        ({**READ, "mode": "strict"}, "the option mode is one of failfast, permissive: not 'strict'"),
        ({**READ, "encoding": "avro"}, "one of auto, raw, binary, json, arrow"),
        ({**READ, "partitionBytes": "0"}, "is a positive number"),
        ({**READ, "partitionBytes": "-1"}, "is a positive number"),
        ({**READ, "maxBytesPerTrigger": "1.5g"}, "is a positive number"),
        ({**READ, "outageTimeout": "2m"}, "a positive number, of seconds, without a unit: not '2m'"),
        ({**READ, "failOnDataLoss": "no"}, "one of true, false"),
        ({**READ, "columns": "a,,b"}, "columns is empty"),
        ({"metadata": URI, "log": "a, b,a"}, "the option log names 'a' 2 times, and its rows would come 2"),
        ({"metadata": URI, "ledger": "7,8,07"}, "the option ledger names 7 2 times"),
        ({"metadata": URI, "ledger": "payments,9,payments"}, "the option ledger names 'payments' 2 times"),
        ({"metadata": URI, "ledger": "1,first one"}, "a ledger's id, an unbounded ledger's name, several"),
        ({"metadata": URI, "ledger": "-1"}, "a ledger's id"),
    ],
)
def test_what_is_wrong_with_a_read_is_said(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_read(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metadata": URI}, "the option log is needed"),
        ({**WRITE, "ledger": "1"}, "'ledger' is unknown; did you mean ledgerBytes"),
        ({**WRITE, "ifexist": "error"}, "did you mean ifExists"),
        ({**WRITE, "ensembleSize": "2"}, "ensemble_size 2 is below write_quorum 3"),
        ({**WRITE, "ackQuorum": "0"}, "ackQuorum is a positive number, without a unit"),
        ({**WRITE, "value": "v", "encoding": "json"}, "the option value names the column"),
        ({**WRITE, "compression": "gzip"}, "one of none, zstd, lz4"),
    ],
)
def test_what_is_wrong_with_a_write_is_said(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        parse_write(options)


def schema(**columns: object) -> str:
    fields = [
        {"name": name, "type": kind, "nullable": False, "metadata": {"a": 1}}
        for name, kind in columns.items()
    ]
    return json.dumps({"type": "struct", "fields": fields})


@given(st.sampled_from(ENCODINGS), st.sampled_from(COMPRESSIONS), st.none() | st.just(schema(a="long")))
def test_what_a_ledger_says_of_itself_is_read_back(encoding: str, compression: str, text: str | None) -> None:
    written = Written(encoding, compression, text)
    assert Written.of_custom({**written.to_custom(), "app": b"x"}) == written
    for before in (Written("arrow", "zstd", schema='{"fields":[]}'), Written("json", "lz4"), Written()):
        assert Written.of_custom({**before.to_custom(), **written.to_custom_of_log()}) == written


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ({provenance.ENCODING: b"avro"}, "this release knows binary"),
        ({provenance.ENCODING: b"json", provenance.COMPRESSION: b"gzip"}, "'gzip'"),
        ({provenance.ENCODING: b"json", provenance.SCHEMA: b"nonsense"}, "schema in its metadata is damaged"),
    ],
)
def test_tags_of_another_release_or_damaged_are_refused(custom: dict[str, bytes], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        Written.of_custom(custom)
    assert Written.of_custom({"app": b"x"}) is None


def test_a_schema_that_does_not_fit_the_metadata_is_refused() -> None:
    wide = schema(**{f"column {number} {number * 7919 % 104729}": "long" for number in range(20_000)})
    with pytest.raises(InvalidArgumentError, match="write fewer columns"):
        Written("arrow", schema=wide).to_custom()


def test_columns_that_differ_are_named_and_nulls_and_order_are_no_difference() -> None:
    array = {"type": "array", "elementType": "long", "containsNull": False}
    loose = {"type": "array", "elementType": "long", "containsNull": True}
    assert provenance.differences(schema(a="long", b=array), schema(b=loose, a="long")) == []
    assert provenance.differences(schema(a="long", c="string"), schema(a="integer", b="string")) == [
        "column 'b' is missing",
        "column 'c' is not in the log",
        "column 'a' is long, in the log integer",
    ]
    map_ = {"type": "map", "keyType": "string", "valueType": array, "valueContainsNull": True}
    inner = {"name": "m", "type": map_, "nullable": True, "metadata": {}}
    nested = {"type": "struct", "fields": [inner, {**inner, "name": "n", "type": "date"}]}
    assert provenance.misfits(schema(s=nested), schema(s={**nested, "fields": [inner]})) == [
        "column 's' is struct<m:map<string,array<long>>,n:date>, in the log struct<m:map<string,array<long>>>"
    ]


def test_collations_decide_what_is_meant_also_within_a_column() -> None:
    """Logs that are read together must compare alike; comments do not matter."""

    def text(collation: str | None, comment: str) -> str:
        metadata = {"comment": comment} | ({"__COLLATIONS": {"x": collation}} if collation else {})
        inner = {"name": "x", "type": "string", "nullable": True, "metadata": metadata}
        return schema(s={"type": "struct", "fields": [inner]})

    assert provenance.as_meant(text(None, "a")) == provenance.as_meant(text(None, "b"))
    assert provenance.as_meant(text(None, "a")) != provenance.as_meant(text("spark.UTF8_LCASE", "a"))


def test_an_outage_ends_with_an_answer_and_fails_once_it_has_lasted_too_long() -> None:
    error = BookieUnavailableError("away")
    said: list[str] = []
    outage = Outage(10, lambda text, reason: said.append(text % reason))
    assert outage.pause_s(error, 5.0, asked=1.0) > 0
    assert outage.pause_s(error, 10.9, asked=9.0) > 0, "one outage since 1.0"
    outage.ended()
    assert outage.pause_s(error, 20.0, asked=19.0) > 0, "another one"
    assert len(said) == 2
    with pytest.raises(BookieUnavailableError):
        outage.pause_s(error, 29.0, asked=28.0)


def test_an_entry_size_above_the_limit_is_refused_in_the_driver() -> None:
    assert parse_write({**WRITE, "entryBytes": "4m"}).entry_bytes == 4 << 20
    with pytest.raises(InvalidArgumentError, match=r"entryBytes is 4,194,305, and the largest entry"):
        parse_write({**WRITE, "entryBytes": "4194305"})
