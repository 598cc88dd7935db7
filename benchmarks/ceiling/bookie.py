"""The ceiling's bookie: frames go from the receive buffer to the file without an object per entry.

    python -m benchmarks.ceiling.bookie FILE fresh|recycled

`fresh` writes into blocks that were only allocated, and allocates them anew each time the file is full.
`recycled` writes into blocks that were written before, so that an fdatasync has no metadata to commit.

Prints `ready PORT` once it serves.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgpack
import uvloop

FILE_BYTES = 1 << 30
BUFFER_BYTES = 4 << 20
ROOM_BYTES_MIN = 256 << 10
BUFFERS_PER_CALL = 1024  # IOV_MAX
PREFIX = struct.Struct(">II")


class Journal:
    """One file, written round and round, one group behind each fdatasync."""

    def __init__(self, path: str, *, is_recycled: bool) -> None:
        self.descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        os.posix_fallocate(self.descriptor, 0, FILE_BYTES)
        self.is_recycled = is_recycled
        if is_recycled:
            zeros = bytes(1 << 20)
            for at in range(0, FILE_BYTES, len(zeros)):
                os.pwrite(self.descriptor, zeros, at)
            os.fdatasync(self.descriptor)
        self.loop = asyncio.get_running_loop()
        self.thread = ThreadPoolExecutor(1)
        self.waiting: list[tuple[Connection, memoryview, int]] = []
        self.is_busy = False
        self.end = 0

    def append(self, connection: Connection, frame: memoryview, last_entry: int) -> None:
        """Queue a frame; frames queued while one group is written make the next group."""
        self.waiting.append((connection, frame, last_entry))
        if not self.is_busy:
            self.is_busy = True
            self.loop.call_soon(self.start_group)

    def start_group(self) -> None:
        """Hand all queued frames to the writing thread."""
        group, self.waiting = self.waiting, []
        frames = [frame for _, frame, _ in group]
        size = sum(map(len, frames))
        start = 0 if self.end + size > FILE_BYTES else self.end
        self.end = start + size
        written = self.loop.run_in_executor(self.thread, self.write, frames, start)
        written.add_done_callback(lambda _: self.finish_group(group))

    def write(self, frames: list[memoryview], at: int) -> None:
        """Write and sync, on the thread."""
        if at == 0 and not self.is_recycled:
            os.ftruncate(self.descriptor, 0)
            os.posix_fallocate(self.descriptor, 0, FILE_BYTES)
        for first in range(0, len(frames), BUFFERS_PER_CALL):
            at += os.pwritev(self.descriptor, frames[first : first + BUFFERS_PER_CALL], at)
        os.fdatasync(self.descriptor)

    def finish_group(self, group: list[tuple[Connection, memoryview, int]]) -> None:
        """Answer each connection once, with its last entry."""
        for connection, last_entry in {connection: last for connection, _, last in group}.items():
            connection.answer(last_entry)
        if self.waiting:
            self.start_group()
        else:
            self.is_busy = False


class Connection(asyncio.BufferedProtocol):
    """Cuts the input into frames that stay in the receive buffer."""

    transport: asyncio.Transport

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.begin_buffer(b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def begin_buffer(self, rest: bytes | memoryview) -> None:
        """Start a new buffer; the old one lives on until its frames are on disk."""
        self.view = memoryview(bytearray(max(BUFFER_BYTES, 2 * len(rest))))
        self.view[: len(rest)] = rest
        self.parsed, self.filled = 0, len(rest)

    def get_buffer(self, sizehint: int) -> memoryview:
        if len(self.view) - self.filled < ROOM_BYTES_MIN:
            self.begin_buffer(self.view[self.parsed : self.filled])
        return self.view[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        while self.filled - self.parsed >= PREFIX.size:
            length, header_bytes = PREFIX.unpack_from(self.view, self.parsed)
            end = self.parsed + 4 + length
            if end > self.filled:
                return
            header_at = self.parsed + PREFIX.size
            packed = self.view[header_at : header_at + header_bytes]
            _, first, _, count, _, _ = cast("list[int]", msgpack.unpackb(packed))
            self.journal.append(self, self.view[self.parsed : end], first + count - 1)
            self.parsed = end

    def answer(self, last_entry: int) -> None:
        """Tell the client how far its entries are on disk."""
        if not self.transport.is_closing():
            packed = msgpack.packb([1, last_entry])
            self.transport.write(len(packed).to_bytes(4, "big") + packed)


async def main() -> None:
    path, blocks = sys.argv[1:]
    assert blocks in ("fresh", "recycled")
    journal = Journal(path, is_recycled=blocks == "recycled")
    server = await asyncio.get_running_loop().create_server(lambda: Connection(journal), "127.0.0.1", 0)
    print("ready", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
