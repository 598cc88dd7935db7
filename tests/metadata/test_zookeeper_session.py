"""What a ZooKeeper session makes of what it hears, without a server."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self, cast

import pytest
from aiozk import protocol

from metadata.backends.zookeeper.session import ConnectionLostError, Session, _Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SET = 5


class Line:
    """A connection whose server and clock are the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session = Session([("h", 1)], timeout_s=6.0)
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
        session = Session([(host, port)], timeout_s=6.0)
        session.start()
        async with asyncio.timeout(20):
            assert await session.exists("/a") is None
        assert connections == 2
        session.abort()
        await asyncio.gather(*filter(None, serving))


class Server:
    """A server that refuses a client which has seen a later transaction, as ZooKeeper's do."""

    def __init__(self, zxid: int, *, has_majority: bool = True) -> None:
        self.zxid = zxid
        self.has_majority = has_majority
        self.sessions = 0
        self.refused = 0
        self.seen: list[int] = []
        self.address = ("127.0.0.1", 0)
        self._tasks: list[asyncio.Task[None] | None] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, *self.address)
        self.address = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*filter(None, self._tasks))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.current_task())
        try:
            frame = await self._frame(reader)
            _, seen, _, session = struct.unpack_from("!iqiq", frame)
            if seen > self.zxid:
                self.refused += 1
                return
            self.seen.append(seen)
            self.sessions += not session
            answer = struct.pack("!iiqi16s?", 0, 6000, session or self.sessions, 16, b"password", False)
            writer.write(struct.pack("!i", len(answer)) + answer)
            while True:
                xid, opcode = struct.unpack_from("!ii", await self._frame(reader))
                if opcode == SET and not self.has_majority:
                    return
                if opcode == SET:
                    self.zxid += 100  # what the leader has, and this transaction
                writer.write(struct.pack("!iiqi", 16, xid, self.zxid, -101))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _frame(self, reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


@asynccontextmanager
async def session_with(*servers: Server, seen: int) -> AsyncIterator[Session]:
    """A session with servers, of which it has seen transactions up to one."""
    session = Session([each.address for each in servers], timeout_s=6.0, written="/w")
    session.session_id, session._last_zxid = 77, seen
    session.start()
    try:
        async with asyncio.timeout(20):
            yield session
    finally:
        session.abort()


async def test_a_session_begins_anew_where_the_servers_have_forgotten_transactions() -> None:
    async with Server(100) as server, session_with(server, seen=1000) as session:
        with pytest.raises(ConnectionLostError):  # its caller may go by what they have forgotten
            await session.set("/a", b"", 7)
        assert server.zxid == 200  # it was not sent
        assert await session.exists("/a") is None
        assert session.session_id == server.sessions == 2  # one session only asked
        assert server.seen == [0, 0]
        assert session._last_zxid == 200


async def test_a_server_that_lags_is_waited_for_in_the_same_session() -> None:
    """It is the only one that can be reached, and a write makes it hear of everything."""
    async with Server(950) as server, session_with(server, seen=1000) as session:
        assert await session.exists("/a") is None
        assert session.session_id == 77
        assert server.seen == [0, 1000]


async def test_servers_that_cannot_write_are_not_taken_for_servers_that_were_set_back() -> None:
    async with Server(100, has_majority=False) as server, session_with(server, seen=1000) as session:
        while server.refused < 4:  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.01)
        assert (session.session_id, session._last_zxid) == (77, 1000)


async def test_one_server_of_several_that_is_behind_ends_no_session() -> None:
    """It may have been started by mistake, on old data and alone."""
    async with Server(100) as server, Server(0) as one, Server(0) as other:
        one._server.close()
        other._server.close()
        async with session_with(server, one, other, seen=1000) as session:
            while server.refused < 4:  # noqa: ASYNC110 (nobody is told)
                await asyncio.sleep(0.01)
            assert (session.session_id, server.sessions) == (77, 0)
