"""Closing a ledger with a loss, where a bookie lists entries that it cannot serve."""

from __future__ import annotations

import asyncio

import pytest

import client_aio
from bookie_aio.wire.messages import Failure, Hello, Message, Ping, Read, ReadAnswer, Status, Stop
from metadata.access.bookies import DRAINING, Order, change_order, retire
from metadata.ids import cookie_key
from metadata.model.given_up import GivenUp
from metadata.model.ledger import Fragment, LedgerState
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


async def leave(now: Scene, number: int, how: str) -> None:
    """Let a bookie be away in one of several ways."""
    name, store = f"b{number}", now.ledgers.store
    now.bookies[number].script = gone
    if how != "it runs":
        await now.bookies[number].registration.close()
    if how != "it has no cookie":
        await store.create(cookie_key(name), b"{}")
    if how == "it was ordered to leave":
        await change_order(store, name, lambda _: Order(DRAINING))
    elif how == "it is retired":
        await retire(store, name)


@pytest.mark.parametrize("is_unbounded", [False, True])
@pytest.mark.parametrize("how", ["it has no cookie", "it was ordered to leave", "it is retired"])
async def test_behind_a_fragment_whose_bookies_are_gone_for_good_the_one_before_is_the_last(
    how: str, is_unbounded: bool
) -> None:
    async with scene(6) as now, asyncio.timeout(WAIT_S):
        await now.create(name="payments" if is_unbounded else None)
        if is_unbounded:
            await now.change(lambda metadata: metadata.take_over())
            first = Fragment(0, ("b0", "b1", "b2"))
            await now.change(lambda had: had.open_term(0, first.bookies, length=0, fragments=[first]))
        await now.change(lambda had: had.change_ensemble(3, ["b3", "b4", "b5"], length=9))
        for bookie in now.bookies[:3]:
            bookie.hold(range(5), term=int(is_unbounded))  # 3 and 4 belong to the next fragment.
        for number in (3, 4, 5):
            await leave(now, number, how)
        async with now.client.open_ledger(LEDGER, recover=True, accept_loss=True) as reader:
            metadata = reader.metadata
            assert [bytes(each.data) async for each in reader.read(0, 2)] == [b"0", b"1", b"2"]
        assert (metadata.is_closed, metadata.last_entry) == (True, 2)
        assert metadata.given_up == GivenUp(2, ("b3", "b4", "b5"), 0)
        # No bookie that is gone is named any more.
        assert {name for each in metadata.fragments for name in each.bookies} == {"b0", "b1", "b2"}
        assert [each.first_entry for each in metadata.fragments] == [0, 3]


@pytest.mark.parametrize("how", ["it runs", "it is down"])
async def test_entries_of_bookies_that_may_come_back_are_not_given_up_for_those_before(how: str) -> None:
    async with scene(6) as now, asyncio.timeout(WAIT_S):
        await now.create()
        await now.change(lambda had: had.change_ensemble(3, ["b3", "b4", "b5"], length=3))
        for bookie in now.bookies[:3]:
            bookie.hold(range(3))
        for number in (3, 4):
            await leave(now, number, "it was ordered to leave")
        await leave(now, 5, how)
        with pytest.raises(client_aio.LedgerRecoveryError, match="decommission"):
            await now.client.open_ledger(LEDGER, recover=True, accept_loss=True)
        metadata, _ = await now.ledgers.read(LEDGER)
        assert metadata.state is LedgerState.IN_RECOVERY
