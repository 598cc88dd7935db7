"""Bookies at which too many requests wait for the metadata store: they are asked again."""

from __future__ import annotations

import asyncio

from bookie_aio.wire.messages import Add, AddFlag, Done, Failure, IsFree, Message, Status
from tests.support.scriptedbookies import LEDGER, scene

WAIT_S = 10.0
BUSY = Failure(Status.TOO_MANY_REQUESTS, "too many requests wait for the metadata store")
ENTRIES = 100


async def test_a_bookie_that_is_busy_is_asked_again_whether_an_id_is_free() -> None:
    async with scene(3) as running, asyncio.timeout(WAIT_S):
        asked: list[int] = []

        async def knows_the_first(request: Message) -> Message | Failure | None:
            if not isinstance(request, IsFree):
                return None
            asked.append(request.ledger_id)
            if request.ledger_id != asked[0]:
                return Done()
            return BUSY if len(asked) < 4 else Failure(Status.ID_TAKEN, "it is known here")

        async def is_free(request: Message) -> Message | Failure | None:
            return Done() if isinstance(request, IsFree) else None

        first, *others = running.bookies
        first.script = knows_the_first
        for bookie in others:
            bookie.script = is_free
        ledger = await running.client.create_ledger()
        assert asked[:4] == [asked[0]] * 4
        assert ledger.ledger_id not in asked[:4]


async def test_a_repair_sends_the_first_copy_alone_and_again_while_the_target_is_busy() -> None:
    async with scene(4) as running, asyncio.timeout(WAIT_S):
        *copies, target = running.bookies
        await running.create()
        await running.change(lambda metadata: metadata.close(ENTRIES - 1, 0))
        for bookie in copies:
            bookie.hold(range(ENTRIES))
        busy, stored = 3, 0

        async def take(request: Message) -> Message | Failure | None:
            nonlocal busy, stored
            if not isinstance(request, Add):
                return None
            assert request.flags == AddFlag.REPAIR
            if busy:
                busy -= 1
                assert not stored
                return BUSY
            stored += 1
            target.hold(range(ENTRIES))
            return Done()

        target.script = take
        report = await running.client.repair_ledger(LEDGER, replace="b0", by="b3")
        assert not busy
        assert [part.lost for part in report.fragments] == [()]
        assert stored == ENTRIES
