"""Logs whose ledgers have a password: written and read by Spark, which never sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

import client_aio
from bookie_aio.wire.blocks import encode_block
from bookie_aio.wire.messages import Add, AddFlag, Done
from client_aio.config import PASSWORD_VARIABLE
from client_aio.core.digest import CODE_BYTES
from client_aio.spark import export, import_, ledger_sink, sweep_orphans, verify
from client_aio.spark.options import parse_write
from client_aio.spark.passwords import password_of, settled
from metadata.ids import TERM_FINAL
from tests.support.sparkfaults import die_at_the_first_attempt
from tests.support.sparksession import PASSWORD, PASSWORD_ENV, Bookies, read, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

ROWS = [b"%d" % number for number in range(120)]


@pytest.fixture
def locked(tmp_path: Path) -> dict[str, str]:
    """The option that names a file with the password."""
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    return {"passwordFile": str(file)}


@pytest.fixture
def wrong(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "wrong"
    file.write_text("a wrong guess")
    return {"passwordFile": str(file)}


def numbers(spark: SparkSession) -> DataFrame:
    frame = spark.range(0, len(ROWS), 1, 3)
    return frame.select(F.col("id").cast("string").cast("binary").alias("value"))


def values(frame: DataFrame) -> list[bytes]:
    return [bytes(row.value) for row in frame.orderBy("position").collect()]


def records(bookies: Bookies, log: str) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [one.data async for one in bookies.client.read_log(log, password=PASSWORD.encode())]

    return bookies.run(collect())


def digests_of(bookies: Bookies, log: str) -> set[str]:
    async def look() -> set[str]:
        rows = (await bookies.client.log_metadata(log)).rows
        return {(await bookies.client.ledger_metadata(row.ledger_id)).digest for row in rows}

    return bookies.run(look())


def test_a_log_with_a_password_is_written_and_read_and_spark_never_shows_it(
    spark: SparkSession, bookies: Bookies, locked: dict[str, str]
) -> None:
    faulty = numbers(spark).mapInArrow(die_at_the_first_attempt, "value binary")
    write(faulty, bookies.uri, log="locked", **locked)
    assert digests_of(bookies, "locked") == {"hmac-sha256"}
    assert bookies.leftovers("locked") == set(), "what failed attempts wrote is deleted"
    by_file = read(spark, bookies.uri, log="locked", **locked)
    assert values(by_file) == ROWS
    by_variable = read(spark, bookies.uri, log="locked", passwordEnv=PASSWORD_ENV)
    assert values(by_variable) == ROWS
    write(numbers(spark).limit(2), bookies.uri, mode="overwrite", log="locked", passwordEnv=PASSWORD_ENV)
    assert sorted(records(bookies, "locked")) == [b"0", b"1"]
    assert bookies.ledgers_of("locked")[1] == set(), "what was replaced is deleted, with the password"
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    shown = [executions.apply(index).physicalPlanDescription() for index in range(executions.size())]
    shown += [frame._jdf.queryExecution().toString() for frame in (by_file, by_variable)]
    shown.append(spark.sparkContext.getConf().toDebugString())
    assert shown
    assert not [text for text in shown if PASSWORD in text]


def test_a_stream_goes_from_one_log_with_a_password_to_another(
    spark: SparkSession, bookies: Bookies, locked: dict[str, str], tmp_path: Path
) -> None:
    secret = PASSWORD.encode()
    writer = bookies.run(bookies.open_log("locked-in", digest="hmac-sha256", password=secret))
    try:
        # The last ledger stays open, which the driver has to look into.
        bookies.append_by_ledgers(writer, ROWS[:50], ROWS[50:100], ROWS[100:])
        source = spark.readStream.format("ledger").options(
            metadata=bookies.uri, log="locked-in", columns="value", maxEntriesPerTrigger="70", **locked
        )
        query = (
            source.load()
            .writeStream.format("ledger")
            .options(metadata=bookies.uri, log="locked-out", checkpointLocation=str(tmp_path / "c"), **locked)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
        assert query.exception() is None
    finally:
        bookies.run(writer.close())
    assert sorted(records(bookies, "locked-out")) == sorted(ROWS)
    assert digests_of(bookies, "locked-out") == {"hmac-sha256"}


def test_a_password_that_is_missing_or_does_not_fit_is_said_by_the_driver(
    spark: SparkSession, bookies: Bookies, locked: dict[str, str], wrong: dict[str, str], tmp_path: Path
) -> None:
    write(numbers(spark), bookies.uri, log="guarded", **locked)
    write(numbers(spark), bookies.uri, log="open")
    missing = {"passwordFile": str(tmp_path / "none")}
    unset = {"passwordEnv": "NO_SUCH_VARIABLE"}
    for log, options, said in [
        ("guarded", {}, "needs a password: name a file that holds it by passwordFile"),
        ("guarded", wrong, f"wrong password for ledger .* read from passwordFile {wrong['passwordFile']}"),
        ("guarded", missing, "No such file or directory"),
        (
            "guarded",
            unset,
            "variable NO_SUCH_VARIABLE, .* spark.executorEnv.NO_SUCH_VARIABLE",
        ),
        ("guarded", {"passwordFile": "password"}, "give an absolute path"),
        ("guarded", {**locked, **unset}, "choose one"),
        ("guarded", {"password": PASSWORD}, "use passwordFile or passwordEnv"),
        ("open", locked, "has no password .* an empty passwordEnv"),
    ]:
        for attempt in (
            lambda log=log, options=options: read(spark, bookies.uri, log=log, **options).collect(),
            lambda log=log, options=options: write(numbers(spark), bookies.uri, log=log, **options),
        ):
            with pytest.raises(PySparkException, match=said) as raised:
                attempt()
            assert PASSWORD not in str(raised.value)
            assert "a wrong guess" not in str(raised.value)
    assert records(bookies, "guarded") == ROWS
    assert bookies.leftovers("guarded") == set()


def test_the_usual_variable_is_settled_in_the_driver_and_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"metadata": "sqlite:///x/metadata.db", "log": "any"}
    assert password_of(settled(parse_write(given))) == b""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    options = settled(parse_write(given))
    assert options.password_env == PASSWORD_VARIABLE
    assert password_of(options) == PASSWORD.encode()
    assert PASSWORD not in repr(options)
    assert password_of(settled(parse_write({**given, "passwordEnv": ""}))) == b""
    monkeypatch.delenv(PASSWORD_VARIABLE)
    with pytest.raises(client_aio.InvalidArgumentError, match="is not set on"):
        password_of(options)  # as an executor without it does: it writes nothing unprotected


def test_partitions_are_written_with_a_password_by_a_function(spark: SparkSession, bookies: Bookies) -> None:
    sink = ledger_sink(bookies.uri, log="locked-foreach", password_env=PASSWORD_ENV)
    numbers(spark).foreachPartition(sink)
    numbers(spark).foreachPartition(sink)
    assert sorted(records(bookies, "locked-foreach")) == sorted(ROWS * 2)
    assert digests_of(bookies, "locked-foreach") == {"hmac-sha256"}


def test_jobs_verify_export_and_import_ledgers_with_a_password(
    spark: SparkSession, bookies: Bookies, locked: dict[str, str], wrong: dict[str, str], tmp_path: Path
) -> None:
    write(numbers(spark), bookies.uri, log="locked-jobs", **locked)
    place, folder = {"password_file": locked["passwordFile"]}, str(tmp_path / "export")
    guess = {"password_file": wrong["passwordFile"]}
    for given in ({}, place):
        rows = verify(spark, bookies.uri, log="locked-jobs", **given).collect()
        assert {row.status for row in rows} == {"ok"}
        assert sum(row.intact for row in rows) == 3 * len(ROWS)
    with pytest.raises(client_aio.UnauthorizedAccessError, match="wrong password"):
        verify(spark, bookies.uri, log="locked-jobs", **guess)
    with pytest.raises(client_aio.UnauthorizedAccessError, match="needs a password: name a file"):
        export(spark, bookies.uri, folder, log="locked-jobs")
    export(spark, bookies.uri, folder, log="locked-jobs", **place)
    with pytest.raises(client_aio.InvalidArgumentError, match="3 of the ledgers exported had a password"):
        import_(spark, bookies.uri, folder, log="locked-again")
    with pytest.raises(client_aio.UnauthorizedAccessError, match="wrong password"):
        import_(spark, bookies.uri, folder, log="locked-jobs", **guess)
    import_(spark, bookies.uri, folder, log="locked-again", **place)
    assert records(bookies, "locked-again") == records(bookies, "locked-jobs")
    assert digests_of(bookies, "locked-again") == {"hmac-sha256"}


async def store_forgery(bookies: Bookies, bookie_id: str) -> int:
    """Have a bookie keep an entry whose checksum holds and whose code nobody with the password made."""
    ledger = await bookies.client.create_ledger(digest="hmac-sha256", password=PASSWORD.encode())
    await bookies.cluster[bookie_id].kill()
    await ledger.add_entry(b"genuine")
    await ledger.close()
    await bookies.cluster[bookie_id].start()
    forged = encode_block(
        ledger_id=ledger.ledger_id, content_term=0, first_entry=0, stride=1, lac=-1, lafr=-1,
        payloads=[b"forgery"], running=[7], macs=[bytes(CODE_BYTES)] * 2,
    )  # fmt: skip
    connection = await bookies.client._context.pool.get(bookie_id)
    request = Add(ledger.ledger_id, TERM_FINAL, int(AddFlag.REPAIR))
    await connection.call(request, Done, body=forged, timeout_s=10, ledger_id=ledger.ledger_id)
    return ledger.ledger_id


def test_verify_finds_a_forgery_by_the_password(
    spark: SparkSession, locked: dict[str, str], tmp_path: Path
) -> None:
    with Bookies(tmp_path, bookies=3) as bookies:
        ledger_id = bookies.run(store_forgery(bookies, "b3"))
        rows = verify(spark, bookies.uri, ledger_ids=[ledger_id])
        assert {row.status for row in rows.collect()} == {"ok"}, "its checksum is right"
        rows = verify(
            spark, bookies.uri, ledger_ids=[ledger_id], password_file=locked["passwordFile"]
        ).collect()
        found = {(row.bookie, row.status) for row in rows}
        assert found == {("b1", "ok"), ("b2", "ok"), ("b3", "damaged")}


def test_the_sweep_deletes_ledgers_with_a_password_by_it(bookies: Bookies) -> None:
    secret = PASSWORD.encode()

    async def leave() -> int:
        tagged = {"custom_metadata": {"spark.log": b"locked-swept", "spark.job": b"dead"}}
        async with bookies.client.create_ledger(digest="hmac-sha256", password=secret, **tagged) as ledger:
            return ledger.ledger_id

    left = bookies.run(leave())
    with pytest.raises(client_aio.UnauthorizedAccessError, match="needs a password"):
        bookies.run(sweep_orphans(bookies.uri, log="locked-swept", grace_s=0))
    assert bookies.ledgers_of("locked-swept")[1] == {left}
    assert bookies.run(sweep_orphans(bookies.uri, log="locked-swept", grace_s=0, password=secret)) == [left]
