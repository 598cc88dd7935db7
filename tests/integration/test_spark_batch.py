"""Frames to logs and back in a real Spark: what is written is read, what is wrong is said at once."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from tests.support.sparksession import Bookies, read, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from tests.support.zookeeper import ZooKeeperServer


def payloads(spark: SparkSession, count: int, partitions: int = 3) -> DataFrame:
    """Return rows of bytes in a known order: the decimal digits of 0, 1, 2 …"""
    frame = spark.range(0, count, 1, partitions)
    return frame.select(F.col("id").cast("string").cast("binary").alias("value"))


def test_bytes_go_in_and_come_out_in_order_with_where_they_are(spark: SparkSession, bookies: Bookies) -> None:
    write(payloads(spark, 1000), bookies.uri, log="bytes")
    assert bookies.records("bytes") == [b"%d" % number for number in range(1000)]
    frame = read(spark, bookies.uri, log="bytes")
    assert frame.columns == ["log", "ledger_id", "entry_id", "position", "timestamp", "value"]
    rows = frame.orderBy("position").collect()
    assert [bytes(row.value) for row in rows] == [b"%d" % number for number in range(1000)]
    listed, left_over = bookies.ledgers_of("bytes")
    assert {row.ledger_id for row in rows} == listed
    assert len(listed) == 3
    assert not left_over
    for row in rows:
        assert row.log == "bytes"
        assert int(row.position[20:]) == row.entry_id
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    assert abs(rows[0].timestamp - now) < datetime.timedelta(minutes=5)


@pytest.mark.parametrize("encoding", ["json", "arrow"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_columns_of_all_kinds_come_back_equal(
    spark: SparkSession, bookies: Bookies, encoding: str, compression: str
) -> None:
    log = f"columns-{encoding}-{compression}"
    schema = (
        "i int, l long, d double, s string, b binary, t timestamp, n timestamp_ntz, day date, "
        "dec decimal(20,4), list array<int>, m map<string,long>, st struct<a:int,b:array<string>>, f boolean"
    )
    moment = datetime.datetime(2026, 2, 3, 4, 5, 6, 789012)
    full = (
        1, 2**40, 0.5, "täxt", b"\x00\xff", moment, moment, moment.date(), Decimal("123.4500"), [1, None],
        {"k": 7}, (3, ["x"]), True,
    )  # fmt: skip
    rows = [
        full,
        (None,) * 13,
        (2, -1, float("inf"), "", b"", moment, None, None, None, [], {}, (None, None), False),
    ]
    frame = spark.createDataFrame(rows * 20, schema).repartition(2)
    write(frame, bookies.uri, log=log, encoding=encoding, compression=compression)
    back = read(spark, bookies.uri, log=log)
    assert back.schema.simpleString() == frame.schema.simpleString()
    assert sorted(map(repr, back.collect())) == sorted(map(repr, frame.collect()))


def test_numbers_that_json_does_not_have_are_written_as_spark_writes_them(
    spark: SparkSession, bookies: Bookies
) -> None:
    numbers = [float("nan"), float("inf"), float("-inf"), 0.5]
    frame = spark.createDataFrame([(number,) for number in numbers], "d double").coalesce(1)
    write(frame, bookies.uri, log="not-finite", encoding="json")
    ought = [row.text.encode() for row in frame.select(F.to_json(F.struct("d")).alias("text")).collect()]
    assert bookies.records("not-finite") == ought
    raw = read(spark, bookies.uri, log="not-finite", encoding="binary", columns="value")
    parsed = raw.select(F.from_json(F.col("value").cast("string"), "d double").alias("row")).select("row.d")
    for back in (parsed, read(spark, bookies.uri, log="not-finite")):
        assert [repr(row.d) for row in back.collect()] == list(map(repr, numbers))


def test_only_the_columns_asked_for_are_read(spark: SparkSession, bookies: Bookies) -> None:
    frame = spark.createDataFrame([(1, "one"), (2, "two")], "number int, word string")
    write(frame.coalesce(1), bookies.uri, log="chosen")
    back = read(spark, bookies.uri, log="chosen", columns="word, entry_id")
    assert [tuple(row) for row in back.collect()] == [("one", 0), ("two", 0)]  # a batch is one entry
    raw = read(spark, bookies.uri, log="chosen", encoding="binary", columns="value")
    assert raw.count() == 1


def test_rows_are_found_by_where_they_are(spark: SparkSession, bookies: Bookies) -> None:
    write(payloads(spark, 300), bookies.uri, log="filtered")
    frame = read(spark, bookies.uri, log="filtered")
    rows = frame.orderBy("position").collect()
    middle = rows[150]
    cases = [
        (f"position < '{middle.position}'", rows[:150]),
        (f"position >= '{middle.position}'", rows[150:]),
        (f"ledger_id = {middle.ledger_id}", [row for row in rows if row.ledger_id == middle.ledger_id]),
        ("entry_id in (3, 5)", [row for row in rows if row.entry_id in (3, 5)]),
        ("entry_id between 2 and 4", [row for row in rows if row.entry_id in (2, 3, 4)]),
        ("timestamp > '2020-01-01' and entry_id = 0", [row for row in rows if row.entry_id == 0]),
        ("timestamp < '2020-01-01'", []),
        ("log = 'other'", []),
        ("value = cast('7' as binary) and entry_id > 0", [rows[7]]),
    ]
    for condition, expected in cases:
        assert frame.where(condition).orderBy("position").collect() == expected, condition


def test_a_frame_that_was_filtered_once_has_all_of_its_rows_still(
    spark: SparkSession, bookies: Bookies
) -> None:
    """Spark plans it once: a filter that the source took would hold for all that is made of it later."""
    write(payloads(spark, 200), bookies.uri, log="used-twice")
    frame = read(spark, bookies.uri, log="used-twice")
    assert 0 < frame.where("entry_id < 3").count() < 200
    assert frame.count() == 200
    assert frame.where("entry_id < 3").union(frame.where("entry_id >= 3")).count() == 200


def test_overwrite_replaces_all_at_once_and_append_goes_behind(spark: SparkSession, bookies: Bookies) -> None:
    write(payloads(spark, 10), bookies.uri, log="replaced")
    write(payloads(spark, 20), bookies.uri, log="replaced")
    assert len(bookies.records("replaced")) == 30
    before, _ = bookies.ledgers_of("replaced")
    write(payloads(spark, 5), bookies.uri, mode="overwrite", log="replaced")
    assert bookies.records("replaced") == [b"0", b"1", b"2", b"3", b"4"]
    listed, left_over = bookies.ledgers_of("replaced")
    assert not listed & before
    assert not left_over, "what was replaced is deleted"
    new = spark.createDataFrame([(1,)], "n int")
    write(new, bookies.uri, mode="overwrite", log="replaced")
    assert [row.n for row in read(spark, bookies.uri, log="replaced").collect()] == [1]


def test_a_frame_that_was_loaded_before_an_overwrite_says_that_its_columns_are_gone(
    spark: SparkSession, bookies: Bookies
) -> None:
    write(spark.createDataFrame([(1, "x")], "n int, s string"), bookies.uri, log="renewed")
    loaded = read(spark, bookies.uri, log="renewed")
    write(spark.createDataFrame([(2,)], "n int"), bookies.uri, mode="overwrite", log="renewed")
    with pytest.raises(PySparkException, match=r"column 's' is not in the log.* load it again"):
        loaded.collect()
    assert [row.n for row in read(spark, bookies.uri, log="renewed").collect()] == [2]


def test_if_exists_refuses_or_leaves_alone(spark: SparkSession, bookies: Bookies) -> None:
    write(payloads(spark, 3), bookies.uri, log="there", ifExists="error")
    with pytest.raises(PySparkException, match="ifExists is error"):
        write(payloads(spark, 3), bookies.uri, log="there", ifExists="error")
    write(payloads(spark, 3), bookies.uri, log="there", ifExists="ignore")
    assert len(bookies.records("there")) == 3
    assert not bookies.ledgers_of("there")[1]


def test_an_empty_frame_makes_a_log_with_its_columns(spark: SparkSession, bookies: Bookies) -> None:
    write(spark.createDataFrame([], "a int, b string"), bookies.uri, log="empty")
    back = read(spark, bookies.uri, log="empty")
    assert back.schema.simpleString() == "struct<a:int,b:string>"
    assert back.collect() == []
    write(spark.createDataFrame([("x", 1)], "b string, a int"), bookies.uri, log="empty")
    assert [tuple(row) for row in read(spark, bookies.uri, log="empty").collect()] == [(1, "x")]


def test_large_batches_are_cut_into_entries_and_ledgers(spark: SparkSession, bookies: Bookies) -> None:
    frame = spark.range(0, 2000, 1, 1).select(F.expr("repeat(cast(id as string), 500)").alias("text"))
    write(frame, bookies.uri, log="cut", encoding="arrow", entryBytes="64k", ledgerBytes="300k")
    assert len(bookies.ledgers_of("cut")[0]) > 3
    back = read(spark, bookies.uri, log="cut", partitionBytes="300k")
    assert back.rdd.getNumPartitions() > 3
    assert [row.text for row in back.collect()] == [row.text for row in frame.collect()]


def test_ledgers_are_read_by_id_by_list_and_all(spark: SparkSession, bookies: Bookies) -> None:
    write(payloads(spark, 30), bookies.uri, log="by-id")
    ids = sorted(bookies.ledgers_of("by-id")[0])
    one = read(spark, bookies.uri, ledger=str(ids[0]))
    assert {row.log for row in one.collect()} == {None}
    assert one.count() == 10
    assert read(spark, bookies.uri, ledger=",".join(map(str, ids))).count() == 30
    everything = read(spark, bookies.uri, ledger="all")
    assert everything.where(F.col("ledger_id").isin(ids)).count() == 30


def test_a_log_that_is_being_written_is_read_up_to_what_is_acknowledged(
    spark: SparkSession, bookies: Bookies
) -> None:
    writer = bookies.run(bookies.open_log("live"))
    numbers = [b"%d" % number for number in range(100)]
    try:
        bookies.append_by_ledgers(writer, numbers[:40], numbers[40:80], numbers[80:])
        frame = read(spark, bookies.uri, log="live")
        assert [bytes(row.value) for row in frame.orderBy("position").collect()] == numbers
        bookies.append_by_ledgers(writer, [b"0"])
    finally:
        bookies.run(writer.close())


BAD_READS = [
    ({"log": "nowhere"}, "there is no log 'nowhere'"),
    ({"ledger": "987654321"}, "there is no ledger 987654321"),
    ({"log": "bytes", "colunms": "value"}, "did you mean columns"),
    ({"log": "bytes", "columns": "nothing"}, "there are: log, ledger_id"),
    ({"log": "bytes", "metadata": "sqlite:///no/such/folder/metadata.db"}, "no/such/folder"),
    ({"log": "bytes", "encoding": "arrow"}, "its metadata names 'binary'"),
    ({"log": "bytes", "encoding": "json"}, "give them with"),
]


@pytest.mark.parametrize(("options", "said"), BAD_READS, ids=[said for _, said in BAD_READS])
def test_a_wrong_read_is_refused_by_the_driver(
    spark: SparkSession, bookies: Bookies, options: dict[str, str], said: str
) -> None:
    if options.get("log") == "bytes" and not bookies.ledgers_of("bytes")[0]:
        write(payloads(spark, 10), bookies.uri, log="bytes")
    with pytest.raises(PySparkException, match=said):
        read(spark, bookies.uri, **options).collect()


BAD_WRITES = [
    ("value string", {}, "column 'value' is string, not binary"),
    ("value binary, n int", {"value": "payload"}, "names 'payload'; the frame has value, n"),
    ("a binary, b binary", {"encoding": "binary"}, "which column holds the bytes"),
    ("a int", {}, "does not fit log 'columns': column 'n' is missing; column 'a' is not in the log"),
    ("n string", {}, "column 'n' is string, in the log integer"),
    ("value binary", {}, "would be written with encoding binary, and log 'columns' has arrow"),
    ("n int", {"ensembleSize": "9"}, "bookies run, and the option ensembleSize is 9"),
    ("n int", {"metadata": "sqlite:///no/such/folder/metadata.db"}, "no/such/folder"),
    ("n int", {"log": "a/b"}, "log name 'a/b' is not legal"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "options", "said"), BAD_WRITES, ids=[said for *_, said in BAD_WRITES])
def test_a_wrong_write_is_refused_by_the_driver(
    spark: SparkSession, bookies: Bookies, schema: str, options: dict[str, str], said: str
) -> None:
    if not bookies.ledgers_of("columns")[0]:
        write(spark.createDataFrame([(1,)], "n int"), bookies.uri, log="columns")
    if schema == "value string":
        options = {**options, "encoding": "binary", "log": "fresh"}
    elif "binary" in schema and "has arrow" not in said:
        options = {**options, "log": "fresh"}
    frame = spark.createDataFrame([], schema)
    with pytest.raises(PySparkException, match=said):
        write(frame, bookies.uri, **{"log": "columns", **options})


def test_zookeeper_keeps_the_metadata_as_well(
    spark: SparkSession, zookeeper: ZooKeeperServer, tmp_path: Path
) -> None:
    with Bookies(tmp_path, bookies=3, uri=f"zk://{zookeeper.address}/spark") as other:
        write(payloads(spark, 100), other.uri, log="zk")
        write(payloads(spark, 100), other.uri, log="zk")
        assert other.records("zk") == [b"%d" % number for number in range(100)] * 2
        assert read(spark, other.uri, log="zk").where("entry_id < 5").count() == 30
        assert other.ledgers_of("zk")[1] == set()


def test_nulls_and_rows_above_the_limit_fail_the_job_and_leave_nothing(
    spark: SparkSession, bookies: Bookies
) -> None:
    null = payloads(spark, 100).union(spark.createDataFrame([(None,)], "value binary"))
    with pytest.raises(PySparkException, match="has a null in column 'value'"):
        write(null, bookies.uri, log="refused")
    large = payloads(spark, 100).union(spark.createDataFrame([(bytes(5_000_000),)], "value binary"))
    with pytest.raises(
        PySparkException,
        match=r"entry of 5,000,000 bytes, most of it in column 'value', and the limit is 4,194,304",
    ):
        write(large, bookies.uri, log="refused")
    assert bookies.ledgers_of("refused")[0] == set()
    assert bookies.leftovers("refused") == set()


def test_sql_reads_and_writes_through_views_and_makes_no_table(spark: SparkSession, bookies: Bookies) -> None:
    write(spark.range(3), bookies.uri, log="sql")
    view = f"using ledger options (metadata '{bookies.uri}', log 'sql')"
    with pytest.raises(PySparkException, match=r"CREATE TABLE .* is refused: .* TEMPORARY VIEW"):
        spark.sql(f"create table sql_table {view}")
    with pytest.raises(PySparkException, match="no options, as in a statement on a table of the catalog"):
        spark.sql(f"create table sql_made {view} as select 1 as id")
    spark.sql(f"create temporary view sql_view {view}")
    assert spark.sql("select count(*) from sql_view").first()[0] == 3
    spark.sql("insert into sql_view values (9)")
    assert sorted(row.id for row in spark.sql("select * from sql_view").collect()) == [0, 1, 2, 9]
    spark.sql("drop view sql_view")


def test_a_table_is_read_and_written_with_the_options_in_each_statement(
    spark: SparkSession, bookies: Bookies
) -> None:
    """Spark forgets a table's own options. Unlike a view, a table is planned anew by each statement."""
    write(spark.range(3), bookies.uri, log="tabled")
    options = f"with (metadata = '{bookies.uri}', log = 'tabled')"
    spark.sql("create table with_options (id bigint) using ledger")
    spark.sql(f"create temporary view over_table as select id from with_options {options}")
    try:
        for view in (f"with_options {options}", "over_table"):
            before = spark.sql(f"select count(*) from {view}").first()[0]
            spark.sql(f"insert into with_options {options} values (9)")
            assert spark.sql(f"select count(*) from {view}").first()[0] == before + 1
        for statement in ("select * from with_options", "insert into with_options values (9)"):
            with pytest.raises(PySparkException, match=r"no options, .* WITH \(metadata = '…', log = '…'\)"):
                spark.sql(statement).collect()
    finally:
        spark.sql("drop view over_table")
        spark.sql("drop table with_options")


