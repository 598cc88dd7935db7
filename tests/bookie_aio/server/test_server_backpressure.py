"""Back-pressure: what one peer does costs bounded memory, and the others little."""

from __future__ import annotations

import asyncio
import gc
import heapq
import inspect
import logging
import os
import resource
import socket
import types
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.config import Limits
from bookie_aio.server.backpressure import Budget, SlowLane
from bookie_aio.server.connection import Connection
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.messages import (
    NO_TERM,
    Add,
    AddFlag,
    Delete,
    Force,
    Info,
    Message,
    Ping,
    Read,
    ReadLac,
    Status,
    WriteLac,
    encode_request,
)
from metadata.access.bookies import split_address
from tests.support.rawclient import WAIT_S, block, hello, lac_statement

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from bookie_aio.server.bookie import Bookie
    from bookie_aio.wire.blocks import Buffer
    from tests.bookie_aio.server.conftest import Bookies

KIB = 1024
MIB = 1024 * KIB


def figure(bookie: Bookie, name: str) -> int:
    value = bookie.info()[name]
    assert isinstance(value, int)
    return value


async def until_steady(bookie: Bookie, name: str, at_least: int) -> int:
    """Wait until a figure has come up to where it must, and no longer moves; gives it."""
    seen = -1
    async with asyncio.timeout(WAIT_S):
        while (now := figure(bookie, name)) != seen or now < at_least:
            seen = now
            await asyncio.sleep(0.05)  # there is no event for "nothing more happens"
    return seen


async def test_a_connection_above_its_limit_is_not_read_until_its_adds_are_durable(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    limits = Limits(connection_bytes_pending_max=256 * KIB)
    bookie = await bookies.start(disk=disk, limits=limits)
    greedy, modest = await bookies.connect(bookie), await bookies.connect(bookie)
    disk.hold()
    adds = [greedy.add(7, i, [bytes(64 * KIB)]) for i in range(200)]
    pending = await until_steady(bookie, "bytes_pending", 256 * KIB)
    assert pending <= 256 * KIB + 65 * KIB
    # The other one is served as if nothing was.
    other = modest.add(8, 0, [b"a"])
    assert (await modest.call(Ping())).status is Status.OK
    disk.release()
    assert (await other).status is Status.OK
    assert {answer.status for answer in await asyncio.wait_for(asyncio.gather(*adds), WAIT_S)} == {Status.OK}
    assert figure(bookie, "bytes_pending") == 0


async def test_a_connection_whose_adds_were_answered_before_they_are_durable_goes_on_when_they_are(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(connection_bytes_pending_max=64 * KIB))
    client = await bookies.connect(bookie)
    disk.hold()
    add = client.add(7, 0, [bytes(64 * KIB)], flags=AddFlag.DEFERRED_SYNC)
    assert (await add).status is Status.OK
    force = client.send(Force(7, 0))
    await until_steady(bookie, "bytes_pending", 64 * KIB)
    disk.release()
    # Nothing is answered when the add is durable, and the force has not been read yet.
    assert (await asyncio.wait_for(force, WAIT_S)).status is Status.OK


STATEMENT = lac_statement(7, 0)._replace(mac=bytes(32))


@pytest.mark.parametrize(
    ("request_", "body", "status"),
    [
        (WriteLac(7, 5, STATEMENT), b"", Status.OK),
        (Force(7, 5), b"", Status.OK),
        (ReadLac(7, 5, -1, 0), b"", Status.OK),
        (Add(7, 4, 0), block(7, 1, [b"late"]), Status.INVALID_TERM),
        (Add(8, 0, 0), block(8, 0, [b"late"]), Status.NO_SUCH_LEDGER),
    ],
    ids=["statement", "force", "fence", "outdated", "deleted"],
)
async def test_what_waits_for_the_disk_is_bounded_whatever_it_is(
    bookies: Bookies, request_: Message, body: bytes, status: Status
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(connection_bytes_pending_max=64 * KIB))
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [b"a"], term=5)).status is Status.OK
    assert (await client.call(Delete(8))).status is Status.OK
    disk.hold()
    held = client.add(7, 1, [b"in flight"], term=5)
    await disk.arrived.wait()
    waiting = [client.send(request_, body) for _ in range(200)]
    pending = await until_steady(bookie, "bytes_pending", 64 * KIB)
    assert pending <= 64 * KIB + 6 * KIB
    disk.release()
    assert (await held).status is Status.OK
    answers = await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
    assert {answer.status for answer in answers} == {status}
    assert figure(bookie, "bytes_pending") == 0


