"""What is no gap: an entry that some bookie may have intact, which did not say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Message, Read, ReadAnswer, Stop
from metadata.access.logs import LogStore
from metadata.model.given_up import GivenUp
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogHead, LogRow
from tests.support.scriptedbookies import LEDGER, Scene, scene

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT_S = 20.0


async def unknown(request: Message) -> ReadAnswer | None:
    """Answer of entry 1 that it is not known."""
    if isinstance(request, Read) and request.first <= 1 <= request.last:
        return ReadAnswer(Stop.UNKNOWN, request.first, None)
    return None


async def list_rows(now: Scene, rows: Sequence[LogRow]) -> LogHead:
    """Make a log with these rows."""
    lists = LogStore(now.ledgers.store, "orders", draw_token=iter("abcdefghij").__next__)
    await lists.create(custom={}, created_ms=1)
    changed = await lists.change_now(*await lists.read(), lambda head: head.append(rows))
    return changed.head


async def test_a_record_is_not_lost_while_a_bookie_that_lists_it_does_not_answer_reads() -> None:
    goes_on = asyncio.Event()

    async def hang(request: Message) -> None:
        if isinstance(request, Read) and request.first <= 1 <= request.last:
            await goes_on.wait()

    async with scene(read_timeout_s=0.3, speculative_read_s=0.05) as now, asyncio.timeout(WAIT_S):
        await now.create()
        for bookie in now.bookies[:2]:
            bookie.hold(range(3))
        await now.change(lambda metadata: metadata.close(2, 3))
        await list_rows(now, [LogRow(LEDGER, LEDGER, 1)])
        now.bookies[0].script, now.bookies[1].script = unknown, hang
        with pytest.raises(client_aio.EntryUnknownError) as caught:
            _ = [each async for each in now.client.read_log("orders", on_gap="skip")]
        assert caught.value.is_unanswered
        now.bookies[1].script = None
        goes_on.set()
        found = [each async for each in now.client.read_log("orders", on_gap="skip")]
        assert all(isinstance(each, client_aio.LogRecord) for each in found)
        assert len(found) == 3


async def test_a_loss_that_was_accepted_is_told_at_the_end_of_a_page_of_the_list() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        for bookie in now.bookies:
            bookie.hold(range(3))
        await now.change(lambda metadata: metadata.begin_recovery())
        await now.change(lambda metadata: metadata.close_with_loss(2, 3, GivenUp(2, ("b0", "b1"), 0)))
        head = await list_rows(now, [LogRow(each, LEDGER, 10**12) for each in range(1, 601)])
        last = head.newest[0].id - 1
        assert last > 0
        with pytest.raises(client_aio.RecordsLostError, match=f"from {last}:3 on"):
            _ = [each async for each in now.client.read_log("orders", client_aio.Position(last, 0))]


@pytest.mark.parametrize("lost", ["closed with a loss", "missing"])
@pytest.mark.parametrize("follows", ["nothing", "an empty ledger", "nothing that is left of it"])
async def test_who_reads_from_the_end_on_is_not_told_of_a_loss_before_it(lost: str, follows: str) -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        await now.change(lambda metadata: metadata.begin_recovery())
        await now.change(lambda metadata: metadata.close_with_loss(2, 3, GivenUp(2, ("b0", "b1"), 0)))
        rows = [LogRow(LEDGER, LEDGER, 1)]
        if follows != "nothing":
            await now.create(ledger_id=LEDGER + 1)
            rows.append(LogRow(LEDGER + 1, LEDGER + 1, 1))
        if follows == "nothing that is left of it":
            metadata, version = await now.ledgers.read(LEDGER + 1)
            empty = metadata.begin_recovery().close_with_loss(-1, 0, GivenUp(-1, ("b0", "b1"), 0))
            await now.ledgers.compare_and_set(empty, version)
        if lost == "missing":
            await now.ledgers.delete(LEDGER)
        await list_rows(now, rows)
        assert [each async for each in now.client.read_log("orders", "end")] == []
        assert [each async for each in now.client.read_log("orders", "end", on_gap="skip")] == []


@pytest.mark.parametrize("more", [[], [5]])
async def test_behind_the_last_entry_that_a_bookie_lists_one_gap_is_told(more: list[int]) -> None:
    async with scene(bookies=2) as now, asyncio.timeout(WAIT_S):
        await now.create(copies=1)
        metadata = LedgerMetadata.new(
            LEDGER + 1, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"]
        )
        await now.ledgers.create_ledger(metadata)
        now.bookies[0].hold([0, 1, 2, *more])
        now.bookies[1].hold([0])
        now.bookies[1].lac = (0, 0)
        await list_rows(now, [LogRow(each, each, 1) for each in (LEDGER, LEDGER + 1)])

        async def read(request: Message) -> ReadAnswer | None:
            """Answer of each entry that is not held that it is not known."""
            if isinstance(request, Read) and request.first not in now.bookies[0].entries:
                return ReadAnswer(Stop.UNKNOWN, request.first, None)
            return None

        now.bookies[0].script = read
        found: list[str] = []
        async for each in now.client.read_log("orders", on_gap="skip"):
            if isinstance(each, client_aio.LogGap):
                found.append(f"{each.first} to {each.last}")
            else:
                found.append(str(each.position))
            assert len(found) < 10
        between = [f"{LEDGER}:3 to {LEDGER}:4", f"{LEDGER}:5"] if more else []
        end = f"{LEDGER}:{6 if more else 3} to None"
        assert found == [*(f"{LEDGER}:{each}" for each in range(3)), *between, end, f"{LEDGER + 1}:0"]
