"""When adds leave: those that would only wait at the bookie wait here, and none waits for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.many import encode_done
from bookie_aio.wire.messages import (
    ADDED,
    MANY_MAX,
    VERSION_MAX,
    Add,
    Done,
    Failure,
    HelloAnswer,
    Op,
    Ping,
    Status,
    WriteLac,
    decode_request,
    encode_answer,
    encode_failure,
)
from bookie_aio.wire.prepared import PreparedRequest
from client_aio.bookies.connection import BookieConnection, connect
from client_aio.context import Flushes
from client_aio.core.liveness import PING_TIMEOUT_S
from metadata.errors import BookieUnavailableError, MalformedFrameError, OperationTimeoutError
from tests.support.rawclient import lac_statement

if TYPE_CHECKING:
    from client_aio.bookies.connection import Outcome

WAIT_S = 10.0


class Wire:
    """A transport that keeps what is written, write by write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.written = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))
        self.written.set()

    def writelines(self, data: list[bytes]) -> None:
        self.write(b"".join(data))

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    def requests(self) -> list[list[tuple[int, int]]]:
        """Return operation and id of the requests of each write."""
        found = []
        for data in self.writes:
            parser = FrameParser(FRAME_BYTES_MAX)
            parser.feed(data)
            decoded = [decode_request(header) for header, _ in parser.frames()]
            found.append([(int(request.op), request_id) for request_id, _, request in decoded])
        return found


class Adding:
    """A connection, and what came of the adds sent over it."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.connection = BookieConnection("b1", lambda _: None, PING_TIMEOUT_S)
        self.connection.connection_made(cast("asyncio.Transport", self.wire))
        self.outcomes: list[Outcome] = []
        self.moved = asyncio.Event()

    @classmethod
    async def greeted(cls, version: int = VERSION_MAX, frame_bytes_max: int = FRAME_BYTES_MAX) -> Adding:
        """Return a connection to a bookie that speaks this version."""
        adding = cls()
        shaking = asyncio.create_task(adding.connection._handshake("", WAIT_S))
        await asyncio.sleep(0)
        answer = HelloAnswer(version, "b1", "", "nonce", frame_bytes_max, frame_bytes_max)
        adding.receive(encode_frame(encode_answer(Op.HELLO, 0, answer)))
        await shaking
        adding.wire.writes.clear()
        return adding

    def add(self, size: int = 100, *, ledger_id: int = 7, timeout_s: float = WAIT_S) -> None:
        request = PreparedRequest(Add(ledger_id, 0, 0))
        self.connection.send_prepared(request, self._add_ended, request, bytes(size), size, timeout_s)

    def tell_lac(self, ledger_id: int) -> None:
        message = WriteLac(ledger_id, 0, lac_statement(ledger_id, 4))
        self.connection.tell_lac(message, self._ended, WAIT_S, None)

    def receive(self, data: bytes) -> None:
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))

    def answer(self, *request_ids: int) -> None:
        self.receive(b"".join(map(ADDED.pack, request_ids)))

    async def complete(self, count: int) -> None:
        """Wait until so many adds have an outcome."""
        while len(self.outcomes) < count:
            self.moved.clear()
            await self.moved.wait()

    def _add_ended(self, sent: PreparedRequest, outcome: Outcome, body: memoryview) -> None:
        self._ended(outcome, body)

    def _ended(self, outcome: Outcome, _: memoryview) -> None:
        self.outcomes.append(outcome)
        self.moved.set()

    async def turn(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)


ADD, PING, ADDS = int(Op.ADD), int(Op.PING), int(Op.ADDS)
WRITE_LAC, WRITE_LACS = int(Op.WRITE_LAC), int(Op.WRITE_LACS)


async def test_the_adds_of_a_turn_leave_together_at_its_end() -> None:
    adding = Adding()
    adding.add()
    adding.add()
    assert adding.wire.writes == []
    await adding.turn()
    assert adding.wire.requests() == [[(ADD, 0), (ADD, 1)]]
    adding.connection.close()


async def test_adds_behind_one_that_is_not_answered_wait_for_its_answer() -> None:
    adding = Adding()
    adding.add()
    await adding.turn()
    for _ in range(3):
        adding.add()
        await adding.turn()
    assert adding.wire.requests() == [[(ADD, 0)]]
    adding.answer(0)
    await adding.turn()
    assert adding.wire.requests() == [[(ADD, 0)], [(ADD, 1), (ADD, 2), (ADD, 3)]]
    adding.answer(1, 2, 3)
    assert len(adding.outcomes) == 4
    adding.connection.close()


async def test_what_makes_a_batch_does_not_wait() -> None:
    adding = Adding()
    adding.add()
    await adding.turn()
    adding.add(20_000)
    assert len(adding.wire.writes) == 1
    adding.add(20_000)
    assert adding.wire.requests() == [[(ADD, 0)], [(ADD, 1), (ADD, 2)]]
    adding.connection.close()


async def test_another_request_overtakes_no_add() -> None:
    adding = Adding()
    adding.add()
    await adding.turn()
    adding.add()
    adding.connection.request(Ping(), lambda *_: None, timeout_s=WAIT_S)
    assert adding.wire.requests() == [[(ADD, 0)], [(ADD, 1)], [(PING, 2)]]
    adding.connection.close()


async def test_no_add_waits_for_a_bookie_that_stays_silent() -> None:
    adding = Adding()
    adding.add()
    await adding.turn()
    adding.add()
    adding.wire.written.clear()
    await asyncio.wait_for(adding.wire.written.wait(), WAIT_S)
    assert adding.wire.requests() == [[(ADD, 0)], [(ADD, 1)]]
    adding.connection.close()
    assert len(adding.outcomes) == 2


async def test_adds_do_not_wait_for_the_deadlines_behind_one_that_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adding = await Adding.greeted()
    monkeypatch.setattr(adding.connection, "_check_deadlines", lambda: None)
    adding.add()  # the bookie reads the id counter for it, say
    await adding.turn()
    for number in range(2, 5):
        adding.wire.written.clear()
        adding.add(ledger_id=8)
        await asyncio.wait_for(adding.wire.written.wait(), WAIT_S)
        adding.answer(number)
    assert adding.wire.requests() == [[(ADD, number)] for number in range(1, 5)]
    adding.connection.close()


async def test_a_host_that_can_be_none_is_a_bookie_that_cannot_be_reached() -> None:
    """The resolver of names says so by an error that is none of the system's."""
    for host in ("b1..example", "b" * 64 + ".example"):
        with pytest.raises(BookieUnavailableError, match="cannot be reached"):
            await connect(f"{host}:3181", bookie_id="b1", instance_id="", timeout_s=WAIT_S)