async def test_each_new_fence_counts_until_it_is_durable(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(connection_bytes_pending_max=64 * KIB))
    client = await bookies.connect(bookie)
    disk.hold()
    waiting = [client.send(ReadLac(7, term, -1, 0)) for term in range(1, 200)]
    assert await until_steady(bookie, "bytes_pending", 64 * KIB) <= 64 * KIB + 2 * KIB
    assert bookie._engine is not None
    assert bookie._engine.term(7) < 40  # a fence and an answer that waits for it: two for each
    disk.release()
    await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
    assert figure(bookie, "bytes_pending") == 0


async def test_a_refused_request_that_has_locked_a_ledger_counts_until_that_is_durable(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(connection_bytes_pending_max=64 * KIB))
    client = await bookies.connect(bookie)
    disk.hold()
    no_range = (1, 0, 5, 0, 1, 1)
    for ledger_id in range(200):
        await bookies.protect(ledger_id)
    waiting = [client.send(Read(ledger_id, *no_range), auth=bytes(32)) for ledger_id in range(200)]
    assert await until_steady(bookie, "bytes_pending", 64 * KIB) <= 64 * KIB + 2 * KIB
    disk.release()
    answers = await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S)
    assert {answer.status for answer in answers} == {Status.BAD_REQUEST}
    assert (await client.add(1000, 0, [b"x"])).status is Status.OK  # behind all of them
    assert figure(bookie, "bytes_pending") == 0


async def test_the_total_of_all_connections_is_bounded_and_all_go_on_afterwards(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(bytes_pending_max=512 * KIB))
    clients = [await bookies.connect(bookie) for _ in range(5)]
    disk.hold()
    adds = [
        client.add(number, i, [bytes(64 * KIB)]) for i in range(40) for number, client in enumerate(clients)
    ]
    pending = await until_steady(bookie, "bytes_pending", 512 * KIB)
    assert pending <= 512 * KIB + 65 * KIB
    assert figure(bookie, "connections_waiting") >= 1
    disk.release()
    assert {answer.status for answer in await asyncio.wait_for(asyncio.gather(*adds), WAIT_S)} == {Status.OK}
    assert figure(bookie, "bytes_pending") == figure(bookie, "connections_waiting") == 0


async def test_a_reader_that_takes_no_answers_stops_being_served_and_holds_a_bounded_amount(
    bookies: Bookies,
) -> None:
    limits = Limits(connection_reads_bytes_max=2 * MIB)
    bookie = await bookies.start(limits=limits)
    writer, reader = await bookies.connect(bookie), await bookies.connect(bookie)
    for i in range(4):
        await writer.add(7, i, [bytes(512 * KIB)])
    reader.stop_listening()
    reads = [reader.send(Read(7, NO_TERM, 0, 0, 3, 1, MIB)) for _ in range(200)]
    # One answer may be enough to fill the transport's buffer, so that no other read begins.
    held = await until_steady(bookie, "reads_bytes", 512 * KIB)
    assert held <= 3 * MIB
    executed = bookie.info()["counters"]
    assert (await writer.add(7, 4, [b"another is served"])).status is Status.OK
    reader.listen_again()
    answers = await asyncio.wait_for(asyncio.gather(*reads), WAIT_S)
    assert {len(answer.entries) for answer in answers} == {1}
    assert isinstance(executed, dict)
    assert executed["requests"]["read"] < 100
    await until_steady(bookie, "reads_bytes", 0)
    assert figure(bookie, "reads_bytes") == 0


