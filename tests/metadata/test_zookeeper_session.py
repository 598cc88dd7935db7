"""What a ZooKeeper session makes of what it hears, without a server."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import cast

from aiozk import protocol

from metadata.backends.zookeeper.session import ConnectionLostError, Session, _Connection


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

    def answer(self, xid: int, code: int = -101, body: bytes = b"") -> None:
        """Answer a request with an error, or a ping."""
        self.connection.data_received(struct.pack("!iiqi", 16 + len(body), xid, 1, code) + body)

    def abort(self) -> None:
        pass


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


async def test_an_answer_that_makes_no_sense_fails_what_it_answers() -> None:
    line = Line()
    asked = [line.ask(), line.ask()]
    line.answer(1, 0, b"\0\0")  # a node's data, cut short
    assert line.connection.lost.done()
    assert all(isinstance(future.exception(), ConnectionLostError) for future in asked)


async def test_a_session_that_is_over_is_not_alive_by_the_answer_that_says_so() -> None:
    line = Line()
    asked = line.ask()
    line.now = 101.0
    line.answer(1, -112)
    assert isinstance(asked.exception(), ConnectionLostError)
    assert line.session.heard_at < 0


async def test_a_connection_that_is_lost_with_its_handshake_is_not_used() -> None:
    """The answer to the handshake and a frame that is none arrive together, at first."""
    connections = 0
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        serving.append(asyncio.current_task())
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        answer = struct.pack("!iiqi16s?", 0, 6000, 7, 16, b"password", False)
        frames = struct.pack("!i", len(answer)) + answer
        if connections == 1:
            frames += struct.pack("!i", -5)
        writer.write(frames)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                (xid,) = struct.unpack_from("!i", await reader.readexactly(size))
                writer.write(struct.pack("!iiqi", 16, xid, 1, -101))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        session = Session([(host, port)], timeout_s=6.0, on_session=lambda: None)
        session.start()
        async with asyncio.timeout(20):
            assert await session.exists("/a") is None
        assert connections == 2
        session.abort()
        await asyncio.gather(*filter(None, serving))
