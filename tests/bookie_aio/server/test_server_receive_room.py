"""The room for receive buffers: whatever is received in part, some frame is always read on."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.config import Limits
from bookie_aio.server.backpressure import Backpressure, ReceiveRoom
from bookie_aio.wire.frames import FrameParser, encode_frame
from bookie_aio.wire.messages import Add, Ping, Status, encode_request
from tests.support.rawclient import WAIT_S, RawClient, block

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies

KIB = 1024
MIB = 1024 * KIB


class Loop:
    """An event loop whose callbacks run where a test says so."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def time(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def run(self) -> None:
        for _ in range(10_000):
            if not self._due:
                return
            self._due.pop(0)()
        raise AssertionError("the loop never comes to rest")


class Senders:
    """The connections of one budget."""

    def __init__(self, received_bytes_max: int) -> None:
        self.limits = Limits(received_bytes_max=received_bytes_max)
        self.loop = Loop()
        self.backpressure = Backpressure(self.limits, cast("asyncio.AbstractEventLoop", self.loop))
        self.budget = self.backpressure.received_of_others
        self.all: list[Sender] = []

    def one(self) -> Sender:
        self.all.append(Sender(self))
        return self.all[-1]

    @property
    def waiting(self) -> list[Sender]:
        return [each for each in self.all if each.is_waiting]

    @property
    def reading(self) -> list[Sender]:
        return [each for each in self.all if each.room._reserved]

    def settle(self) -> None:
        self.loop.run()
        assert self.budget.used == sum(each.room._counted for each in self.all)
        assert self.budget.reservations == len(self.reading)
        assert self.budget.waiting == len(self.waiting)
        assert self.reading or not self.waiting, "frames wait for one another"


class Sender:
    """A connection whose frames arrive in part. While it waits, nothing of it is read."""

    def __init__(self, senders: Senders) -> None:
        self._senders = senders
        self.parser = FrameParser(senders.limits.frame_bytes_max, reuses_buffer=True)
        self.room = ReceiveRoom(self.parser, senders.limits, senders.backpressure)
        self._ahead = b""
        self.is_waiting = False
        self.handled = 0

    def send(self, body_bytes: int) -> None:
        self._ahead += encode_frame(encode_request(Ping(), 1), body_bytes) + bytes(body_bytes)

    def receive(self, count: int = 2**30) -> None:
        while count and self._ahead and not self.is_waiting:
            buffer = self.parser.get_buffer()
            size = min(len(buffer), count, len(self._ahead))
            buffer[:size] = self._ahead[:size]
            self._ahead = self._ahead[size:]
            count -= size
            self.parser.buffer_updated(size)
            self.room_again()

    def room_again(self) -> None:
        while self.parser.next_packed() is not None:
            self.handled += 1
            self.room.end_frame()
        self.is_waiting = not self.room.reserve(self)
        self.room.count()

    def lose(self) -> None:
        self._senders.budget.forget(self)
        self._senders.all.remove(self)
        self.room.close()


def test_parts_of_many_frames_that_fill_the_budget_keep_no_frame_waiting_for_ever() -> None:
    """Each of 2,000 writers begins a frame in one burst. Most wait with a first buffer full."""
    senders = Senders(24 * MIB)
    for _ in range(2000):
        sender = senders.one()
        sender.send(64 * KIB)
        sender.receive(16 * KIB)
    assert len(senders.waiting) > 1000
    while any(not each.handled for each in senders.all):
        senders.settle()
        for sender in senders.reading:
            sender.receive()
    senders.settle()
    assert senders.budget.used <= 24 * MIB


def test_former_buffers_of_writers_keep_no_frame_waiting_for_ever() -> None:
    senders = Senders(24 * MIB)
    writers = [senders.one() for _ in range(12)]
    for _ in range(2):
        for writer in writers:
            writer.send(2 * MIB)
            writer.receive(2 * MIB)
    for _ in range(3):
        for writer in writers:
            writer.send(2 * MIB + 100 * KIB)
            senders.settle()
            writer.receive()
    while any(writer.handled < 5 for writer in writers):
        senders.settle()
        for writer in writers:
            writer.receive()


