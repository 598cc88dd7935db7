"""Deadlines on an event loop that is busy all the time: each ends, and none before what came is read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import (
    ADDED,
    ALIVE_ID,
    VERSION_MAX,
    Add,
    Done,
    HelloAnswer,
    Op,
    encode_answer,
)
from bookie_aio.wire.prepared import PreparedRequest
from client_aio.bookies.connection import BookieConnection
from client_aio.ledger.replication import StallWatch
from metadata.awake import LOOK_INTERVAL_S, LOOKS_PER_PERIOD, AwakeClock
from metadata.errors import BookieUnavailableError, OperationTimeoutError
from tests.support.busyloop import BusyLoop, run_busy

if TYPE_CHECKING:
    from client_aio.bookies.connection import Outcome

FRAME_BYTES = 1 << 20
SLICES = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6)


class Line:
    """A connection to a bookie, whose answers the test lets come."""

    def __init__(self, loop: BusyLoop, ping_timeout_s: float) -> None:
        self._loop = loop
        self.connection = BookieConnection("b1", lambda _: None, ping_timeout_s)
        self.connection.connection_made(cast("asyncio.Transport", self))
        self.ended: asyncio.Future[tuple[float, Outcome]] = loop.create_future()

    def write(self, data: bytes) -> None: ...

    def writelines(self, data: list[bytes]) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def receive(self, data: bytes) -> None:
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))

    async def greet(self) -> None:
        shaking = asyncio.create_task(self.connection._handshake("", 10.0))
        await asyncio.sleep(0)
        answer = HelloAnswer(VERSION_MAX, "b1", "", "nonce", FRAME_BYTES, FRAME_BYTES)
        self.receive(encode_frame(encode_answer(Op.HELLO, 0, answer)))
        await shaking

    def add(self, timeout_s: float) -> None:
        request = PreparedRequest(Add(7, 0, 0))
        self.connection.send_prepared(request, self._add_ended, request, b"x", 1, timeout_s)

    def _add_ended(self, sent: PreparedRequest, outcome: Outcome, body: memoryview) -> None:
        self._ended(outcome, body)

    def _ended(self, outcome: Outcome, _: memoryview) -> None:
        if not self.ended.done():
            self.ended.set_result((self._loop.time(), outcome))


def latest_s(timeout_s: float, slices: list[float]) -> float:
    """Return when a timeout has ended that is looked at in each `LOOK_INTERVAL_S`; see `metadata.awake`."""
    standstill_s = 2 * max(slices) + LOOK_INTERVAL_S
    return (
        timeout_s
        + (2 + timeout_s / (LOOKS_PER_PERIOD - 1) / LOOK_INTERVAL_S) * standstill_s
        + 8 * max(slices)
    )


@settings(deadline=None, max_examples=50)
@given(SLICES, st.floats(0.5, 4.0), st.booleans())
def test_a_request_that_is_not_answered_ends(slices: list[float], timeout_s: float, by_ping: bool) -> None:
    async def main(loop: BusyLoop) -> tuple[float, Outcome]:
        line = Line(loop, timeout_s if by_ping else 1000.0)
        await line.greet()
        working = asyncio.create_task(loop.work(slices, 100.0))
        line.add(1000.0 if by_ping else timeout_s)
        ended = await line.ended
        working.cancel()
        return ended

    ended_at, outcome = run_busy(main)
    assert isinstance(outcome, BookieUnavailableError if by_ping else OperationTimeoutError)
    assert timeout_s <= ended_at <= latest_s(timeout_s + (0.5 if by_ping else 0.0), slices)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.05, 12.0), min_size=1, max_size=6), st.floats(0.5, 4.0), st.floats(0, 1))
def test_an_answer_that_came_in_time_is_read_first(
    slices: list[float], timeout_s: float, share: float
) -> None:
    async def main(loop: BusyLoop) -> Outcome:
        line = Line(loop, 1000.0)
        await line.greet()
        working = asyncio.create_task(loop.work(slices, 100.0))
        line.add(timeout_s)
        loop.come(loop.time() + share * timeout_s, lambda: line.receive(ADDED.pack(1)))
        _, outcome = await line.ended
        working.cancel()
        return outcome

    assert isinstance(run_busy(main), Done)


def test_all_that_came_is_read_though_it_takes_many_reads() -> None:
    """The second standstill is not excused: it is as long as the first."""

    async def main(loop: BusyLoop) -> Outcome:
        line = Line(loop, 1000.0)
        await line.greet()
        line.add(4.0)
        alive = encode_frame(encode_answer(Op.PING, ALIVE_ID, Done()))
        for _ in range(50):
            loop.come(16.0, lambda: line.receive(alive))
        loop.come(16.0, lambda: line.receive(ADDED.pack(1)))
        await loop.work([5.0], 20.0)
        return (await line.ended)[1]

    assert isinstance(run_busy(main), Done)


@settings(deadline=None, max_examples=50)
@given(SLICES, st.floats(0.5, 4.0))
def test_adds_that_nobody_acknowledges_stall(slices: list[float], timeout_s: float) -> None:
    async def main(loop: BusyLoop) -> float:
        clock, stalled = AwakeClock(), loop.create_future()
        clock.start()
        window = SimpleNamespace(last_entry_reported=4, last_add_pushed=5, ledger_id=7, ack_quorum=2)
        StallWatch(cast("Any", window), lambda _: stalled.set_result(loop.time()), timeout_s, clock)
        working = asyncio.create_task(loop.work(slices, 100.0))
        ended_at = await stalled
        working.cancel()
        clock.stop()
        return cast("float", ended_at)

    # The watch looks four times in its timeout.
    assert timeout_s <= run_busy(main) <= latest_s(1.25 * timeout_s, slices)
