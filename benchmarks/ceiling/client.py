"""The ceiling's writing client: three bookies, an add is done when two of them have it on disk.

    python -m benchmarks.ceiling.client PORT,PORT,PORT ENTRY_BYTES IN_FLIGHT LEDGERS WARM_UP SECONDS READ

One ledger, and no reading. Prints `ready`, `warm`, and the figures as one line of JSON.
"""

from __future__ import annotations

import array
import asyncio
import functools
import json
import struct
import sys
from collections import deque
from typing import cast

import msgpack
import uvloop
from crc32c import crc32c

from benchmarks.load import Load, drive

LEDGER = 7
FRAME_BYTES_MAX = 512 << 10
ENTRIES_PER_FRAME_MAX = 4096


class Connection(asyncio.Protocol):
    """Hands the answers of one bookie to the writer."""

    transport: asyncio.Transport

    def __init__(self, writer: Writer, index: int) -> None:
        self.writer, self.index, self.rest = writer, index, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        data, at = self.rest + data, 0
        while len(data) >= at + 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            _, last_entry = cast("list[int]", msgpack.unpackb(data[at + 4 : end]))
            self.writer.on_disk(self.index, last_entry)
            at = end
        self.rest = data[at:]


class Writer:
    """All adds of one event-loop iteration leave as one frame, the same bytes to every bookie."""

    def __init__(self, loop: asyncio.AbstractEventLoop, entry_bytes: int) -> None:
        self.loop = loop
        self.entries_per_frame = max(1, min(ENTRIES_PER_FRAME_MAX, FRAME_BYTES_MAX // entry_bytes))
        self.connections: list[Connection] = []
        self.last_on_disk = [-1, -1, -1]
        self.unsent: list[bytes] = []
        self.futures: deque[asyncio.Future[int]] = deque()
        self.next_entry, self.lac = 0, -1

    def add(self, payload: bytes) -> asyncio.Future[int]:
        """Queue an entry for this iteration's frame."""
        future = self.loop.create_future()
        self.futures.append(future)
        if not self.unsent:
            self.loop.call_soon(self.send)
        self.unsent.append(payload)
        self.next_entry += 1
        return future

    def send(self) -> None:
        """Frame and write the queued entries."""
        unsent, self.unsent = self.unsent, []
        first = self.next_entry - len(unsent)
        for start in range(0, len(unsent), self.entries_per_frame):
            part = unsent[start : start + self.entries_per_frame]
            lengths = array.array("I", map(len, part)).tobytes()
            digests = array.array("I", map(crc32c, part)).tobytes()
            header = msgpack.packb([LEDGER, first + start, self.lac, len(part), lengths, digests])
            body = b"".join(part)
            frame = struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
            for connection in self.connections:
                connection.transport.write(frame)

    def on_disk(self, index: int, last_entry: int) -> None:
        """Complete, in order, the adds that two of the three bookies have."""
        self.last_on_disk[index] = last_entry
        lac = sorted(self.last_on_disk)[1]
        for entry in range(self.lac + 1, lac + 1):
            self.futures.popleft().set_result(entry)
        self.lac = max(self.lac, lac)


async def main() -> None:
    ports, load = sys.argv[1], Load.of_arguments(sys.argv[2:])
    loop = asyncio.get_running_loop()
    writer = Writer(loop, load.entry_bytes)
    for index, port in enumerate(ports.split(",")):
        _, connection = await loop.create_connection(
            functools.partial(Connection, writer, index), "127.0.0.1", int(port)
        )
        writer.connections.append(connection)
    print("ready", flush=True)
    figures = await drive(lambda _: writer.add, load)
    print(json.dumps(figures.to_dict()))


if __name__ == "__main__":
    uvloop.run(main())
