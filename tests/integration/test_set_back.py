"""Copies from the past, on bookies in processes: of a bookie's directory, of the metadata, and of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.core.identity import SET_BACK_JUMP, AgeFile
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import AGE
from bookie_aio.wire.messages import Info
from client_aio import Position
from metadata.access.bookies import available_bookies
from metadata.backends.uri import open_store
from metadata.errors import BookKeeperError, LedgerRecoveryError, MetadataUnavailableError
from metadata.ids import ledger_key
from metadata.model.ledger import LedgerState
from tests.support.cli import Cli
from tests.support.cluster import Cluster
from tests.support.rawclient import RawClient
from tests.support.replicas import every_copy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

WAIT_S = 60
ORDERS = list(itertools.permutations(["b1", "b2", "b3"]))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three bookies that sweep all the time; the test starts them."""
    cluster = Cluster(tmp_path)
    for bookie in cluster.bookies.values():
        bookie.arguments = ["--sweep-interval", "0.2"]
    yield cluster
    await cluster.end()  # also where the test has failed


def copy_metadata(folder: Path, name: str) -> None:
    """Copy the metadata of a cluster whose bookies have ended."""
    (folder / name).mkdir()
    for path in folder.glob("metadata.db*"):
        shutil.copy2(path, folder / name / path.name)


def copy_database(source: Path, to: Path) -> None:
    """Copy a database in use, by SQLite's own backup; a copy into one in use replaces its contents."""
    with (
        contextlib.closing(sqlite3.connect(source)) as store,
        contextlib.closing(sqlite3.connect(to)) as other,
    ):
        store.backup(other)


def restore_metadata(folder: Path, name: str) -> None:
    for path in folder.glob("metadata.db*"):
        path.unlink()
    for path in (folder / name).iterdir():
        shutil.copy2(path, folder / path.name)


def restore_directory(cluster: Cluster, bookie_id: str, copy: Path, *, but: str = "") -> None:
    """Put a copy in the place of a directory, but for one file that stays as it is."""
    directory = cluster[bookie_id].directory
    kept = (directory / but).read_bytes() if but else b""
    shutil.rmtree(directory)
    shutil.copytree(copy, directory)
    if but:
        (directory / but).write_bytes(kept)


async def info(cluster: Cluster, bookie_id: str) -> dict[str, object]:
    async with await RawClient.connect(cluster[bookie_id].addresses[0]) as raw:
        document: dict[str, object] = json.loads((await raw.call(Info())).body)
        return document


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def raised(cluster: Cluster, bookie_id: str) -> None:
    """Wait until the age of a bookie covers what was written, so that a copy from now on is noticed.

    Each bookie that runs has a seat in the ledger that is made: the age may have covered the rest before.
    """
    first = (await info(cluster, bookie_id))["age"]
    await make_ledgers(cluster.uri, 1)

    async def has_grown() -> bool:
        return (await info(cluster, bookie_id))["age"] != first

    await until(has_grown)


async def all_raised(cluster: Cluster) -> None:
    """Do as `raised` for each of the bookies, all of which run: each of them then notices a copy."""
    first = {name: (await info(cluster, name))["age"] for name in cluster.bookies}
    size = len(first)
    async with client_aio.connect(cluster.uri) as client:
        sizes = {"ensemble_size": size, "write_quorum": size, "ack_quorum": size}
        async with client.create_ledger(**sizes) as ledger:
            await ledger.add_entry(b"0")

    async def have_grown() -> bool:
        return all([(await info(cluster, name))["age"] != age for name, age in first.items()])

    await until(have_grown)


async def command(cluster: Cluster, *arguments: str) -> Any:
    return await asyncio.to_thread(Cli(cluster.uri).rows, *arguments)


async def make_ledgers(uri: str, count: int) -> list[int]:
    ids = []
    async with client_aio.connect(uri) as client:
        for _ in range(count):
            async with client.create_ledger() as ledger:
                await ledger.add_entries([b"0", b"1"])
            ids.append(ledger.ledger_id)
    return ids


