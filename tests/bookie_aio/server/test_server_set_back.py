"""Older metadata give a bookie back what newer ones took from it: it answers UNKNOWN for what it lacks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.disk.disk import write_file
from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    Delete,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
)
from metadata.access.bookies import AgeRecord, SetBack, SetBacks
from metadata.access.ledgers import LedgerStore
from metadata.errors import DiskFullError, MetadataSetBackError, MetadataUnavailableError
from metadata.ids import KEY_SET_BACKS, TERM_FINAL, age_key, ledger_key
from metadata.model.ledger import LedgerMetadata, UnboundedRecord
from tests.bookie_aio.server.conftest import engine_of
from tests.bookie_aio.server.test_server_age import (
    SIZES,
    WAIT_S,
    copy_of,
    draw,
    fresh,
    held,
    make,
)
from tests.support.storage import copy_as_a_crash_leaves_it

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.core.healing import Owed
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.storage.disk.disk import Disk
    from metadata.backends.memory import MemoryMetadataStore
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.rawclient import RawClient

__all__ = ["fresh"]

MIB = 1024 * 1024


async def start(bookies: Bookies) -> Bookie:
    return await bookies.start(sweep_interval_s=3600.0, age_interval_s=3600.0, unnamed_grace_s=0.01)


async def are_marked(client: RawClient, *ledger_ids: int) -> list[bool]:
    answers = [(await client.call(ReadLac(one, NO_TERM, -1, 0))).message for one in ledger_ids]
    assert all(isinstance(answer, ReadLacAnswer) for answer in answers)
    return [answer.is_damaged for answer in answers]


async def read(client: RawClient, ledger_id: int, entry_id: int, term: int) -> Stop:
    answer = (await client.call(Read(ledger_id, term, 0, entry_id, entry_id, 1, MIB))).message
    assert isinstance(answer, ReadAnswer)
    return Stop(answer.stop)


async def evict(bookies: Bookies, bookie: Bookie, ledger_id: int) -> None:
    ledgers, gc = LedgerStore(bookies.store()), bookie._ledger_gc
    metadata, version = await ledgers.read(ledger_id)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b1", "b9").close(0, 1), version)
    assert gc is not None
    async with asyncio.timeout(WAIT_S):
        while not gc.forgotten:
            await gc.sweep()
            await asyncio.sleep(0.02)


async def tell_of_set_back(bookies: Bookies, token: str, raised_to: int, *answered: str) -> None:
    """Write the event of another bookie."""
    found = await SetBacks.read(bookies.store())
    event = SetBack(token, "b2", 0, raised_to, list(answered))
    await found.replace(bookies.store(), [*found.events, event])


async def test_marks_that_ended_by_newer_metadata_count_again_under_older_ones(fresh: Bookies) -> None:
    """The bookie owes more by these, and a recovery would close the ledger before what others have."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    lifted, kept = await draw(fresh, 2)
    await make(fresh, client, lifted, kept)
    older = copy_of(fresh.tree)
    marking = engine_of(bookie).marking
    await when_durable(partial(engine_of(bookie).append_mark, lifted))
    await when_durable(partial(marking.lift, lifted, marking.of(lifted), TERM_FINAL))
    assert await are_marked(client, lifted, kept) == [False, False]
    await bookie.close()
    fresh.tree = older
    for _ in range(2):
        bookie = await start(fresh)
        client = await fresh.connect(bookie)
        assert await are_marked(client, lifted, kept) == [True, False]
        assert await read(client, lifted, 1, TERM_FINAL) is Stop.UNKNOWN
        await bookie.close()


