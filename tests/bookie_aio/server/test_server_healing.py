"""One bookie that lost data: its marks are bounded, lifted, and end; ids that are gone are folded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.messages import AddFlag, Failure, LiftMark, LiftMarkAnswer, Status
from metadata.access.bookies import SetBack
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.memory import MemoryTree
from metadata.ids import TERM_FINAL, ledger_key
from metadata.model.ledger import LedgerMetadata, UnboundedRecord
from tests.bookie_aio.server.conftest import engine_of

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.server.ledger_gc import LedgerGarbageCollector
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

IDS = 40
"""The ids that have been given out when a test begins."""


@pytest.fixture
async def ledgers(bookies: Bookies) -> LedgerStore:
    """Return the ledgers of a cluster that has given out some ids."""
    bookies.tree = MemoryTree()
    store = bookies.store()
    await store.allocate_ids(LEDGER_SEQUENCE, IDS)
    return LedgerStore(store)


async def create(
    ledgers: LedgerStore, ledger_id: int, *bookie_ids: str, last: int | None = None, **more: Any
) -> None:
    """Create a ledger on these bookies, and close it at an entry unless that is None."""
    size = len(bookie_ids)
    sizes = {"ensemble_size": size, "write_quorum": max(1, size - 1), "ack_quorum": 1}
    metadata = LedgerMetadata.new(ledger_id, **sizes, bookies=list(bookie_ids), **more)
    version = await ledgers.create_ledger(metadata)
    if last is not None:
        await ledgers.compare_and_set(metadata.close(last, 5 * (last + 1)), version)


def gc_of(bookie: Bookie) -> LedgerGarbageCollector:
    assert bookie._ledger_gc is not None
    return bookie._ledger_gc


async def lose(bookie: Bookie) -> None:
    """Let a bookie lose data of any ledger, and know which ids had been given out."""
    await when_durable(partial(engine_of(bookie).marking.mark_all, IDS - 1))


async def ask(client: RawClient, ledger_id: int, lift: int = 0) -> int | str:
    """Return the ledger's mark, or why it stays."""
    answer = await client.call(LiftMark(ledger_id, lift))
    if isinstance(answer.message, LiftMarkAnswer):
        return answer.message.mark
    assert isinstance(answer.message, Failure)
    assert answer.status is Status.BAD_REQUEST
    return answer.message.message


async def lift(client: RawClient, ledger_id: int) -> int | str:
    mark = await ask(client, ledger_id)
    assert isinstance(mark, int)
    return await ask(client, ledger_id, mark)