async def readable(uri: str, ids: list[int]) -> list[int]:
    found = []
    async with client_aio.connect(uri, read_timeout_s=5) as client:
        for ledger_id in ids:
            reader = await client.open_ledger(ledger_id)
            if [bytes(entry.data) async for entry in reader.read(0, 1)] == [b"0", b"1"]:
                found.append(ledger_id)
    return found


@pytest.mark.parametrize("but", ["", AGE, form.WITNESS, form.CHECKPOINT])
async def test_a_recovery_does_not_count_a_replica_that_was_set_back(
    cluster: Cluster, tmp_path: Path, but: str
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        await cluster.start()
        async with client_aio.connect(cluster.uri) as client:
            writer = await client.create_ledger()
            await writer.add_entry(b"0")
            await cluster["b1"].end()
            shutil.copytree(cluster["b1"].directory, tmp_path / "backup")
            await cluster["b1"].start()
            await writer.add_entry(b"1")
            await cluster["b3"].end()
            for number in range(2, 8):
                await writer.add_entry(b"%d" % number)
            await writer.abort()
        await cluster.end()
        restore_directory(cluster, "b1", tmp_path / "backup", but=but)
        if but:  # The directory as a whole contradicts the metadata store alone.
            await asyncio.to_thread(Cli().run, "bookie", "inspect", str(cluster["b1"].directory), code=1)
        await cluster["b1"].start()
        await cluster["b3"].start()
        async with client_aio.connect(cluster.uri, connect_timeout_s=1, read_timeout_s=2) as client:
            with pytest.raises(client_aio.LedgerRecoveryError):
                await client.open_ledger(writer.ledger_id, recover=True)
            await cluster["b2"].start()
            reader = await client.open_ledger(writer.ledger_id, recover=True)
            entries = [bytes(entry.data) async for entry in reader.read(0, reader.last_add_confirmed)]
            assert entries[:8] == [b"%d" % number for number in range(8)]
            # The bookie takes ordinary adds to new ledgers: all three are needed here.
            async with client.create_ledger(ack_quorum=3) as ledger:
                assert await ledger.add_entries([b"0", b"1"]) == (0, 1)
        await cluster.end()


async def test_of_a_directory_and_its_copy_only_one_serves(cluster: Cluster, tmp_path: Path) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        await cluster.start()
        await make_ledgers(cluster.uri, 1)
        original = cluster["b1"]
        shutil.copytree(original.directory, tmp_path / "copy")
        await original.kill()
        await original.start()
        await original.end()
        home, original.directory = original.directory, tmp_path / "copy"
        with pytest.raises(Exception):  # noqa: B017, PT011
            await original.start()
        assert "--accept-older-copy" in original.log.read_text()
        original.directory = home
        await original.start()
        assert (await info(cluster, "b1"))["is_writable"]
        await cluster.end()


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[3], ORDERS[5]], ids=lambda order: "-".join(order))
async def test_bookies_drop_nothing_on_the_word_of_older_metadata(
    cluster: Cluster, tmp_path: Path, order: tuple[str, ...]
) -> None:
    async with asyncio.timeout(6 * WAIT_S):
        await cluster.start()
        before = await make_ledgers(cluster.uri, 2)
        await cluster.end()
        copy_metadata(tmp_path, "older")
        await cluster.start()
        lost = await make_ledgers(cluster.uri, 3)
        await cluster.end()
        copy_metadata(tmp_path, "newest")
        restore_metadata(tmp_path, "older")
        for bookie_id in order:  # one after another, each of them twice
            for _ in range(2):
                await cluster[bookie_id].start()
                await cluster[bookie_id].end()
        await cluster.start()
        for bookie_id in order:
            doubt = (await info(cluster, bookie_id))["metadata_set_back"]
            assert isinstance(doubt, dict)
            assert doubt["in_doubt_below"] > max(lost)
        (new,) = await make_ledgers(cluster.uri, 1)
        assert new > SET_BACK_JUMP
        shown = await command(cluster, "bookie", "accept-metadata", "--dry-run")
        assert shown["answered_for"] == []
        assert [row["ledger_id"] for row in shown["ledgers_in_doubt"]] == lost
        await cluster.end()
        copy_metadata(tmp_path, "after")
        restore_metadata(tmp_path, "newest")
        await cluster.start()
        assert await readable(cluster.uri, before + lost) == before + lost
        await cluster.end()
        # The older metadata once more: the operator accepts them, and what they lack is dropped.
        restore_metadata(tmp_path, "after")
        await cluster.start()
        answer = await command(cluster, "bookie", "accept-metadata", "--yes")
        assert answer["answered_for"] == ["b1", "b2", "b3"]

        async def is_dropped() -> bool:
            return all([(await info(cluster, each))["ledgers_dropped"] == len(lost) for each in order])

        await until(is_dropped)
        assert await readable(cluster.uri, [*before, new]) == [*before, new]
        await cluster.end()


