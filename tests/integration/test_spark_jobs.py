"""The jobs that ship: verify finds what is wrong with replicas and nothing else; import inverts export."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from crc32c import crc32c
from pyspark.errors import AnalysisException

import client_aio
from bookie_aio.wire.blocks import HEADER_BYTES, encode_block
from bookie_aio.wire.messages import Add, AddFlag, Done
from client_aio.spark import export, import_, stats, sweep_orphans, verify
from client_aio.spark.catalog import Catalog
from client_aio.spark.jobs import reporting
from client_aio.spark.options import parse_read
from metadata.errors import InvalidArgumentError
from metadata.ids import TERM_FINAL
from tests.support.cli import Cli
from tests.support.replicas import flip
from tests.support.sparksession import Bookies, write

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession


def bad_rows(spark: SparkSession, uri: str, **chosen: object) -> list[tuple[object, ...]]:
    rows = verify(spark, uri, **chosen).where("status <> 'ok'").collect()
    return sorted(
        (row.ledger_id, row.bookie, row.status, row.missing, row.damaged, row.first_bad_entry) for row in rows
    )


async def make_ledger(bookies: Bookies, payloads: list[bytes], lost: str | None = None) -> int:
    """Write a ledger, with a bookie of its ensemble killed before the first entry where one is named."""
    ledger = await bookies.client.create_ledger()
    if lost is not None:
        await bookies.cluster[lost].kill()
    await ledger.add_entries(payloads)
    await ledger.close()
    return ledger.ledger_id


async def store_with_wrong_checksum(bookies: Bookies, bookie_id: str, ledger_id: int, entry: bytes) -> None:
    """Have a bookie keep entry 0 of a ledger under a checksum that is not that entry's."""
    block = bytearray(
        encode_block(
            ledger_id=ledger_id, content_term=0, first_entry=0, stride=1, lac=-1, lafr=-1,
            payloads=[entry], running=[len(entry)],
        )
    )  # fmt: skip
    block[HEADER_BYTES + 12] ^= 1
    head_bytes = int.from_bytes(block[8:12], "little")
    block[4:8] = crc32c(bytes(block[8:head_bytes])).to_bytes(4, "little")
    connection = await bookies.client._context.pool.get(bookie_id)
    request = Add(ledger_id, TERM_FINAL, int(AddFlag.REPAIR))
    await connection.call(request, Done, body=bytes(block), timeout_s=10, ledger_id=ledger_id)


def test_verify_finds_each_kind_of_fault_and_nothing_on_healthy_replicas(
    spark: SparkSession, tmp_path: Path
) -> None:
    with Bookies(tmp_path, bookies=3) as bookies:
        payloads = [b"payload number %d" % number for number in range(1000)]
        healthy = bookies.run(make_ledger(bookies, payloads))
        assert bad_rows(spark, bookies.uri) == []
        assert verify(spark, bookies.uri).count() == 3

        short = bookies.run(make_ledger(bookies, payloads, lost="b3"))
        assert {(row[1], row[2]) for row in bad_rows(spark, bookies.uri)} == {("b3", "unreachable")}
        bookies.run(bookies.cluster["b3"].start())
        assert bad_rows(spark, bookies.uri) == [(short, "b3", "missing", 1000, 0, 0)]

        forged = bookies.run(make_ledger(bookies, [b"an entry"], lost="b3"))
        bookies.run(bookies.cluster["b3"].start())
        bookies.run(store_with_wrong_checksum(bookies, "b3", forged, b"an entry"))
        assert bad_rows(spark, bookies.uri, ledger_ids=[forged]) == [(forged, "b3", "damaged", 0, 1, 0)]

        bookies.run(bookies.cluster["b1"].kill())
        flip(bookies.cluster["b1"].directory, payloads[700] + payloads[701])
        bookies.run(bookies.cluster["b1"].start())
        found = {row[:3]: row[3:] for row in bad_rows(spark, bookies.uri)}
        assert set(found) == {
            (healthy, "b1", "damaged"),
            (short, "b1", "damaged"),
            (short, "b3", "missing"),
            (forged, "b3", "damaged"),
        }


