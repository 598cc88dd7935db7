"""Tails: where their ledgers are watched, and what becomes of them when a bookie refuses, lies or is lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Failure, Message, Read, Status, Watch
from client_aio.tails import SharedRead, places
from tests.support.scriptedbookies import LEDGER, Scene, ScriptedBookie, scene

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from bookie_aio.wire.blocks import Block

WAIT_S = 20.0


async def followed(now: Scene) -> AsyncGenerator[client_aio.Entry, None]:
    """Return a tail of the ledger, which has no entry yet."""
    await now.create(copies=3)
    reader = await now.client.open_ledger(LEDGER)
    return reader.tail()


def write(now: Scene, bookies: list[ScriptedBookie]) -> None:
    """Give these bookies a LAC, and all bookies the entry."""
    for bookie in now.bookies:
        bookie.hold(range(1))
    for bookie in bookies:
        bookie.lac = (0, 0)


def test_ledgers_are_watched_at_two_bookies_doubtful_ones_last() -> None:
    whole = ("a", "b", "c"), 3, 2
    assert [places(*whole, turn, ()) for turn in range(3)] == [["a", "b"], ["b", "c"], ["c", "a"]]
    assert places(*whole, 0, ["b"]) == ["a", "c"]
    assert places(*whole, 0, ["b", "a"]) == ["c", "a"]
    assert places(*whole, 1, ["a", "b", "c"]) == ["b", "c"]
    assert places(("a",), 1, 1, 5, ["a"]) == ["a"]


def test_a_ledger_is_watched_at_so_many_of_a_write_set_that_one_has_each_entry() -> None:
    names = ("a", "b", "c", "d", "e")
    assert places(names, 5, 3, 3, ()) == ["d", "e", "a"]
    assert places(names, 5, 1, 0, ()) == list(names)
    assert places(names, 5, 3, 3, ["e"]) == ["d", "a", "b"]
    assert places(names, 3, 1, 4, ()) == ["e", "a", "b"]
    assert places(names, 2, 2, 0, ["b"]) == ["c", "d"]  # and not "a", "c": no write set has both
    assert places(names, 1, 1, 4, ()) == ["e", "a"]  # a write set of one may hang
    assert places(names, 3, 2, 0, ["a", "b", "d"]) == ["c", "e"]


async def test_a_tail_hears_of_entries_that_two_of_its_bookies_get_no_adds_of() -> None:
    async with scene(5) as now, asyncio.timeout(WAIT_S):
        await now.create(copies=5)
        reader = await now.client.open_ledger(LEDGER)
        without = {LEDGER % 5, (LEDGER + 1) % 5}  # watched first
        write(now, [bookie for number, bookie in enumerate(now.bookies) if number not in without])
        async with aclosing(reader.tail()) as tail:
            assert (await anext(tail)).data == b"0"


@pytest.mark.parametrize("refusing", [0, 1, 2])
async def test_a_bookie_that_watches_too_much_is_passed_over_and_not_pressed(refusing: int) -> None:
    asked = [0] * 3

    async with scene() as now, asyncio.timeout(WAIT_S):
        for number, bookie in enumerate(now.bookies):

            async def refuse(request: Message, number: int = number) -> Message | Failure | None:
                if not isinstance(request, Watch):
                    return None
                asked[number] += 1
                return Failure(Status.TOO_MANY_REQUESTS, "no") if number != refusing else None

            bookie.script = refuse
        tail = await followed(now)
        write(now, now.bookies[refusing : refusing + 1])  # the only one that takes it
        async with aclosing(tail):
            assert (await anext(tail)).data == b"0"
        assert max(asked) < 10


async def test_a_bookie_whose_connections_end_is_replaced() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        lost = now.bookies[(LEDGER) % 3]

        async def lose(request: Message) -> Message | Failure | None:
            return Failure(Status.SHUTTING_DOWN, "ending") if isinstance(request, Watch) else None

        lost.script = lose
        tail = await followed(now)
        write(now, [bookie for bookie in now.bookies if bookie is not lost][-1:])
        async with aclosing(tail):
            assert (await anext(tail)).data == b"0"


async def test_tails_go_on_though_the_application_cancels_all_tasks() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        tail = await followed(now)
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0)  # begun
        own = [
            task for task in asyncio.all_tasks() if task.get_name().startswith(("metadata of", "tails at"))
        ]
        assert own
        for task in own:
            task.cancel()
        write(now, now.bookies)
        await now.change(lambda metadata: metadata.close(0, 1))
        assert (await waiting).data == b"0"
        assert [entry.data async for entry in tail] == []


async def test_a_read_that_tails_share_ends_with_the_last_of_them() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def read() -> list[Block]:
        begun.set()
        try:
            return await asyncio.Event().wait() and []
        finally:
            ended.set()

    shared = SharedRead(asyncio.ensure_future(read()))
    first, second = (asyncio.ensure_future(shared.result()) for _ in range(2))
    await begun.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not shared.task.done()
    second.cancel()
    await asyncio.gather(second, shared.task, return_exceptions=True)
    assert ended.is_set()


async def test_tails_that_wake_together_read_once() -> None:
    reads = 0

    async def count(request: Message) -> None:
        nonlocal reads
        reads += isinstance(request, Read)

    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create(copies=3)
        tails = [(await now.client.open_ledger(LEDGER)).tail() for _ in range(50)]
        for bookie in now.bookies:
            bookie.script = count
        waiting = [asyncio.ensure_future(anext(tail)) for tail in tails]
        await asyncio.sleep(0)
        write(now, now.bookies)
        assert {(await each).data for each in waiting} == {b"0"}
        for tail in tails:
            await tail.aclose()
    assert reads < 10


async def test_a_tail_goes_on_after_its_read_was_cancelled_with_all_tasks_but_its_own() -> None:
    begun, may_answer = asyncio.Event(), asyncio.Event()

    async def hold(request: Message) -> None:
        if isinstance(request, Read):
            begun.set()
            await may_answer.wait()

    async with scene() as now, asyncio.timeout(WAIT_S):
        tail = await followed(now)
        kept = asyncio.all_tasks()
        for bookie in now.bookies:
            bookie.script = hold
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0)
        write(now, now.bookies)
        await begun.wait()
        for task in asyncio.all_tasks() - kept - {waiting}:
            task.cancel()
        may_answer.set()
        assert (await waiting).data == b"0"


async def test_a_tail_ends_when_its_client_is_closed() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        tail = await followed(now)
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(0)
        await now.client.close()
        with pytest.raises(client_aio.ClientClosedError):
            await waiting
