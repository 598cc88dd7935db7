"""Closing a ledger with a loss, where a bookie lists entries that it cannot serve."""

from __future__ import annotations

import asyncio

import pytest

import client_aio
from bookie_aio.wire.messages import Failure, Hello, Message, Ping, Read, ReadAnswer, Status, Stop
from metadata.model.ledger import LedgerState
from tests.support.scriptedbookies import LEDGER, Scene, scene

WAIT_S = 20.0


async def gone(request: Message) -> Failure | None:
    """Fail everything but the connection."""
    return None if isinstance(request, (Hello, Ping)) else Failure(Status.INTERNAL_ERROR, "gone")


def hold_ten(now: Scene) -> None:
    """Let the first bookie be the only one that answers, with ten entries."""
    now.bookies[0].hold(range(10))
    now.bookies[0].lac = (0, 8)
    for bookie in now.bookies[1:]:
        bookie.script = gone


class Unreadable:
    """What a bookie answers to reads of entries from one on, so many times."""

    def __init__(self, first: int, answer: Failure | Stop, times: int = 1 << 30) -> None:
        self._first = first
        self._answer = answer
        self.left = times

    async def __call__(self, request: Message) -> Message | Failure | None:
        if not isinstance(request, Read) or request.last < self._first or not self.left:
            return None
        if request.first != request.last:  # of the recovery, before the loss is accepted
            return Failure(Status.INTERNAL_ERROR, "too many open files")
        self.left -= 1
        if isinstance(self._answer, Failure):
            return self._answer
        return ReadAnswer(self._answer, request.first, None)


NO_FILES = Failure(Status.INTERNAL_ERROR, "too many open files")


@pytest.mark.parametrize("answer", [NO_FILES, Stop.UNKNOWN])
async def test_a_bookie_that_cannot_serve_an_entry_for_a_moment_is_asked_again(
    answer: Failure | Stop,
) -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        hold_ten(now)
        now.bookies[0].script = script = Unreadable(0, answer, times=1)
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            assert script.left == 0
            assert reader.last_add_confirmed == 9
            given_up = reader.metadata.given_up
        assert given_up is not None
        assert (given_up.lac, given_up.bookies) == (8, ("b1", "b2"))


async def test_a_bookie_that_restarts_is_met_when_it_is_back() -> None:
    loop = asyncio.get_running_loop()
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        hold_ten(now)
        fails = Unreadable(0, NO_FILES)
        restarting: list[asyncio.TimerHandle] = []

        async def script(request: Message) -> Message | Failure | None:
            left, answer = fails.left, await fails(request)
            if fails.left < left and not restarting:
                restarting.append(loop.call_later(0.3, setattr, fails, "left", 0))
            return answer

        now.bookies[0].script = script
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            assert reader.last_add_confirmed == 9
            given_up = reader.metadata.given_up
        assert given_up is not None
        assert given_up.bookies == ("b1", "b2")


async def test_the_only_bookie_that_cannot_serve_its_entries_leaves_the_ledger_as_it_is() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        hold_ten(now)
        now.bookies[0].script = Unreadable(0, NO_FILES)
        with pytest.raises(client_aio.LedgerRecoveryError):
            await now.client.open_ledger(LEDGER, recover=True, accept_loss=True)
        metadata, _ = await now.ledgers.read(LEDGER)
        assert metadata.state is LedgerState.IN_RECOVERY


async def test_a_bookie_that_cannot_serve_its_entries_is_recorded() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        hold_ten(now)
        now.bookies[0].script = Unreadable(0, NO_FILES)
        now.bookies[1].hold(range(3))
        now.bookies[1].script = Unreadable(9, NO_FILES)
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            assert reader.last_add_confirmed == 2
            given_up = reader.metadata.given_up
        assert given_up is not None
        assert given_up.bookies == ("b0", "b2")


async def test_an_entry_that_stays_unreadable_is_passed_over_and_its_bookie_recorded() -> None:
    async with scene() as now, asyncio.timeout(WAIT_S):
        await now.create()
        hold_ten(now)
        now.bookies[0].script = Unreadable(7, Stop.UNKNOWN)
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            assert reader.last_add_confirmed == 6
            given_up = reader.metadata.given_up
        assert given_up is not None
        assert (given_up.lac, given_up.bookies, given_up.missing) == (8, ("b0", "b1", "b2"), 0)


async def test_an_entry_that_one_bookie_cannot_serve_is_taken_from_another() -> None:
    async with scene(5) as now, asyncio.timeout(WAIT_S):
        await now.create(copies=5)
        hold_ten(now)
        now.bookies[0].script = Unreadable(0, NO_FILES)
        now.bookies[1].hold(range(10))
        now.bookies[1].script = None
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            assert reader.last_add_confirmed == 9
            given_up = reader.metadata.given_up
        assert given_up is not None
        assert given_up.bookies == ("b2", "b3", "b4")
