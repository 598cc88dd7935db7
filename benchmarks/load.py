"""The load that all writing benchmarks put on whatever they measure: a full window, kept full.

Owns the window, the clock and the figures, so that the product and the ceiling are measured by the same
code. What is measured is a function that takes a payload and returns a future; an add's latency runs from the
moment the window had room for it to its future's done callback.
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Load:
    """What to write: entries of a size, so many in flight, for so long."""

    entry_bytes: int
    in_flight: int
    seconds: float

    @property
    def name(self) -> str:
        """Give the load as a table names it."""
        size = f"{self.entry_bytes // 1024} KiB" if self.entry_bytes % 1024 == 0 else f"{self.entry_bytes} B"
        return f"{size}, {self.in_flight:,} in flight"


@dataclass(frozen=True)
class Figures:
    """What one run gave. `client_us` is the client's processor time for each add."""

    adds_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    client_us: float
    adds: int

    def to_dict(self) -> dict[str, float]:
        """Give the figures by name."""
        return asdict(self)


async def drive(add: Callable[[bytes], asyncio.Future[int]], load: Load) -> Figures:
    """Keep the window full for the given time. What is still in flight at the end is not waited for."""
    payload, wake = b"x" * load.entry_bytes, asyncio.Event()
    latencies: list[float] = []
    room = load.in_flight

    def done_since(sent_at: float) -> Callable[[asyncio.Future[int]], None]:
        def done(future: asyncio.Future[int]) -> None:
            nonlocal room
            future.result()
            latencies.append(time.perf_counter() - sent_at)
            room += 1
            wake.set()

        return done

    cpu_before, started_at = _cpu_seconds(), time.perf_counter()
    while (now := time.perf_counter()) < started_at + load.seconds:
        callback, count, room = done_since(now), room, 0
        for _ in range(count):
            add(payload).add_done_callback(callback)
        wake.clear()
        await wake.wait()
    elapsed, cpu, count = time.perf_counter() - started_at, _cpu_seconds() - cpu_before, len(latencies)
    latencies.sort()
    return Figures(
        adds_per_s=count / elapsed,
        p50_ms=1e3 * latencies[count // 2],
        p99_ms=1e3 * latencies[int(count * 0.99)],
        p999_ms=1e3 * latencies[int(count * 0.999)],
        client_us=1e6 * cpu / count,
        adds=count,
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
