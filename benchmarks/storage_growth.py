"""A bookie's storage as it grows: memory, restart, cost by entry, pauses, bytes to the device.

    python -m benchmarks.storage_growth [memory|restart|cost|pauses|bytes|all] [--directory DIR] [--small]

Measures the storage engine, in a process of its own, with entries as they come from many ledgers at once. A
block holds one entry unless noted otherwise, which is the worst case for the index.

- `memory`: resident memory after 10,000,000 entries of 100 bytes, added to 10,000 ledgers in turn, and while
  each of the ledgers is read.
- `restart`: seconds until the engine serves after `kill -9`, with 1 GiB and with 10 GiB stored.
- `cost`: processor time and latency of an add with 10**3, 10**5 and 10**7 entries stored, and with 1, 100
  and 10,000 ledgers.
- `pauses`: latency of adds at a fixed rate while half of the data is deleted and the live rest is compacted,
  and without.
- `bytes`: bytes written to the device per byte of payload, into recycled segment files.

Each line of the output is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.running import run
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.engine import Engine
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.wire.blocks import Block, encode_block

if TYPE_CHECKING:
    from collections.abc import Iterator

    from metadata.errors import StorageError

MIB, GIB = 1024**2, 1024**3
IN_FLIGHT = 1000


def say(**row: Any) -> None:
    """Print a line."""
    print(json.dumps(row), flush=True)


def status_mib(field: str) -> float:
    """Return a figure of this process's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"the system does not tell {field}")


def written_bytes() -> int:
    """Return what this process has caused to be written to a device."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("the system does not tell what was written")


def percentile(values: list[float], share: float) -> float:
    """Return a percentile, in milliseconds."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3, 3)


class Store:
    """An engine, and a writer of interleaved ledgers."""

    def __init__(self, engine: Engine, entry_bytes: int, entries: int = 1) -> None:
        self.engine = engine
        self.payloads = [random.randbytes(entry_bytes) for _ in range(entries)]
        self.running = [entry_bytes * (number + 1) for number in range(entries)]
        self.next: dict[int, int] = {}
        self.room = asyncio.Semaphore(IN_FLIGHT)
        self.latencies: list[float] = []
        self.error: StorageError | None = None

    @classmethod
    async def open(cls, directory: str, entry_bytes: int, entries: int = 1) -> Store:
        """Open an engine with the default configuration."""
        os.makedirs(directory, exist_ok=True)
        engine = await Engine.open(
            RealDisk(), [directory], StorageConfig(),
            draw_generation=lambda: random.getrandbits(64),
            on_indexed=lambda _: None, on_failed=print, on_writable=print, on_warning=print,
        )  # fmt: skip
        return cls(engine, entry_bytes, entries)

    def block(self, ledger_id: int) -> Block:
        """Return the next block of a ledger."""
        first = self.next.get(ledger_id, 0)
        self.next[ledger_id] = first + len(self.payloads)
        data = encode_block(
            ledger_id=ledger_id, content_term=0, first_entry=first, stride=1, lac=first - 1, lafr=-1,
            payloads=self.payloads, running=self.running,
        )  # fmt: skip
        return Block.parse(memoryview(data))

    def add(self, ledger_id: int) -> None:
        """Add a block, and note how long it took."""
        started = time.perf_counter()

        def done(error: StorageError | None) -> None:
            self.latencies.append(time.perf_counter() - started)
            self.error = self.error or error
            self.room.release()

        self.engine.append_block(self.block(ledger_id), done)

    async def write(self, ledger_ids: Iterator[int], blocks: int) -> None:
        """Add that many blocks, `IN_FLIGHT` of them at a time."""
        for _ in range(blocks):
            await self.room.acquire()
            self.add(next(ledger_ids))
        await self.flush()

    async def flush(self) -> None:
        """Wait for everything."""
        flushed = asyncio.Event()
        self.engine.barrier(lambda _: flushed.set())
        await flushed.wait()
        if self.error is not None:
            raise self.error

    async def delete(self, ledger_ids: range) -> None:
        """Delete ledgers."""
        for ledger_id in ledger_ids:
            self.engine.append_tombstone(ledger_id, lambda _: None)
            self.next.pop(ledger_id, None)
        await self.flush()


def in_turn(ledgers: int, first: int = 0) -> Iterator[int]:
    """Return ledger ids, each in its turn."""
    return (first + number % ledgers for number in count())


