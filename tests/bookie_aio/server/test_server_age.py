"""A bookie's age, its doubt in the metadata store, and ids that were not given out."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.core.identity import SET_BACK_JUMP, AgeFile
from bookie_aio.server.bookie import Bookie
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.segment.format import AGE
from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    Delete,
    Failure,
    Force,
    Info,
    IsFree,
    ListLedgers,
    Read,
    ReadLac,
    Status,
    WriteLac,
)
from client_aio.core.placement import Choice
from metadata.access.bookies import AgeRecord, SetBacks
from metadata.access.dump import Restore, check_dump, dump
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import (
    CookieMismatchError,
    DiskFailedError,
    KeyExistsError,
    MetadataSetBackError,
    MetadataUnavailableError,
)
from metadata.ids import TERM_FINAL, age_key, cookie_key
from metadata.model.ledger import LedgerMetadata
from tests.support.mortal import DiedError, MortalStore
from tests.support.rawclient import RawClient, lac_statement
from tests.support.storage import FaultyDisk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    from client_aio.core.placement import Seating
    from tests.bookie_aio.server.conftest import Bookies

WAIT_S = 30
SIZES = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "bookies": ["b1"]}


def age_of(folder: Path) -> AgeFile:
    age = AgeFile.parse((folder / AGE).read_bytes())
    assert age is not None
    return age


async def stored_age(bookies: Bookies) -> AgeRecord:
    return AgeRecord.from_json((await bookies.store().read(age_key("b1"))).value)


async def held(client: RawClient) -> list[int]:
    return [one for (one,) in struct.iter_unpack("<Q", (await client.call(ListLedgers(0))).body)]


async def draw(bookies: Bookies, count: int) -> range:
    return await bookies.store().allocate_ids(LEDGER_SEQUENCE, count)


async def poll(is_so: Callable[[], bool]) -> None:
    """Wait until something that no event tells of is so."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def make(bookies: Bookies, client: RawClient, *ledger_ids: int) -> None:
    """Make ledgers with an entry each; their ids have been given out."""
    for ledger_id in ledger_ids:
        await LedgerStore(bookies.store()).create_ledger(LedgerMetadata.new(ledger_id, **SIZES))
        assert (await client.add(ledger_id, 0, [b"0"])).status is Status.OK


def copy_of(tree: MemoryTree) -> MemoryTree:
    """Return a copy of the metadata, as a backup holds it: without registrations."""
    copy = MemoryTree()
    nodes = {key: node for key, node in tree.__dict__["_nodes"].items() if "available/" not in key}
    copy.__dict__["_nodes"] = deepcopy(nodes)
    for name in ("_counters", "_drawn"):
        copy.__dict__[name] = dict(tree.__dict__[name])
    return copy


@pytest.fixture
def fresh(bookies: Bookies) -> Bookies:
    """A cluster whose id counter is at 0."""
    bookies.tree = MemoryTree()
    return bookies


# --- the age ---


async def test_the_age_grows_with_each_start_and_with_what_is_written(
    bookies: Bookies, tmp_path: Path
) -> None:
    bookie = await bookies.start(age_interval_s=3600.0)
    first = age_of(tmp_path / "b1")
    stored = await stored_age(bookies)
    assert (stored.number, stored.token) == (first.number, first.token) == (first.number, bookie.nonce)
    await bookie.age.raise_if_written()
    assert age_of(tmp_path / "b1").number == first.number  # nothing was written
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    await bookie.age.raise_if_written()
    assert age_of(tmp_path / "b1").number == first.number + 1 == (await stored_age(bookies)).number
    assert (await client.add(7, 1, [b"b"])).status is Status.OK
    await bookie.close()  # raises it for what was written last
    assert age_of(tmp_path / "b1").number == first.number + 2
    bookie = await bookies.start()
    assert age_of(tmp_path / "b1").number == first.number + 3
    assert not bookie.age.has_lost
    await client.close()


