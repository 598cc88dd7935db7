"""What a ZooKeeper session makes of what it hears, without a server."""

from __future__ import annotations

import asyncio
import struct
from typing import cast

from aiozk import protocol

from metadata._aiozk import Session, _Connection


class Line:
    """A connection whose server and clock are the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session = Session([("h", 1)], timeout_s=6.0, on_session=lambda: None)
        self.connection = _Connection(self.session, "h:1")
        self.connection._loop = cast("asyncio.AbstractEventLoop", self)
        self.connection.connection_made(cast("asyncio.Transport", self))
        self.connection.handshake.cancel()

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[object]:
        return asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        pass

    def ask(self) -> asyncio.Future[object]:
        return cast(
            "asyncio.Future[object]", self.connection.send(protocol.GetDataRequest(path="/a", watch=False))
        )

    def ping(self) -> None:
        self.connection.send_raw(protocol.PingRequest().serialize(protocol.PING_XID))

    def answer(self, xid: int) -> None:
        """Answer a request with an error, or a ping."""
        self.connection.data_received(struct.pack("!iiqi", 16, xid, 1, -101))


async def test_only_what_was_answered_is_known_to_have_been_received() -> None:
    line = Line()
    asked = [line.ask()]  # 1, at 100
    line.now = 101.0
    asked.append(line.ask())  # 2
    line.now = 102.0
    line.answer(1)
    assert line.session.heard_at == 100.0
    line.now = 103.0
    line.ping()
    line.answer(2)  # it says nothing of the ping
    assert line.session.heard_at == 101.0
    line.now = 104.0
    line.answer(protocol.PING_XID)
    assert line.session.heard_at == 103.0
    assert all(future.exception() for future in asked)


async def test_a_watch_that_fires_says_nothing_of_what_was_sent() -> None:
    line = Line()
    line.ping()
    path = b"/a"
    body = struct.pack("!iqi", protocol.WATCH_XID, -1, 0) + struct.pack("!iii", 3, 3, len(path)) + path
    line.connection.data_received(struct.pack("!i", len(body)) + body)
    assert not line.connection.lost.done()
    assert line.session.heard_at == 0.0