async def test_a_reader_that_takes_nothing_for_too_long_is_disconnected(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bookie_aio")
    bookie = await bookies.start(limits=Limits(write_stall_timeout_s=0.2))
    writer, reader = await bookies.connect(bookie), await bookies.connect(bookie)
    await writer.add(7, 0, [bytes(MIB)])
    reader.stop_listening()
    for _ in range(30):
        reader.send(Read(7, NO_TERM, 0, 0, 0, 1, MIB))
    async with asyncio.timeout(5):
        while figure(bookie, "connections") == 2:
            await writer.call(Ping())
    assert any("took no answer" in str(vars(record).get("bookie_fields")) for record in caplog.records)
    assert figure(bookie, "reads_bytes") == 0


async def test_a_connection_lost_with_adds_and_reads_on_the_way_gives_everything_back(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    leaver, stayer = await bookies.connect(bookie), await bookies.connect(bookie)
    disk.hold()
    leaver.add(7, 0, [b"a"])
    leaver.send(Read(7, 5, 0, 0, 0, 1, MIB))
    await leaver.call(Ping())
    assert figure(bookie, "bytes_pending") > 0
    assert figure(bookie, "reads_bytes") == MIB
    await leaver.close()
    while figure(bookie, "connections") == 2:
        await stayer.call(Ping())
    await stayer.call(Ping())
    assert figure(bookie, "reads_bytes") == 0
    disk.release()
    assert (await stayer.call(Read(7, 5, 0, 0, 0, 1, MIB))).entries == [(0, b"a")]
    assert figure(bookie, "bytes_pending") == 0


async def test_readers_share_a_budget_that_keeps_no_writer_waiting(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(reads_bytes_max=2 * MIB))
    writer = await bookies.connect(bookie)
    await writer.add(7, 0, [bytes(MIB)])
    readers = [await bookies.connect(bookie) for _ in range(4)]
    for reader in readers:
        reader.stop_listening()
    reads = [reader.send(Read(7, NO_TERM, 0, 0, 0, 1, MIB)) for _ in range(20) for reader in readers]
    assert await until_steady(bookie, "reads_bytes", MIB) <= 3 * MIB
    assert figure(bookie, "connections_waiting") >= 1
    assert (await writer.add(7, 1, [b"not kept waiting"])).status is Status.OK
    await readers[0].close()  # with reads that have not begun
    for reader in readers[1:]:
        reader.listen_again()
    answers = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), WAIT_S)
    assert sum(not isinstance(answer, BaseException) for answer in answers) >= 60
    await until_steady(bookie, "reads_bytes", 0)
    assert figure(bookie, "reads_bytes") == figure(bookie, "connections_waiting") == 0


