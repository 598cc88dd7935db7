"""Processor time for each add, at the client and at one bookie, without sockets and disks.

    python -m benchmarks.layers [--seconds 1] [--alone] [--profile] [-o table|json]

The production code of each side runs alone in this process. The client's writers run against transports that
answer every frame at once. A bookie's connections and its engine run against a file that is durable at once.
The result is the cost of Python itself, which bounds the throughput of a machine with few cores. It does not
depend on other work of the machine. Shapes: one ledger whose adds leave in large batches, and many ledgers
with an add each, which share frames unless told otherwise (`--alone`). `--profile` prints the time function
by function.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import random
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import uvloop

from bookie_aio.config import Limits
from bookie_aio.metrics import RequestMetrics
from bookie_aio.server.backpressure import Backpressure
from bookie_aio.server.connection import Connection
from bookie_aio.server.dispatcher import Dispatcher, LedgerAuthoriser
from bookie_aio.server.given_ids import GivenIds
from bookie_aio.server.password_ledgers import PasswordLedgers
from bookie_aio.server.registration import StandingOrder
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.engine import Engine
from bookie_aio.structured_logging import RepeatedWarnings
from bookie_aio.wire.blocks import encode_block
from bookie_aio.wire.frames import decode_header, encode_frame
from bookie_aio.wire.many import encode_done, frames_of_adds
from bookie_aio.wire.messages import (
    ADDED,
    VERSION_MAX,
    VERSION_MIN,
    Add,
    Done,
    Hello,
    HelloAnswer,
    Op,
    encode_answer,
    encode_request,
)
from bookie_aio.wire.prepared import PreparedRequest
from client_aio.bookies.connection import MANY_BYTES_MAX, BookieConnection
from client_aio.bookies.pool import BookieDirectory, BookiePool
from client_aio.config import ClientConfig, WriteOptions
from client_aio.context import ClientContext, ClientCounters
from client_aio.core.digest import Digest
from client_aio.ledger.writer import LedgerWriter
from metadata.ids import LEDGER_ID_MAX
from metadata.model.ledger import LedgerMetadata

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.storage.disk.disk import File

BOOKIES = ("b1", "b2", "b3")
READ_BYTES = 256 * 1024
_REQUEST_ID = struct.Struct(">I")
_ID_AT = 8 + 3  # behind a frame's lengths, the array's head, the operation and the mark of a u32


@dataclass(frozen=True)
class Shape:
    """So many ledgers, each with so many adds of a size in every event-loop iteration."""

    ledgers: int
    adds: int
    entry_bytes: int

    @property
    def name(self) -> str:
        """Return the shape as a table names it."""
        return f"{self.ledgers:,} × {self.adds:,} × {self.entry_bytes:,} B"


SHAPES = (
    Shape(1, 256, 1024),
    Shape(1, 2048, 100),
    Shape(1000, 1, 1024),
    Shape(1000, 8, 100),
    Shape(1, 1, 1024),
)


class Silent:
    """A transport that takes everything and sends nothing."""

    def __init__(self) -> None:
        self.frames = 0

    def write(self, data: bytes) -> None:
        self.frames += 1

    def writelines(self, data: list[bytes]) -> None:
        self.frames += 1

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def abort(self) -> None:
        pass


class Answering(Silent):
    """A transport whose other end acknowledges each add in the next event-loop iteration."""

    def __init__(self, connection: BookieConnection) -> None:
        super().__init__()
        self._connection = connection
        self._answers: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._answer)
        at = 0
        while at < len(data):
            op = data[at + 9]
            if op == Op.ADD:
                (request_id,) = _REQUEST_ID.unpack_from(data, at + _ID_AT)
                self._answers.append(ADDED.pack(request_id))
            elif op in (Op.ADDS, Op.WRITE_LACS):
                header = memoryview(data)[at + 8 : at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")]
                _, request_id, _, count = cast("list[int]", decode_header(header))
                self._answers.append(encode_done(Op(op), range(request_id, request_id + count)))
            else:  # the LAC of one idle writer
                header = memoryview(data)[at + 8 : at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")]
                request_id = cast("int", decode_header(header)[1])
                self._answers.append(encode_frame(encode_answer(op, request_id, Done())))
            at += 4 + int.from_bytes(data[at : at + 4], "big")

    def writelines(self, data: list[bytes]) -> None:
        self.write(b"".join(data))

    def _answer(self) -> None:
        answers, self._answers = memoryview(b"".join(self._answers)), []
        feed(self._connection, answers)


def feed(protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
    """Hand bytes to a protocol as a socket would."""
    while data:
        buffer = protocol.get_buffer(-1)
        size = min(len(buffer), len(data), READ_BYTES)
        cast("memoryview", buffer)[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


class DurableAtOnce:
    """A file whose writes are durable at once; all else is the file's own."""

    def __init__(self, file: File) -> None:
        self._file = file

    def write_and_sync(
        self, buffers: object, offset: int, then: object = (), *, at_once: bool = False
    ) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


