"""Readers whose metadata are not those of now: what they are told late is found, and what is gone is said."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Failure, ListEntries, ListEntriesAnswer, Message, Read, ReadLac, Status
from client_aio.bookies.connection import list_entries
from metadata.access.fragments import LedgerNames
from metadata.errors import MetadataCorruptError, ProtocolError
from metadata.ids import NO_ENTRY, ledger_key
from metadata.model.ledger import Fragment, LedgerMetadata
from tests.support.scriptedbookies import LEDGER, Scene, scene

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from client_aio.ledger.reader import LedgerReader
    from metadata.store import Version

    Change = Callable[[LedgerMetadata], LedgerMetadata]

WAIT_S = 10.0
NAME = "payments"
BOTH = pytest.mark.parametrize("name", [None, NAME], ids=["bounded", "unbounded"])


# --- the metadata ---


@BOTH
async def test_metadata_do_not_go_back_whichever_refresh_is_answered_last(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that saw its ledger closed, and then OPEN once more, would wait for ever."""
    async with scene() as now:
        await now.create(name=name)
        reader = await now.client.open_ledger(LEDGER)
        read, may_answer, has_read = reader._context.ledgers.read, asyncio.Event(), asyncio.Event()

        async def read_late(ledger_id: int, *, sync: bool = False) -> tuple[LedgerMetadata, Version]:
            found = await read(ledger_id, sync=sync)
            has_read.set()
            await may_answer.wait()
            return found

        monkeypatch.setattr(reader._context.ledgers, "read", read_late)
        overtaken = asyncio.create_task(reader.refresh())
        await has_read.wait()
        monkeypatch.undo()
        await now.change(lambda metadata: metadata.close(NO_ENTRY, 0))
        await reader.refresh()
        assert reader.is_closed
        may_answer.set()
        await overtaken
        assert reader.is_closed


# --- the LAC ---


@BOTH
async def test_a_ledger_deleted_before_its_lac_is_asked_for_is_not_opened(name: str | None) -> None:
    """The first look at the metadata is answered from the past, and the bookies have not heard of it yet."""
    async with scene() as now:
        await now.create(name=name)
        for bookie in now.bookies:
            bookie.hold(range(5))
            bookie.lac = (0, 4)
        now.server.lag()
        await now.ledgers.delete(LEDGER)
        with pytest.raises(client_aio.NoSuchLedgerError):
            await now.client.open_ledger(LEDGER)


@BOTH
async def test_a_ledger_deleted_while_its_lac_is_asked_for_is_not_opened(name: str | None) -> None:
    async with scene() as now:
        await now.create(name=name)

        async def delete(request: Message) -> Failure | None:
            if not isinstance(request, ReadLac):
                return None
            with suppress(client_aio.NoSuchLedgerError):
                await now.ledgers.delete(LEDGER)
            return Failure(Status.NO_SUCH_LEDGER, "deleted")

        for bookie in now.bookies:
            bookie.script = delete
        with pytest.raises(client_aio.NoSuchLedgerError):
            await now.client.open_ledger(LEDGER)


@BOTH
async def test_the_lac_is_asked_of_the_ensemble_of_now_however_the_server_lags(name: str | None) -> None:
    async with scene(5) as now:
        await now.create(name=name)
        for bookie in now.bookies[:3]:
            bookie.hold(range(5))
            bookie.lac = (0, 3)
        reader = await now.client.open_ledger(LEDGER)
        now.server.lag()
        await now.change(lambda metadata: metadata.change_ensemble(5, ["b3", "b4", "b2"]))
        for bookie in now.bookies[3:]:
            bookie.hold(range(5, 10))
            bookie.lac = (0, 9)
        now.bookies[2].script = silent  # b0 and b1 would cover the write sets of the past without it
        assert await reader.read_last_add_confirmed() == 9


async def silent(_: Message) -> None:
    await asyncio.Event().wait()


# --- terms and trims ---


async def test_one_that_knows_a_later_term_is_enough_to_look_again() -> None:
    """One has what a displaced writer left where others hold what was acknowledged under the next term."""
    async with scene(speculative_read_s=0.01) as now:
        await now.create(name=NAME)
        await now.change(next_term(0))
        for bookie in now.bookies:
            bookie.hold([0], term=1)
        reader = await now.client.open_ledger(LEDGER)
        await now.change(next_term(1))
        displaced, *others = now.bookies
        displaced.entries[1] = (1, b"left behind")
        for bookie in others:
            bookie.entries[1] = (2, b"acknowledged")
        asked = asyncio.Semaphore(0)

        async def note(request: Message) -> None:
            if isinstance(request, Read):
                asked.release()

        async def come_last(request: Message) -> None:
            if isinstance(request, Read):
                for _ in others:
                    await asked.acquire()

        displaced.script = come_last
        for bookie in others:
            bookie.script = note
        async with asyncio.timeout(WAIT_S):
            assert [entry.data async for entry in reader.read_unconfirmed(1, 1)] == [b"acknowledged"]


async def test_what_was_read_ahead_may_be_trimmed_while_the_rest_is_read() -> None:
    """The first of five fragments is given and the second at hand when both are trimmed."""
    async with five_fragments() as (now, trim):
        reader = await now.client.open_ledger(LEDGER)
        async with asyncio.timeout(WAIT_S), aclosing(reader.read(0, 14)) as entries:
            found = [(await anext(entries)).entry_id]
            await trim(6, reader)
            found += [entry.entry_id async for entry in entries]
        assert found == list(range(15))