async def test_a_slow_reader_gives_way_once_others_wait_for_the_room_it_takes_up(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bookie_aio")
    # One answer that it does not take uses up the room, however much of it the system's buffers hold.
    limits = Limits(reads_bytes_max=MIB, connection_reads_bytes_max=MIB, contended_stall_timeout_s=0.2)
    bookie = await bookies.start(limits=limits)
    writer, slow = await bookies.connect(bookie), await bookies.connect(bookie)
    await writer.add(7, 0, [bytes(MIB)])
    slow.stop_listening()
    for _ in range(40):
        slow.send(Read(7, NO_TERM, 0, 0, 0, 1, MIB))
    assert await until_steady(bookie, "reads_bytes", MIB) >= MIB
    # Alone, it may take its time: nobody misses the room.
    await asyncio.sleep(0.5)
    assert figure(bookie, "connections") == 2
    answer = await writer.call(Read(7, NO_TERM, 0, 0, 0, 1, MIB))
    assert len(answer.entries) == 1
    assert figure(bookie, "connections") == 1
    assert any("took no answer for 0.2 s" in str(vars(one).get("bookie_fields")) for one in caplog.records)
    await until_steady(bookie, "reads_bytes", 0)


async def test_a_storm_of_reads_runs_a_few_at_a_time_and_connections_take_turns(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(reads_max=4, connection_reads_max=2))
    writer = await bookies.connect(bookie)
    await writer.add(7, 0, [b"a"])
    readers = [await bookies.connect(bookie) for _ in range(4)]
    disk.hold()
    held = writer.add(7, 1, [b"b"])
    await writer.call(Ping())
    # Fencing reads wait for the disk, so they are being computed until the test lets it go.
    reads = [[reader.send(Read(7, 0, 0, 0, 0, 1, KIB)) for reader in readers] for _ in range(10)]
    assert await until_steady(bookie, "reads_running", 4) == 4
    waiting = await until_steady(bookie, "connections_waiting", 2)
    # Each reader waits that may run more reads. How many these are depends on the order in which reads came.
    of_readers = sorted(len(connection.reads) for connection in bookie._connections)[1:]
    assert waiting == sum(count < 2 for count in of_readers)
    assert (await writer.call(Ping())).status is Status.OK
    disk.release()
    await held
    first = await asyncio.wait_for(asyncio.gather(*reads[0]), WAIT_S)
    # Whoever was kept waiting is served before those that were first have had all they asked for.
    assert [len(answer.entries) for answer in first] == [1, 1, 1, 1]
    for answers in reads:
        assert [len(answer.entries) for answer in await asyncio.gather(*answers)] == [1, 1, 1, 1]
    assert figure(bookie, "reads_running") == figure(bookie, "connections_waiting") == 0


async def test_a_connection_that_always_has_reads_to_go_on_with_leaves_others_their_turn(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(reads_max=2))
    greedy, modest = await bookies.connect(bookie), await bookies.connect(bookie)
    await greedy.add(7, 0, [b"a"])
    disk.hold()
    held = modest.add(7, 1, [b"b"])
    first = [greedy.send(Read(7, 0, 0, 0, 0, 1, KIB)) for _ in range(2)]  # fencing: until the disk is let go
    more = [greedy.send(Read(7, NO_TERM, 0, 0, 0, 1, KIB)) for _ in range(500)]
    await until_steady(bookie, "connections_waiting", 1)
    wanted = modest.send(Read(7, NO_TERM, 0, 0, 0, 1, KIB))
    await until_steady(bookie, "connections_waiting", 2)
    send, sent = Connection.send, list[int]()

    def noted(self: Connection, *buffers: Buffer) -> None:
        sent.append(id(self))
        send(self, *buffers)

    # The order in which answers leave the bookie. In that of their arrival, many of one socket come at once.
    monkeypatch.setattr(Connection, "send", noted)
    disk.release()
    await asyncio.wait_for(asyncio.gather(held, wanted, *first, *more), WAIT_S)
    of_modest = min(set(sent), key=sent.count)
    assert sent.count(of_modest) == 2
    assert max(number for number, one in enumerate(sent) if one == of_modest) < 50
    assert figure(bookie, "reads_running") == figure(bookie, "connections_waiting") == 0


class Deaf(asyncio.Transport):
    """A transport that takes what it is given."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_a_connection_with_many_frames_at_once_leaves_others_their_turn(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(connection_frames_per_turn=10, slow_lane_slice_s=60))
    connection = bookie._accept()
    connection.connection_made(Deaf())
    requests = [hello(), *[Ping()] * 35]
    data = b"".join(encode_frame(encode_request(request, n)) for n, request in enumerate(requests))
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    handled = []
    for _ in range(5):
        counters = bookie.info()["counters"]
        assert isinstance(counters, dict)
        handled.append(counters["requests"]["ping"])
        await asyncio.sleep(0)
    assert handled == [9, 19, 29, 35, 35]
    connection.connection_lost(None)


async def test_frames_in_part_have_one_budget(bookies: Bookies) -> None:
    """A frame gets its buffer only where all of it has room. The others wait unread."""
    limits = Limits(received_bytes_max=8 * MIB, received_rate_min=100 * MIB)
    bookie = await bookies.start(limits=limits)
    writer = await bookies.connect(bookie)
    assert (await writer.add(1, 0, [b"a"])).status is Status.OK
    part = encode_frame(encode_request(Add(2, 0, 0), 1), 4 * MIB) + bytes(4 * MIB - 1)
    strangers = [await bookies.connect(bookie) for _ in range(8)]
    for stranger in strangers:
        stranger.send_bytes(part)
    await until_steady(bookie, "connections_waiting", 1)
    assert figure(bookie, "received_bytes") <= 10 * MIB
    # A writer's frames have a budget of their own.
    assert (await asyncio.wait_for(writer.add(1, 1, [bytes(3 * MIB)]), WAIT_S)).status is Status.OK
    # Those that hold room for a frame that does not arrive lose it, until all have had their turn.
    async with asyncio.timeout(3 * WAIT_S):
        for stranger in strangers[:-2]:
            await stranger.closed.wait()


class Hand:
    """An event loop whose time moves only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now + delay, len(self.due), callback))

    def run(self, until: float) -> None:
        while self.due and self.due[0][0] <= until:
            at, _, callback = heapq.heappop(self.due)
            self.now = max(self.now, at)
            callback()
        self.now = max(self.now, until)