async def test_a_directory_set_back_has_lost_data(bookies: Bookies, tmp_path: Path) -> None:
    bookie = await bookies.start(age_interval_s=3600.0)
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    await bookie.age.raise_if_written()
    shutil.copytree(tmp_path / "b1", tmp_path / "backup")
    assert (await client.add(7, 1, [b"b"])).status is Status.OK
    await bookie.age.raise_if_written()
    await bookie.close()
    shutil.rmtree(tmp_path / "b1")
    shutil.copytree(tmp_path / "backup", tmp_path / "b1")
    bookie = await bookies.start()
    assert bookie.age.has_lost
    client = await bookies.connect(bookie)
    assert (await client.add(7, 1, [b"b"])).status is Status.DATA_LOST
    await bookie.close()
    bookie = await bookies.start()  # it is no older copy any more, and the mark stays
    assert not bookie.age.has_lost
    client = await bookies.connect(bookie)
    assert (await client.add(7, 1, [b"b"])).status is Status.DATA_LOST


async def test_an_age_that_is_lost_or_damaged_counts_as_set_back(bookies: Bookies, tmp_path: Path) -> None:
    for damage in (b"", b"0000 {}"):
        await (await bookies.start()).close()
        (tmp_path / "b1" / AGE).write_bytes(damage)
        bookie = await bookies.start()
        assert bookie.age.has_lost
        await bookie.close()


async def test_of_a_directory_and_its_copy_only_the_one_that_ran_last_goes_on(
    bookies: Bookies, tmp_path: Path
) -> None:
    await (await bookies.start()).close()
    shutil.copytree(tmp_path / "b1", tmp_path / "copy")
    bookie = await bookies.start()
    with pytest.raises(KeyExistsError, match="running already"):
        await bookies.start(folder="copy")
    await bookie.close()
    for _ in range(2):  # for good
        with pytest.raises(CookieMismatchError, match=r"--accept-older-copy"):
            await bookies.start(folder="copy")
    bookie = await bookies.start()
    assert not bookie.age.has_lost
    await bookie.close()
    # The other order: a directory that was moved goes on in its new place, and the old one does not.
    shutil.copytree(tmp_path / "b1", tmp_path / "moved")
    bookie = await bookies.start(folder="moved")
    assert not bookie.age.has_lost
    await bookie.close()
    with pytest.raises(CookieMismatchError, match="moved"):
        await bookies.start()
    bookie = await bookies.start(folder="copy", accept_older_copy=True)
    assert bookie.age.has_lost
    await bookie.close()


async def test_a_bookie_whose_copy_was_started_serves_no_more(bookies: Bookies, tmp_path: Path) -> None:
    bookie = await bookies.start(age_interval_s=0.5)
    # A file that the running bookie is about to rename may be gone before it is copied.
    shutil.copytree(tmp_path / "b1", tmp_path / "copy", ignore=shutil.ignore_patterns("*.new"))
    assert bookie._registration is not None
    await bookie._registration.close()  # as if it had been cut off from the store
    copy = await bookies.start(folder="copy")
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    async with asyncio.timeout(WAIT_S):
        error = await bookie.stopped
    assert isinstance(error, CookieMismatchError)
    assert not copy.stopped.done()


