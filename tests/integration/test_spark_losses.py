"""What was lost, trimmed or deleted under a query or a job is told, or left out; never passed over."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import client_aio
from client_aio.admin import replicas
from client_aio.spark import archive, jobs, stats
from client_aio.spark.catalog import Catalog
from client_aio.spark.options import parse_read
from client_aio.spark.passwords import PasswordPlace
from client_aio.spark.source import LedgerDataSource
from client_aio.spark.stream import LedgerStreamReader
from metadata.model import paged_list
from metadata.model.ledger import GivenUp
from tests.support.sparksession import Bookies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from client_aio.spark.catalog import Listed
    from client_aio.spark.scan_plan import Stretch
    from metadata.model.ledger import LedgerMetadata

SCHEMA = StructType([StructField("value", BinaryType())])
WITH_ERROR = StructType([*SCHEMA.fields, StructField("_error", StringType())])
ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bookies]:
    """Bookies that need no Spark beside them."""
    with Bookies(tmp_path_factory.mktemp("losses"), bookies=3) as running:
        yield running


@pytest.fixture
def log() -> str:
    """Name a log of the test's own."""
    return f"losses-{secrets.token_hex(8)}"


def give_up(bookies: Bookies, ledger_id: int) -> None:
    """Have a closed ledger look as one that was closed with a loss."""

    async def change() -> None:
        ledgers = bookies.client._context.ledgers
        metadata, version = await ledgers.read(ledger_id)
        lost = GivenUp((metadata.last_entry or 0) + 5, ("b1", "b2"), 0)
        await ledgers.compare_and_set(replace(metadata, given_up=lost), version)

    bookies.run(change())


def rows(reader: Any, *between: Any) -> list[dict[str, Any]]:
    parts = reader.partitions(*between)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


# --- records that were given up ---


def test_a_batch_read_tells_of_a_ledger_that_was_closed_with_a_loss(bookies: Bookies, log: str) -> None:
    lost = bookies.append(log, [b"0", b"1"])[-1]
    bookies.append(log, [b"2"])
    give_up(bookies, lost[0])
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    with pytest.raises(client_aio.RecordsLostError, match=f"from {lost[0]}:2 on: .* set mode to permissive"):
        rows(LedgerDataSource(given).reader(SCHEMA))
    found = rows(LedgerDataSource({**given, "mode": "permissive"}).reader(WITH_ERROR))
    assert [row["value"] for row in found] == [b"0", b"1", None, b"2"]
    assert [row["_error"] is None for row in found] == [True, True, False, True]
    alone = {"metadata": bookies.uri, "ledger": str(lost[0]), "columns": "value"}
    assert len(rows(LedgerDataSource(alone).reader(SCHEMA))) == 2, "as a reader of the ledger itself does"


def test_an_empty_ledger_that_was_closed_with_a_loss_is_told(bookies: Bookies, log: str) -> None:
    writer = bookies.run(bookies.open_log(log))
    bookies.run(writer.close())
    give_up(bookies, writer.ledger_id)
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    with pytest.raises(client_aio.RecordsLostError):
        rows(LedgerDataSource(given).reader(SCHEMA))


def test_a_stream_tells_of_a_loss_with_the_batch_that_passes_it(bookies: Bookies, log: str) -> None:
    writer = bookies.run(bookies.open_log(log))
    bookies.append_by_ledgers(writer, [b"0", b"1", b"2"])
    given = {"metadata": bookies.uri, "log": log, "columns": "value"}
    strict = LedgerStreamReader(parse_read(given), SCHEMA)
    lenient = LedgerStreamReader(parse_read({**given, "mode": "permissive"}), WITH_ERROR)
    start = strict.initialOffset()
    first = strict.latestOffset(start, ALL)
    assert first["entry"] == 3
    bookies.run(writer.close())
    give_up(bookies, start["id"])
    bookies.append(log, [b"3"])
    assert [row["value"] for row in rows(strict, start, first)] == [b"0", b"1", b"2"], "planned before"
    behind = strict.latestOffset(first, ALL)
    with pytest.raises(client_aio.RecordsLostError, match=f"from {start['id']}:3 on"):
        rows(strict, first, behind)
    assert [row["value"] for row in rows(lenient, first, behind)] == [None, b"3"]
    assert rows(lenient, behind, behind) == []
    further = first | {"entry": 9}  # Acknowledged and read, then lost.
    assert [row["value"] for row in rows(lenient, first, further)] == [None]
    assert [row["value"] for row in rows(lenient, further, behind)] == [None, b"3"]
    strict.stop()
    lenient.stop()


# --- ledgers that are deleted or trimmed ---