async def test_marks_of_all_ledgers_that_ended_count_again_under_older_metadata(fresh: Bookies) -> None:
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    unheard, held, later = await draw(fresh, 3)
    await make(fresh, client, held, later)
    older = copy_of(fresh.tree)
    engine = engine_of(bookie)
    engine.marking._ledgers.marks.learn_mark(1 << 40, held)  # ids above it are of after the loss
    await when_durable(partial(engine.marking.end_all, 1 << 40))
    assert await are_marked(client, unheard, held, later) == [False] * 3
    await bookie.close()
    fresh.tree = older
    for _ in range(2):
        bookie = await start(fresh)
        assert await are_marked(await fresh.connect(bookie), unheard, held, later) == [True, True, False]
        await bookie.close()


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_what_was_evicted_and_came_back_in_part_is_marked_under_older_metadata(
    fresh: Bookies, is_restarted: bool
) -> None:
    """A repair brings back the entries of one fragment. Older metadata name the bookie for more."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    assert (await client.add(ledger, 1, [b"1"])).status is Status.OK
    older = copy_of(fresh.tree)
    await evict(fresh, bookie, ledger)
    assert (await client.add(ledger, 0, [b"0"], flags=AddFlag.REPAIR)).status is Status.OK
    await bookie.close()
    if is_restarted:
        bookie = await start(fresh)
        await bookie.close()
    fresh.tree = older
    client = await fresh.connect(await start(fresh))
    assert await read(client, ledger, 1, TERM_FINAL) is Stop.UNKNOWN


async def test_an_answer_that_came_before_the_bookie_heard_of_the_event_leaves_no_denial(
    fresh: Bookies,
) -> None:
    """The command answers for the bookies that run, whether they have read the event or not."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    await evict(fresh, bookie, ledger)
    await tell_of_set_back(fresh, "an event", ledger + 1, "b1")
    await bookie.age.learn_events()
    assert not bookie.age.unanswered_below
    assert await are_marked(client, ledger) == [True]


@pytest.mark.parametrize("has_lost", [False, True])
async def test_without_room_for_the_marks_an_event_stays_new(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, has_lost: bool
) -> None:
    """The doubt counts at once, and so do the marks. A restart would forget marks that are in memory only."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    await evict(fresh, bookie, ledger)
    age = bookie.age
    with monkeypatch.context() as patched:

        def refuse(size: int, kept: int) -> None:
            raise DiskFullError("the test says there is no space")

        patched.setattr(engine_of(bookie), "_check_room", refuse)
        age._file = replace(age._file, has_lost=has_lost)
        await tell_of_set_back(fresh, "an event", ledger + 1)
        with monkeypatch.context() as crowded:
            # What waits behind a record that is dropped for lack of room is dropped with it.
            crowded.setattr(engine_of(bookie), "barrier", lambda done: done(DiskFullError("dropped")))
            await age.learn_events()
        assert age.in_doubt_below == ledger + 1
        assert await are_marked(client, ledger) == [True]
        assert (age._file.has_lost, age._file.set_backs) == (has_lost, ())
    await age.learn_events()
    assert (age._file.has_lost, age._file.set_backs) == (False, ("an event",))
    assert (engine_of(bookie).marking.bound >= ledger) is has_lost
    await bookie.close()
    assert await are_marked(await fresh.connect(await start(fresh)), ledger) == [True]


async def test_without_room_for_the_marks_of_all_ledgers_they_are_written_later(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count in memory meanwhile. That is no reason not to write them."""
    bookie = await start(fresh)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, await fresh.connect(bookie), ledger)
    marking = engine_of(bookie).marking
    marking._ledgers.marks.learn_mark(1 << 40, ledger)
    await when_durable(partial(marking.end_all, 1 << 40))
    with monkeypatch.context() as patched:

        def refuse(size: int, kept: int) -> None:
            raise DiskFullError("the test says there is no space")

        patched.setattr(engine_of(bookie), "_check_room", refuse)
        await tell_of_set_back(fresh, "an event", ledger + 1)
        await bookie.age.learn_events()
        assert marking.bound == ledger
    await bookie.age.learn_events()
    assert bookie.age._file.set_backs == ("an event",)
    crashed = copy_as_a_crash_leaves_it(fresh.folder / "b1", fresh.folder / "crashed")
    await bookie.close()
    (fresh.folder / "b1").rename(fresh.folder / "closed")
    crashed.rename(fresh.folder / "b1")
    await fresh.take_for_newest("b1")
    bookie = await start(fresh)
    assert not bookie.age.has_lost
    assert engine_of(bookie).marking.bound == ledger


async def test_a_mark_of_an_event_bounds_no_loss_that_has_no_bound_yet(fresh: Bookies) -> None:
    bookie = await start(fresh)
    marks = engine_of(bookie).marking._ledgers.marks
    marks.learn_mark(1 << 40, 7)
    marks.learn_end(1 << 40, 7)
    marks.learn_mark(2 << 40, -1)
    await tell_of_set_back(fresh, "an event", 8)
    await bookie.age.learn_events()
    assert marks.number > 2 << 40
    assert marks.is_unbounded


