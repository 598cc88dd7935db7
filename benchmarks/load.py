"""The load of all writing benchmarks: a window that is kept full.

Owns the window, the clock and the figures, so that the product and the ceiling are measured by the same code.
The measured side is a function that takes a payload and returns a future. An add's latency runs from the
moment the window had room for it to its future's done callback. The caller supplies that function anew for
each burst. A change from ledger to ledger therefore costs nothing for each add.
"""

from __future__ import annotations

import array
import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.processes import Child

_ANSWER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Load:
    """A load: entries of a size, so many in flight over all ledgers, for so long.

    With `read_entries` that many entries are written to be read again and again, and reading is measured.
    `kind` and `rate` (entries a second) are the workload's: see `benchmarks.peers.workloads`.
    """

    entry_bytes: int
    in_flight: int
    seconds: float
    warm_up_s: float = 0.0
    ledgers: int = 1
    read_entries: int = 0
    kind: str = "write"
    rate: int = 0

    @property
    def name(self) -> str:
        """Return the load as a table names it."""
        size = f"{self.entry_bytes // 1024} KiB" if self.entry_bytes % 1024 == 0 else f"{self.entry_bytes} B"
        return f"{size}, {self.in_flight:,} in flight"

    def arguments(self) -> list[str]:
        """Return the load as the arguments of a client in a process of its own."""
        values = (
            self.entry_bytes, self.in_flight, self.ledgers, self.warm_up_s, self.seconds, self.read_entries,
            self.kind, self.rate,
        )  # fmt: skip
        return list(map(str, values))

    @classmethod
    def of_arguments(cls, arguments: Sequence[str]) -> Load:
        """Take such arguments."""
        entry_bytes, in_flight, ledgers, warm_up_s, seconds, read_entries, kind, rate = arguments
        return cls(
            int(entry_bytes),
            int(in_flight),
            float(seconds),
            float(warm_up_s),
            int(ledgers),
            int(read_entries),
            kind,
            int(rate),
        )


@dataclass(frozen=True)
class Figures:
    """The figures of one run, warm-up left out. `client_us` is the client's processor time for each add."""

    adds_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    client_us: float
    adds: int
    failed: int = 0
    adds_with_warm_up: int = 0

    def to_dict(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)

    @classmethod
    def of_latencies(
        cls, latencies_s: array.array[float], elapsed_s: float, cpu_s: float, failed: int, all_adds: int
    ) -> Figures:
        """Sum up; sorts its argument."""
        found, count = sorted(latencies_s), len(latencies_s)
        return cls(
            adds_per_s=count / elapsed_s,
            p50_ms=1e3 * found[count // 2],
            p99_ms=1e3 * found[int(count * 0.99)],
            p999_ms=1e3 * found[int(count * 0.999)],
            client_us=1e6 * cpu_s / count,
            adds=count,
            failed=failed,
            adds_with_warm_up=all_adds,
        )


async def figures_of(client: Child, load: Load) -> Figures:
    """Wait for the figures that a client in a process of its own prints."""
    timeout_s = load.warm_up_s + load.seconds + _ANSWER_TIMEOUT_S
    return Figures(**json.loads(await client.line(lambda line: line.startswith("{"), timeout_s)))


Add = Callable[[bytes], asyncio.Future[int]]


async def drive(
    add_for: Callable[[int], Add],
    load: Load,
    keep: Callable[[array.array[float]], None] = lambda _: None,
) -> Figures:
    """Keep the window full for the given time; prints `warm` when the measured part begins.

    Adds in flight at the end are not waited for.

    Args:
        add_for: returns the adding function, for so many adds in a row.
        keep: gets all latencies, in seconds.
    """
    payload, wake = b"x" * load.entry_bytes, asyncio.Event()
    latencies = array.array("d")
    room, failed, before = load.in_flight, 0, 0

    def done_since(sent_at: float) -> Callable[[asyncio.Future[int]], None]:
        def done(future: asyncio.Future[int]) -> None:
            nonlocal room, failed
            if future.exception() is None:
                latencies.append(time.perf_counter() - sent_at)
            else:
                failed += 1
            room += 1
            wake.set()

        return done

    started_at = time.perf_counter()
    for is_measured, until in ((False, load.warm_up_s), (True, load.warm_up_s + load.seconds)):
        if is_measured:
            print("warm", flush=True)
            before, failed = len(latencies) + failed, 0
            del latencies[:]
        cpu_before, phase_at = cpu_seconds(), time.perf_counter()
        while (now := time.perf_counter()) < started_at + until:
            callback, count, room = done_since(now), room, 0
            add = add_for(count)
            for _ in range(count):
                add(payload).add_done_callback(callback)
            wake.clear()
            await wake.wait()
    elapsed, cpu = time.perf_counter() - phase_at, cpu_seconds() - cpu_before
    keep(latencies)
    return Figures.of_latencies(latencies, elapsed, cpu, failed, before + len(latencies) + failed)


def cpu_seconds() -> float:
    """Return the processor time that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
