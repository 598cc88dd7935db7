"""An unbounded ledger's writer that loses two of three bookies, or the ledger: what becomes of each add."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from client_aio import (
    BookKeeperError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    OperationTimeoutError,
    Outcome,
    WriterState,
)
from client_aio.unbounded import writer as unbounded_writer
from metadata.model.ledger import LedgerMetadata, LedgerState
from metadata.store import Version
from tests.support.healing import LASTS_S, bring_back, hold_up, lose_two, state_is, stop_two
from tests.support.unbounded import NAME, everything, numbered

if TYPE_CHECKING:
    from client_aio import UnboundedLedgerWriter
    from tests.support.cluster import Cluster


async def test_every_add_takes_effect_once_and_under_its_id_over_a_loss(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(LASTS_S):
        ledger = await client.open_unbounded_ledger(NAME)
        assert await ledger.add_entries(numbered(0, 9)) == (0, 9)
        before = [ledger.add_entry(b"%d" % n) for n in range(10, 300)]
        await lose_two(cluster)
        before += [ledger.add_entry(b"%d" % n) for n in range(300, 310)]
        bulk = asyncio.create_task(ledger.add_entries(numbered(310, 319)))
        await asyncio.sleep(0)  # It takes its entries.
        await state_is(ledger, WriterState.HEALING)
        held = [ledger.add_entry(b"%d" % n) for n in range(320, 330)]
        flushed, rolled = asyncio.create_task(ledger.flush()), asyncio.create_task(ledger.roll())
        trimmed = asyncio.create_task(ledger.trim(5))
        assert ledger.bytes_in_flight > 0
        assert ledger.last_add_pushed == 329
        await bring_back(cluster)
        assert await asyncio.gather(*before, *held) == [*range(10, 310), *range(320, 330)]
        assert await bulk == (310, 319)
        await flushed
        assert await rolled == 330
        assert ledger.last_add_confirmed == 329
        assert ledger.term == ledger.metadata.term
        assert ledger.term > 1
        assert ledger.state is WriterState.WRITING
        assert await trimmed == ledger.first_entry
        assert [entry.data async for entry in ledger.read(300, 329)] == numbered(300, 329)
        assert await ledger.add_entry(b"330") == 330
        await ledger.close(seal=True)
        assert ledger.state is WriterState.CLOSED
        left = await everything(client, None)
        assert left == [(n, b"%d" % n) for n in range(left[0][0], 331)]


async def test_a_writer_that_heals_is_fenced_once_another_has_the_ledger(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(LASTS_S),
    ):
        ledger = await client.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        healing, go_on = asyncio.Event(), asyncio.Event()
        reads = client._context.ledgers.read

        async def read_late(ledger_id: int, *, sync: bool = False) -> object:
            healing.set()
            await go_on.wait()  # between the failure and the metadata that decide
            return await reads(ledger_id, sync=sync)

        client._context.ledgers.read = read_late
        stop_two(cluster)
        cut_off = ledger.add_entry(b"1")
        await lose_two(cluster)
        await healing.wait()
        held = ledger.add_entry(b"2")
        await bring_back(cluster)
        async with await _taken(other) as taken:
            await taken.add_entry(b"other")
        go_on.set()
        for future in (cut_off, held):
            with pytest.raises(LedgerFencedError) as failed:
                await future
            assert failed.value.outcome is Outcome.UNKNOWN
        assert ledger.state is WriterState.FENCED
        with pytest.raises(LedgerFencedError):
            await ledger.close()
        await ledger.abort()
        found = [data for _, data in await everything(other)]
        assert found in ([b"0", b"other"], [b"0", b"1", b"other"])


@pytest.mark.parametrize("how", ["taken over", "sealed", "deleted"])
async def test_a_writer_that_waits_for_bookies_hears_at_once_that_another_has_the_ledger(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
        asyncio.timeout(LASTS_S),
    ):
        ledger = await client.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        waits = hold_up(monkeypatch, unbounded_writer, client)
        await lose_two(cluster)
        outstanding = ledger.add_entry(b"1")
        await waits.wait()
        await bring_back(cluster)
        if how == "deleted":
            await other.delete_ledger(NAME)
        else:
            taken = await _taken(other)
            await taken.close(seal=how == "sealed")
        kinds = {"taken over": LedgerFencedError, "sealed": LedgerClosedError, "deleted": NoSuchLedgerError}
        with pytest.raises((LedgerFencedError, kinds[how])):
            await outstanding
        assert ledger.state in (WriterState.FENCED, WriterState.CLOSED)
        await ledger.abort()


async def _taken(client: client_aio.Client) -> UnboundedLedgerWriter:
    while True:
        try:
            return await client.open_unbounded_ledger(NAME)
        except BookKeeperError:
            await client._context.pool.directory.wait_for_change(0.1)


async def test_overdue_adds_fail_together_and_later_ones_go_on(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(LASTS_S):
        ledger = await client.open_unbounded_ledger(NAME, append_timeout_s=1.0)
        assert await ledger.add_entry(b"0") == 0
        await lose_two(cluster)
        overdue = [ledger.add_entry(b"1")]
        bulk = asyncio.create_task(ledger.add_entries([b"2", b"3"]))
        await state_is(ledger, WriterState.HEALING)
        overdue.append(ledger.add_entry(b"4"))
        for each in (*overdue, bulk):
            with pytest.raises(OperationTimeoutError, match="may be there") as failed:
                await each
            assert failed.value.outcome is Outcome.UNKNOWN
        assert not ledger.is_closed
        with pytest.raises(OperationTimeoutError):
            await ledger.flush()
        await ledger.flush()  # Nothing is outstanding any more.
        await bring_back(cluster)
        await state_is(ledger, WriterState.WRITING)
        later = await ledger.add_entry(b"later")
        assert await ledger.add_entries([b"x", b"y"]) == (later + 1, later + 2)
        await ledger.close()
        found = await everything(client)
        assert found[later:] == [(later, b"later"), (later + 1, b"x"), (later + 2, b"y")]
        assert [data for _, data in found[1:later]] == [b"1", b"2", b"3", b"4"][: later - 1]


async def test_a_writer_that_heals_can_be_aborted_and_its_client_closed(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(LASTS_S):
        ledgers = [await client.open_unbounded_ledger(name) for name in ("one", "two", "gone")]
        await lose_two(cluster)
        futures = [ledger.add_entry(b"0") for ledger in ledgers]
        for ledger in ledgers:
            await state_is(ledger, WriterState.HEALING)
        await client._context.ledgers.delete(ledgers[2].ledger_id, None)
        with pytest.raises(NoSuchLedgerError):
            await futures[2]
        await ledgers[0].abort()
    async with asyncio.timeout(LASTS_S):
        for ledger, future in zip(ledgers[:2], futures, strict=False):
            with pytest.raises(BookKeeperError) as failed:
                await future
            assert failed.value.outcome is Outcome.UNKNOWN
            assert ledger.state is WriterState.CLOSED


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_writer_whose_tasks_were_cancelled_while_it_took_the_term_goes_on(
    cluster: Cluster, is_late: bool
) -> None:
    """Nobody hears of the compare-and-set that raises the term, which may happen during the next attempt."""
    async with client_aio.connect(cluster.uri) as client, asyncio.timeout(LASTS_S):
        ledger = await client.open_unbounded_ledger(NAME)
        await ledger.add_entry(b"0")
        store = client._context.ledgers.store
        compare_and_set, cancelled = store.compare_and_set, list[tuple[str, bytes, Version, Any]]()

        async def cut_off(key: str, value: bytes, version: Version, **options: Any) -> Version:
            if LedgerMetadata.from_json(value).state is LedgerState.IN_RECOVERY:
                if not cancelled:
                    cancelled.append((key, value, version, options))
                    if not is_late:
                        await compare_and_set(key, value, version, **options)
                    for task in asyncio.all_tasks():
                        if task is asyncio.current_task() or task.get_name().startswith("healing"):
                            task.cancel()
                    await asyncio.sleep(0)  # raises CancelledError
                elif is_late and len(cancelled) == 1:
                    cancelled.append(cancelled[0])
                    *late, with_token = cancelled[0]
                    await compare_and_set(*late, **with_token)
            return await compare_and_set(key, value, version, **options)

        store.compare_and_set = cut_off
        await lose_two(cluster)
        outstanding = ledger.add_entry(b"1")
        await state_is(ledger, WriterState.HEALING)
        await bring_back(cluster)
        assert await outstanding == 1
        assert len(cancelled) == 1 + is_late
        assert ledger.term > LedgerMetadata.from_json(cancelled[0][1]).term
        await ledger.close()


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "1", True])
async def test_the_timeout_of_adds_is_a_positive_number(cluster: Cluster, wrong: object) -> None:
    async with client_aio.connect(cluster.uri) as client:
        with pytest.raises(InvalidArgumentError, match="append_timeout_s"):
            client.open_unbounded_ledger(NAME, append_timeout_s=wrong)