class Busy:
    """A connection that always has another request, of a cost in seconds."""

    def __init__(
        self, lane: SlowLane, hand: Hand, cost: float, price: float, *, is_writer: bool = False
    ) -> None:
        self.lane, self.hand, self.cost, self.price, self.is_writer = lane, hand, cost, price, is_writer
        self.handled = 0

    def take_turn(self) -> None:
        while self.lane.begin(self, self.price, is_writer=self.is_writer):
            self.hand.now += self.cost
            self.handled += 1
            self.lane.end()

    @property
    def spent(self) -> float:
        return self.handled * self.cost


def lane_of(hand: Hand) -> SlowLane:
    return SlowLane(0.0005, cast("asyncio.AbstractEventLoop", hand), hand.time, hand.time)


def run_with_adds(hand: Hand, lane: SlowLane, seconds: float) -> float:
    """Let time pass in which an add becomes durable every 10 ms. Return the longest time it was late."""
    late, at, end = 0.0, hand.now, hand.now + seconds
    while hand.now < end:
        at += 0.01
        hand.run(at)
        late = max(late, hand.now - at)
        lane.adds += 1
    return late


@pytest.mark.parametrize(("price", "share"), [(1.0, 0.5), (8.0, 1 / 9)])
def test_while_adds_are_served_other_requests_get_a_share_of_the_time(price: float, share: float) -> None:
    hand = Hand()
    lane = lane_of(hand)
    crowd = [Busy(lane, hand, 0.0001, price) for _ in range(100)]
    for one in crowd:
        one.take_turn()
    late = run_with_adds(hand, lane, 10.0)
    assert share * 0.8 <= sum(one.spent for one in crowd) / 10.0 <= share * 1.05
    assert late <= 0.0005 + 0.0002  # a slice, and a turn that has begun


def test_while_no_adds_come_other_requests_get_all_of_the_time() -> None:
    hand = Hand()
    lane = lane_of(hand)
    crowd = [Busy(lane, hand, 0.0001, 8.0) for _ in range(3)]
    for one in crowd:
        one.take_turn()
    hand.run(hand.now + 1.0)
    before = sum(one.spent for one in crowd)
    hand.run(hand.now + 1.0)
    assert sum(one.spent for one in crowd) - before > 0.95


def test_turns_are_counted_in_time_and_not_in_requests() -> None:
    """A connection whose requests take twenty times as long gets a twentieth of them, or one in each turn."""
    hand = Hand()
    lane = lane_of(hand)
    cheap, dear = Busy(lane, hand, 0.00001, 8.0), Busy(lane, hand, 0.0002, 8.0)
    for one in (cheap, dear):
        one.take_turn()
    run_with_adds(hand, lane, 10.0)
    assert 15 <= cheap.handled / dear.handled <= 25


def test_writers_go_first_and_keep_nobody_out() -> None:
    """The adds of a writer wait behind its own reads."""
    hand = Hand()
    lane = lane_of(hand)
    strangers = [Busy(lane, hand, 0.0001, 1.0) for _ in range(100)]
    writer = Busy(lane, hand, 0.0001, 1.0, is_writer=True)
    for one in (*strangers, writer):
        one.take_turn()
    run_with_adds(hand, lane, 5.0)
    of_strangers = sum(one.handled for one in strangers)
    assert 2.5 <= writer.handled / of_strangers <= 3.5


def test_a_connection_that_is_gone_gets_no_turn() -> None:
    hand = Hand()
    lane = lane_of(hand)
    here, gone = Busy(lane, hand, 0.001, 8.0), Busy(lane, hand, 0.001, 8.0)
    for one in (here, gone):
        one.take_turn()
    lane.forget(gone)
    before = gone.handled
    run_with_adds(hand, lane, 1.0)
    assert gone.handled == before
    assert here.handled > 1