def test_a_read_of_all_ledgers_leaves_out_one_that_is_deleted_meanwhile(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bookies.run(_opened(bookies))
    ask = Catalog._stretch_of

    async def delete_first(
        catalog: Catalog, row: Listed, metadata: LedgerMetadata, created_ms: int, listed: list[Listed]
    ) -> Stretch:
        if row.ledger_id == ledger.ledger_id:
            await catalog._client.delete_ledger(row.ledger_id)
        return await ask(catalog, row, metadata, created_ms, listed)

    monkeypatch.setattr(Catalog, "_stretch_of", delete_first)
    reader: Any = LedgerDataSource({"metadata": bookies.uri, "ledger": "all"}).reader(SCHEMA)
    found = {piece.stretch.ledger_id for part in reader.partitions() for piece in part.value}
    assert ledger.ledger_id not in found


async def _opened(bookies: Bookies) -> client_aio.LedgerWriter:
    ledger = await bookies.client.create_ledger()
    await ledger.add_entry(b"x")
    return ledger


async def _unbounded(bookies: Bookies, name: str, fragments: int) -> client_aio.UnboundedLedgerWriter:
    ledger = await bookies.client.open_unbounded_ledger(name)
    for number in range(fragments):
        await ledger.add_entry(b"%d" % number)
        await ledger.roll()
    await ledger.add_entry(b"%d" % fragments)
    return ledger


def test_a_ledger_that_was_trimmed_is_not_exported(bookies: Bookies, log: str) -> None:
    """An import begins at entry 0, and the manifest counts from there."""
    ledger = bookies.run(_unbounded(bookies, log, 3))
    bookies.run(ledger.trim(2))
    bookies.run(ledger.close(seal=True))
    with pytest.raises(client_aio.InvalidArgumentError, match="has been trimmed, and begins at entry 2"):
        bookies.run(archive._manifest(bookies.uri, None, [ledger.ledger_id], PasswordPlace()))


# --- jobs ---


def _wanted(bookies: Bookies, ledger_id: int) -> list[tuple[int, int, int, int, str]]:
    return bookies.run(jobs._replicas(bookies.uri, None, [ledger_id], PasswordPlace()))


def test_verify_reads_fragments_that_stand_in_pages(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_list, "HEAD_ROWS_BYTES_MAX", 200)
    monkeypatch.setattr(paged_list, "PAGE_ROWS_BYTES_MAX", 150)
    ledger = bookies.run(_unbounded(bookies, log, 20))
    assert len(bookies.run(bookies.client.ledger_metadata(log)).fragments) < 20
    wanted = _wanted(bookies, ledger.ledger_id)
    assert {first for _, _, first, _, _ in wanted} == set(range(20))
    found = bookies.run(jobs._verify_rows(bookies.uri, wanted, b""))
    assert [(row["status"], row["intact"]) for row in found] == [("ok", 1)] * 60
    bookies.run(ledger.close())


def test_verify_leaves_out_what_is_trimmed_or_deleted_meanwhile(bookies: Bookies, log: str) -> None:
    ledger = bookies.run(_unbounded(bookies, log, 3))
    wanted = _wanted(bookies, ledger.ledger_id)
    bookies.run(ledger.trim(2))
    found = bookies.run(jobs._verify_rows(bookies.uri, wanted, b""))
    assert {(row["first_entry"], row["status"]) for row in found} == {(2, "ok")}
    bookies.run(ledger.abort())
    bookies.run(bookies.client.delete_ledger(ledger.ledger_id))
    assert bookies.run(jobs._verify_rows(bookies.uri, wanted, b"")) == []


def test_what_is_dropped_while_verify_reads_it_is_not_reported_as_missing(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bookies.run(_unbounded(bookies, log, 3))
    wanted = _wanted(bookies, ledger.ledger_id)
    read = replicas.verify_replica

    async def trim_first(*asked: Any) -> Any:
        await bookies.client.delete_ledger(ledger.ledger_id)
        return await read(*asked)

    bookies.run(ledger.abort())
    monkeypatch.setattr(jobs, "verify_replica", trim_first)
    assert bookies.run(jobs._verify_rows(bookies.uri, wanted[:1], b"")) == []


def test_a_log_is_summed_up_though_it_is_truncated_meanwhile(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookies.append(log, [b"0", b"1"])
    second = bookies.append(log, [b"2"])[0]
    _once(monkeypatch, lambda client: client.truncate_log(log, second))
    (found,) = bookies.run(stats(bookies.uri, log=log))
    assert (found["ledgers"], found["entries"]) == (1, 1)


def test_logs_are_summed_up_though_one_is_deleted_meanwhile(
    bookies: Bookies, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookies.append(f"{log}-kept", [b"0"])
    bookies.append(log, [b"1"])
    _once(monkeypatch, lambda client: client.delete_log(log))
    found = {each["log"]: each["entries"] for each in bookies.run(stats(bookies.uri))}
    assert (found.get(log), found[f"{log}-kept"]) == (None, 1)


def _once(monkeypatch: pytest.MonkeyPatch, happen: Callable[[client_aio.Client], Awaitable[object]]) -> None:
    """Let something happen before the metadata of a ledger are read for the first time."""
    read = client_aio.Client.ledger_metadata
    happened: list[bool] = []

    async def after(client: client_aio.Client, ledger_id: int | str) -> LedgerMetadata:
        if not happened:
            happened.append(True)
            await happen(client)
        return await read(client, ledger_id)

    monkeypatch.setattr(client_aio.Client, "ledger_metadata", after)