async def test_a_log_opens_on_older_metadata_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        await cluster.start()
        async with client_aio.connect(cluster.uri) as client, client.open_log("orders") as log:
            await log.append(b"before")
        await cluster.end()
        copy_metadata(tmp_path, "older")
        await cluster.start()
        await make_ledgers(cluster.uri, 3)
        await cluster.end()
        restore_metadata(tmp_path, "older")
        await cluster.start()
        async with client_aio.connect(cluster.uri) as client:
            async with client.open_log("orders") as log:
                await log.append(b"after")
            records = [bytes(record.data) async for record in client.read_log("orders")]
            assert records == [b"before", b"after"]
        await cluster.end()


async def test_a_client_that_drew_its_ids_before_the_bookies_came_draws_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with asyncio.timeout(4 * WAIT_S):
        await cluster.start()
        (before,) = await make_ledgers(cluster.uri, 1)
        await cluster.end()
        copy_metadata(tmp_path, "older")
        await cluster.start()
        lost = await make_ledgers(cluster.uri, 3)
        await cluster.end()
        restore_metadata(tmp_path, "older")
        async with client_aio.connect(cluster.uri) as client:
            assert await client._context.ledgers.allocate_id() <= max(lost)  # its block is drawn by now
            await cluster.start()
            async with client.create_ledger() as ledger:
                await ledger.add_entries([b"0", b"1"])
            assert ledger.ledger_id > SET_BACK_JUMP
            assert sorted([one async for one in client.list_ledgers()]) == [before, ledger.ledger_id]
        await cluster.end()