@pytest.mark.parametrize("lives", range(1, 8))
async def test_a_start_that_ends_behind_any_write_to_the_store_marks_nothing(
    bookies: Bookies, lives: int, tmp_path: Path
) -> None:
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    await bookie.close()
    for _ in range(2):
        store = MortalStore(bookies.store(), lives)
        try:
            dying = await Bookie.start(
                bookies.config(), store, bookies.disk(), rng=bookies.rng, now_ms=lambda: 0
            )
        except DiedError:
            pass
        else:
            store.dead.set()
            await dying.close()
        await store.inner.close()
    bookie = await bookies.start()
    assert not bookie.age.has_lost
    assert not bookie.age.in_doubt_below
    client = await bookies.connect(bookie)
    assert (await client.add(7, 1, [b"b"])).status is Status.OK


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_age_that_an_earlier_start_intended_is_not_forgotten_on_a_full_disk(
    bookies: Bookies, tmp_path: Path, is_late: bool
) -> None:
    """Its compare-and-set takes effect before the next raise, or never; a later start finds no loss."""
    await (await bookies.start()).close()
    age = age_of(tmp_path / "b1")
    (tmp_path / "b1" / AGE).write_bytes(age.intend(age.number + 1, "earlier").to_bytes())
    disk = FaultyDisk()
    disk.is_full, disk.is_full_for = True, lambda path: AGE in os.path.basename(path)
    config = replace(bookies.config(), age_interval_s=3600.0)
    bookie = await Bookie.start(config, bookies.store(), disk, rng=bookies.rng, now_ms=lambda: 0)
    disk.is_full = False
    assert (await stored_age(bookies)).number == age.number
    if is_late:
        store = bookies.store()
        at = (await store.read(age_key("b1"))).version
        place = list(config.directories)
        await store.compare_and_set(age_key("b1"), AgeRecord(age.number + 1, "earlier", place).to_json(), at)
    await bookie.age.raise_if_written()
    assert (await stored_age(bookies)).token == "earlier"
    await bookie.age.raise_if_written()  # A copy from before this start would have the earlier age, too.
    assert (await stored_age(bookies)).token == bookie.nonce == age_of(tmp_path / "b1").token
    await bookie.close()
    bookie = await bookies.start()
    assert not bookie.age.has_lost
    assert not bookie.age.in_doubt_below


@pytest.mark.parametrize("what", ["create", "write", "sync", "rename"])
async def test_a_disk_that_fails_under_the_age_ends_the_bookie(bookies: Bookies, what: str) -> None:
    """It went on without a word, until a segment was to be made, on a disk that changes no name any more."""
    disk = FaultyDisk()
    config = replace(bookies.config(), age_interval_s=0.01)
    bookie = await Bookie.start(config, bookies.store(), disk, rng=bookies.rng, now_ms=lambda: 0)
    assert not bookie.stopped.done()

    def fail(step: str, path: str) -> None:
        if step == what and AGE in os.path.basename(path):
            raise DiskFailedError("the test makes this step fail")

    disk.on_step = fail
    disk.fail_sync_of = f"{AGE}.new" if what == "sync" else ""
    client = await bookies.connect(bookie)
    assert (await client.add(1, 0, [b"0"])).status is Status.OK
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await bookie.stopped, DiskFailedError)
    await bookie.close()


async def test_a_new_bookie_under_an_id_that_was_removed_has_no_older_age(
    bookies: Bookies, tmp_path: Path
) -> None:
    await (await bookies.start()).close()
    await bookies.store().delete(cookie_key("b1"))
    bookie = await bookies.start(folder="another")
    assert not bookie.age.has_lost
    assert not bookie.age.in_doubt_below


# --- metadata set back ---


async def test_metadata_set_back_drop_nothing_until_an_operator_answers(
    fresh: Bookies, tmp_path: Path
) -> None:
    bookie = await fresh.start(sweep_interval_s=3600.0)
    client = await fresh.connect(bookie)
    await make(fresh, client, *await draw(fresh, 3))
    older = copy_of(fresh.tree)
    await make(fresh, client, *await draw(fresh, 3))
    await bookie.close()
    fresh.tree = older
    for _ in range(2):  # also after a restart
        bookie = await fresh.start(sweep_interval_s=3600.0)
        client = await fresh.connect(bookie)
        assert bookie._ledger_gc is not None
        assert await bookie._ledger_gc.sweep() == 0
        assert await held(client) == [0, 1, 2, 3, 4, 5]
        refusal = await client.call(Delete(4))
        assert refusal.status is Status.INTERNAL_ERROR
        doubt = json.loads((await client.call(Info())).body)["metadata_set_back"]
        assert doubt["in_doubt_below"] > 5
        await bookie.close()
    assert (await draw(fresh, 1)).start > SET_BACK_JUMP
    bookie = await fresh.start(sweep_interval_s=3600.0)
    client = await fresh.connect(bookie)
    assert bookie._ledger_gc is not None
    # What is given out from now on is deleted as ever.
    (new,) = await draw(fresh, 1)
    await make(fresh, client, new)
    await LedgerStore(fresh.store()).delete(new)
    assert (await client.call(Delete(new))).status is Status.OK
    await answer_for(fresh, "b1")
    await poll(lambda: not bookie.age.in_doubt_below)
    assert await bookie._ledger_gc.sweep() == 3
    assert await held(client) == [0, 1, 2]


