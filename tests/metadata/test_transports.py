"""Several buffers at once to a real socket: the protocol is told to pause, and what it wrote arrives."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import pytest
import uvloop

from metadata.transports import gathering_write

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    Run = Callable[[Coroutine[None, None, None]], None]

WAIT_S = 30
MIB = 1024 * 1024


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Return what runs a coroutine, on the plain loop as well as on the one that commands use."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Writer(asyncio.Protocol):
    """A protocol that keeps what its transport told it."""

    def __init__(self) -> None:
        self.is_paused = False
        self.resumed, self.lost = asyncio.Event(), asyncio.Event()
        self.write_all: Callable[[Iterable[bytes]], None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.write_all = gathering_write(transport)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def connected() -> tuple[Writer, socket.socket]:
    """Return a writer and the socket of its peer, which nobody reads."""
    ours, peer = socket.socketpair()
    _, writer = await asyncio.get_running_loop().create_connection(Writer, sock=ours)
    peer.setblocking(False)
    return writer, peer


async def read(peer: socket.socket, count: int) -> bytes:
    received = bytearray()
    async with asyncio.timeout(WAIT_S):
        while len(received) < count:
            received += await asyncio.get_running_loop().sock_recv(peer, MIB)
    return bytes(received)


def test_a_peer_that_reads_nothing_pauses_the_writer_which_loses_nothing(run: Run) -> None:
    run(a_peer_that_reads_nothing_pauses_the_writer_which_loses_nothing())


async def a_peer_that_reads_nothing_pauses_the_writer_which_loses_nothing() -> None:
    writer, peer = await connected()
    with peer:
        sent = [bytes([i]) * MIB for i in range(8)]
        for first in range(0, 8, 2):
            writer.write_all(sent[first : first + 2])
        await asyncio.sleep(0)
        assert writer.is_paused
        assert await read(peer, 8 * MIB) == b"".join(sent)
        await asyncio.wait_for(writer.resumed.wait(), WAIT_S)
        writer.transport.close()
        await asyncio.wait_for(writer.lost.wait(), WAIT_S)


def test_an_empty_buffer_leaves_nothing_behind(run: Run) -> None:
    run(an_empty_buffer_leaves_nothing_behind())


async def an_empty_buffer_leaves_nothing_behind() -> None:
    writer, peer = await connected()
    with peer:
        writer.write_all([b"", b"a", b"", b"b", b""])
        assert await read(peer, 2) == b"ab"
        writer.transport.close()  # the transport waits for what is left
        await asyncio.wait_for(writer.lost.wait(), WAIT_S)


def test_what_is_written_to_a_connection_that_is_lost_is_dropped(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run(what_is_written_to_a_connection_that_is_lost_is_dropped())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def what_is_written_to_a_connection_that_is_lost_is_dropped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = Writer()
        connecting = asyncio.get_running_loop().create_connection(lambda: writer, *server.getsockname())
        await asyncio.wait_for(connecting, WAIT_S)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # resets the connection
        # The first write meets the error; the protocol hears of it in the next event-loop iteration.
        for _ in range(3):
            writer.write_all([b"a" * MIB, b"b"])
        await asyncio.wait_for(writer.lost.wait(), WAIT_S)


class OfAsyncio(asyncio.Transport):
    """A transport of asyncio's that keeps its writes, and refuses `writelines`."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        raise AssertionError("some releases of Python have faults here")


def test_no_release_of_asyncio_is_trusted_with_writelines() -> None:
    transport = OfAsyncio()
    gathering_write(transport)([b"a", b"", memoryview(b"b")])
    assert transport.written == [b"ab"]