async def client_us(shape: Shape, seconds: float, *, alone: bool) -> float:
    """Return the client's processor time for an add, in µs, futures and all."""
    config = ClientConfig()
    pool = BookiePool(BookieDirectory(cast("Any", None), config), config, "")
    context = ClientContext(
        config=config, ledgers=cast("Any", None), pool=pool, finder=cast("Any", None),
        tokens=random.Random(1), now_ms=lambda: 0, counters=ClientCounters(time.perf_counter),
    )  # fmt: skip
    connections = {}
    for bookie_id in BOOKIES:
        connection = BookieConnection(bookie_id, lambda _: None, config.ping_timeout_s)
        connection.connection_made(cast("asyncio.Transport", Answering(connection)))
        connection._many_bytes_max = 0 if alone else MANY_BYTES_MAX
        connections[bookie_id] = connection
    writers = []
    for ledger_id in range(shape.ledgers):
        writer = LedgerWriter(context, metadata_of(ledger_id), 0, Digest(ledger_id), WriteOptions())
        writer._replicator.seat(BOOKIES, dict(connections))
        writers.append(writer)
    payload = bytes(shape.entry_bytes)

    async def turn() -> None:
        waiting = 0
        ended = asyncio.get_running_loop().create_future()

        def done(future: asyncio.Future[int]) -> None:
            nonlocal waiting
            future.result()
            waiting -= 1
            if not waiting:
                ended.set_result(None)

        for writer in writers:
            add = writer.add_entry
            for _ in range(shape.adds):
                waiting += 1
                add(payload).add_done_callback(done)
        await ended

    found = await per_add(turn, shape, seconds)
    for writer in writers:
        await writer.abort()
    for connection in connections.values():
        connection.close()
    context.close()
    return found


def metadata_of(ledger_id: int) -> LedgerMetadata:
    """Return the metadata of a ledger on all three bookies."""
    return LedgerMetadata.new(ledger_id, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=BOOKIES)