async def test_the_newest_metadata_put_back_need_an_answer_too(fresh: Bookies) -> None:
    bookie = await fresh.start(sweep_interval_s=3600.0)
    client = await fresh.connect(bookie)
    await make(fresh, client, *await draw(fresh, 2))
    older = copy_of(fresh.tree)
    await make(fresh, client, *await draw(fresh, 2))
    await bookie.close()
    newest = copy_of(fresh.tree)
    fresh.tree = older
    await (await fresh.start()).close()
    fresh.tree = newest
    bookie = await fresh.start(sweep_interval_s=3600.0)
    assert bookie.age.in_doubt_below
    assert bookie._ledger_gc is not None
    assert await bookie._ledger_gc.sweep() == 0
    client = await fresh.connect(bookie)
    await LedgerStore(fresh.store()).delete(3)
    assert (await client.call(Delete(3))).status is Status.INTERNAL_ERROR
    await answer_for(fresh, "b1")
    await poll(lambda: not bookie.age.in_doubt_below)
    assert (await client.call(Delete(3))).status is Status.OK


async def answer_for(bookies: Bookies, *bookie_ids: str) -> None:
    """Answer for bookies, as an operator does."""
    found = await SetBacks.read(bookies.store())
    await found.replace(bookies.store(), [event.answer_for(bookie_ids) for event in found.events])


async def test_what_moved_before_a_set_back_is_never_evicted(fresh: Bookies) -> None:
    """Older metadata name the bookies of before a repair, whose copies may be gone."""
    bookie = await fresh.start(sweep_interval_s=3600.0)
    client, ledgers = await fresh.connect(bookie), LedgerStore(fresh.store())
    (repaired,) = await draw(fresh, 1)
    metadata = LedgerMetadata.new(repaired, **(SIZES | {"bookies": ["b9"]})).close(0, 1)
    await ledgers.create_ledger(metadata)
    older = copy_of(fresh.tree)
    assert (await client.add(repaired, 0, [b"0"], flags=AddFlag.REPAIR)).status is Status.OK
    metadata, version = await ledgers.read(repaired)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b9", "b1"), version)
    await bookie.close()
    fresh.tree = older
    bookie = await fresh.start(sweep_interval_s=3600.0, unnamed_grace_s=0.01)
    gc, client = bookie._ledger_gc, await fresh.connect(bookie)
    assert gc is not None
    for is_answered in (False, True):
        if is_answered:
            await answer_for(fresh, "b1")
            await poll(lambda: not bookie.age.unanswered_below)
        for _ in range(3):
            await gc.sweep()
            await asyncio.sleep(0.02)  # longer than the grace period
        assert (gc.forgotten, await held(client)) == (0, [repaired])


async def test_a_bookie_that_came_after_a_set_back_folds_and_ends_nothing_until_an_operator_answers(
    fresh: Bookies,
) -> None:
    """Others may hold ledgers that the older metadata do not list."""
    bookie = await fresh.start(sweep_interval_s=3600.0)
    older = copy_of(fresh.tree)
    (lost,) = await draw(fresh, 1)
    await make(fresh, await fresh.connect(bookie), lost)
    await bookie.close()
    fresh.tree = older
    await fresh.start(sweep_interval_s=3600.0)
    late = await fresh.start("b2", sweep_interval_s=3600.0)
    gc, engine = late._ledger_gc, late._engine
    assert gc is not None
    assert engine is not None
    assert not late.age.in_doubt_below
    shown = json.loads((await (await fresh.connect(late)).call(Info())).body)["metadata_set_back"]
    assert shown["in_doubt_below"] == 0 < lost + 1 <= shown["unanswered_below"]
    await when_durable(partial(engine.marking.mark_all, lost))
    await LedgerStore(fresh.store()).raise_floor((await draw(fresh, 2)).start + 1)
    assert late.age.unanswered_below < await LedgerStore(fresh.store()).floor()
    for _ in range(3):
        await gc.sweep()
    assert (engine.is_deleted(lost), engine.is_damaged(lost)) == (False, True)
    await answer_for(fresh, "b1", "b2")
    await poll(lambda: not late.age.unanswered_below)
    for _ in range(3):
        await gc.sweep()
    assert (engine.is_deleted(lost), engine.marking.number) == (True, 0)