async def test_a_directory_and_the_metadata_set_back_together_are_told_apart_by_the_other_bookies(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with asyncio.timeout(6 * WAIT_S):
        await cluster.start()
        await make_ledgers(cluster.uri, 1)
        await cluster.end()
        copy_metadata(tmp_path, "older")
        shutil.copytree(cluster["b1"].directory, tmp_path / "backup")
        await cluster.start()
        await make_ledgers(cluster.uri, 1)
        await raised(cluster, "b2")

        async def is_seen() -> bool:
            age = AgeFile.parse((cluster["b2"].directory / AGE).read_bytes())
            seen = {} if age is None else {peer.bookie_id: peer.number for peer in age.peers}
            older = AgeFile.parse((tmp_path / "backup" / AGE).read_bytes())
            return older is not None and seen.get("b1", 0) > older.number

        await until(is_seen)
        await cluster.kill()
        restore_metadata(tmp_path, "older")
        restore_directory(cluster, "b1", tmp_path / "backup")
        await cluster["b1"].start()  # alone, nothing tells it
        await cluster["b2"].start()

        async def is_marked() -> bool:
            return "as another bookie knows" in cluster["b1"].log.read_text()

        await until(is_marked)
        await cluster["b1"].kill()  # perhaps before the mark was durable
        for _ in range(2):
            await cluster["b1"].start()
            await cluster["b1"].end()
        assert cluster["b1"].log.read_text().count("as another bookie knows") <= 2
        await cluster.end()


@contextlib.asynccontextmanager
async def displaced(
    folder: Path, cluster: Cluster
) -> AsyncIterator[tuple[client_aio.LedgerWriter, list[str]]]:
    """Have a writer replace two of its three bookies, and set the metadata back to before that.

    Yields:
        The writer, which has had 20 entries acknowledged; and the bookies that the older copy names. The
        first two of these have 10 and 15 entries; all others have the last one that was acknowledged.
    """
    async with cluster, client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
        writer = await client.create_ledger()
        await writer.add_entries([b"%d" % number for number in range(10)])
        named = list((await client.ledger_metadata(writer.ledger_id)).last_fragment.bookies)
        await asyncio.to_thread(copy_running_metadata, folder, "older")
        for bookie_id, following in ((named[0], 15), (named[1], 20)):
            await every_copy(client, writer.ledger_id)
            await cluster[bookie_id].kill()
            await writer.add_entry(b"%d" % (writer.last_add_confirmed + 1))

            async def is_replaced(bookie_id: str = bookie_id) -> bool:
                found = (await client.ledger_metadata(writer.ledger_id)).last_fragment
                return bookie_id not in found.bookies

            await until(is_replaced)
            present = writer.last_add_confirmed + 1
            await writer.add_entries([b"%d" % number for number in range(present, following)])
        await every_copy(client, writer.ledger_id)
        holder = next(name for name in cluster.bookies if name not in named)
        await raised(cluster, holder)
        await cluster.end()
        restore_metadata(folder, "older")
        yield writer, named
        await writer.abort()


def copy_running_metadata(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    copy_database(folder / "metadata.db", folder / name / "metadata.db")


@pytest.mark.parametrize("missing", ["named", "holder"])
async def test_a_recovery_by_older_metadata_finds_what_other_bookies_acknowledged(
    tmp_path: Path, missing: str
) -> None:
    cluster = Cluster(tmp_path, bookies=5)
    async with asyncio.timeout(4 * WAIT_S), displaced(tmp_path, cluster) as (writer, named):
        others = sorted(set(cluster.bookies) - set(named))
        away = named[2] if missing == "named" else others[0]
        await asyncio.gather(*(cluster[name].start() for name in cluster.bookies if name != away))
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            reader = await client.open_ledger(writer.ledger_id, recover=True)
            assert reader.last_add_confirmed == 19
        with pytest.raises(BookKeeperError):
            await writer.add_entry(b"fenced, wherever it writes")
        await writer.abort()
        await cluster[away].start()
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            # The bookies that the metadata name have it all, whoever had it before.
            whole = Counter(
                each.first_entry
                for each in await client.ledger_replicas(writer.ledger_id)
                if each.entries_missing == 0
            )
            fragments = (await client.ledger_metadata(writer.ledger_id)).fragments
            assert all(whole[fragment.first_entry] >= 2 for fragment in fragments)
            reader = await client.open_ledger(writer.ledger_id)
            found = [bytes(each.data) async for each in reader.read(0, 19)]
            assert found == [b"%d" % number for number in range(20)]


async def test_a_recovery_by_older_metadata_ends_only_where_enough_bookies_answer(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, bookies=5)
    async with asyncio.timeout(4 * WAIT_S), displaced(tmp_path, cluster) as (writer, named):
        await asyncio.gather(*(cluster[name].start() for name in named))
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            with pytest.raises(LedgerRecoveryError, match="was set back"):
                await client.open_ledger(writer.ledger_id, recover=True)
            metadata = await client.ledger_metadata(writer.ledger_id)
            assert metadata.state is LedgerState.OPEN  # nothing is fenced
            await asyncio.gather(*(cluster[name].start() for name in set(cluster.bookies) - set(named)))
            reader = await client.open_ledger(writer.ledger_id, recover=True)
            assert reader.last_add_confirmed == 19


@pytest.mark.parametrize(("size", "is_guaranteed"), [(2, False), (3, True)])
async def test_a_recovery_by_older_metadata_writes_nothing_back_where_no_other_bookie_has_anything(
    tmp_path: Path, size: int, is_guaranteed: bool
) -> None:
    """One of its bookies is away, and no other one takes adds: it could write nothing back."""
    async with asyncio.timeout(4 * WAIT_S), Cluster(tmp_path, bookies=size + 1) as cluster:
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            sizes = {"ensemble_size": size, "write_quorum": size, "ack_quorum": 2}
            writer = await client.create_ledger(**sizes, guaranteed_write_quorum=is_guaranteed)
            await writer.add_entries([b"%d" % number for number in range(10)])
            named = writer.metadata.last_fragment.bookies
            (other,) = set(cluster.bookies).difference(named)

            await cluster.heard(client, Position(writer.ledger_id, 9))  # an idle writer states it
            await asyncio.to_thread(copy_running_metadata, tmp_path, "older")
            await raised(cluster, named[0])
            await cluster.end()
            restore_metadata(tmp_path, "older")
            await writer.abort()
        await asyncio.gather(*(cluster[name].start() for name in cluster.bookies if name != named[0]))
        await command(cluster, "bookie", "read-only", "on", other)
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            reader = await client.open_ledger(writer.ledger_id, recover=True)
            assert reader.last_add_confirmed == 9
            assert (await client.ledger_metadata(writer.ledger_id)).last_fragment.bookies == named


@pytest.mark.parametrize("other", ["runs", "is away", "has taken a seat"])
async def test_an_unbounded_ledger_that_was_trimmed_behind_the_copy_is_taken_over(
    tmp_path: Path, other: str
) -> None:
    """By the copy its last fragment begins with entries that nobody has any more."""
    cluster, named = Cluster(tmp_path, bookies=4), {"b1", "b2", "b3"}
    for bookie in cluster.bookies.values():
        bookie.arguments = ["--sweep-interval", "0.2"]
    async with asyncio.timeout(4 * WAIT_S), cluster:
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            await cluster["b4"].end()
            writer = await client.open_unbounded_ledger("changes")
            assert {*writer.metadata.last_fragment.bookies} == named
            await writer.add_entries([b"%d" % number for number in range(10)])
            await writer.roll()
            await writer.add_entries([b"%d" % number for number in range(10, 15)])
            await asyncio.to_thread(copy_running_metadata, tmp_path, "older")
            await writer.add_entries([b"%d" % number for number in range(15, 20)])
            if other == "has taken a seat":
                await cluster["b4"].start()
                await cluster["b3"].end()
            await writer.roll()
            await writer.add_entries([b"%d" % number for number in range(20, 30)])
            await writer.trim(20)
            if other == "has taken a seat":
                await cluster["b3"].start()

            async def is_trimmed() -> bool:
                return all("ledger trimmed" in cluster[each].log.read_text() for each in named)

            await until(is_trimmed)
            await raised(cluster, "b1")
            await cluster.end()
            restore_metadata(tmp_path, "older")
            await writer.abort()
        running = [name for name in cluster.bookies if name != "b4" or other != "is away"]
        await asyncio.gather(*(cluster[name].start() for name in running))
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            async with client.open_unbounded_ledger("changes") as next_writer:
                assert next_writer.last_add_confirmed == 29
                assert await next_writer.add_entry(b"more") == 30
                assert next_writer.length == 10 + 2 * 20 + 4
            reader = await client.open_ledger(writer.ledger_id)
            found = [bytes(each.data) async for each in reader.read(20, 30)]
            assert found == [*(b"%d" % number for number in range(20, 30)), b"more"]


@contextlib.asynccontextmanager
async def writer_of_before(
    folder: Path, cluster: Cluster, *, is_closed: bool
) -> AsyncIterator[tuple[client_aio.LedgerWriter, list[str], list[str]]]:
    """Have a writer live on while the metadata are set back, and no bookie runs.

    Args:
        is_closed: a recovery has closed the ledger since the copy was taken.

    Yields:
        The writer, which has had 10 entries acknowledged; its bookies; and the other two.
    """
    async with cluster, client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
        writer = await client.create_ledger()
        await writer.add_entries([b"%d" % number for number in range(10)])
        await every_copy(client, writer.ledger_id)
        await asyncio.to_thread(copy_running_metadata, folder, "older")
        named = list(writer.metadata.last_fragment.bookies)
        if is_closed:
            async with client_aio.connect(cluster.uri) as other:
                assert (await other.open_ledger(writer.ledger_id, recover=True)).is_closed
        await all_raised(cluster)
        await cluster.end()
        restore_metadata(folder, "older")
        yield writer, named, [name for name in cluster.bookies if name not in named]
        await writer.abort()


async def start(cluster: Cluster, *names: str) -> None:
    await asyncio.gather(*(cluster[name].start() for name in names))


async def is_waiting(going_on: asyncio.Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(going_on), 1)


@pytest.mark.parametrize("how", ["add", "close"])
async def test_a_writer_does_not_go_on_by_older_metadata_behind_a_recovery(tmp_path: Path, how: str) -> None:
    """They have its ledger OPEN, and two bookies would take its entries that nobody has fenced."""
    cluster = Cluster(tmp_path, bookies=5)
    async with (
        asyncio.timeout(4 * WAIT_S),
        writer_of_before(tmp_path, cluster, is_closed=True) as (writer, named, others),
    ):
        await start(cluster, *others)
        going_on = asyncio.ensure_future(writer.add_entry(b"10") if how == "add" else writer.close())
        await is_waiting(going_on)
        await start(cluster, named[2])
        with pytest.raises(client_aio.LedgerFencedError):
            await going_on
        await start(cluster, *named[:2])
        async with client_aio.connect(cluster.uri) as client:
            reader = await client.open_ledger(writer.ledger_id, recover=True)
            assert reader.last_add_confirmed == 9


async def test_a_writer_goes_on_by_older_metadata_once_enough_bookies_say_that_nobody_fenced_it(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, bookies=5)
    async with (
        asyncio.timeout(4 * WAIT_S),
        writer_of_before(tmp_path, cluster, is_closed=False) as (writer, named, others),
    ):
        await start(cluster, named[2], *others)
        adding = writer.add_entry(b"10")
        await is_waiting(adding)  # A recovery may have fenced the two that are away.
        await start(cluster, named[0])
        assert await adding == 10
        assert (await writer.close()).last_entry == 10


async def test_a_change_that_is_tried_again_behind_a_set_back_is_judged_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was cut off from the metadata store while a recovery closed the ledger, and behind that."""
    cluster, is_cut, reached = Cluster(tmp_path, bookies=5), True, asyncio.Event()
    async with (
        asyncio.timeout(4 * WAIT_S),
        cluster,
        client_aio.connect(cluster.uri, connect_timeout_s=2) as client,
    ):
        writer = await client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1)
        await writer.add_entries([b"%d" % number for number in range(10)])
        (named,) = writer.metadata.last_fragment.bookies
        await asyncio.to_thread(copy_running_metadata, tmp_path, "older")
        ledgers = client._context.ledgers
        compare_and_set = ledgers.compare_and_set

        async def cut(*arguments: Any, **others: Any) -> Any:
            if is_cut:
                reached.set()
                raise MetadataUnavailableError("it is cut off")
            return await compare_and_set(*arguments, **others)

        monkeypatch.setattr(ledgers, "compare_and_set", cut)
        await cluster[named].kill()
        adding = writer.add_entry(b"10")
        await reached.wait()
        await start(cluster, named)
        async with client_aio.connect(cluster.uri) as other:
            assert (await other.open_ledger(writer.ledger_id, recover=True)).is_closed
        await all_raised(cluster)
        await cluster.end()
        restore_metadata(tmp_path, "older")
        await start(cluster, *(name for name in cluster.bookies if name != named))
        is_cut = False
        await is_waiting(adding)
        await start(cluster, named)
        with pytest.raises(client_aio.LedgerFencedError):
            await adding
        await writer.abort()


@pytest.mark.parametrize("how", ["closed", "deleted"])
async def test_older_metadata_that_refuse_a_change_decide_without_the_bookies(
    tmp_path: Path, how: str
) -> None:
    """Rule 10: a close succeeds where another client closed the ledger at the same end."""
    cluster = Cluster(tmp_path, bookies=5)
    async with (
        asyncio.timeout(4 * WAIT_S),
        writer_of_before(tmp_path, cluster, is_closed=False) as (writer, _, __),
    ):
        await start(cluster, *cluster.bookies)
        async with client_aio.connect(cluster.uri) as other:
            if how == "closed":
                await other.open_ledger(writer.ledger_id, recover=True)
                assert (await writer.close()).last_entry == 9
            else:
                await other.delete_ledger(writer.ledger_id)
                with pytest.raises(client_aio.NoSuchLedgerError):
                    await writer.close()


async def test_a_writer_that_has_changed_older_metadata_asks_no_more(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, bookies=5)
    async with (
        asyncio.timeout(4 * WAIT_S),
        writer_of_before(tmp_path, cluster, is_closed=False) as (writer, named, others),
    ):
        await start(cluster, *named[:2], *others)
        assert await writer.add_entry(b"10") == 10
        await until(is_out(writer, named[2]))
        await start(cluster, named[2])
        first, second, _ = writer.metadata.last_fragment.bookies
        await asyncio.gather(cluster[first].kill(), cluster[second].kill())
        assert await asyncio.wait_for(writer.add_entry(b"11"), WAIT_S / 2) == 11


def is_out(writer: client_aio.LedgerWriter, bookie_id: str) -> Callable[[], Awaitable[bool]]:
    async def is_replaced() -> bool:
        return bookie_id not in writer.metadata.last_fragment.bookies

    return is_replaced


async def test_a_bookie_that_lost_data_does_not_say_that_nobody_fenced_it(tmp_path: Path) -> None:
    """The fence may be among what it lost."""
    cluster = Cluster(tmp_path, bookies=5)
    async with (
        asyncio.timeout(4 * WAIT_S),
        writer_of_before(tmp_path, cluster, is_closed=False) as (writer, named, others),
    ):
        for path in cluster[named[0]].directory.glob("*.segment"):
            path.unlink()
        await start(cluster, *named[:2], *others)
        adding = writer.add_entry(b"10")
        await is_waiting(adding)
        await start(cluster, named[2])
        assert await adding == 10


async def test_a_loss_by_older_metadata_names_the_bookies_that_have_what_is_lost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, bookies=5)
    async with asyncio.timeout(4 * WAIT_S), displaced(tmp_path, cluster) as (writer, named):
        holder, away = sorted(set(cluster.bookies) - set(named))
        await asyncio.gather(*(cluster[name].start() for name in (*named[:2], holder)))
        async with client_aio.connect(cluster.uri, connect_timeout_s=2) as client:
            await client.open_ledger(writer.ledger_id, recover=True, accept_loss=True)
            metadata = await client.ledger_metadata(writer.ledger_id)
        assert metadata.last_entry == 14
        assert metadata.given_up is not None
        assert set(metadata.given_up.bookies) == {named[2], holder, away}
        assert metadata.given_up.lac >= 18


@pytest.mark.parametrize("how", ["in place", "another file", "another file without leases"])
async def test_metadata_that_are_set_back_under_running_bookies_cost_no_ledger(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    """The bookies were started again since the copy, which knows none of their registrations."""
    path, older = tmp_path / "metadata.db", tmp_path / "older"

    async def is_ready() -> bool:
        found = [await info(cluster, each) for each in cluster.bookies]
        async with await open_store(cluster.uri) as store:
            listed = await available_bookies(store)
        return all(each["metadata_set_back"] for each in found) and len(listed) == 3

    async def is_swept() -> bool:
        return [(await info(cluster, each))["ledgers_dropped"] for each in cluster.bookies] == [1, 1, 1]

    async with asyncio.timeout(4 * WAIT_S):
        await cluster.start()
        before = await make_ledgers(cluster.uri, 2)
        copy_database(path, older)
        lost = await make_ledgers(cluster.uri, 2)
        await cluster.end()
        await cluster.start()
        lost += await make_ledgers(cluster.uri, 1)
        if how == "in place":
            copy_database(older, path)
        else:
            for name in os.listdir(tmp_path):
                is_lease = name.startswith("metadata.db-leases-")
                if name.startswith("metadata.db") and (not is_lease or how.endswith("without leases")):
                    (tmp_path / name).unlink()
            shutil.copy2(older, path)
        await until(is_ready)
        *new, deleted = await make_ledgers(cluster.uri, 3)
        assert not set(new) & set(lost)
        async with await open_store(cluster.uri) as store:
            await store.delete(ledger_key(deleted))
        await until(is_swept)
        assert await readable(cluster.uri, [*before, *new]) == [*before, *new]
        assert await is_swept()
        await cluster.end()
