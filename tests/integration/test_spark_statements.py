"""A statement sees what the statements before it wrote, though Spark plans a view but once."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from client_aio.spark.catalog import with_catalog
from client_aio.spark.options import parse_read
from client_aio.spark.provenance import APPLICATION
from client_aio.spark.scan_plan import Place
from client_aio.sync.loop_thread import get_loop_thread
from tests.support.sparksession import Bookies, read, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from client_aio.spark.catalog import Catalog, Found


@pytest.fixture
def view(spark: SparkSession, bookies: Bookies, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of a view of a log with the rows 0, 1 and 2; the log has the name of the view."""
    name = re.sub(r"\W", "_", request.node.name)
    write(spark.range(3), bookies.uri, log=name)
    spark.sql(f"create temporary view {name} using ledger options (metadata '{bookies.uri}', log '{name}')")
    yield name
    spark.sql(f"drop view {name}")


def ids(spark: SparkSession, statement: str) -> list[int]:
    return sorted(row.id for row in spark.sql(statement).collect())


def test_a_view_sees_each_insert(spark: SparkSession, view: str) -> None:
    assert ids(spark, f"select id from {view}") == [0, 1, 2]
    for number in (7, 8, 9):
        spark.sql(f"insert into {view} values ({number})")
        assert ids(spark, f"select id from {view}") == [0, 1, 2, *range(7, number + 1)]
    assert spark.sql(f"select count(*) from {view} where id > 7").first()[0] == 2


def test_an_insert_from_its_own_view_doubles_the_rows(spark: SparkSession, view: str) -> None:
    assert len(ids(spark, f"select id from {view}")) == 3
    for count in (6, 12, 24):
        spark.sql(f"insert into {view} select id from {view}")
        assert len(ids(spark, f"select id from {view}")) == count


@pytest.mark.parametrize("hint", ["broadcast", "merge"])
def test_both_sides_of_a_join_see_the_same(
    spark: SparkSession, bookies: Bookies, view: str, hint: str
) -> None:
    """Spark runs the smaller side on a thread of its own."""
    for number in (7, 8):
        spark.sql(f"insert into {view} values ({number})")
        joined = f"select /*+ {hint}(b) */ a.id from {view} a join {view} b on a.id = b.id order by a.id"
        assert ids(spark, joined) == [0, 1, 2, *range(7, number + 1)]
        within = f"select id from {view} where id = (select max(id) from {view})"
        assert ids(spark, within) == [number]


def test_a_frame_sees_what_was_saved_since(spark: SparkSession, bookies: Bookies) -> None:
    write(spark.range(3), bookies.uri, log="saved-since")
    frame = read(spark, bookies.uri, log="saved-since")
    assert frame.count() == len(frame.collect()) == 3
    write(spark.range(3, 5), bookies.uri, log="saved-since")
    assert frame.count() == len(frame.collect()) == 5
    assert frame.where(F.col("id") > 2).count() == 2
    assert frame.rdd.count() == 3  # An RDD's tasks are told of no statement.


def test_a_view_of_an_empty_log_sees_an_insert(spark: SparkSession, bookies: Bookies) -> None:
    bookies.run(bookies.client.create_log("empty-view"))
    options = f"(metadata '{bookies.uri}', log 'empty-view')"
    spark.sql(f"create temporary view empty_view using ledger options {options}")
    assert spark.sql("select count(*) from empty_view").first()[0] == 0
    write(spark.sql("select cast('a' as binary) as value"), bookies.uri, log="empty-view")
    assert [bytes(row.value) for row in spark.sql("select value from empty_view").collect()] == [b"a"]
    spark.sql("drop view empty_view")


def test_rows_of_others_are_seen_as_far_as_the_last_row_of_our_own(
    spark: SparkSession, bookies: Bookies
) -> None:
    """The rows read are a prefix of the log."""
    bookies.append("of-others", [b"0"])
    frame = read(spark, bookies.uri, log="of-others")

    def records() -> list[bytes]:
        return [bytes(row.value) for row in frame.orderBy("position").collect()]

    assert records() == [b"0"]
    bookies.append("of-others", [b"1", b"2"])
    assert records() == [b"0"]
    write(spark.sql("select cast('3' as binary) as value"), bookies.uri, log="of-others")
    bookies.append("of-others", [b"4"])
    assert records() == [b"0", b"1", b"2", b"3"]


def test_an_open_ledger_is_read_on_from_where_the_plan_ended(spark: SparkSession, bookies: Bookies) -> None:
    """The addition has closed it."""
    writer = bookies.run(_opened(bookies, "read-on"))
    for record in (b"0", b"1"):
        bookies.run(_appended(writer, record))
    bookies.run(bookies.cluster.heard(bookies.client, writer.last_add_confirmed))
    frame = read(spark, bookies.uri, log="read-on")
    assert frame.count() == 2
    bookies.run(_appended(writer, b"2"))
    write(spark.sql("select cast('3' as binary) as value"), bookies.uri, log="read-on")
    bookies.run(writer.abort())
    assert [bytes(row.value) for row in frame.orderBy("position").collect()] == [b"0", b"1", b"2", b"3"]


async def _opened(bookies: Bookies, log: str) -> Any:
    return await bookies.client.open_log(log)


async def _appended(writer: Any, record: bytes) -> None:
    await writer.append(record)


def test_what_was_overwritten_is_an_error_until_the_view_is_created_again(
    spark: SparkSession, view: str
) -> None:
    assert ids(spark, f"select id from {view}") == [0, 1, 2]
    spark.sql(f"insert overwrite {view} values (9)")
    with pytest.raises(PySparkException, match="was overwritten or truncated since the read was planned"):
        ids(spark, f"select id from {view}")


def test_what_a_statement_finds_does_not_depend_on_when_its_tasks_run(
    spark: SparkSession, bookies: Bookies
) -> None:
    """A task that is tried again finds the same rows, also after later additions."""
    log = "tried-again"
    write(spark.range(2), bookies.uri, log=log)
    options = parse_read({"metadata": bookies.uri, "log": log})

    async def application(catalog: Catalog) -> str:
        (one, *_) = [row.ledger_id for row in await catalog.listed()]
        return (await catalog._client.ledger_metadata(one)).custom[APPLICATION].decode()

    name = get_loop_thread().run(with_catalog(options, application))

    def found(began_ms: int, application: str = name) -> int:
        async def ask(catalog: Catalog) -> list[Found]:
            return await catalog.added_by(application, log, Place(0, 0), began_ms)

        return sum(one.stretch.entries for one in get_loop_thread().run(with_catalog(options, ask)))

    began_ms = _after()
    first = found(began_ms)
    assert first > 0
    write(spark.range(2, 4), bookies.uri, log=log)
    later_ms = _after()
    assert (found(began_ms), found(later_ms)) == (first, 2 * first)
    assert found(later_ms, application="another") == 0


def _after() -> int:
    """Return a time after all that was done so far, once it has passed."""
    moment = time.time_ns() // 1_000_000 + 1
    while time.time_ns() // 1_000_000 <= moment:
        time.sleep(0.001)
    return moment