async def test_an_answer_covers_bookies_that_are_formatted_later(fresh: Bookies) -> None:
    bookie = await fresh.start(sweep_interval_s=3600.0)
    older = copy_of(fresh.tree)
    await make(fresh, await fresh.connect(bookie), *await draw(fresh, 1))
    await bookie.close()
    fresh.tree = older
    bookie = await fresh.start(sweep_interval_s=3600.0)
    early = await fresh.start("b2")
    assert not early.age.in_doubt_below
    assert early.age.unanswered_below == bookie.age.unanswered_below > 0
    await answer_for(fresh, "b1")
    assert not (await fresh.start("b3")).age.unanswered_below
    assert [event.answered for event in (await SetBacks.read(fresh.store())).events] == [["b1", "b3"]]
    await poll(lambda: not bookie.age.unanswered_below)
    assert early.age.unanswered_below  # it ran, and nobody has answered for it


async def test_what_a_bookie_comes_to_hold_in_doubt_is_not_dropped(fresh: Bookies) -> None:
    """A writer that nobody has stopped adds to a ledger that the older metadata do not list."""
    bookie = await fresh.start(sweep_interval_s=3600.0)
    await make(fresh, await fresh.connect(bookie), *await draw(fresh, 1))
    older = copy_of(fresh.tree)
    written, unheard = await draw(fresh, 2)
    for ledger_id in (written, unheard):
        await LedgerStore(fresh.store()).create_ledger(LedgerMetadata.new(ledger_id, **SIZES))
    await bookie.close()
    fresh.tree = older
    bookie = await fresh.start(sweep_interval_s=3600.0)
    client = await fresh.connect(bookie)
    assert bookie._ledger_gc is not None
    assert await bookie._ledger_gc.sweep() == 0  # all that it holds is listed
    assert (await client.add(written, 0, [b"0"])).status is Status.OK
    assert await bookie._ledger_gc.sweep() == 0
    assert (await client.call(Delete(unheard))).status is Status.INTERNAL_ERROR
    assert await held(client) == [0, written]


async def test_what_was_evicted_by_newer_metadata_is_not_denied_under_older_ones(fresh: Bookies) -> None:
    """They name this bookie, and a recovery would close the ledger before entries that others have."""
    bookie = await fresh.start(sweep_interval_s=3600.0, unnamed_grace_s=0.01)
    client, ledgers = await fresh.connect(bookie), LedgerStore(fresh.store())
    evicted, kept, fenced = await draw(fresh, 3)
    await make(fresh, client, evicted, kept)
    await ledgers.create_ledger(LedgerMetadata.new(fenced, **SIZES))
    assert (await client.call(ReadLac(fenced, TERM_FINAL, -1, 0))).status is Status.OK
    older = copy_of(fresh.tree)
    metadata, version = await ledgers.read(evicted)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b1", "b9").close(0, 1), version)
    gc = bookie._ledger_gc
    assert gc is not None
    async with asyncio.timeout(WAIT_S):
        while not gc.forgotten:
            await gc.sweep()
            await asyncio.sleep(0.02)
    await bookie.close()
    for _ in range(2):
        fresh.tree = copy_of(older)
        bookie = await fresh.start(sweep_interval_s=3600.0)
        client = await fresh.connect(bookie)
        answers = [await client.call(ReadLac(one, NO_TERM, -1, 0)) for one in (evicted, kept, fenced)]
        assert [answer.message.is_damaged for answer in answers] == [True, False, False]
        await bookie.close()


