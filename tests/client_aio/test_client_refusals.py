"""Bookies that take connections and refuse adds: writing goes on without them, and tries them in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from bookie_aio.wire.messages import Add, Done, Failure, Message, Status
from client_aio import LedgerState, LedgerWriter
from tests.support.scriptedbookies import Scene, scene

WAIT_S = 10.0
SETTINGS: dict[str, Any] = {"replacement_retry_s": 0.1, "ensemble_change_timeout_s": 0.5}


class Refusals:
    """Has the bookies of a scene take all adds, but for those that refuse them."""

    def __init__(self, running: Scene) -> None:
        self.refusing: set[str] = set()
        self.adds: Counter[str] = Counter()
        for bookie in running.bookies:
            bookie.script = partial(self._answer, bookie.bookie_id)

    async def _answer(self, name: str, request: Message) -> Message | Failure | None:
        if isinstance(request, Add):
            self.adds[name] += 1
            if name in self.refusing:
                return Failure(Status.DATA_LOST, "it has lost data of this ledger")
            return Done()
        return None


async def add(ledger: LedgerWriter, count: int) -> None:
    for _ in range(count):
        await asyncio.wait_for(ledger.add_entry(b"x"), WAIT_S)
        await asyncio.sleep(0.02)


async def test_with_guaranteed_write_quorum_writing_goes_on_and_the_close_waits() -> None:
    # Nobody else is to be had. Far longer than a writer would wait for a bookie below the ack quorum.
    async with scene(3, explicit_lac_delay_s=60.0, **SETTINGS) as running:
        refusals = Refusals(running)
        ledger = await running.client.create_ledger(guaranteed_write_quorum=True)
        named = ledger.metadata.last_fragment
        await add(ledger, 2)
        refusals.refusing.add("b1")
        await add(ledger, 40)
        assert (ledger.last_add_confirmed, ledger.last_add_fully_replicated) == (41, 1)
        tries = Counter(refusals.adds)
        closing = asyncio.create_task(ledger.close())
        await asyncio.sleep(1.0)
        assert not closing.done()
        # All that it owes, 40 entries, once every replacement_retry_s; that is no spinning.
        assert refusals.adds["b1"] - tries["b1"] <= 11 * 40
        assert refusals.adds["b0"] == refusals.adds["b2"] == 42
        refusals.refusing.clear()
        metadata = await asyncio.wait_for(closing, WAIT_S)
        assert (metadata.state, metadata.last_entry) == (LedgerState.CLOSED, 41)
        assert metadata.fragments == (named,)
        assert ledger.last_add_fully_replicated == 41


async def test_one_that_is_well_again_gets_its_turn_beside_one_that_goes_on_refusing() -> None:
    async with scene(4, explicit_lac_delay_s=60.0, quarantine_s=60.0, **SETTINGS) as running:
        refusals = Refusals(running)
        ledger = await running.client.create_ledger(guaranteed_write_quorum=True)
        former = ledger.metadata.last_fragment.bookies[0]
        (spare,) = {"b0", "b1", "b2", "b3"} - set(ledger.metadata.last_fragment.bookies)
        refusals.refusing = {former, spare}
        await add(ledger, 20)
        assert refusals.adds[spare]
        assert ledger.last_add_fully_replicated == -1
        refusals.refusing.remove(former)
        metadata = await asyncio.wait_for(ledger.close(), WAIT_S)
        assert metadata.last_fragment.bookies[0] == former