def test_a_large_frame_that_was_handled_leaves_no_buffer_behind_where_room_is_short() -> None:
    """Each frame may come beyond the limit where no other is read. What they leave must not add up."""
    senders = Senders(8 * MIB)
    for number in range(100):
        stranger = senders.one()
        stranger.send(4 * MIB)
        stranger.send((3 * MIB, 100, 0)[number % 3])
        stranger.receive(4 * MIB + 60)
        senders.settle()
        assert senders.budget.used <= (8 + 5) * MIB + 100 * 16 * KIB
    assert len(senders.waiting) > 25


def test_a_frame_that_waits_holds_no_more_than_has_arrived_of_it() -> None:
    senders = Senders(MIB)
    first = senders.one()
    first.send(MIB)
    first.receive(100)
    waiting = [senders.one() for _ in range(1000)]
    for each in waiting:
        each.send(MIB)
        each.receive(100)
    senders.settle()
    assert {each.parser.buffer_bytes for each in waiting} == {100}


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_of_parts_losses_and_ends_some_frame_is_read_on(seed: int) -> None:
    rng = random.Random(seed)
    senders = Senders(rng.choice((64 * KIB, MIB, 4 * MIB)))
    limit, frame_max = senders.limits.received_bytes_max, senders.limits.frame_bytes_max
    most = rng.choice((5, 40, 150))
    for _ in range(1500):
        if len(senders.all) < most and rng.random() < 0.4:
            senders.one()
        if not senders.all:
            continue
        sender = rng.choice(senders.all)
        chance = rng.random()
        if chance < 0.05:
            sender.lose()
            continue
        if chance < 0.5 and not sender.is_waiting:
            sender.send(rng.choice((0, 100, 10 * KIB, 64 * KIB, 300 * KIB, 2 * MIB)))
        sender.receive(rng.choice((3, 100, 16 * KIB, MIB)))
        if rng.random() < 0.3:
            senders.settle()
            assert senders.budget.used <= 2 * limit + frame_max + 32 * KIB * most
    while senders.waiting or senders.reading:
        senders.settle()
        before = len(senders.waiting)
        for each in senders.reading:  # all that was sent arrives, or the deadline ends the connection
            each.receive()
            if each.room._reserved:
                each.lose()
        senders.settle()
        assert len(senders.waiting) < before or not before or senders.reading
    for each in list(senders.all):
        each.lose()
    assert senders.budget.used == senders.budget.reservations == 0


async def until_a_frame_waits(bookie: Bookie) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:  # there is no event for it
            if bookie._backpressure.received_of_others.waiting:
                return
            await asyncio.sleep(0.01)


async def test_an_add_comes_through_beside_any_number_of_frames_in_part(bookies: Bookies) -> None:
    limits = Limits(received_bytes_max=256 * KIB, received_rate_min=100 * MIB, frame_progress_timeout_s=0.2)
    bookie = await bookies.start(limits=limits)
    part = encode_frame(encode_request(Add(2, 0, 0), 1), 64 * KIB)[:100] + bytes(90)
    strangers = await asyncio.gather(*(bookies.connect(bookie) for _ in range(24)))
    writer = await bookies.connect(bookie)
    for stranger in strangers:
        stranger.send_bytes(part + bytes(16 * KIB - len(part)))
    await until_a_frame_waits(bookie)
    async with asyncio.timeout(3 * WAIT_S):
        assert (await writer.add(1, 0, [bytes(64 * KIB)])).status is Status.OK


async def test_frames_in_part_behind_refused_ones_keep_no_add_waiting(bookies: Bookies) -> None:
    """The body of a refused frame leaves its buffer behind, in which the next frame begins."""
    limits = Limits(received_bytes_max=4 * MIB, received_rate_min=100 * MIB, frame_progress_timeout_s=0.2)
    bookie = await bookies.start(limits=limits)
    refused = encode_frame(encode_request(Ping(), 1), MIB) + bytes(MIB)
    head = encode_frame(encode_request(Add(2, 0, 0), 2), 4 * MIB)[:12]
    strangers: list[RawClient] = []
    for _ in range(8):
        strangers.append(await bookies.connect(bookie))
        strangers[-1].send_bytes(refused + head)
    await until_a_frame_waits(bookie)
    writer = await bookies.connect(bookie)
    body = block(1, 0, [bytes(3 * MIB)])
    async with asyncio.timeout(3 * WAIT_S):
        assert (await writer.call(Add(1, 0, 0), body)).status is Status.OK