class _First:
    """A placement policy that chooses certain bookies first."""

    def __init__(self, *wanted: str) -> None:
        self._wanted = wanted

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        free = sorted(seating.candidates, key=lambda name: (name not in self._wanted, name))
        return Choice(free[: len(seating.vacant)])


async def test_a_term_that_was_counted_behind_a_copy_is_not_counted_again(fresh: Bookies) -> None:
    """Two writers would store different entries under one term, and readers could not tell them apart."""
    running = _Restarted(fresh)
    await running.start(fresh.tree)
    await running.write(("b1", "b2", "b3"), b"0")
    older = copy_of(fresh.tree)
    behind = await running.write(("b4", "b5", "b6"))
    await running.start(older)
    again = await running.write(("b4", "b5", "b1"), b"other")
    assert again > behind + SET_BACK_JUMP // 2


async def test_no_other_entries_are_written_in_place_of_those_of_a_term_behind_a_copy(fresh: Bookies) -> None:
    running = _Restarted(fresh)
    await running.start(fresh.tree)
    await running.write(("b1", "b2", "b3"), b"0")
    older = copy_of(fresh.tree)
    await running.write(("b4", "b5", "b6"), b"1", b"2", b"3")
    newest = copy_of(fresh.tree)
    await running.start(older)
    with pytest.raises(
        client_aio.LedgerRecoveryError, match="an entry 1 cannot be decided without b4, b5, b6"
    ):
        await running.write(("b1", "b2", "b3"), b"other")
    await running.start(newest)
    async with client_aio.connect(fresh.store()) as client, client.open_ledger("u") as reader:
        assert [bytes(each.data) async for each in reader.read(0, 3)] == [b"0", b"1", b"2", b"3"]


class _Restarted:
    """Six bookies that are restarted on copies of the metadata, and an unbounded ledger."""

    def __init__(self, fresh: Bookies) -> None:
        self._fresh = fresh
        self._running: list[Bookie] = []

    async def start(self, tree: MemoryTree) -> None:
        for bookie in self._running:
            await bookie.close()
        self._fresh.tree = tree
        names = [f"b{number}" for number in range(1, 7)]
        self._running = [await self._fresh.start(name, sweep_interval_s=3600.0) for name in names]

    async def write(self, first: tuple[str, ...], *texts: bytes) -> int:
        """Take the ledger over, onto these bookies, and add entries; returns the term."""
        async with client_aio.connect(self._fresh.store(), placement=_First(*first)) as client:
            writer = await client.open_unbounded_ledger("u", ensemble_size=3, write_quorum=3, ack_quorum=2)
            async with writer:
                for text in texts:
                    await writer.add_entry(text)
            return writer.metadata.term


async def test_a_store_set_back_under_an_idle_bookie_is_one_event(fresh: Bookies) -> None:
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    await make(fresh, client, *await draw(fresh, 1))
    await bookie.age.raise_if_written()
    older = copy_of(fresh.tree)
    assert (await client.add(0, 1, [b"1"])).status is Status.OK
    await bookie.age.raise_if_written()
    store.tree = fresh.tree = older
    with pytest.raises(MetadataSetBackError):
        await bookie.age.check()
    assert bookie._ledger_gc is not None
    for _ in range(3):
        await bookie.age.check()
        await bookie._ledger_gc.sweep()
    assert len((await SetBacks.read(fresh.store())).events) == 1


async def test_an_id_drawn_behind_a_copy_is_not_free_though_the_copy_gave_it_out_again(
    fresh: Bookies,
) -> None:
    """The client that has it has written nothing yet, and the counter is as high as before."""
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    older = copy_of(fresh.tree)
    (first,) = await draw(fresh, 1)
    assert (await client.call(IsFree(first))).status is Status.OK
    await bookie.age.raise_if_written()
    store.tree = fresh.tree = older
    assert list(await draw(fresh, 1)) == [first]
    await bookie._given_ids.read_again()  # a reading serves a second
    assert (await client.call(IsFree(first))).status is Status.ID_TAKEN
    assert len((await SetBacks.read(fresh.store())).events) == 1