async def test_the_adds_of_a_turn_share_a_frame_where_the_bookie_knows_it() -> None:
    adding = await Adding.greeted()
    for ledger_id in range(3):
        adding.add(ledger_id=ledger_id)
    await adding.turn()
    assert adding.wire.requests() == [[(ADDS, 1)]]
    adding.receive(encode_done(Op.ADDS, [1, 3]))
    assert adding.outcomes == [Done(), Done()]
    adding.receive(encode_frame(encode_failure(ADD, 2, Failure(Status.INVALID_TERM, "fenced", 3))))
    assert adding.outcomes[2:] == [Failure(Status.INVALID_TERM, "fenced", 3)]
    adding.add()
    await adding.turn()
    assert adding.wire.requests() == [[(ADDS, 1)], [(ADD, 4)]]  # alone as ever
    adding.connection.close()


@pytest.mark.parametrize(("version", "frame_bytes_max"), [(4, FRAME_BYTES_MAX), (VERSION_MAX, 20_000)])
async def test_an_older_bookie_and_one_of_small_frames_get_adds_one_by_one(
    version: int, frame_bytes_max: int
) -> None:
    adding = await Adding.greeted(version, frame_bytes_max)
    adding.add()
    adding.add()
    adding.tell_lac(1)
    adding.tell_lac(2)
    await adding.turn()
    sent = [one for write in adding.wire.requests() for one in write]
    if version == 4:
        assert sent == [(ADD, 1), (ADD, 2), (WRITE_LAC, 3), (WRITE_LAC, 4)]
    else:
        assert sent[:2] == [(ADD, 1), (ADD, 2)]
    adding.connection.close()