async def test_a_directory_and_metadata_set_back_together_mark_all_ids_that_may_have_been_given_out(
    fresh: Bookies,
) -> None:
    """The first bookie writes the event before it raises the counter, which is that of the older copy."""
    bookie = await start(fresh)
    (older,) = await draw(fresh, 1)
    await make(fresh, await fresh.connect(bookie), older)
    found = await SetBacks.read(fresh.store())
    event = SetBack("an event", "b2", older + 1, older + 100, [], {"b1": ["a later start", 99]})
    await found.replace(fresh.store(), [event])
    await bookie.age.learn_events()
    assert bookie.age.has_lost
    assert engine_of(bookie).marking.bound == older + 99


async def test_a_recovery_is_not_told_that_a_trimmed_entry_is_not_there(fresh: Bookies) -> None:
    """Only by older metadata is it asked for. It would end the ledger before entries that are kept."""
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    record = LedgerMetadata.new(ledger, **SIZES, unbounded=UnboundedRecord("x"))
    await LedgerStore(fresh.store()).create_ledger(record)
    for number in range(4):
        assert (await client.add(ledger, number, [b"%d" % number])).status is Status.OK
    await when_durable(partial(engine_of(bookie).append_trim, ledger, 2))
    assert await read(client, ledger, 1, NO_TERM) is Stop.NO_SUCH_ENTRY
    assert await read(client, ledger, 1, 1) is Stop.UNKNOWN
    assert [await read(client, ledger, one, 1) for one in (2, 3, 4)] == [
        Stop.END, Stop.END, Stop.NO_SUCH_ENTRY,
    ]  # fmt: skip


