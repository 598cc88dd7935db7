"""The storage engine beside the raw disk: `python -m benchmarks.storage [DIRECTORY]`.

Writes the same groups twice, in the same run and directory. One pass uses `Engine.append_block`, the other a
bare `pwritev` and `fdatasync` on the same kind of thread. Prints MB/s of payload and the time of one group
with nothing else in flight. Also prints the cost of the event loop's share alone (accepting, forming the
group, indexing). A bookie cannot spend that time on anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, cast

from benchmarks.running import run
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.engine import Engine
from bookie_aio.wire.blocks import Block, encode_block

if TYPE_CHECKING:
    from bookie_aio.storage.disk.disk import File

MIB = 1024 * 1024


def make_block(entries: int, entry_bytes: int, first: int = 0) -> Block:
    """Return a block with random payload."""
    payloads = [random.randbytes(entry_bytes) for _ in range(entries)]
    running = [entry_bytes * (first + number + 1) for number in range(entries)]
    data = encode_block(
        ledger_id=1, content_term=0, first_entry=first, stride=1, lac=-1, lafr=-1,
        payloads=payloads, running=running,
    )  # fmt: skip
    return Block.parse(memoryview(data))


async def open_engine(disk: RealDisk, directory: str) -> Engine:
    """Return a fresh engine."""
    os.makedirs(directory)
    return await Engine.open(
        disk, [directory], StorageConfig(),
        draw_generation=lambda: random.getrandbits(64),
        on_indexed=lambda _: None, on_failed=print, on_writable=print,
    )  # fmt: skip


async def stream(engine: Engine, block: Block, total: int, in_flight: int) -> float:
    """Return the seconds it takes to store the block again and again, so many of them in flight."""
    room = asyncio.Semaphore(in_flight)
    started = time.perf_counter()
    for _ in range(total // block.total_bytes):
        await room.acquire()
        engine.append_block(block, lambda _: room.release())
    ended = asyncio.Event()
    engine.barrier(lambda _: ended.set())
    await ended.wait()
    return time.perf_counter() - started


async def one_at_a_time(engine: Engine, block: Block, count: int) -> list[float]:
    """Return the seconds of each block when it waits for the one before."""
    loop = asyncio.get_running_loop()
    found = []
    for _ in range(count):
        started = time.perf_counter()
        done = loop.create_future()
        engine.append_block(block, done.set_result)
        await done
        found.append(time.perf_counter() - started)
    return found


async def raw(file: File, block: Block, total: int, group: int) -> tuple[float, list[float]]:
    """Write the same bytes in groups of so many blocks; return the seconds in all and of each group."""
    offset, times = 4096, []
    started = time.perf_counter()
    while offset < total:
        begun = time.perf_counter()
        await file.write_and_sync([block.view] * group, offset)
        times.append(time.perf_counter() - begun)
        offset += group * block.total_bytes
    return time.perf_counter() - started, times


def bare(descriptor: int, block: Block, count: int) -> list[float]:
    """Return the seconds of each write and sync without any loop or thread."""
    times = []
    for number in range(count):
        begun = time.perf_counter()
        os.pwritev(descriptor, [block.view], number * block.total_bytes)
        os.fdatasync(descriptor)
        times.append(time.perf_counter() - begun)
    return times


class _NoDisk:
    """A file that is durable at once, to measure the event loop's share alone."""

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


async def measure(directory: str) -> None:
    """Print one line per shape of load, then the time of one group alone."""
    disk = RealDisk()
    print(f"{'load':34} {'engine':>12} {'raw':>12} {'loop alone':>14}")
    shapes = [(1000, 100, 8), (256, 1024, 4), (64, 16 * 1024, 4), (1, 1024, 256), (1, 64 * 1024, 32)]
    for number, (entries, size, in_flight) in enumerate(shapes):
        block = make_block(entries, size)
        total = max(8 * MIB, min(512 * MIB, 20_000 * block.total_bytes))
        payload = total // block.total_bytes * block.payload_bytes / MIB
        engine = await open_engine(disk, f"{directory}/{number}")
        seconds = await stream(engine, block, total, in_flight)
        groups = engine.metrics()["groups"]
        assert isinstance(groups, dict)
        mean = max(1, groups["bytes_mean"] // block.total_bytes)
        file = await disk.create(f"{directory}/{number}/raw")
        await file.preallocate(total + 64 * MIB)
        raw_seconds, _ = await raw(file, block, total, mean)
        file.close()
        segment = engine._journal.segment
        real = segment.file
        assert real is not None
        segment.file = cast("File", _NoDisk(real))
        loop_total = min(total, 64 * MIB)
        loop_seconds = await stream(engine, block, loop_total, in_flight)
        segment.file = real
        await engine.close()
        name = f"{entries} x {size} B, {in_flight} in flight, {mean}/group"
        print(
            f"{name:34} {payload / seconds:7.0f} MB/s {payload / raw_seconds:7.0f} MB/s "
            f"{loop_total / MIB / loop_seconds:9.0f} MB/s"
        )
        shutil.rmtree(f"{directory}/{number}")
    engine = await open_engine(disk, f"{directory}/single")
    block = make_block(1, 1024)
    file = await disk.create(f"{directory}/single/raw")
    await file.preallocate(64 * MIB)
    descriptor = os.open(f"{directory}/single/bare", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 64 * MIB)
    for _ in range(2):
        bare_times = bare(descriptor, block, 1500)
        _, raw_times = await raw(file, block, 4096 + 1500 * block.total_bytes, 1)
        times = await one_at_a_time(engine, block, 1500)
        print(
            f"one block of 1 KiB at a time: p50 {statistics.median(times) * 1e3:.3f} ms, "
            f"one hop to a thread {statistics.median(raw_times) * 1e3:.3f} ms, "
            f"bare pwritev and fdatasync {statistics.median(bare_times) * 1e3:.3f} ms"
        )
    os.close(descriptor)
    file.close()
    await engine.close()
    disk.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=parser.parse_args().directory, prefix="storage.") as work:
        run(measure(work))