async def test_a_bookie_that_has_raised_no_age_yet_finds_no_set_back(fresh: Bookies) -> None:
    disk = FaultyDisk()
    disk.is_full, disk.is_full_for = True, lambda path: AGE in os.path.basename(path)
    config = replace(fresh.config(), age_interval_s=3600.0)
    bookie = await Bookie.start(config, fresh.store(), disk, rng=fresh.rng, now_ms=lambda: 0)
    disk.is_full = False
    assert not bookie.age.number
    await bookie.age.raise_if_written(is_forced=True)
    await bookie.age.check()
    assert bookie.age.number
    assert not (await SetBacks.read(fresh.store())).events
    await bookie.close()


async def test_a_dump_of_a_running_cluster_vouches_for_no_ledger_that_it_lacks(fresh: Bookies) -> None:
    bookie = await fresh.start(sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    await make(fresh, client, *await draw(fresh, 2))
    (late,) = await draw(fresh, 1)
    lines: list[bytes] = []
    async with aclosing(dump(fresh.store(), now_ms=0)) as dumped:
        async for line in dumped:
            lines.append(line)
            if b'"ledgers/' in line and late is not None:
                await make(fresh, client, late)
                await bookie.age.raise_if_written()
                late = None
    await bookie.close()
    fresh.tree = MemoryTree()
    await Restore(lambda: iter(lines), check_dump(iter(lines))).run(fresh.store())
    bookie = await fresh.start(sweep_interval_s=3600.0)
    assert bookie.age.in_doubt_below
    assert bookie._ledger_gc is not None
    assert await bookie._ledger_gc.sweep() == 0
    assert await held(await fresh.connect(bookie)) == [0, 1, 2]


async def test_a_store_set_back_under_a_running_bookie_is_noticed_before_anything_is_dropped(
    fresh: Bookies,
) -> None:
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    ids = await draw(fresh, 32)  # one block: the counter does not change with the ledgers made from it
    await make(fresh, client, ids[0])
    await bookie.age.raise_if_written()
    older = copy_of(fresh.tree)
    await make(fresh, client, ids[1])
    await bookie.age.raise_if_written()
    store.tree = older
    with pytest.raises(MetadataSetBackError):
        await bookie.age.check()
    store.tree = fresh.tree = older
    assert (await client.call(Delete(ids[1]))).status is Status.INTERNAL_ERROR
    assert await held(client) == [ids[0], ids[1]]
    assert bookie.age.in_doubt_below


# --- ids that were not given out ---


def hostile(ledger_id: int) -> list[object]:
    return [
        ReadLac(ledger_id, TERM_FINAL, -1, 0),
        Read(ledger_id, 3, 3, 0, 0, 1, 1000),
        Force(ledger_id, 0),
        WriteLac(ledger_id, 0, lac_statement(ledger_id, 3)),
    ]


async def test_nothing_is_stored_for_ids_that_were_not_given_out(fresh: Bookies) -> None:
    bookie = await fresh.start()
    client = await fresh.connect(bookie)
    await draw(fresh, 8)
    for ledger_id in (8, 10**15, 2**63 - 1):
        for request in hostile(ledger_id):
            assert (await client.call(request, auth=b"t" * 32)).status is Status.ID_TAKEN
        for flags in (AddFlag.NONE, AddFlag.RECOVERY, AddFlag.REPAIR, AddFlag.DEFERRED_SYNC):
            assert (await client.add(ledger_id, 0, [b"x"], flags=flags)).status is Status.ID_TAKEN
        assert (await client.call(Delete(ledger_id))).status is Status.BAD_REQUEST
        assert (await client.call(IsFree(ledger_id))).status is Status.ID_TAKEN
    assert await held(client) == []
    assert (await draw(fresh, 1)).start == 8  # no made-up id raised the counter
    await bookie.close()
    assert not (await fresh.start()).age.in_doubt_below


async def test_an_id_that_was_drawn_a_moment_ago_is_never_refused(fresh: Bookies) -> None:
    bookie = await fresh.start()
    client = await fresh.connect(bookie)
    for _ in range(20):
        (ledger_id,) = await draw(fresh, 1)
        adds = [client.add(ledger_id, number, [b"%d" % number]) for number in range(5)]
        fence = client.send(ReadLac(ledger_id, TERM_FINAL, -1, 0))
        late = client.add(ledger_id, 5, [b"late"])
        answers = await asyncio.gather(*adds, fence, late)
        # In their order: everything before the fence is stored, and what comes behind it is refused.
        assert [answer.status for answer in answers] == [Status.OK] * 6 + [Status.INVALID_TERM]


async def test_requests_that_wait_are_refused_for_now_while_the_store_is_away(fresh: Bookies) -> None:
    class Away(MemoryMetadataStore):
        is_away = False

        async def ids_drawn(self, name: str, *, least: int = 0) -> int:
            if self.is_away:
                raise MetadataUnavailableError("away")
            return await super().ids_drawn(name, least=least)

    store = Away(fresh.tree)
    bookie = await fresh.start(store=store)
    client = await fresh.connect(bookie)
    (ledger_id,) = await draw(fresh, 1)
    store.is_away = True
    refusal = await client.add(ledger_id, 0, [b"x"])
    assert refusal.status is Status.TOO_MANY_REQUESTS
    assert isinstance(refusal.message, Failure)
    assert "try again" in refusal.message.message
    store.is_away = False
    assert (await client.add(ledger_id, 0, [b"x"])).status is Status.OK


async def test_adds_of_other_ledgers_do_not_wait_for_the_id_counter(fresh: Bookies) -> None:
    class Hanging(MemoryMetadataStore):
        go_on = asyncio.Event()

        async def ids_drawn(self, name: str, *, least: int = 0) -> int:
            await self.go_on.wait()
            return await super().ids_drawn(name, least=least)

    store = Hanging(fresh.tree)
    store.go_on.set()
    bookie = await fresh.start(store=store)
    writer, newcomer = await fresh.connect(bookie), await fresh.connect(bookie)
    (known,) = await draw(fresh, 1)
    assert (await writer.add(known, 0, [b"x"])).status is Status.OK
    store.go_on.clear()
    (fresh_id,) = await draw(fresh, 1)
    waiting = [writer.add(fresh_id, number, [b"y"]) for number in range(3)]
    held_up = [newcomer.add(fresh_id, number, [b"y"]) for number in range(3, 5)]
    for number in range(1, 4):
        assert (await writer.add(known, number, [b"x"])).status is Status.OK
    assert not any(one.done() for one in (*waiting, *held_up))
    store.go_on.set()
    answers = await asyncio.gather(*waiting, *held_up)
    assert {one.status for one in answers} == {Status.OK}
    assert bookie._backpressure.adds.used == 0


async def test_a_thousand_made_up_ids_cost_a_bounded_number_of_readings(fresh: Bookies) -> None:
    bookie = await fresh.start()
    client = await fresh.connect(bookie)
    assert bookie._given_ids is not None
    before = bookie._given_ids.readings
    asked = [client.call(ReadLac(1000 + number, TERM_FINAL, -1, 0)) for number in range(1000)]
    assert {answer.status for answer in await asyncio.gather(*asked)} == {Status.ID_TAKEN}
    assert bookie._given_ids.readings - before < 200
    assert bookie._backpressure.adds.used == 0


async def test_a_bookie_says_which_ids_are_free(fresh: Bookies) -> None:
    bookie = await fresh.start()
    client = await fresh.connect(bookie)
    await draw(fresh, 4)
    assert (await client.call(IsFree(0))).status is Status.OK
    await make(fresh, client, 0)
    assert (await client.call(ReadLac(1, TERM_FINAL, -1, 0))).status is Status.OK
    assert (await client.call(Delete(2))).status is Status.OK
    for ledger_id in (0, 1, 2):
        assert (await client.call(IsFree(ledger_id))).status is Status.ID_TAKEN
    assert (await client.call(IsFree(3))).status is Status.OK
