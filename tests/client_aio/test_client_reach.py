"""What is checked before a recovery fences: whether it could decide the end, and write entries back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import (
    Add,
    Done,
    Failure,
    Hello,
    Message,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
)
from metadata.access.bookies import SetBack, SetBacks
from metadata.model.ledger import LedgerState
from tests.support.rawclient import lac_statement
from tests.support.scriptedbookies import LEDGER, Scene, scene

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT_S = 20.0


@pytest.mark.parametrize("third_answers", [False, True])
async def test_a_writer_is_not_fenced_where_bookies_that_lost_data_could_decide_nothing(
    third_answers: bool,
) -> None:
    fences: list[Message] = []

    async def whole(request: Message) -> None:
        if isinstance(request, ReadLac) and request.term >= 0:
            fences.append(request)

    async def lossy(request: Message) -> Message | None:
        await whole(request)
        if isinstance(request, ReadLac):
            return ReadLacAnswer(lac_statement(LEDGER, 2, content_term=0), 2, True)
        if isinstance(request, Read):
            return ReadAnswer(Stop.UNKNOWN, request.first, None)
        return None

    async def gone(request: Message) -> Failure | None:
        return None if isinstance(request, (Hello, Ping)) else Failure(Status.INTERNAL_ERROR, "gone")

    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        for bookie in now.bookies:
            bookie.hold(range(3))
            bookie.lac = (0, 2)
        scripts = (whole, lossy, whole if third_answers else gone)
        for bookie, script in zip(now.bookies, scripts, strict=True):
            bookie.script = script
        if third_answers:
            async with now.client.open_ledger(LEDGER, recover=True) as reader:
                assert reader.last_add_confirmed == 2
            return
        with pytest.raises(client_aio.LedgerRecoveryError, match=r"b1 \(it lost data.*Nothing was done"):
            await now.client.open_ledger(LEDGER, recover=True)
        assert not fences
        metadata, _ = await now.ledgers.read(LEDGER)
        assert metadata.state is LedgerState.OPEN


class _Bookies:
    """Scripts of bookies that are whole, take adds, or give no answer; and what was asked of them.

    Args:
        slow: a bookie that gives no answer to reads that fence.
    """

    def __init__(self, now: Scene, alive: set[str], slow: str = "") -> None:
        self._slow = slow
        self.fences: list[Message] = []
        self.added: set[str] = set()
        for bookie in now.bookies:
            name = bookie.bookie_id
            bookie.script = partial(self._alive, name) if name in alive else self._gone

    async def _alive(self, name: str, request: Message) -> Message | None:
        if isinstance(request, ReadLac) and request.term >= 0:
            self.fences.append(request)
        if isinstance(request, Add):
            self.added.add(name)
            return Done()
        if isinstance(request, Read) and request.term >= 0 and name == self._slow:
            await asyncio.Event().wait()
        return None

    async def _gone(self, request: Message) -> Failure | None:
        return None if isinstance(request, (Hello, Ping)) else Failure(Status.INTERNAL_ERROR, "gone")


async def test_a_writer_is_not_fenced_where_too_few_bookies_could_be_written_back_to() -> None:
    # 3/3/3: one answer of each write set fences, and all three bookies have to take what is written back.
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create(sizes=(3, 3))
        now.bookies[0].hold(range(4))
        now.bookies[0].lac = (0, 2)
        bookies = _Bookies(now, {"b0"})
        with pytest.raises(client_aio.LedgerRecoveryError, match=r"written back.*Nothing was done"):
            await now.client.open_ledger(LEDGER, recover=True)
        assert not bookies.fences
        metadata, _ = await now.ledgers.read(LEDGER)
        assert metadata.state is LedgerState.OPEN


@pytest.mark.parametrize("in_doubt", [False, True])
async def test_behind_a_set_back_a_list_counts_though_listed_entries_are_damaged(in_doubt: bool) -> None:
    """Two bookies, each with the mark of one damaged entry, still list all that they ever had."""

    async def answering(request: Message) -> Message | None:
        if isinstance(request, ReadLac) and in_doubt:
            return ReadLacAnswer(lac_statement(LEDGER, 2, content_term=0), 2, True)
        if isinstance(request, Add):
            added.append(request)
            return Done()
        return None

    added: list[Add] = []
    async with scene(4) as now, asyncio.timeout(WAIT_S):
        await now.create()
        event = SetBack("an event", "b0", 0, LEDGER + 1, ["b0", "b1", "b2", "b3"])
        await SetBacks().replace(now.ledgers.store, [event])
        for bookie in now.bookies[:3]:
            bookie.hold(range(3))
            bookie.lac = (0, 2)
        for bookie in now.bookies[:2]:
            bookie.has_mark, bookie.script = True, answering
        if in_doubt:
            with pytest.raises(client_aio.LedgerRecoveryError, match="it lost data"):
                await now.client.open_ledger(LEDGER, recover=True)
        else:
            async with now.client.open_ledger(LEDGER, recover=True) as reader:
                assert reader.last_add_confirmed == 2
        assert not added


@pytest.mark.parametrize("held", [range(3), (0, 1, 2, 4)], ids=["nothing more", "one behind the end"])
async def test_a_recovery_that_writes_nothing_back_needs_no_bookies_for_that(held: Sequence[int]) -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create(sizes=(3, 3))
        now.bookies[0].hold(held)
        now.bookies[0].lac = (0, 2)
        bookies = _Bookies(now, {"b0"})
        async with now.client.open_ledger(LEDGER, recover=True) as reader:
            assert reader.last_add_confirmed == 2
        assert bookies.fences
        assert not bookies.added


async def test_an_entry_that_may_be_cut_off_needs_no_bookies_to_write_it_back_to() -> None:
    # Of all three bookies that would have had to acknowledge entry 3, one has not.
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create(sizes=(3, 3))
        for bookie, count in zip(now.bookies, (4, 3), strict=False):
            bookie.hold(range(count))
            bookie.lac = (0, 2)
        bookies = _Bookies(now, {"b0", "b1"}, slow="b0")
        async with now.client.open_ledger(LEDGER, recover=True) as reader:
            assert reader.last_add_confirmed == 2
        assert not bookies.added


@pytest.mark.parametrize(
    ("sizes", "alive"), [((3, 3), "b0 b3 b4"), ((4, 3), "b0 b2 b4"), ((4, 3), "b1 b2 b3")]
)
async def test_bookies_that_an_ensemble_change_brings_in_count(sizes: tuple[int, int], alive: str) -> None:
    # With 4/4/3 one seat may stay with its failed bookie.
    async with scene(5) as now, asyncio.timeout(WAIT_S):
        await now.create(copies=sizes[0], sizes=sizes)
        for name in alive.split()[:2]:
            bookie = now.bookies[int(name[1:])]
            bookie.hold(range(4))
            bookie.lac = (0, 2)
        bookies = _Bookies(now, set(alive.split()))
        async with now.client.open_ledger(LEDGER, recover=True) as reader:
            assert reader.last_add_confirmed == 3
        assert bookies.added == set(alive.split())