@pytest.mark.parametrize("way", ["saveAsTable", "writeTo"])
def test_a_new_table_is_refused_before_rows_are_written(
    spark: SparkSession, bookies: Bookies, way: str
) -> None:
    """Nothing could read it, and its rows would be in the log."""
    options, frame = {"metadata": bookies.uri, "log": f"no-table-{way}"}, spark.range(3)

    def make() -> None:
        if way == "saveAsTable":
            frame.write.format("ledger").options(**options).mode("append").saveAsTable("no_table")
        else:
            frame.writeTo("no_table").using("ledger").options(**options).create()

    with pytest.raises(PySparkException, match=r"a new table of the catalog .* is refused: .* use save\(\)"):
        make()
    assert not spark.catalog.tableExists("no_table")
    assert bookies.ledgers_of(options["log"]) == (set(), set())


def test_each_batch_is_written_by_a_function(spark: SparkSession, bookies: Bookies, tmp_path: Path) -> None:
    """Spark runs such a write within another execution, as it does for a new table."""
    bookies.append("by-function", [b"1", b"2"])
    stream = spark.readStream.format("ledger").options(metadata=bookies.uri, log="by-function").load()

    def copy(frame: DataFrame, number: int) -> None:
        write(frame.select("value"), bookies.uri, log="by-function-copy")

    writer = stream.writeStream.foreachBatch(copy).option("checkpointLocation", str(tmp_path))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination(60)
    assert query.exception() is None
    assert bookies.records("by-function-copy") == [b"1", b"2"]


def test_a_collation_decides_what_matches_after_reading_too(spark: SparkSession, bookies: Bookies) -> None:
    frame = spark.sql("select 'Ab' collate UTF8_LCASE c").withMetadata("c", {"comment": "a word"})
    write(frame, bookies.uri, log="collated")
    back = read(spark, bookies.uri, log="collated")
    assert back.where("c = 'aB'").count() == 1
    assert back.schema["c"].metadata == {"comment": "a word"}