async def test_a_lift_that_is_under_way_when_an_event_comes_is_marked_again(fresh: Bookies) -> None:
    disk = fresh.disk()
    bookie = await fresh.start(disk=disk, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    engine = engine_of(bookie)
    await when_durable(partial(engine.append_mark, ledger))
    disk.hold()
    lifting = when_durable(partial(engine.marking.lift, ledger, engine.marking.of(ledger), TERM_FINAL))
    await tell_of_set_back(fresh, "an event", ledger + 1)
    learning = asyncio.create_task(bookie.age.learn_events())
    await asyncio.wait_for(disk.arrived.wait(), WAIT_S)
    disk.release()
    await asyncio.gather(lifting, learning)
    assert await are_marked(client, ledger) == [True]


@pytest.mark.parametrize("answered", [[], ["b1"]])
async def test_an_event_that_comes_while_a_bookie_looks_at_its_entries_keeps_the_mark(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, answered: list[str]
) -> None:
    """The metadata that it looks by may be newer than those of the store by now, or older."""
    bookie = await start(fresh)
    client, healing = await fresh.connect(bookie), bookie._healing
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    ledgers = LedgerStore(fresh.store())
    metadata, version = await ledgers.read(ledger)
    await ledgers.compare_and_set(metadata.close(0, 1), version)
    await when_durable(partial(engine_of(bookie).append_mark, ledger))
    assert healing is not None
    check_held = healing._check_held

    async def checked(ledger_id: int, wanted: Owed) -> None:
        await check_held(ledger_id, wanted)
        await tell_of_set_back(fresh, "an event", ledger + 1, *answered)
        await bookie.age.learn_events()

    monkeypatch.setattr(healing, "_check_held", checked)
    mark = await healing.lift(ledger, 0)
    with pytest.raises(MetadataSetBackError):
        await healing.lift(ledger, mark)
    assert await are_marked(client, ledger) == [True]


@pytest.mark.parametrize("answered", [[], ["b1"]])
@pytest.mark.parametrize("what", ["evicted", "ended"])
async def test_an_event_that_comes_while_a_sweep_reads_metadata_keeps_what_it_would_drop(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, what: str, answered: list[str]
) -> None:
    bookie = await start(fresh)
    client, gc, engine = await fresh.connect(bookie), bookie._ledger_gc, engine_of(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    ledgers = LedgerStore(fresh.store())
    metadata, version = await ledgers.read(ledger)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b1", "b9").close(0, 1), version)
    await ledgers.raise_floor((await draw(fresh, 1)).start)
    if what == "ended":
        await when_durable(partial(engine.marking.mark_all, ledger))
    assert gc is not None
    gc._unnamed[ledger] = 0.0 if what == "evicted" else asyncio.get_running_loop().time() + WAIT_S
    engine.eviction_candidates.add(ledger)
    read_metadata, reads = gc._ledgers.read, []

    async def read_late(ledger_id: int) -> object:
        found = await read_metadata(ledger_id)
        reads.append(ledger_id)
        if len(reads) == (1 if what == "evicted" else 2):
            await tell_of_set_back(fresh, "an event", ledger + 1, *answered)
            await bookie.age.learn_events()
        return found

    monkeypatch.setattr(gc._ledgers, "read", read_late)
    await gc.sweep()
    assert (engine.last_entry(ledger), gc.forgotten) == (0, 0)
    assert await are_marked(client, ledger) == [what == "ended"]


async def set_back_under_a_running_bookie(
    bookies: Bookies, *, is_raised: bool = True
) -> tuple[Bookie, MemoryMetadataStore, int]:
    """Return the bookie, its store, and a ledger that the store does not have any more.

    Where it is not raised, the bookie's age is the copy's.
    """
    store = bookies.store()
    bookie = await bookies.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await bookies.connect(bookie)
    ids = await draw(bookies, 32)  # one block: the counter does not change with the ledgers made from it
    await make(bookies, client, ids[0])
    await bookie.age.raise_if_written()
    older = copy_of(bookies.tree)
    late = ids[1] if is_raised else (await draw(bookies, 1)).start
    await make(bookies, client, late)
    if is_raised:
        await bookie.age.raise_if_written()
    store.tree = bookies.tree = older
    return bookie, store, late


async def answer_all(bookies: Bookies) -> None:
    found = await SetBacks.read(bookies.store())
    await found.replace(bookies.store(), [event.answer_for(["b1"]) for event in found.events])


@pytest.mark.parametrize("writes", [0, 1])
async def test_a_set_back_that_a_full_disk_keeps_from_raising_the_age_is_one_event(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Once it is answered, the bookie drops ledgers again, which frees space."""
    bookie, store, late = await set_back_under_a_running_bookie(fresh)
    age, older = bookie.age, copy_of(fresh.tree)
    written: list[str] = []

    async def refuse(disk: Disk, directory: str, name: str, parts: list[bytes]) -> None:
        if len(written) == writes:
            raise DiskFullError("the test says there is no space")
        written.append(name)
        await write_file(disk, directory, name, parts)

    with monkeypatch.context() as patched:
        patched.setattr("bookie_aio.server.age.write_file", refuse)
        for _ in range(3):
            with pytest.raises(MetadataSetBackError):
                await age.check()
            await age.learn_events()
            await age.raise_if_written()
        assert len((await SetBacks.read(fresh.store())).events) == 1
        await answer_all(fresh)
        await age.learn_events()
        client = await fresh.connect(bookie)
        assert (await client.call(Delete(late))).status is Status.OK
        store.tree = fresh.tree = older
        with pytest.raises(MetadataSetBackError):
            await age.check()
        assert len((await SetBacks.read(fresh.store())).events) == 1
        await answer_all(fresh)
        await age.learn_events()
        before = copy_of(fresh.tree)
    await age.raise_if_written(is_forced=True)
    await age.check()
    assert len((await SetBacks.read(fresh.store())).events) == 1
    store.tree = fresh.tree = before
    with pytest.raises(MetadataSetBackError):
        await age.check()
    assert len((await SetBacks.read(fresh.store())).events) == 2


@pytest.mark.parametrize("is_full", [False, True])
async def test_an_event_of_another_bookie_tells_of_the_same_set_back(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    bookie, _, late = await set_back_under_a_running_bookie(fresh)
    before = bookie.age.number
    await tell_of_set_back(fresh, "an event", late + 1)

    async def refuse(*_: object) -> None:
        raise DiskFullError("the test says there is no space")

    with monkeypatch.context() as patched:
        if is_full:
            patched.setattr("bookie_aio.server.age.write_file", refuse)
        await bookie.age.learn_events()
    await bookie.age.raise_if_written(is_forced=True)
    await bookie.age.check()
    assert bookie.age.number > before
    assert bookie.age.in_doubt_below == late + 1
    assert len((await SetBacks.read(fresh.store())).events) == 1


def lose_answer_once(
    monkeypatch: pytest.MonkeyPatch, store: MemoryMetadataStore, name: str, matches: Callable[..., bool]
) -> None:
    """Let one call of a store take effect, and its answer be lost."""
    call, are_lost = getattr(store, name), [True]

    async def answer(*args: object, **more: object) -> object:
        answered = await call(*args, **more)
        if are_lost and matches(*args, **more):
            are_lost.clear()
            raise MetadataUnavailableError("the test says that the answer was lost")
        return answered

    monkeypatch.setattr(store, name, answer)


@pytest.mark.parametrize("is_raised_again", [False, True])
@pytest.mark.parametrize("lost", ["age", "event"])
async def test_a_set_back_is_not_forgotten_with_a_lost_answer(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, lost: str, is_raised_again: bool
) -> None:
    """The age is raised by then, so the next look finds it as it was intended."""
    bookie, store, late = await set_back_under_a_running_bookie(fresh)
    if lost == "age":
        lose_answer_once(monkeypatch, store, "compare_and_set", lambda key, *_, **__: key == age_key("b1"))
    else:
        lose_answer_once(monkeypatch, store, "sync", lambda key: key == KEY_SET_BACKS)
    with pytest.raises(MetadataUnavailableError):
        await bookie.age.check()
    if is_raised_again:
        with pytest.raises(MetadataSetBackError):
            await bookie.age.raise_if_written()
    client = await fresh.connect(bookie)
    assert (await client.call(Delete(late))).status is Status.INTERNAL_ERROR
    assert late in await held(client)
    assert bookie.age.in_doubt_below > late
    await bookie.age.check()
    assert len((await SetBacks.read(fresh.store())).events) == 1


async def test_a_counter_that_fell_is_not_forgotten_with_a_lost_answer(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bookie has raised the counter by then, and its age is that of the copy."""
    bookie, store, late = await set_back_under_a_running_bookie(fresh, is_raised=False)
    lose_answer_once(monkeypatch, store, "ids_drawn", lambda _, least=0: least > 0)
    with pytest.raises(MetadataUnavailableError):
        await bookie.age.learn_ids()
    assert await bookie.age.learn_ids() > late
    client = await fresh.connect(bookie)
    assert (await client.call(Delete(late))).status is Status.INTERNAL_ERROR
    assert late in await held(client)
    assert bookie.age.in_doubt_below > late
    assert len((await SetBacks.read(fresh.store())).events) == 1


async def test_a_request_that_is_cancelled_does_not_interrupt_the_judgement(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie, store, late = await set_back_under_a_running_bookie(fresh)
    client = await fresh.connect(bookie)
    compare_and_set: Callable[..., Awaitable[object]] = store.compare_and_set
    arrived, goes_on = asyncio.Event(), asyncio.Event()

    async def set_late(key: str, *args: object, **more: object) -> object:
        made = await compare_and_set(key, *args, **more)
        if key == age_key("b1"):
            arrived.set()
            await goes_on.wait()
        return made

    monkeypatch.setattr(store, "compare_and_set", set_late)
    client.send(Delete(late))
    await asyncio.wait_for(arrived.wait(), WAIT_S)
    lost = [connection.lost for connection in bookie._connections]
    await client.close()
    await asyncio.wait(lost, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert not bookie.age.in_doubt_below
    goes_on.set()
    async with bookie.age._lock:
        assert bookie.age.in_doubt_below > late
    client = await fresh.connect(bookie)
    assert (await client.call(Delete(late))).status is Status.INTERNAL_ERROR
    assert late in await held(client)


async def test_what_a_sweep_read_before_an_event_ends_no_marks_after_it(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older copy names the bookie for a ledger that newer metadata had excused it of."""
    monkeypatch.setattr("bookie_aio.server.ledger_gc._SETTLED_AT_ONCE", 1)
    bookie = await start(fresh)
    client, gc = await fresh.connect(bookie), bookie._ledger_gc
    settled, other = await draw(fresh, 2)
    await make(fresh, client, settled, other)
    ledgers = LedgerStore(fresh.store())
    await ledgers.raise_floor((await draw(fresh, 1)).start)
    older, version = await ledgers.read(settled)
    version = await ledgers.compare_and_set(older.replace_bookie(0, "b1", "b9").close(0, 1), version)
    metadata, other_version = await ledgers.read(other)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b1", "b9").close(0, 1), other_version)
    await when_durable(partial(engine_of(bookie).marking.mark_all, other))
    assert gc is not None
    for _ in range(3):  # two for the first look at both, one for the second look at the first
        await gc.sweep()
    await fresh.store().compare_and_set(ledger_key(settled), older.to_json(), version)
    await tell_of_set_back(fresh, "an event", other + 1, "b1")
    await bookie.age.learn_events()
    await gc.sweep()
    assert await are_marked(client, settled) == [True]


async def lift(bookies: Bookies, bookie: Bookie, ledger_id: int) -> None:
    """Mark a ledger with one entry, close it, and lift its mark as a client does."""
    await when_durable(partial(engine_of(bookie).append_mark, ledger_id))
    ledgers, healing = LedgerStore(bookies.store()), bookie._healing
    metadata, version = await ledgers.read(ledger_id)
    if not metadata.is_closed:
        await ledgers.compare_and_set(metadata.close(0, 1), version)
    assert healing is not None
    assert not await healing.lift(ledger_id, await healing.lift(ledger_id, 0))


async def end_all(bookies: Bookies, bookie: Bookie, ledger_id: int) -> None:
    """Mark all ledgers up to a closed one that does not name the bookie, and let a sweep end the marks."""
    ledgers, gc = LedgerStore(bookies.store()), bookie._ledger_gc
    metadata, version = await ledgers.read(ledger_id)
    await ledgers.compare_and_set(metadata.replace_bookie(0, "b1", "b9").close(0, 1), version)
    await ledgers.raise_floor((await draw(bookies, 1)).start)
    await when_durable(partial(engine_of(bookie).marking.mark_all, ledger_id))
    assert gc is not None
    for _ in range(2):
        await gc.sweep()
    assert engine_of(bookie).marking.bound < 0


@pytest.mark.parametrize("end", [lift, end_all])
@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
async def test_marks_that_ended_by_what_the_copy_has_stay_ended(
    fresh: Bookies,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Bookies, Bookie, int], Awaitable[None]],
    is_running: bool,
    is_full: bool,
) -> None:
    """Only by the lift itself is an age raised behind the copy."""
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    (before,) = await draw(fresh, 1)
    await make(fresh, await fresh.connect(bookie), before)
    await end(fresh, bookie, before)
    await bookie.age.raise_if_written()
    (after,) = await draw(fresh, 1)
    await make(fresh, await fresh.connect(bookie), after)
    older = copy_of(fresh.tree)
    await lift(fresh, bookie, after)
    if not is_running:
        await bookie.close()
    store.tree = fresh.tree = older
    if not is_running:
        bookie = await start(fresh)
    elif is_full:
        with monkeypatch.context() as patched:

            def refuse(size: int, kept: int) -> None:
                raise DiskFullError("the test says there is no space")

            patched.setattr(engine_of(bookie), "_check_room", refuse)
            with pytest.raises(MetadataSetBackError):
                await bookie.age.check()
            assert not bookie.age._file.set_backs
        await bookie.age.learn_events()
    else:
        with pytest.raises(MetadataSetBackError):
            await bookie.age.raise_if_written()
    assert bookie.age._file.set_backs
    client = await fresh.connect(bookie)
    assert await are_marked(client, before, after) == [False, True]
    await tell_of_set_back(fresh, "another bookie saw it later", after + 1)
    await bookie.age.learn_events()
    await bookie.close()
    client = await fresh.connect(await start(fresh))
    assert await are_marked(client, before, after) == [False, True]


@pytest.mark.parametrize("what", ["lifted", "ended"])
async def test_an_age_that_is_raised_in_the_copy_tells_of_no_metadata_that_were_read_before(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The bookie wrote nothing since the copy was taken, so the copy has its age."""
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client, healing, gc = await fresh.connect(bookie), bookie._healing, bookie._ledger_gc
    assert healing is not None
    assert gc is not None
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    await LedgerStore(store).raise_floor((await draw(fresh, 1)).start)
    marking = engine_of(bookie).marking
    mark = marking.mark_all if what == "ended" else engine_of(bookie).append_mark
    await when_durable(partial(mark, ledger))
    await bookie.age.learn_ids()
    await bookie.age.raise_if_written(is_forced=True)
    older = copy_of(fresh.tree)
    metadata, version = await LedgerStore(store).read(ledger)
    closed = metadata.replace_bookie(0, "b1", "b9").close(0, 1)
    await LedgerStore(store).compare_and_set(closed, version)
    by = gc if what == "ended" else healing
    read_metadata, reads = by._ledgers.read, []

    async def read_and_set_back(ledger_id: int, **how: bool) -> object:
        found = await read_metadata(ledger_id, **how)
        reads.append(ledger_id)
        if len(reads) == (2 if what == "ended" else 1):  # a sweep looks first whether it is to be evicted
            store.tree = fresh.tree = older
        return found

    monkeypatch.setattr(by._ledgers, "read", read_and_set_back)
    if what == "ended":
        for _ in range(3):
            await gc.sweep()
    else:
        with pytest.raises(MetadataUnavailableError):
            await healing.lift(ledger, await healing.lift(ledger, 0))
    assert not bookie.age.events_heard
    assert await are_marked(client, ledger) == [True]


async def test_a_lift_after_a_lost_start_tells_of_no_copy_that_has_an_age_of_that_start(
    fresh: Bookies,
) -> None:
    """The lost start had reached number 12, and its metadata come back when this one is beyond that."""
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    other = copy_of(fresh.tree)
    event = SetBack("an event", "b2", 0, ledger + 1, ["b1"], {"b1": ["a lost start", 12]})
    await (await SetBacks.read(store)).replace(store, [event])
    await bookie.age.learn_events()
    await lift(fresh, bookie, ledger)
    while bookie.age.number <= 12:
        await bookie.age.raise_if_written(is_forced=True)
    assert await are_marked(client, ledger) == [False]
    await bookie.age.raise_if_written(is_forced=True)
    store.tree = fresh.tree = other
    before = await store.read(age_key("b1"))
    age = AgeRecord(12, "a lost start", AgeRecord.from_json(before.value).place)
    await store.compare_and_set(age_key("b1"), age.to_json(), before.version)
    with pytest.raises(MetadataSetBackError):
        await bookie.age.check()
    assert await are_marked(client, ledger) == [True]


@pytest.mark.parametrize("end", [lift, end_all])
async def test_without_room_for_a_new_age_no_mark_ends(
    fresh: Bookies,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Bookies, Bookie, int], Awaitable[None]],
) -> None:
    bookie = await start(fresh)
    client = await fresh.connect(bookie)
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    await bookie.age.raise_if_written()

    async def refuse(file: object) -> None:
        raise DiskFullError("the test says there is no space")

    monkeypatch.setattr(bookie.age, "_write", refuse)
    with pytest.raises(DiskFullError):
        await end(fresh, bookie, ledger)
    assert await are_marked(client, ledger) == [True]


async def test_a_sweep_lifts_the_mark_of_what_was_evicted_once_an_operator_has_answered(
    fresh: Bookies,
) -> None:
    """No fragment names the bookie, so no client asks it."""
    bookie = await start(fresh)
    client, gc = await fresh.connect(bookie), bookie._ledger_gc
    (ledger,) = await draw(fresh, 1)
    await make(fresh, client, ledger)
    await evict(fresh, bookie, ledger)
    await tell_of_set_back(fresh, "an event", ledger + 1)
    await bookie.age.learn_events()
    assert gc is not None
    await gc.sweep()
    assert await are_marked(client, ledger) == [True]
    (event,) = (found := await SetBacks.read(fresh.store())).events
    await found.replace(fresh.store(), [event.answer_for(["b1"])])
    await gc.sweep()
    assert await are_marked(client, ledger) == [False]
    assert (await client.add(ledger, 1, [b"1"])).status is Status.INVALID_TERM


@pytest.mark.parametrize("is_named", [False, True])
async def test_marks_of_all_ledgers_end_beside_an_unbounded_ledger_of_others(
    fresh: Bookies, is_named: bool
) -> None:
    """It is over for nobody. A bookie that has no seat in it is asked by no client."""
    bookie = await start(fresh)
    gc, engine = bookie._ledger_gc, engine_of(bookie)
    (ledger,) = await draw(fresh, 1)
    ledgers = LedgerStore(fresh.store())
    record = LedgerMetadata.new(
        ledger, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1" if is_named else "b8"],
        unbounded=UnboundedRecord("x"),
    )  # fmt: skip
    await ledgers.create_ledger(record.change_ensemble(5, ["b9"]))
    await ledgers.raise_floor((await draw(fresh, 1)).start)
    await when_durable(partial(engine.marking.mark_all, ledger))
    assert gc is not None
    for _ in range(2):
        await gc.sweep()
    assert engine.marking.bound == (ledger if is_named else -1)
    assert bool(engine.marking.of(ledger)) is is_named