@pytest.mark.pure
def test_the_time_of_work_in_tasks_counts() -> None:
    hand = Hand()
    lane = lane_of(hand)

    @types.coroutine
    def wait() -> Generator[str, str, str]:
        return (yield "waits")

    async def work() -> str:
        hand.now += 0.003
        try:
            answer = await wait()
        except ValueError:
            answer = "thrown"
        hand.now += 0.004
        return answer

    for thrown in (None, ValueError("out")):
        timed = lane.timed(work(), 1.0)
        assert inspect.iscoroutine(timed)  # from Python 3.12 on, a task runs nothing else
        began = hand.now
        assert timed.send(None) == "waits"
        hand.run(hand.now + 60.0)
        with pytest.raises(StopIteration) as end:
            timed.throw(thrown) if thrown else timed.send("sent")
        assert end.value.value == ("thrown" if thrown else "sent")
        assert hand.now - began == pytest.approx(60.007)
        lane.adds += 1
        busy = Busy(lane, hand, 0.001, 1.0)
        busy.take_turn()
        assert not busy.handled  # the 4 ms are a debt
        run_with_adds(hand, lane, 1.0)
        assert busy.handled
        lane.forget(busy)


async def test_bursts_of_connections_are_all_served(bookies: Bookies) -> None:
    bookie = await bookies.start()
    writer = await bookies.connect(bookie)
    await writer.add(1, 0, [b"x"])
    host, port = split_address(bookie.address)
    for _ in range(3):
        burst = []
        for _ in range(200):
            burst.append(socket.socket())
            burst[-1].setblocking(False)
            burst[-1].connect_ex((host, port))
        client = await bookies.connect(bookie)
        assert (await client.call(Ping())).status is Status.OK
        assert figure(bookie, "connections") >= 200
        for one in burst:
            one.close()
        await client.close()
    assert (await writer.add(1, 1, [b"x"])).status is Status.OK
    for _ in range(1000):  # there is no event for it
        if figure(bookie, "connections") == 1:
            break
        await asyncio.sleep(0.01)
    assert figure(bookie, "connections") == 1


