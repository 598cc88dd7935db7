"""When adds leave: those that would only wait at the bookie wait here, and none waits for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser
from bookie_aio.wire.messages import ADDED, Add, Op, Ping, PreparedRequest, decode_request
from client_aio.bookies.connection import BookieConnection, connect
from client_aio.core.liveness import PING_TIMEOUT_S
from metadata.errors import BookieUnavailableError

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

    def add(self, size: int = 100) -> None:
        request = PreparedRequest(Add(7, 0, 0))
        self.connection.send_prepared(
            request, lambda outcome, _: self.outcomes.append(outcome), bytes(size), size, WAIT_S
        )

    def answer(self, *request_ids: int) -> None:
        data = b"".join(map(ADDED.pack, request_ids))
        self.connection.get_buffer(-1)[: len(data)] = data
        self.connection.buffer_updated(len(data))

    async def turn(self) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)


ADD, PING = int(Op.ADD), int(Op.PING)


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


async def test_a_host_that_can_be_none_is_a_bookie_that_cannot_be_reached() -> None:
    """The resolver of names says so by an error that is none of the system's."""
    for host in ("b1..example", "b" * 64 + ".example"):
        with pytest.raises(BookieUnavailableError, match="cannot be reached"):
            await connect(f"{host}:3181", bookie_id="b1", instance_id="", timeout_s=WAIT_S)
