"""Closing a client: adds that the ack quorum has acknowledged still reach the slower bookies."""

from __future__ import annotations

import asyncio

import pytest

from bookie_aio.wire.messages import Add, Done, Failure, IsFree, Message, WriteLac
from metadata.errors import WriterAbortedError
from tests.support.scriptedbookies import scene

WAIT_S = 10.0


async def takes(request: Message) -> Message | Failure | None:
    """Answer as a bookie that stores whatever it is sent."""
    return Done() if isinstance(request, (Add, IsFree, WriteLac)) else None


async def test_the_slowest_bookie_gets_the_adds_that_were_held_back_and_time_to_answer() -> None:
    async with scene(3) as running, asyncio.timeout(WAIT_S):
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        answers = asyncio.Event()

        async def takes_late(request: Message) -> Message | Failure | None:
            if isinstance(request, Add):
                arrived.put_nowait(request)
                await answers.wait()
            return await takes(request)

        for bookie, script in zip(running.bookies, (takes, takes, takes_late), strict=True):
            bookie.script = script
        ledger = await running.client.create_ledger()
        for number in range(2):  # The second is held back, since the first has no answer.
            assert await ledger.add_entry(b"%d" % number) == number
        closing = asyncio.create_task(running.client.close())
        for _ in range(2):
            await arrived.get()
        assert not closing.done()
        answers.set()
        await closing


async def test_a_bookie_that_answers_nothing_is_not_waited_for_until_its_adds_are_due() -> None:
    async with scene(3, add_timeout_s=10 * WAIT_S) as running, asyncio.timeout(WAIT_S):

        async def hangs(request: Message) -> Message | Failure | None:
            if isinstance(request, Add):
                await asyncio.Event().wait()
            return await takes(request)

        for bookie, script in zip(running.bookies, (takes, hangs, hangs), strict=True):
            bookie.script = script
        ledger = await running.client.create_ledger()
        adding = ledger.add_entry(b"one copy")
        await running.client.close()
        with pytest.raises(WriterAbortedError):
            await adding


@pytest.mark.parametrize("cancelled", ["closing", "one wait"])
async def test_a_close_that_is_cancelled_leaves_no_connection_open(cancelled: str) -> None:
    """As by who ends all tasks of a loop. A further close ends, and has nothing left to do."""
    async with scene(3) as running, asyncio.timeout(WAIT_S):
        arrived = asyncio.Event()

        async def hangs(request: Message) -> Message | Failure | None:
            if isinstance(request, Add):
                arrived.set()
                await asyncio.Event().wait()
            return await takes(request)

        for bookie, script in zip(running.bookies, (takes, takes, hangs), strict=True):
            bookie.script = script
        ledger = await running.client.create_ledger()
        await ledger.add_entry(b"two copies")
        await arrived.wait()
        connections = list(running.client._context.pool._open.values())
        closing = asyncio.create_task(running.client.close())
        waits: set[asyncio.Task[None]] = set()
        while not waits:
            await asyncio.sleep(0)
            waits = {each for each in asyncio.all_tasks() if "finish_adds" in str(each.get_coro())}
        assert len(connections) == 3
        assert running.client._closing is not None
        for task in {running.client._closing, closing} if cancelled == "closing" else waits:
            task.cancel()
        await asyncio.wait([closing])
        assert not any(each.is_open for each in connections)
        await running.client.close()
