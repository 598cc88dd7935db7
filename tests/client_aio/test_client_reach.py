"""What is checked before a recovery fences: whether the bookies that answer could decide the end."""

from __future__ import annotations

import asyncio

import pytest

import client_aio
from bookie_aio.wire.messages import (
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
from metadata.model.ledger import LedgerState
from tests.support.rawclient import lac_statement
from tests.support.scriptedbookies import LEDGER, scene

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
