"""What is watched at a bookie that answers no WATCH for longer than the timeout, and then all of them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.server.handlers.lac import Watches
from bookie_aio.wire.messages import Done, Watch
from bookie_aio.wire.watching import Moved, encode_moved, parse_asked
from client_aio.config import ClientConfig
from client_aio.tails import WatchedBookie
from metadata.errors import OperationTimeoutError
from tests.sim.cluster.loop import SimLoop
from tests.support.rawclient import lac_statement

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.wire.blocks import LacStatement

CONFIG = ClientConfig(read_timeout_s=10.0, long_poll_s=20.0)
TIMEOUT_S = 30.0
PEER: Any = "the connection"


class HungBookie:
    """A bookie that reads no request for a while, and the one connection to it, which stays open."""

    is_open = True

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watches = Watches(self._loop, 100, 100, self._answer)
        self._lacs: dict[int, int] = {}
        self._unread: deque[tuple[int, Watch, bytes]] | None = deque()
        self._outstanding: dict[int, Callable[[Any, memoryview], None]] = {}
        self.asked = 0

    async def get(self, bookie_id: str) -> HungBookie:
        return self

    def request(
        self, request: Watch, on_answer: Any, *, body: list[bytes], body_bytes: int, timeout_s: float
    ) -> None:
        self.asked += 1
        self._outstanding[self.asked] = on_answer
        self._loop.call_later(timeout_s, self._settle, self.asked, OperationTimeoutError("late"))
        frame = self.asked, request, b"".join(body)
        if self._unread is None:
            self._loop.call_later(0.001, self._read, *frame)
        else:
            self._unread.append(frame)

    def recover(self) -> None:
        """Read all that has come."""
        unread, self._unread = self._unread, None
        for frame in unread or ():
            self._read(*frame)

    def move(self, ledger_id: int, lac: int) -> None:
        self._lacs[ledger_id] = lac
        for peer in self._watches.moved(ledger_id, lac):
            self._watches.tell(peer)

    def _read(self, request_id: int, request: Watch, body: bytes) -> None:
        assert self._watches.change(
            PEER, parse_asked(memoryview(body)), lambda ledger_id: self._lacs.get(ledger_id, -1)
        )
        self._watches.wait(PEER, request_id, request.wait_ms / 1000)

    def _answer(self, peer: object, request_id: int, ledger_ids: list[int]) -> None:
        rows = [Moved(each, lac_statement(each, self._lacs[each])) for each in ledger_ids]
        self._loop.call_later(0.001, self._settle, request_id, Done(), memoryview(encode_moved(rows)))

    def _settle(self, request_id: int, outcome: Any, body: memoryview = memoryview(b"")) -> None:  # noqa: B008
        on_answer = self._outstanding.pop(request_id, None)
        if on_answer is not None:  # An answer to a request that has timed out is dropped.
            on_answer(outcome, body)


class Told:
    """The tails of a client, each of one ledger: what they are told."""

    def __init__(self) -> None:
        self.lacs: dict[int, int] = {}

    def look(self) -> None:
        """There is no other bookie."""

    def ledger(self, ledger_id: int) -> Any:
        def moved(statement: LacStatement, bookie_id: str) -> None:
            self.lacs[ledger_id] = statement.lac

        return SimpleNamespace(moved=moved)


async def over_a_stall(outstanding: int, moving: int) -> None:
    """Arm so many ledgers one by one before the stall is over; of these, so many move during the stall."""
    hung, told = HungBookie(), Told()
    tails, pool = told, hung
    watched = WatchedBookie(tails, pool, CONFIG, "b0")  # type: ignore[arg-type]
    ledgers = range(outstanding)
    for ledger_id in ledgers:
        watched.arm(ledger_id, -1)
        await asyncio.sleep(1.0)
    for ledger_id in range(moving):
        hung.move(ledger_id, 0)
    assert hung.asked == outstanding
    await asyncio.sleep(TIMEOUT_S + 0.5 - outstanding)  # Only the first one is overdue.
    assert hung.asked == outstanding + 1
    hung.recover()
    await asyncio.sleep(1.0)
    assert told.lacs == dict.fromkeys(range(moving), 0)
    assert hung.asked <= outstanding + 2
    for ledger_id in range(moving):
        watched.arm(ledger_id, 0)
    asked = hung.asked
    await asyncio.sleep(10 * CONFIG.long_poll_s)
    assert hung.asked <= asked + 12
    for ledger_id in ledgers:
        hung.move(ledger_id, 1)
        await asyncio.sleep(0.1)
    assert told.lacs == dict.fromkeys(ledgers, 1)
    watched.stop()


@pytest.mark.parametrize("moving", [0, 1, 2])
@pytest.mark.parametrize("outstanding", [1, 2, 4])
def test_a_bookie_that_answers_late_is_watched_by_one_request_afterwards(
    outstanding: int, moving: int
) -> None:
    loop = SimLoop(random.Random(0))
    try:
        loop.run(over_a_stall(outstanding, min(outstanding, moving)), until=1000.0)
    finally:
        loop.end()