def test_verify_takes_a_log_or_ledgers_and_not_both(spark: SparkSession, bookies: Bookies) -> None:
    bookies.append("verified", [b"a"])
    ((ledger_id, _),) = bookies.append("verified-too", [b"b"])
    assert verify(spark, bookies.uri, log="verified").count() == 3
    assert {row.ledger_id for row in verify(spark, bookies.uri, ledger_ids=[ledger_id]).collect()} == {
        ledger_id
    }
    with pytest.raises(client_aio.InvalidArgumentError, match="name a log, or ledgers, and not both"):
        verify(spark, bookies.uri, log="verified", ledger_ids=[ledger_id])
    said = Cli(bookies.uri).run(
        "spark", "verify", "--log", "verified", "--ledger", str(ledger_id), "--ledger", "7", code=2
    )
    assert b"--log and --ledger both say which ledgers to verify" in said
    assert b"'verified'" in said
    assert str(ledger_id).encode() in said


def test_an_export_is_imported_byte_for_byte(spark: SparkSession, bookies: Bookies, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(number, f"word {number}") for number in range(500)], "n int, word string")
    write(frame.repartition(3), bookies.uri, log="exported", compression="zstd")
    write(frame.limit(10), bookies.uri, log="exported", compression="zstd")
    folder = str(tmp_path / "export")
    done = export(spark, bookies.uri, folder, log="exported")
    assert len(done.ledger_ids) == len(bookies.ledgers_of("exported")[0])
    back = import_(spark, bookies.uri, folder, log="imported")
    assert (back.entries, back.size) == (done.entries, done.size)
    assert bookies.records("imported") == bookies.records("exported")
    rows = spark.read.format("ledger").option("metadata", bookies.uri).option("log", "imported").load()
    assert rows.count() == 510
    assert rows.schema == frame.schema
    with pytest.raises(client_aio.InvalidArgumentError, match="has the ledgers of this export already"):
        import_(spark, bookies.uri, folder, log="imported")
    assert rows.count() == 510
    again = import_(spark, bookies.uri, folder, log="imported", again=True)
    assert again.entries == done.entries
    (summed,) = bookies.run(stats(bookies.uri, log="imported"))
    assert summed["rows"] == 2 * 510, "though an entry is a batch of rows"
    with pytest.raises(AnalysisException, match="already exists"):
        export(spark, bookies.uri, folder, log="exported")