async def bookie_us(shape: Shape, seconds: float, *, alone: bool) -> float:
    """Return one bookie's processor time for an add, in µs."""
    loop = asyncio.get_running_loop()
    disk = RealDisk()
    with tempfile.TemporaryDirectory(prefix="layers.") as directory:
        engine = await Engine.open(
            disk, [directory], StorageConfig(segment_bytes=1 << 30), draw_generation=lambda: 1,
            on_indexed=lambda _: None, on_failed=print, on_writable=print,
        )  # fmt: skip
        segment = engine._journal.segment
        segment.file = cast("File", DurableAtOnce(segment.file))
        limits = Limits(
            connection_bytes_pending_max=1 << 30, bytes_pending_max=1 << 30,
            connection_frames_per_turn=1 << 30,
        )  # fmt: skip
        passwords = PasswordLedgers(engine, cast("Any", None))
        warnings = RepeatedWarnings(logging.getLogger(), loop)
        metrics = RequestMetrics(time.perf_counter)
        requests = Dispatcher(
            engine=engine, limits=limits, loop=loop,
            hello=HelloAnswer(VERSION_MAX, "b1", "", "", 1 << 20, 1 << 20),
            info=dict, authoriser=LedgerAuthoriser(engine, passwords), passwords=passwords,
            drop_if_deleted=cast("Any", None), lift_mark=cast("Any", None),
            given_ids=GivenIds(LEDGER_ID_MAX, cast("Any", None)), not_free_below=lambda: 0,
            warnings=warnings, order=StandingOrder(cast("Any", None), "b1", lambda: None), metrics=metrics,
        )  # fmt: skip
        connection = Connection(
            loop,
            limits,
            Backpressure(limits, loop),
            requests,
            set(),
            warnings,
            metrics,
        )
        connection.connection_made(cast("asyncio.Transport", Silent()))
        feed(
            connection,
            memoryview(encode_frame(encode_request(Hello(VERSION_MIN, VERSION_MAX, "layers", "", ""), 0))),
        )
        connection.added()  # adds of a connection that has stored one come first
        prepared = [PreparedRequest(Add(ledger_id, 0, 0)) for ledger_id in range(shape.ledgers)]
        at = 0

        async def turn() -> None:
            nonlocal at
            segment.end = engine._journal._offset = 4096  # the same place again and again
            feed(connection, frames)
            ended = loop.create_future()
            engine.barrier(ended.set_result)
            await ended

        held = [(request, number, block_of(shape, number)) for number, request in enumerate(prepared)]
        frames = memoryview(b"".join(frames_of_adds(held, 0 if alone else MANY_BYTES_MAX)))
        found = await per_add(turn, shape, seconds)
        connection.connection_lost(None)
        segment.file = cast("Any", segment.file)._file
        await engine.close()
    disk.close()
    return found


def block_of(shape: Shape, ledger_id: int) -> bytes:
    """Return the block of one iteration's entries."""
    payloads = [bytes(shape.entry_bytes)] * shape.adds
    running = [shape.entry_bytes * (number + 1) for number in range(shape.adds)]
    return encode_block(
        ledger_id=ledger_id, content_term=0, first_entry=0, stride=1, lac=-1, lafr=-1,
        payloads=payloads, running=running,
    )  # fmt: skip


async def per_add(turn: Callable[[], Coroutine[Any, Any, None]], shape: Shape, seconds: float) -> float:
    """Return the processor time of the fastest tenth of the iterations, for each of their adds, in µs."""
    for _ in range(3):
        await turn()
    took = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        before = time.thread_time()
        await turn()
        took.append(time.thread_time() - before)
    took.sort()
    best = took[: max(1, len(took) // 10)]
    return 1e6 * sum(best) / len(best) / (shape.ledgers * shape.adds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the processor time of each side for an add.")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--alone", action="store_true", help="each block in a frame of its own (version 4)")
    parser.add_argument("--only", type=int, help="the number of one shape")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    rows = []
    for number, shape in enumerate(SHAPES):
        if arguments.only not in (None, number):
            continue
        row: dict[str, Any] = {"shape": shape.name}
        for side, measure in (("client", client_us), ("bookie", bookie_us)):
            profile = cProfile.Profile()
            if arguments.profile:
                profile.enable()
            row[f"{side}_us"] = uvloop.run(measure(shape, arguments.seconds, alone=arguments.alone))
            if arguments.profile:
                profile.disable()
                print(f"{shape.name}, {side}")
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        rows.append(row)
    if arguments.output == "json":
        print(json.dumps(rows, indent=1))
        return
    print(f"{'ledgers × adds × bytes':28}{'client µs/add':>16}{'one bookie µs/add':>20}")
    for row in rows:
        print(f"{row['shape']:28}{row['client_us']:>16.2f}{row['bookie_us']:>20.2f}")


if __name__ == "__main__":
    main()
