"""A client of the wire protocol that does what the test says, right or wrong.

No retries, no checks, no limits: frames out, answers in. What the real client does with them is not here.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate, count
from typing import TYPE_CHECKING, NamedTuple, Self

from bookie_aio.wire.blocks import LacStatement, encode_block, parse_blocks, statement_crc
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.many import encode_adds, encode_write_lacs, parse_done
from bookie_aio.wire.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Add,
    Failure,
    Hello,
    Message,
    Op,
    Status,
    WriteLac,
    decode_answer,
    encode_request,
)
from metadata.access.bookies import split_address

if TYPE_CHECKING:
    from collections.abc import Sequence

WAIT_S = 10.0
"""How long a test waits for what must come."""


class Answer(NamedTuple):
    """One answer, as it came."""

    op: int
    request_id: int
    message: Message | Failure
    body: bytes

    @property
    def status(self) -> Status:
        return self.message.status if isinstance(self.message, Failure) else Status.OK

    @property
    def request_ids(self) -> list[int]:
        """Return the requests that it answers."""
        if self.op in (Op.ADDS, Op.WRITE_LACS):
            return parse_done(self.request_id, memoryview(self.body))
        return [self.request_id]

    @property
    def entries(self) -> list[tuple[int, bytes]]:
        """Return id and payload of the entries in the body, all checksums checked."""
        found = []
        for block in parse_blocks(memoryview(self.body)):
            assert block.payload_is_intact()
            assert block.damaged_entries() == []
            found += list(zip(block.entry_ids, map(bytes, block.payloads()), strict=True))
        return found


class RawClient:
    """One connection. `arrived` lists the answers in the order in which they came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._is_listening = asyncio.Event()
        self._is_listening.set()
        self.arrived: list[Answer] = []
        self.closed = asyncio.Event()
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, address: str, *, greet: bool = True) -> Self:
        """Connect, and shake hands unless told not to."""
        reader, writer = await asyncio.open_connection(*split_address(address), limit=64 * 1024)
        client = cls(reader, writer)
        if greet:
            answer = await client.call(hello())
            assert answer.status is Status.OK, answer
        return client

    async def _receive(self) -> None:
        parser = FrameParser(FRAME_BYTES_MAX)
        try:
            while data := await self._reader.read(64 * 1024):
                parser.feed(data)
                for header, body in parser.frames():
                    answer = Answer(*decode_answer(header), bytes(body))
                    self.arrived.append(answer)
                    for request_id in answer.request_ids:
                        waiting = self._waiting.pop(request_id, None)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(answer)
                await self._is_listening.wait()
        except ConnectionError:
            pass
        finally:
            self.closed.set()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("the bookie closed the connection"))
                    waiting.exception()  # nobody need look

    def send_bytes(self, data: bytes) -> None:
        """Send anything."""
        self._writer.write(data)

    def send(
        self, request: Message, body: bytes = b"", *, auth: bytes | None = None
    ) -> asyncio.Future[Answer]:
        """Send a request; gives the future of its answer."""
        request_id = next(self._ids)
        self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_frame(encode_request(request, request_id, auth), len(body)) + body)
        return self._waiting[request_id]

    def send_adds(self, adds: Sequence[tuple[Add, bytes | None, bytes]]) -> list[asyncio.Future[Answer]]:
        """Send these adds, with tokens and blocks, in one frame; gives the future of the answer to each."""
        request_ids = self._begin(len(adds))
        self._writer.write(b"".join(encode_adds(request_ids[0], adds)))
        return [self._waiting[request_id] for request_id in request_ids]

    def send_write_lacs(self, lacs: Sequence[tuple[WriteLac, bytes | None]]) -> list[asyncio.Future[Answer]]:
        """Send these statements in one frame; gives the future of the answer to each."""
        request_ids = self._begin(len(lacs))
        self._writer.write(encode_write_lacs(request_ids[0], lacs))
        return [self._waiting[request_id] for request_id in request_ids]

    def _begin(self, number: int) -> list[int]:
        request_ids = [next(self._ids) for _ in range(number)]
        for request_id in request_ids:
            self._waiting[request_id] = asyncio.get_running_loop().create_future()
        return request_ids

    async def call(self, request: Message, body: bytes = b"", *, auth: bytes | None = None) -> Answer:
        """Send a request and wait for its answer."""
        return await asyncio.wait_for(self.send(request, body, auth=auth), WAIT_S)

    def add(
        self,
        ledger_id: int,
        first: int,
        payloads: Sequence[bytes],
        *,
        term: int = 0,
        flags: int = 0,
        content_term: int = 0,
        lac: int = -1,
    ) -> asyncio.Future[Answer]:
        """Send an add of one block."""
        body = block(ledger_id, first, payloads, content_term=content_term, lac=lac)
        return self.send(Add(ledger_id, term, flags), body)

    def end(self) -> None:
        """Send nothing more."""
        self._writer.write_eof()

    def stop_listening(self) -> None:
        """Take no more answers."""
        self._is_listening.clear()

    def listen_again(self) -> None:
        """Take answers again."""
        self._is_listening.set()

    async def gone(self) -> None:
        """Wait until the bookie has closed the connection."""
        await asyncio.wait_for(self.closed.wait(), WAIT_S)

    async def close(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._writer.transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def hello(
    *,
    version_min: int = VERSION_MIN,
    version_max: int = VERSION_MAX,
    instance_id: str = "",
    bookie_id: str = "",
) -> Hello:
    """Return a handshake."""
    return Hello(version_min, version_max, "raw", instance_id, bookie_id)


def block(
    ledger_id: int,
    first: int,
    payloads: Sequence[bytes],
    *,
    content_term: int = 0,
    lac: int = -1,
    stride: int = 1,
) -> bytes:
    """Return a block of entries that begin at `first`."""
    return encode_block(
        ledger_id=ledger_id,
        content_term=content_term,
        first_entry=first,
        stride=stride,
        lac=lac,
        lafr=-1,
        payloads=payloads,
        running=list(accumulate(map(len, payloads))),
    )


def lac_statement(ledger_id: int, lac: int, *, content_term: int = 0) -> LacStatement:
    """Return an intact LAC statement."""
    return LacStatement(content_term, lac, -1, statement_crc(ledger_id, content_term, lac, -1))