def test_a_ledger_that_is_named_twice_is_refused_before_anything_is_read_or_written(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    (ledger_id, _), *_ = bookies.append("named-twice", [b"x"])
    with pytest.raises(InvalidArgumentError, match=f"names {ledger_id} 2 times"):
        export(spark, bookies.uri, str(tmp_path / "export"), ledger_ids=[ledger_id, ledger_id])
    assert not (tmp_path / "export").exists()
    with pytest.raises(InvalidArgumentError, match=f"names {ledger_id} 2 times"):
        verify(spark, bookies.uri, ledger_ids=[ledger_id, ledger_id])


def test_an_unbounded_ledger_that_is_named_by_its_name_and_its_id_is_refused(bookies: Bookies) -> None:
    ledger_id = bookies.run(create_unbounded(bookies.client, "named-twice"))
    options = parse_read({"metadata": bookies.uri, "ledger": f"named-twice,{ledger_id}"})
    with pytest.raises(InvalidArgumentError, match=f"names {ledger_id} 2 times"):
        bookies.run(Catalog(bookies.client, options).listed())


async def create_unbounded(client: client_aio.Client, name: str) -> int:
    return await client.create_unbounded_ledger(name)


def test_no_sweep_takes_what_was_imported_for_left_over(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    """Ledgers of an application's log say which log they were made for; they are in another one now.

    An import that was killed before it added its ledgers leaves them. The next one is no repetition.
    """
    records = [b"a", b"b", b"c"]
    bookies.append("of-an-application", records)
    export(spark, bookies.uri, str(tmp_path / "export"), log="of-an-application")
    (line,) = spark.read.text(str(tmp_path / "export" / "manifest")).collect()

    async def die_before_adding() -> int:
        job = f"import-{json.loads(line.value)['id']}".encode()
        tags = {"spark.log": b"imported-from-it", "spark.job": job}
        async with bookies.client.create_ledger(custom_metadata=tags) as ledger:
            await ledger.add_entries(records)
        return ledger.ledger_id

    left = bookies.run(die_before_adding())
    import_(spark, bookies.uri, str(tmp_path / "export"), log="imported-from-it")
    bookies.run(bookies.client.sweep_log_orphans(older_than_s=0))
    assert bookies.run(sweep_orphans(bookies.uri, log="imported-from-it", grace_s=0)) == [left]
    assert bookies.records("imported-from-it") == bookies.records("of-an-application") == records


def test_an_import_of_something_else_adds_nothing(
    spark: SparkSession, bookies: Bookies, tmp_path: Path
) -> None:
    bookies.append("small", [b"a", b"", b"c"])
    folder = tmp_path / "export"
    export(spark, bookies.uri, str(folder), log="small")
    entries = spark.read.parquet(str(folder / "entries")).where("entry_id <> 2")
    entries.write.parquet(str(tmp_path / "short" / "entries"))
    manifest = spark.read.text(str(folder / "manifest"))
    manifest.write.text(str(tmp_path / "short" / "manifest"))
    with pytest.raises(client_aio.InvalidArgumentError, match="differs from what the manifest says"):
        import_(spark, bookies.uri, str(tmp_path / "short"), log="refused-import")
    assert bookies.ledgers_of("refused-import") == (set(), set()), "told before anything is written"
    (text,) = (row.value for row in manifest.collect())
    without = json.dumps({**json.loads(text), "ledgers": []})
    for name, damage in (
        *(("short", "{"), ("short", '{"format": 2, "id": "x", "custom": {}}'), ("no", "")),
        ("short", without),
        ("short", text.replace('"bytes": 2', '"bytes": "2"')),
        ("short", text.replace('"quorums": [', '"quorums": [9, ')),
    ):
        for part in (tmp_path / "short" / "manifest").glob("*.txt") if damage else ():
            part.write_text(damage)
            (part.parent / f".{part.name}.crc").unlink(missing_ok=True)
        with pytest.raises(client_aio.InvalidArgumentError, match=r"is damaged|holds no export") as raised:
            import_(spark, bookies.uri, str(tmp_path / name), log="refused-import")
        assert "\n" not in str(raised.value)
        assert bookies.ledgers_of("refused-import") == (set(), set())
    (cut, *_) = (folder / "entries").glob("*.parquet")
    (cut.parent / f".{cut.name}.crc").unlink()
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(
        client_aio.InvalidArgumentError, match=r"cannot be read: .* not a Parquet file"
    ) as raised:
        import_(spark, bookies.uri, str(folder), log="refused-import")
    assert "\n" not in str(raised.value)
    with pytest.raises(client_aio.InvalidArgumentError, match="name a log, or ledgers"):
        export(spark, bookies.uri, str(tmp_path / "neither"))


def test_stats_sum_up_a_log(bookies: Bookies, spark: SparkSession) -> None:
    two = spark.createDataFrame([(1, "x"), (2, "y")], "n int, s string")
    write(two.coalesce(1), bookies.uri, log="summed")
    (row,) = bookies.run(stats(bookies.uri, log="summed"))
    assert (row["log"], row["encoding"], row["ledgers"], row["open_ledgers"]) == ("summed", "arrow", 1, 0)
    assert row["columns"] == ["n", "s"]
    assert (row["entries"], row["rows"]) == (1, 2)
    assert row["bytes"] == row["bytes_last_day"] > 0
    rows = Cli(bookies.uri).rows("spark", "stats", "--log", "summed")
    assert rows[0]["bytes"] == row["bytes"]
    assert Cli(bookies.uri).rows("spark", "sweep", "--log", "summed") == []


def test_stats_and_sweep_need_no_spark(bookies: Bookies) -> None:
    """As with the wheel alone: pyspark and pyarrow cannot be imported."""
    bookies.append("without-spark", [b"a"])
    program = (
        "import sys; sys.modules.update(pyspark=None, pyarrow=None); import client_aio.cli.main as m;"
        "sys.argv[0] = 'bookie-aio'; m.main()"
    )
    for command, said in (("stats", b"without-spark"), ("sweep", b"nothing to delete")):
        arguments = ["spark", command, "--log", "without-spark", "--metadata", bookies.uri]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr


def test_a_job_reports_how_far_it_is(spark: SparkSession, bookies: Bookies) -> None:
    said: list[str] = []
    heard = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if "tasks of the present stage" in line:
            heard.set()

    def slow(batches: Iterable[object]) -> Iterable[object]:
        time.sleep(0.5)
        return batches

    with reporting(spark, "verify", say, every_s=0.05):
        for _ in range(20):
            spark.range(2).repartition(2).mapInArrow(slow, "id long").count()
            if heard.is_set():
                break
    assert heard.is_set()
    assert all(line.startswith("verify: 0 s, ") or line.startswith("verify: ") for line in said)