async def test_a_mark_is_lifted_for_what_the_bookie_owes_and_for_nothing_less(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    """Of three bookies with two copies of each entry, this one owes 0, 2, 3, 5, 6, 8 and 9."""
    await create(ledgers, 7, "b1", "b2", "b3", last=9)
    await lose(bookie)
    assert (await client.add(7, 0, [b"entry"])).status is Status.DATA_LOST
    for entry_id in (0, 2, 3, 5, 6, 9):
        await engine_add(client, 7, entry_id)
    assert "lacks 1 of the entries" in str(await lift(client, 7))
    await engine_add(client, 7, 8)
    assert await lift(client, 7) == 0
    assert not engine_of(bookie).is_damaged(7)
    assert (await client.add(7, 10, [b"late"])).status is Status.INVALID_TERM
    assert await ask(client, 7, 99) == 0  # there is none any more


async def engine_add(client: RawClient, ledger_id: int, entry_id: int) -> None:
    answer = await client.add(ledger_id, entry_id, [b"entry"], flags=AddFlag.REPAIR)
    assert answer.status is Status.OK


async def test_a_mark_that_no_client_was_told_is_not_lifted(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    await create(ledgers, 7, "b1", last=-1)
    marking = engine_of(bookie).marking
    await when_durable(partial(engine_of(bookie).append_mark, 7))
    told = await ask(client, 7)
    await when_durable(partial(engine_of(bookie).append_mark, 7))
    found = marking.of(7)
    assert found > told
    for guess in (told, found, 2**63 - 1):
        assert await ask(client, 7, guess) == found
    assert await lift(client, 7) == 0


async def test_marks_of_unbounded_ledgers_are_lifted_outside_of_their_last_fragment(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    await create(ledgers, 7, "b1", unbounded=UnboundedRecord("mine"))
    await create(ledgers, 8, "b2", unbounded=UnboundedRecord("other"))
    await lose(bookie)
    assert "b1 is in its last fragment" in str(await lift(client, 7))
    assert await lift(client, 8) == 0
    assert (engine_of(bookie).term(8), engine_of(bookie).is_damaged(8)) == (0, False)


@pytest.mark.parametrize("is_in_doubt", [True, False], ids=["in doubt", "unanswered"])
async def test_no_mark_is_lifted_by_the_word_of_an_older_copy(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient, is_in_doubt: bool
) -> None:
    await create(ledgers, 7, "b1", last=-1)
    await lose(bookie)
    mark, age = await ask(client, 7), gc_of(bookie)._age
    assert isinstance(mark, int)
    before = age._file, age._events
    if is_in_doubt:
        age._file = replace(age._file, doubt="an event", in_doubt_below=IDS)
    else:
        age._events = (SetBack("an event", "b2", 0, IDS, []),)
    answer = await client.call(LiftMark(7, mark))
    assert answer.status is Status.INTERNAL_ERROR
    assert "set back to an older copy" in str(answer.message)
    assert engine_of(bookie).is_damaged(7)
    age._file, age._events = before
    assert await ask(client, 7, mark) == 0


async def test_marks_of_all_ledgers_end_when_nothing_needs_them(
    bookies: Bookies, ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    await create(ledgers, 7, "b1", last=-1)
    await create(ledgers, 8, "b2", last=3)  # it owes nothing of this one
    await create(ledgers, 9, "b1")
    await lose(bookie)
    marking, gc = engine_of(bookie).marking, gc_of(bookie)
    assert await lift(client, 7) == 0
    await gc.sweep()
    assert marking.bound == IDS - 1  # ids up to the bound may still be created
    await ledgers.raise_floor(IDS)
    await gc.sweep()
    assert marking.bound == IDS - 1  # ledger 9 is open
    metadata, version = await ledgers.read(9)
    await ledgers.compare_and_set(metadata.close(-1, 0), version)
    await gc.sweep()
    assert marking.bound == IDS - 1  # and marked
    assert await lift(client, 9) == 0
    await gc.sweep()
    assert marking.bound == IDS - 1  # a second look follows, behind a new age
    await gc.sweep()
    for _ in range(2):
        engine = engine_of(bookie)
        assert (engine.marking.bound, engine.marking.concerns_all) == (-1, False)
        assert [engine.term(one) for one in (7, 8, 9, IDS)] == [TERM_FINAL] * 3 + [0]
        await bookie.close()
        bookie = await bookies.start()


async def test_a_ledger_whose_metadata_do_not_parse_ends_no_sweep(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    await create(ledgers, 7, "b2", last=-1)
    await lose(bookie)
    await ledgers.raise_floor(IDS)
    _, version = await ledgers.store.read(ledger_key(7))
    await ledgers.store.compare_and_set(ledger_key(7), b'"damaged"', version)
    gc = gc_of(bookie)
    before = gc.sweeps
    await gc.sweep()
    assert (gc.sweeps, engine_of(bookie).marking.bound) == (before + 1, IDS - 1)


async def test_ids_that_are_gone_are_folded_into_few_ranges(
    bookies: Bookies, ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    """Every second id is that of a deleted ledger, most of which this bookie never heard of."""
    for one in range(0, IDS, 2):
        await create(ledgers, one, "b1", last=-1)
    for one in (4, 8):
        assert (await client.add(one, 0, [b"entry"])).status is Status.OK
    for one in range(0, IDS - 2, 2):
        await ledgers.delete(one)
    gc, deleted = gc_of(bookie), engine_of(bookie)._ledgers.deleted
    assert await gc.sweep() == 2
    assert list(deleted.ranges()) == [(4, 4), (8, 8)]  # the floor is 0
    await ledgers.raise_floor(IDS - 1)
    await gc.sweep()
    assert list(deleted.ranges()) == [(4, 4), (8, 8)]  # found once
    await gc.sweep()
    for _ in range(2):
        deleted = engine_of(bookie)._ledgers.deleted
        assert list(deleted.ranges()) == [(0, IDS - 3)]
        assert (await client.add(3, 0, [b"late"])).status is Status.NO_SUCH_LEDGER
        assert (await client.add(IDS - 2, 0, [b"listed"])).status is Status.OK
        assert (await client.add(IDS - 1, 0, [b"at the floor"])).status is Status.OK
        await bookie.close()
        bookie = await bookies.start()
        client = await bookies.connect(bookie)
    folded = gc_of(bookie)
    await folded.sweep()
    await folded.sweep()
    assert folded.folded == 0  # they are known to be gone


async def test_an_id_of_which_something_is_held_is_not_folded_with_its_neighbours(
    ledgers: LedgerStore, bookie: Bookie, client: RawClient
) -> None:
    await ledgers.raise_floor(IDS)
    gc = gc_of(bookie)
    await gc.sweep()
    # A stranger's add, behind the list of what is held and before the fold of a sweep.
    compare = gc._compare

    async def compared(held: list[int], floor: int) -> object:
        found = await compare(held, floor)
        assert (await client.add(7, 0, [b"entry"])).status is Status.OK
        return found

    vars(gc)["_compare"] = compared
    await gc.sweep()
    deleted = engine_of(bookie)._ledgers.deleted
    assert list(deleted.ranges()) == [(0, 6), (8, IDS - 1)]
    vars(gc)["_compare"] = compare
    assert await gc.sweep() == 1  # by a read of its own metadata
    assert list(deleted.ranges()) == [(0, IDS - 1)]


async def test_the_floor_follows_the_id_counter_and_no_counter_that_fell(
    ledgers: LedgerStore, bookie: Bookie
) -> None:
    gc = gc_of(bookie)
    await gc.sweep()
    assert await ledgers.floor() == 0  # a client may hold ids of the last hour
    gc.floor_after_s = 0.0
    await gc.sweep()
    assert await ledgers.floor() == IDS
    await ledgers.store.allocate_ids(LEDGER_SEQUENCE, 5)
    await gc.sweep()
    assert await ledgers.floor() == IDS + 1
    gc._drawn = (asyncio.get_running_loop().time(), 10**6)  # of a store that was replaced by an older copy
    await gc.sweep()
    assert await ledgers.floor() < 10**6