async def test_a_bookie_without_descriptors_says_so_and_accepts_again_later(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    bookie = await bookies.start()
    writer = await bookies.connect(bookie)
    late, taken = socket.socket(), []
    late.setblocking(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 20, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        late.connect_ex(split_address(bookie.address))
        for _ in range(1000):  # there is no event for it
            if caplog.records:
                break
            await asyncio.sleep(0.01)
        assert (await writer.add(1, 0, [b"x"])).status is Status.OK
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [record.getMessage() for record in caplog.records] == ["no connection can be accepted"]
    assert "Too many open files" in str(vars(caplog.records[0])["bookie_fields"])
    late.setblocking(True)
    greeting = encode_frame(encode_request(hello(), 0))
    await asyncio.to_thread(late.sendall, greeting)
    assert await asyncio.to_thread(late.recv, 4096)
    late.close()


async def test_an_add_does_not_wait_for_dear_requests_of_others(bookies: Bookies) -> None:
    bookie = await bookies.start()
    crowd, writer = [await bookies.connect(bookie) for _ in range(20)], await bookies.connect(bookie)
    await writer.add(1, 0, [b"x"])
    infos = [one.send(Info()) for one in crowd for _ in range(100)]
    for number in range(1, 4):
        assert (await writer.add(1, number, [b"x"])).status is Status.OK
    assert not all(one.done() for one in infos)
    assert {one.status for one in await asyncio.gather(*infos)} == {Status.OK}


async def test_many_that_wait_for_one_ledger_are_woken_once_each(bookies: Bookies) -> None:
    bookie = await bookies.start()
    writer = await bookies.connect(bookie)
    await writer.add(7, 0, [b"a"])
    tails = [await bookies.connect(bookie) for _ in range(20)]
    polls = [tail.send(ReadLac(7, NO_TERM, 0, 10_000)) for tail in tails for _ in range(5)]
    for tail in tails:
        await tail.call(Ping())
    assert figure(bookie, "polls_waiting") == 100
    await writer.add(7, 1, [b"b"], lac=0)  # which they know: nobody is woken
    await writer.call(Ping())
    assert figure(bookie, "polls_waiting") == 100
    await writer.add(7, 2, [b"c"], lac=1)
    await asyncio.wait_for(asyncio.gather(*polls), WAIT_S)
    assert figure(bookie, "polls_waiting") == 0
    for tail in tails:
        await tail.call(Ping())
        assert len(tail.arrived) == 1 + 1 + 5 + 1  # greeting, ping, one answer for each poll, ping


async def test_idle_connections_hold_no_buffers(bookies: Bookies) -> None:
    bookie = await bookies.start()
    clients = [await bookies.connect(bookie) for _ in range(50)]
    for number, client in enumerate(clients):
        await client.add(number, 0, [bytes(100)])
    for client in clients:
        await client.call(Ping())
    assert sum(connection.buffer_bytes for connection in bookie._connections) == 0


async def test_a_connection_that_was_busy_lets_go_of_its_large_buffer(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(idle_buffer_s=0.05, handshake_timeout_s=2))
    client = await bookies.connect(bookie)
    (connection,) = bookie._connections
    await asyncio.gather(*(client.add(7, number, [bytes(MIB)]) for number in range(8)))
    assert connection.buffer_bytes > 16 * KIB
    for _ in range(1000):  # there is no event for it
        if connection.buffer_bytes:
            await asyncio.sleep(0.01)
    assert connection.buffer_bytes == 0
    assert (await client.call(Ping())).status is Status.OK


@pytest.mark.pure
@pytest.mark.parametrize("ending", ["the peer", "a bad frame", "the bookie", "a blocked request"])
async def test_a_connection_that_is_lost_leaves_nothing_for_the_garbage_collector(
    bookies: Bookies, ending: str
) -> None:
    """The collector of a bookie runs seldom: buffers that waited for it would add up."""
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk, limits=Limits(connection_bytes_pending_max=64 * KIB))
    client = await bookies.connect(bookie)
    assert (await client.add(7, 0, [bytes(100)])).status is Status.OK
    (kept,) = bookie._connections
    connection = weakref.ref(kept)
    lost = kept.lost
    del kept
    gc.collect()
    gc.disable()
    try:
        if ending == "a bad frame":
            client.send_bytes(bytes(100 * KIB))
            await client.gone()
        else:
            if ending == "a blocked request":
                disk.hold()
                for number in range(1, 5):
                    client.add(7, number, [bytes(64 * KIB)])
                await until_steady(bookie, "bytes_pending", 64 * KIB)
            client.send_bytes(encode_frame(encode_request(Add(7, 0, 0), 9), MIB) + bytes(MIB - 1))
            for _ in range(1000):  # there is no event for it
                found = connection()
                assert found is not None
                if found._parser.is_mid_frame or found._is_blocked:
                    break
                del found
                await asyncio.sleep(0.01)
            if ending == "the bookie":
                found.close()
            del found
        await client.close()
        await asyncio.wait_for(lost, WAIT_S)
        disk.release()
        for _ in range(1000):
            if connection() is not None:
                await asyncio.sleep(0.01)
        assert connection() is None
    finally:
        gc.enable()


async def test_a_connection_that_is_closed_handles_none_of_the_frames_that_wait(bookies: Bookies) -> None:
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    assert (await client.call(Ping())).status is Status.OK
    (connection,) = bookie._connections
    connection._is_blocked = True  # and what blocked it is over, which nobody has told it yet
    added = client.add(7, 0, [b"late"])
    connection._has_received = False
    for _ in range(1000):  # there is no event for it
        if not connection._has_received:
            await asyncio.sleep(0.01)
    assert connection._has_received
    connection.close()
    await client.gone()
    added.cancel()
    assert bookie._engine is not None
    await asyncio.sleep(0)
    assert bookie._engine.last_entry(7) == -1
    assert not bookie._engine.is_pending(7)


class Waiter:
    """Waits for room, and takes some when it comes."""

    def __init__(self, budget: Budget, name: str, turns: list[str], takes: int) -> None:
        self.budget, self.name, self.turns, self.takes = budget, name, turns, takes

    def room_again(self) -> None:
        self.turns.append(self.name)
        self.budget.count(self.takes)
        if self.budget.is_exhausted:
            self.budget.wait(self)


async def test_room_is_given_out_in_turn() -> None:
    budget = Budget(10, asyncio.get_running_loop())
    budget.count(10)
    turns: list[str] = []
    for name in "abc":
        budget.wait(Waiter(budget, name, turns, takes=10))
    for _ in range(5):
        budget.count(-10)
        await asyncio.sleep(0)
    assert turns == ["a", "b", "c", "a", "b"]