@pytest.mark.parametrize(("method", "last"), [("read", 14), ("read_unconfirmed", 20)])
async def test_a_reader_that_is_overtaken_by_a_trim_gives_what_it_has_and_says_so(
    method: str, last: int
) -> None:
    """It is not taken for the end either, of what is unconfirmed."""
    async with five_fragments() as (now, trim):
        reader = await now.client.open_ledger(LEDGER)
        found: list[int] = []
        async with asyncio.timeout(WAIT_S), aclosing(getattr(reader, method)(0, last)) as entries:
            found.append((await anext(entries)).entry_id)
            await trim(12, reader)
            with pytest.raises(client_aio.NoSuchEntryError, match=r"entry 6 .* trimmed: .* at entry 12"):
                await put(entries, found)
        assert found == list(range(6))


async def put(entries: AsyncIterator[client_aio.Entry], found: list[int]) -> None:
    """Append the ids of the entries, one by one."""
    async for entry in entries:
        found.append(entry.entry_id)  # noqa: PERF401 (what came before the error counts)


def next_term(first_entry: int) -> Change:
    """Return the change of a takeover that ends before an entry."""

    def apply(metadata: LedgerMetadata) -> LedgerMetadata:
        taken = metadata.take_over()
        bookies = taken.last_fragment.bookies
        return taken.open_term(first_entry, bookies, length=0, fragments=taken.fragments)

    return apply


@asynccontextmanager
async def five_fragments() -> AsyncIterator[tuple[Scene, Callable[[int, LedgerReader], Awaitable[None]]]]:
    """Return a ledger of five fragments of three entries, and what trims it and moves the rest to b1.

    b0 answers for the entries from 6 on only then.
    """
    async with scene(2, read_ahead_requests=3) as now:
        await now.create(copies=1, name=NAME)
        fragments = tuple(Fragment(first, ("b0",)) for first in (0, 3, 6, 9, 12))
        await now.change(lambda old: replace(old, fragments=fragments))
        before, after = now.bookies
        before.hold(range(6))
        after.hold(range(6, 15))
        before.lac = (0, 14)
        is_trimmed = asyncio.Event()

        async def wait(request: Message) -> None:
            if isinstance(request, Read) and request.first >= 6:
                await is_trimmed.wait()

        async def trim(before_entry: int, reader: LedgerReader) -> None:
            def apply(old: LedgerMetadata) -> LedgerMetadata:
                left = [each for each in old.fragments if each.first_entry >= before_entry]
                return replace(old, fragments=tuple(each.replace_bookie("b0", "b1") for each in left))

            await now.change(apply)
            is_trimmed.set()
            # It hears of it while it has more at hand.
            while reader.metadata.first_entry < before_entry:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0)

        before.script = wait
        yield now, trim


@pytest.mark.parametrize("deniers", [1, 2])
async def test_a_ledger_that_is_complete_ends_where_as_many_deny_as_a_recovery_would_ask_for(
    deniers: int,
) -> None:
    """With three copies of which two acknowledge, one that has not got an entry proves nothing."""
    async with scene() as now:
        await now.create()
        for bookie in now.bookies[:deniers]:
            bookie.hold(range(2))
        for bookie in now.bookies[deniers:]:
            bookie.hold(range(3))
            bookie.script = refuse_reads
        reader = await now.client.open_ledger(LEDGER)
        found: list[int] = []
        async with asyncio.timeout(WAIT_S), aclosing(reader.read_rest(0)) as entries:
            if deniers == 2:
                await put(entries, found)
            else:
                with pytest.raises(client_aio.BookieUnavailableError):
                    await put(entries, found)
        assert found == [0, 1]


async def refuse_reads(request: Message) -> Failure | None:
    return Failure(Status.INTERNAL_ERROR, "not now") if isinstance(request, Read) else None


# --- damage, names, bookies that do not move on ---


@BOTH
async def test_a_tail_whose_metadata_are_damaged_ends_with_that(name: str | None) -> None:
    async with scene() as now:
        await now.create(name=name)
        for bookie in now.bookies:
            bookie.hold(range(3))
            bookie.lac = (0, 2)
        reader = await now.client.open_ledger(LEDGER)
        async with asyncio.timeout(WAIT_S), aclosing(reader.tail()) as entries:
            assert [(await anext(entries)).entry_id for _ in range(3)] == [0, 1, 2]
            _, version = await now.ledgers.read(LEDGER)
            await now.ledgers.store.compare_and_set(ledger_key(LEDGER), b"{}", version)
            with pytest.raises(MetadataCorruptError):
                await anext(entries)


async def test_a_name_made_anew_is_found_however_the_server_lags() -> None:
    async with scene() as now:
        names = LedgerNames(now.ledgers)
        await now.create(name=NAME)
        await names.give(NAME, LEDGER, token="t1")
        now.server.lag()
        await now.ledgers.delete(LEDGER)
        await names.take(NAME, LEDGER)
        await now.create(name=NAME, ledger_id=LEDGER + 1)
        await names.give(NAME, LEDGER + 1, token="t2")
        reader = await now.client.open_ledger(NAME)
        assert reader.ledger_id == LEDGER + 1


async def test_a_bookie_whose_list_does_not_move_on_breaks_the_protocol() -> None:
    async with scene(1) as now:

        async def stay(request: Message) -> Message | None:
            return ListEntriesAnswer(5, False) if isinstance(request, ListEntries) else None

        now.bookies[0].script = stay
        connection = await now.client._context.pool.get("b0")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ProtocolError, match="from 5 on is said to go on at 5"):
                await list_entries(connection, LEDGER, 0, 9, WAIT_S)