async def test_small_blocks_wait_for_a_fuller_frame_and_large_ones_do_not() -> None:
    adding = await Adding.greeted()
    adding.add()
    await adding.turn()
    for _ in range(MANY_MAX - 1):
        adding.add(1000)
    assert adding.wire.requests() == [[(ADD, 1)]]
    adding.add(1000)
    assert adding.wire.requests() == [[(ADD, 1)], [(ADDS, 2)]]
    adding.add(20_000)
    adding.add(20_000)
    assert adding.wire.requests()[2:] == [[(ADDS, MANY_MAX + 2)]]
    adding.add(600_000)
    assert adding.wire.requests()[3:] == [[(ADD, MANY_MAX + 4)]]
    adding.connection.close()


@pytest.mark.parametrize("ids", [[1, 9], [1, 1]])
async def test_an_answer_that_names_what_is_not_outstanding_ends_the_connection(ids: list[int]) -> None:
    adding = await Adding.greeted()
    adding.add()
    adding.add()
    await adding.turn()
    adding.receive(encode_done(Op.ADDS, ids))
    assert isinstance(adding.connection.error, MalformedFrameError)
    assert adding.outcomes[0] == Done()  # request 1, which the bookie did store
    assert adding.outcomes[1] is adding.connection.error


async def test_an_answer_to_adds_names_adds_only() -> None:
    adding = await Adding.greeted()
    adding.connection.request(Ping(), adding._ended, timeout_s=WAIT_S)
    adding.receive(encode_done(Op.ADDS, [1]))
    assert adding.outcomes == [adding.connection.error]


async def test_a_lost_connection_is_the_outcome_of_every_add_that_was_not_answered() -> None:
    adding = await Adding.greeted()
    for _ in range(4):
        adding.add()
    await adding.turn()
    adding.receive(encode_done(Op.ADDS, [2]))
    adding.connection.connection_lost(None)
    assert adding.outcomes[0] == Done()
    assert [type(one) for one in adding.outcomes[1:]] == [BookieUnavailableError] * 3


async def test_a_timeout_is_the_outcome_of_every_add_of_a_frame_that_was_not_answered() -> None:
    adding = await Adding.greeted()
    for _ in range(3):
        adding.add(timeout_s=0.02)
    await adding.turn()
    adding.receive(encode_done(Op.ADDS, [2]))
    await asyncio.wait_for(adding.complete(3), WAIT_S)
    assert [type(one) for one in adding.outcomes] == [Done, OperationTimeoutError, OperationTimeoutError]
    adding.receive(encode_done(Op.ADDS, [1, 3]))  # late, and of no use to anybody
    assert len(adding.outcomes) == 3
    adding.connection.close()


async def test_a_writer_that_cannot_send_keeps_no_other_from_sending() -> None:
    loop, told, sent = asyncio.get_running_loop(), list[object](), list[str]()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    flushes, error = Flushes(loop), ValueError("a fault")

    def fail() -> None:
        raise error

    flushes.add(lambda: sent.append("first"))
    flushes.add(fail)
    flushes.add(lambda: flushes.add(lambda: sent.append("behind them")))
    flushes.add(lambda: sent.append("last"))
    assert sent == []
    await asyncio.sleep(0)
    assert sent == ["first", "last"]
    await asyncio.sleep(0)
    assert sent == ["first", "last", "behind them"]
    assert told == [error]


async def test_the_lacs_of_a_turn_share_a_frame_behind_its_adds() -> None:
    adding = await Adding.greeted()
    adding.add()
    for ledger_id in range(3):
        adding.tell_lac(ledger_id)
    await adding.turn()
    assert adding.wire.requests() == [[(ADD, 1)], [(WRITE_LACS, 2)]]
    adding.receive(encode_done(Op.WRITE_LACS, [2, 4]))
    assert adding.outcomes == [Done(), Done()]
    adding.receive(encode_frame(encode_failure(WRITE_LAC, 3, Failure(Status.INVALID_TERM, "fenced", 3))))
    assert len(adding.outcomes) == 3
    adding.tell_lac(1)
    adding.connection.request(Ping(), lambda *_: None, timeout_s=WAIT_S)
    assert adding.wire.requests()[2:] == [[(WRITE_LAC, 5)], [(PING, 6)]]
    adding.connection.close()