async def measure_memory(directory: str, scale: int) -> None:
    """Print the memory while entries are stored, and while they are read."""
    ledgers, blocks = 10_000 // scale, 10_000_000 // scale
    store = await Store.open(directory, 100)
    say(what="memory", entries=0, rss_mib=status_mib("VmRSS"))
    turn = in_turn(ledgers)
    for part in range(10):
        used, started = time.process_time(), time.perf_counter()
        store.latencies.clear()
        await store.write(turn, blocks // 10)
        say(
            what="memory", entries=(part + 1) * blocks // 10, ledgers=ledgers, rss_mib=status_mib("VmRSS"),
            peak_mib=status_mib("VmHWM"), cpu_us=round((time.process_time() - used) / (blocks / 10) * 1e6, 2),
            per_s=round(blocks / 10 / (time.perf_counter() - started)),
            p50_ms=percentile(store.latencies, 0.5), p99_ms=percentile(store.latencies, 0.99),
        )  # fmt: skip
    store.latencies.clear()
    rng, times = random.Random(1), []
    for _ in range(2000):
        started = time.perf_counter()
        await store.engine.read(rng.randrange(ledgers), 0, range(0, 100), 64 * 1024)
        times.append(time.perf_counter() - started)
    say(
        what="memory", reads=len(times), entries_each=100, rss_mib=status_mib("VmRSS"),
        peak_mib=status_mib("VmHWM"), p50_ms=percentile(times, 0.5), p99_ms=percentile(times, 0.99),
    )  # fmt: skip
    await store.engine.close()


async def fill(directory: str, size: int, entries: int, ledgers: int) -> None:
    """Store so many bytes of 1 KiB entries, and die by SIGKILL with more in flight."""
    store = await Store.open(directory, 1024, entries)
    turn = in_turn(ledgers)
    await store.write(turn, size // (1024 * entries))
    for _ in range(100):
        store.add(next(turn))
    await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


async def measure_restart(directory: str, size: int, entries: int, ledgers: int) -> None:
    """Print how long it takes to open the engine."""
    started, used = time.perf_counter(), time.process_time()
    store = await Store.open(directory, 1024)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    store.next[0] = store.engine.last_entry(0) + 1
    await store.write(iter([0]), 1)
    say(
        what="restart", stored_gib=size / GIB, entries_per_block=entries, ledgers=ledgers,
        seconds=round(seconds, 3), cpu_s=round(cpu, 3),
        to_first_add_s=round(time.perf_counter() - started, 3), segments=store.engine.metrics()["segments"],
    )  # fmt: skip
    os._exit(0)  # as it is, for the next measurement


async def measure_cost(directory: str, stored: int, ledgers: int) -> None:
    """Print the cost of an add in a store of that size."""
    store = await Store.open(directory, 100)
    turn = in_turn(ledgers)
    await store.write(turn, stored)
    measured = 50_000
    store.latencies.clear()
    used = time.process_time()
    await store.write(turn, measured)
    cpu = time.process_time() - used
    say(
        what="cost", stored=stored, ledgers=ledgers, cpu_us=round(cpu / measured * 1e6, 2),
        p50_ms=percentile(store.latencies, 0.5), p99_ms=percentile(store.latencies, 0.99),
    )  # fmt: skip
    await store.engine.close()


async def paced(store: Store, ledger_ids: Iterator[int], per_s: int, seconds: float) -> list[float]:
    """Add at a fixed rate; return the latencies from the moment when each add was due."""
    store.latencies.clear()
    loop, late = asyncio.get_running_loop(), list[float]()
    started, number = loop.time(), 0
    while (now := loop.time()) < started + seconds:
        while started + number / per_s <= now:
            due, number = started + number / per_s, number + 1

            def done(_: StorageError | None, due: float = due) -> None:
                late.append(loop.time() - due)

            store.engine.append_block(store.block(next(ledger_ids)), done)
        await asyncio.sleep(0.001)
    await store.flush()
    return late


async def reclaimed(store: Store) -> None:
    """Wait until nothing has been copied for a while."""
    before = None
    while (now := store.engine.metrics()["reclaimed"]) != before:
        before = now
        await asyncio.sleep(3 * CompactionConfig().pause_s)


async def measure_pauses(directory: str, scale: int) -> None:
    """Print the latencies with and without half of the data being reclaimed."""
    store = await Store.open(directory, 1024)
    ledgers, blocks, per_s = 1000, 600_000 // scale, 2_000
    await store.write(in_turn(ledgers), blocks)
    seconds = 20.0 if scale == 1 else 5.0
    for what in ("quiet", "reclaiming", "quiet"):
        if what == "reclaiming":
            # Some segments die as a whole, most keep two fifths of what they held.
            await store.delete(range(600))
        elif store.engine.metrics()["reclaimed"]["given_up"]:
            await reclaimed(store)
        times = await paced(store, in_turn(100, 50_000), per_s, seconds)
        say(
            what="pauses", during=what, adds_per_s=per_s, p50_ms=percentile(times, 0.5),
            p99_ms=percentile(times, 0.99), p999_ms=percentile(times, 0.999), max_ms=percentile(times, 1),
            reclaimed=store.engine.metrics()["reclaimed"],
        )  # fmt: skip
    await store.engine.close()


def spare_files(store: Store) -> int:
    """Return the number of files that are waiting to be segments again."""
    figures = store.engine.metrics()["disk"]
    assert isinstance(figures, dict)
    return int(figures["spare_files"])


async def measure_bytes(directory: str, scale: int) -> None:
    """Print the bytes written to the device per byte of payload, in the steady state."""
    for name, entry_bytes, entries, in_flight in (
        ("1 KiB, 1,000 in flight", 1024, 50, 20),
        ("100 B, 10,000 in flight", 100, 500, 20),
        ("64 KiB, 64 in flight", 65536, 2, 32),
        ("1 KiB, one in flight", 1024, 1, 1),
    ):
        path = f"{directory}/{entry_bytes}-{in_flight}"
        total = (GIB if in_flight > 1 else 32 * MIB) // scale
        warm = await Store.open(path, 65536, 8)
        await warm.write(in_turn(8), (total + GIB // 2) // (8 * 65536))
        await warm.delete(range(8))
        for _ in range(300):
            if spare_files(warm) * 128 * MIB >= total:
                break
            await asyncio.sleep(0.1)
        await warm.engine.close()
        store = await Store.open(path, entry_bytes, entries)
        store.room = asyncio.Semaphore(in_flight)
        blocks = total // (entry_bytes * entries)
        before, started = written_bytes(), time.perf_counter()
        await store.write(in_turn(1 if in_flight == 1 else 10, 100), blocks)
        await asyncio.sleep(1)  # for indexes and checkpoints
        payload = blocks * entry_bytes * entries
        say(
            what="bytes", load=name, device_per_payload=round((written_bytes() - before) / payload, 3),
            mib_per_s=round(payload / MIB / (time.perf_counter() - started - 1)),
            spare_files=spare_files(store),
        )  # fmt: skip
        await store.engine.close()
        shutil.rmtree(path)


def child(*arguments: object) -> int:
    """Run a part of this script in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.storage_growth", *map(str, arguments)]
    return subprocess.run(command, check=False).returncode


def measure(what: str, directory: str, scale: int) -> None:
    """Run one kind of measurement."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="growth.") as work:
        if what == "restart":
            for entries, ledgers in ((50, 100), (1, 1000)):
                for size in (GIB // scale, 10 * GIB // scale):
                    path = f"{work}/{entries}-{size}"
                    child("fill", "--directory", path, "--numbers", size, entries, ledgers)
                    for _ in range(3):
                        child("open", "--directory", path, "--numbers", size, entries, ledgers)
                    shutil.rmtree(path)
        elif what == "cost":
            for stored in (1000, 100_000, 10_000_000 // scale):
                for ledgers in (1, 100, 10_000):
                    child("add", "--directory", f"{work}/b", "--numbers", stored, ledgers)
                    shutil.rmtree(f"{work}/b")
        else:
            child(f"{what}-here", "--directory", f"{work}/b", "--numbers", scale)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all")
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--small", action="store_true", help="a hundredth of it, to see that it runs")
    parser.add_argument("--numbers", nargs="*", type=int, default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts: dict[str, Any] = {
        "memory-here": measure_memory, "pauses-here": measure_pauses, "bytes-here": measure_bytes,
        "fill": fill, "open": measure_restart, "add": measure_cost,
    }  # fmt: skip
    if arguments.what in parts:
        run(parts[arguments.what](arguments.directory, *arguments.numbers))
        return
    say(what="machine", cpus=os.cpu_count(), load=os.getloadavg()[0], soft_files=resource.getrlimit(7)[0])
    kinds = ("memory", "restart", "cost", "pauses", "bytes")
    for what in kinds if arguments.what == "all" else (arguments.what,):
        measure(what, arguments.directory, 100 if arguments.small else 1)


if __name__ == "__main__":
    main()
