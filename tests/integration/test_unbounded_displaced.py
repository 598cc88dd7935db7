"""Unbounded ledgers: a writer that was displaced, a roll asked for during another, a trim under a reader."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import pytest

import client_aio
from metadata.access.fragments import FragmentList
from tests.support.unbounded import NAME, WAIT_S, clients, everything, numbered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client_aio.core.ensemble_change import EnsembleChange
    from metadata.model.paged_list import PageRef


async def test_a_displaced_writer_neither_trims_nor_seals_what_others_have_added(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, other, _):
        former = await one.open_unbounded_ledger(NAME)
        await former.add_entries(numbered(0, 4))
        await former.roll()
        await former.add_entries(numbered(5, 9))
        ledger = await other.open_unbounded_ledger(NAME)
        await ledger.add_entries(numbered(10, 19))  # acknowledged
        trimmed: object = None
        with suppress(client_aio.LedgerFencedError):
            trimmed = await former.trim(5)
        sealed: object = None
        with suppress(client_aio.LedgerFencedError):
            sealed = await former.close(seal=True)
        await ledger.close()  # its last entries are known to readers now
        found = [entry_id for entry_id, _ in await everything(one, None)]
        assert (trimmed, sealed, found) == (None, None, list(range(20)))


async def test_a_displaced_writer_that_has_read_the_metadata_again_seals_nothing(tmp_path: Path) -> None:
    # A writer that is telling its LAC when the bookies are killed would find that they are gone, and end.
    settings = {"read_timeout_s": 1, "add_timeout_s": 2, "connect_timeout_s": 1, "explicit_lac_delay_s": 3600}
    async with clients(tmp_path, **settings) as (one, other, cluster):
        former = await one.open_unbounded_ledger(NAME)
        await former.add_entries(numbered(0, 9))
        ledger = await other.open_unbounded_ledger(NAME)
        await ledger.add_entries(numbered(10, 19))  # acknowledged
        await cluster.kill()
        with pytest.raises(client_aio.BookKeeperError):
            [entry async for entry in former.read(0, 9)]  # reads the metadata again
        await cluster.start()
        with pytest.raises(client_aio.LedgerFencedError):
            await former.close(seal=True)
        await (await one.open_unbounded_ledger(NAME)).close()
        assert await everything(one) == list(enumerate(numbered(0, 19)))


async def test_what_was_added_before_a_roll_was_asked_for_lies_before_it(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entries(numbered(0, 9))
        first = asyncio.create_task(ledger.roll())
        for _ in range(500_000):
            if ledger._window.is_holding:
                break
            await asyncio.sleep(0)
        assert ledger._window.is_holding
        added = ledger.add_entry(b"10")
        begins = await ledger.roll()
        await first
        assert await added < begins


async def test_what_was_read_may_be_trimmed_while_the_rest_is_read(tmp_path: Path) -> None:
    settings = {"read_ahead_requests": 1, "connect_timeout_s": 1}
    async with clients(tmp_path, bookies=2, **settings) as (one, other, cluster):
        ledger = await one.open_unbounded_ledger(NAME, ensemble_size=1, write_quorum=1, ack_quorum=1)
        await ledger.add_entries(numbered(0, 4))
        await ledger.roll()
        await ledger.add_entries(numbered(5, 9))
        await ledger.roll()
        await ledger.add_entry(b"10")
        reader = await other.open_ledger(NAME)
        async with aclosing(reader.read(0, 9)) as entries:
            found = [tuple(await anext(entries)) for _ in range(5)]
            assert await ledger.trim(5) == 5
            (holder,) = next(f.bookies for f in ledger.metadata.fragments if f.first_entry == 5)
            spare = next(name for name in cluster.bookies if name != holder)
            await one.repair_ledger(ledger.ledger_id, replace=holder, by=spare)
            await ledger.close()
            await cluster[holder].kill()
            found += [tuple(entry) async for entry in entries]
        assert found == list(enumerate(numbered(0, 9)))


async def test_a_bookie_that_is_lost_while_its_fragment_is_written_is_replaced(tmp_path: Path) -> None:
    async with clients(tmp_path, bookies=5) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME, ensemble_size=3, write_quorum=3, ack_quorum=3)
        await ledger.add_entry(b"0")
        held: list[asyncio.Future[int]] = []
        write = ledger._write_change

        async def lose_one(change: EnsembleChange) -> bool:
            is_written = await write(change)
            if not held:
                held.append(ledger.add_entry(b"1"))
                lost = change.bookies[0]
                ledger._changes._connections[lost].close(
                    client_aio.BookieUnavailableError("cut", bookie_id=lost)
                )
            return is_written

        ledger._write_change = lose_one
        assert await ledger.roll() == 1
        assert await asyncio.wait_for(held[0], WAIT_S) == 1
        await ledger.close()


async def test_a_roll_is_told_of_when_it_is_written_however_many_follow(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        write = ledger._write_change
        others: list[asyncio.Task[int]] = []

        async def ask_again(change: EnsembleChange) -> bool:
            if len(others) < 5:
                others.append(asyncio.create_task(ledger.roll()))
                await asyncio.sleep(0)
            return await write(change)

        ledger._write_change = ask_again
        await ledger.roll()
        assert len(others) <= 2
        await asyncio.gather(*others)
        await ledger.close()


async def test_what_waits_behind_a_bulk_lies_before_a_roll(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        begun, go = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"0"
            begun.set()
            await go.wait()
            yield b"1"

        bulk = asyncio.create_task(ledger.add_entries(slowly()))
        await begun.wait()
        queued = ledger.add_entry(b"2")
        rolling = asyncio.create_task(ledger.roll())
        await asyncio.sleep(0)
        go.set()
        first = await rolling
        assert (await bulk, await queued) == ((0, 1), 2)
        assert first > 2
        await ledger.close()


async def test_a_roll_ends_with_a_writer_that_is_aborted_before_it_begins(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        rolling = asyncio.create_task(ledger.roll())
        await asyncio.sleep(0)  # It is asked for, and nobody has seen to it yet.
        await ledger.abort()
        with pytest.raises(client_aio.WriterAbortedError):
            await asyncio.wait_for(rolling, WAIT_S)


async def test_a_close_that_seals_seals_though_another_one_does_not(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        added = ledger.add_entry(b"0")
        sealing = asyncio.create_task(ledger.close(seal=True))
        await asyncio.sleep(0)
        await ledger.close()
        assert (await sealing).is_closed
        assert (await one.ledger_metadata(NAME)).is_closed
        assert await added == 0


async def test_a_ledger_that_was_sealed_stays_so_for_a_close_beside_that(tmp_path: Path) -> None:
    async with clients(tmp_path) as (one, _, _):
        ledger = await one.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        sealed, left = await asyncio.gather(ledger.close(seal=True), ledger.close())
        assert sealed == left == await ledger.close(seal=True) == await ledger.close()
        assert sealed.is_closed


async def test_a_ledger_is_deleted_though_its_writer_trims_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients(tmp_path) as (one, other, _):
        ledger = await one.open_unbounded_ledger(NAME)
        while not ledger.metadata.unbounded.pages:
            ledger.add_entry(b"x")
            await ledger.roll()
        really = FragmentList.page

        async def trimmed(self: FragmentList, ref: PageRef) -> object:
            monkeypatch.setattr(FragmentList, "page", really)
            await ledger.trim(ledger.last_add_confirmed)
            return await really(self, ref)

        monkeypatch.setattr(FragmentList, "page", trimmed)
        await other.delete_ledger(NAME)
        with pytest.raises(client_aio.NoSuchLedgerError):
            await other.ledger_metadata(NAME)
