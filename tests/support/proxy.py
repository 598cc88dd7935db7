"""A TCP proxy before a ZooKeeper server that loses answers, goes silent or refuses, when told.

It understands just enough of ZooKeeper's protocol to know which frame is which request and which answer
belongs to it: both directions are cut into frames, and requests are told by opcode and transaction id.

    async with ZooKeeperProxy("127.0.0.1", port) as proxy:
        hit = proxy.lose_answer("create", path="/x")    # the next such request takes effect, its answer
        ...                                             # does not arrive: the connection is reset instead
        assert hit.is_set()
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tests.support.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

OPCODES = {
    "create": (1, 15),
    "delete": (2,),
    "exists": (3,),
    "get": (4,),
    "set": (5,),
    "multi": (14,),
    "children": (8, 12),
}


@dataclass
class _Loss:
    opcodes: tuple[int, ...]
    path: str | None
    before_answer: Callable[[], Awaitable[None]] | None
    hit: asyncio.Event = field(default_factory=asyncio.Event)


class ZooKeeperProxy:
    """The proxy. `address` is what clients connect to."""

    def __init__(self, host: str, port: int) -> None:
        """Prepare a proxy before the server at that address."""
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._pipes: set[_Pipe] = set()
        self._losses: list[_Loss] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.connections = 0
        """How many connections clients have made."""

    @property
    def address(self) -> str:
        """Return `host:port` for clients."""
        return f"127.0.0.1:{self._port}"

    def lose_answer(
        self,
        request: str,
        *,
        path: str | None = None,
        before_answer: Callable[[], Awaitable[None]] | None = None,
    ) -> asyncio.Event:
        """Let the next such request through, and reset its connection once the server has answered.

        Args:
            request: a name in `OPCODES`.
            path: only a request for this node.
            before_answer: awaited between the server's answer and the reset.

        Returns:
            An event that is set when it has happened.
        """
        loss = _Loss(OPCODES[request], path, before_answer)
        self._losses.append(loss)
        return loss.hit

    def black_hole(self) -> None:
        """Keep all connections open and pass nothing on, until `restore`."""
        self._flowing.clear()

    def reset_all(self) -> None:
        """Reset every connection there is."""
        for pipe in list(self._pipes):
            pipe.reset()

    async def refuse(self) -> None:
        """Reset every connection and refuse new ones, until `restore`."""
        assert self._server is not None
        self._server.close()
        self._server = None
        self.reset_all()

    async def restore(self) -> None:
        """Pass everything on again."""
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        pipe = _Pipe(self, reader, writer)
        self._pipes.add(pipe)
        try:
            await pipe.run(self._target)
        finally:
            self._pipes.discard(pipe)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flowing.set()
        if self._server is not None:
            self._server.close()
        pipes = list(self._pipes)
        self.reset_all()
        await asyncio.gather(*(pipe.done.wait() for pipe in pipes))


class _Pipe(Pipe):
    """One client's connection and the one to the server behind it."""

    def __init__(
        self, proxy: ZooKeeperProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(reader, writer)
        self._proxy = proxy
        self._marked: dict[int, _Loss] = {}

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(reader, writer, self._see_request)

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._forward(reader, writer, self._see_answer)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        see: Callable[[bytes], Awaitable[None]],
    ) -> None:
        is_first = True
        while True:
            head = await reader.readexactly(4)
            frame = await reader.readexactly(struct.unpack("!i", head)[0])
            await self._proxy._flowing.wait()
            # The first frame of each direction is the handshake, which has no transaction id.
            if not is_first:
                await see(frame)
            is_first = False
            writer.write(head + frame)
            await writer.drain()

    async def _see_request(self, frame: bytes) -> None:
        xid, opcode = struct.unpack_from("!ii", frame)
        for loss in self._proxy._losses:
            if opcode in loss.opcodes and loss.path in (None, _path_of(frame)):
                self._proxy._losses.remove(loss)
                self._marked[xid] = loss
                return

    async def _see_answer(self, frame: bytes) -> None:
        (xid,) = struct.unpack_from("!i", frame)
        loss = self._marked.pop(xid, None)
        if loss is not None:
            if loss.before_answer is not None:
                await loss.before_answer()
            loss.hit.set()
            raise ConnectionResetError("this answer is lost")


def _path_of(frame: bytes) -> str | None:
    with contextlib.suppress(struct.error, UnicodeDecodeError):
        (length,) = struct.unpack_from("!i", frame, 8)
        return frame[12 : 12 + length].decode()
    return None
