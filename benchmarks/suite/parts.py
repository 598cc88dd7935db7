"""The parts of the suite: the measurements, case by case.

A part is an asynchronous generator of cases: a name, and the figures found. Each begins with fresh clusters.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks import layers
from benchmarks.suite.bench import next_line
from benchmarks.watching import resident_mib

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from benchmarks.suite.bench import Bench, Running

    Cases = AsyncGenerator[tuple[str, dict[str, Any]], None]

SIZES = ((1024, (1, 10, 100, 300, 1000)), (100, (1, 100, 1000, 10_000)), (64 << 10, (1, 16, 64)))
ENSEMBLES = ((1, 1, 1), (3, 2, 2), (3, 3, 2), (5, 3, 2))
SHARES_OF_PEAK = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
GIB = 1 << 30
_SAMPLE_S = 1.0


async def closed(bench: Bench) -> Cases:
    """Throughput and latency over entry size and adds in flight."""
    for entry_bytes, windows in SIZES:
        async with bench.cluster() as cluster:
            for in_flight in windows:
                spec = bench.spec("closed", entry_bytes=entry_bytes, in_flight=in_flight)
                found = await cluster.run(spec)
                yield (
                    f"{entry_bytes} B, {in_flight}",
                    {**found, "entry_bytes": entry_bytes, "in_flight": in_flight},
                )


async def ensembles(bench: Bench) -> Cases:
    """The same over ensembles: E, Qw, Qa."""
    for ensemble in ENSEMBLES:
        async with bench.cluster(bookies=max(3, ensemble[0])) as cluster:
            spec = bench.spec("closed", ensemble=ensemble)
            yield "/".join(map(str, ensemble)), {**await cluster.run(spec), "ensemble": ensemble}


async def ledgers(bench: Bench) -> Cases:
    """The same over the number of ledgers written at once, 1,000 adds in flight in all."""
    for count in (1, 10, 100, 1000, 10_000):
        count = min(count, max(10, bench.scaled(count)))
        async with bench.cluster() as cluster:
            found = await cluster.run(bench.spec("closed", ledgers=count))
            yield f"{count} ledgers", {**found, "ledgers": count}


async def open_loop(bench: Bench) -> Cases:
    """Latency from the moment an add was due, at shares of the peak rate."""
    async with bench.cluster() as cluster:
        peak = (await cluster.run(bench.spec("closed")))["adds_per_s"]
        for share in SHARES_OF_PEAK:
            found = await cluster.run(bench.spec("open", rate=share * peak))
            yield f"{share:.0%} of peak", {**found, "rate": share * peak, "share": share}


async def tail(bench: Bench) -> Cases:
    """From the writing of an entry to its arrival at a reader that follows, in another process."""
    for rate in (10, 100, 1000, 10_000):
        async with bench.cluster() as cluster:
            # Longer than the reader measures, which takes a moment to start.
            spec = bench.spec("tail_writer", rate=rate, seconds=bench.seconds + 4)
            async with cluster.client(spec) as writer:
                ledger_id = (await next_line(writer, spec))["ledger_id"]
                found = await cluster.run(bench.spec("tail_reader", ledger_id=ledger_id))
            yield f"{rate} adds/s", {**found, "rate": rate}


async def reads(bench: Bench) -> Cases:
    """Catch-up reads by one reader, entry by entry and in batches; alone and interleaved with others."""
    for count, total in ((1, 1_000_000), (100, 2_000_000)):
        async with bench.cluster() as cluster:
            filled = await cluster.run(bench.spec("fill", ledgers=count, entries=bench.scaled(total)))
            for name, per_entry in (("entries", True), ("batches", False)):
                spec = bench.spec("read", ledger_id=filled["ledger_ids"][0], per_entry=per_entry)
                yield f"{name}, 1 of {count}", {**await cluster.run(spec), "ledgers": count}


async def growth(bench: Bench) -> Cases:
    """Cost and latency of an add with ever more stored: flat, if all is well."""
    stored = 0
    async with bench.cluster() as cluster:
        for total in (1_000, 100_000, 1_000_000, 10_000_000):
            wanted = bench.scaled(total)
            if wanted > stored:
                spec = bench.spec(
                    "fill", entries=wanted - stored, ledgers=max(1, wanted // 1000), entry_bytes=100
                )
                await cluster.run(spec)
            found = await cluster.run(bench.spec("closed", in_flight=300))
            stored = max(stored, wanted) + int(found["adds_with_warm_up"])
            yield (
                f"{wanted:,} entries",
                {**found, "entries_stored": wanted, "disk_bytes": cluster.disk_bytes()},
            )


async def memory(bench: Bench) -> Cases:
    """A bookie's memory with ten million entries in ten thousand ledgers."""
    async with bench.cluster() as cluster:
        yield "empty", {"bookie_mib": cluster.bookie_mib()}
        entries, count = bench.scaled(10_000_000), bench.scaled(10_000)
        spec = bench.spec("fill", entries=entries, ledgers=count, entry_bytes=100)
        yield f"{entries:,} in {count:,}", {**await cluster.run(spec), "disk_bytes": cluster.disk_bytes()}


async def restart(bench: Bench) -> Cases:
    """From the start of a killed bookie's process to its serving, over what it stores."""
    async with bench.cluster() as cluster:
        stored = 0
        for total in (0, GIB, 10 * GIB):
            wanted = bench.scaled(total) if total else 0
            if wanted > stored:
                await cluster.run(bench.spec("fill", entries=(wanted - stored) // 65_536, entry_bytes=65_536))
                stored = wanted
            took = []
            for _ in range(3):
                bookie = cluster.cluster["b1"]
                await bookie.kill()
                begun = time.perf_counter()
                await bookie.start()
                took.append(time.perf_counter() - begun)
            yield f"{wanted / GIB:.2f} GiB", {"stored_bytes": wanted, "seconds": sorted(took)[1], "all": took}


async def processor(bench: Bench) -> Cases:
    """Processor time of each side for an add, without sockets and disks (`benchmarks.layers`)."""
    for shape in layers.SHAPES:
        row = {
            "client_us": await layers.client_us(shape, min(2.0, bench.seconds)),
            "bookie_us": await layers.bookie_us(shape, min(2.0, bench.seconds)),
        }
        yield shape.name, row


async def fairness(bench: Bench) -> Cases:
    """Latency of a modest writer (100 adds/s) alone, and beside clients at full speed."""
    modest = bench.spec("open", rate=100, entry_bytes=100)
    greedy = bench.spec("closed", in_flight=4000, seconds=bench.seconds + 2 * bench.warm_up_s + 2)
    large = {**greedy, "entry_bytes": 1 << 20, "in_flight": 60}
    many = {**greedy, "ledgers": 1000, "in_flight": 1000}
    beside: dict[str, list[dict[str, Any]]] = {
        "alone": [],
        "beside one writer at full speed": [greedy],
        "beside one with large entries": [large],
        "beside three writers": [greedy, greedy, large],
        "beside a thousand ledgers": [many],
    }
    for name, others in beside.items():
        async with bench.cluster() as cluster:
            yield name, await _beside(cluster, others, modest)
    async with bench.cluster() as cluster:
        filled = await cluster.run(bench.spec("fill", entries=bench.scaled(300_000)))
        reader = bench.spec(
            "read", ledger_id=filled["ledger_ids"][0], seconds=greedy["seconds"], per_entry=False
        )
        yield "beside eight readers", await _beside(cluster, [reader] * 8, modest)


async def _beside(cluster: Running, others: list[dict[str, Any]], modest: dict[str, Any]) -> dict[str, Any]:
    """Run the others, and the modest one while they are at it."""
    if not others:
        return await cluster.run(modest)
    running = [asyncio.create_task(cluster.run(spec)) for spec in others]
    try:
        await asyncio.sleep(1)
        found = await cluster.run(modest)
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return found


async def connections(bench: Bench) -> Cases:
    """The cost of open connections for the bookie, and for a modest writer beside them."""
    modest = bench.spec("open", rate=100, entry_bytes=100)
    for full in (1, 1000, 9900):
        count = bench.scaled(full)
        async with bench.cluster() as cluster:
            bookie = cluster.pids[0]
            before = resident_mib(bookie)
            spec = bench.spec("connect_many", entries=count, seconds=bench.seconds + bench.warm_up_s + 3)
            async with cluster.client(spec) as child:
                held = await next_line(child, spec)
                grown = resident_mib(bookie) - before
                found = await cluster.run(modest)
                pings = await next_line(child, spec)
            yield f"{count} connections", {**found, **held, "grown_mib": grown, "pings": pings}


async def soak(bench: Bench) -> Cases:
    """70 % of the peak rate for long, ledgers created and deleted all the time: disk and memory over time.

    Lasts `--soak-minutes`. Each ledger takes 64 MiB; three are kept.
    """
    async with bench.cluster() as cluster:
        peak = (await cluster.run(bench.spec("closed")))["adds_per_s"]
        seconds = 60 * soak_minutes
        spec = bench.spec("soak", rate=0.7 * peak, seconds=seconds, entries=(64 << 20) // 1024)
        samples: list[dict[str, Any]] = []
        async with cluster.client(spec) as child:
            while "done" not in (line := await next_line(child, {"seconds": 60})):
                sample = {
                    "at_s": line["at_s"],
                    "disk_mib": cluster.disk_bytes() / (1 << 20),
                    "bookie_mib": cluster.bookie_mib(),
                    "p50_ms": line["latency_ms"]["p50"],
                    "p99_ms": line["latency_ms"]["p99"],
                    "adds": line["adds"],
                    "failed": line["failed"],
                    "deleted": line["deleted"],
                }
                samples.append(sample)
        yield f"{soak_minutes:g} minutes", {**line, "rate": 0.7 * peak, "samples": samples}


soak_minutes = 20.0
"""How long `soak` lasts; the command line sets it."""

PARTS: dict[str, Callable[[Bench], Cases]] = {
    "closed": closed,
    "open": open_loop,
    "ensembles": ensembles,
    "ledgers": ledgers,
    "tail": tail,
    "reads": reads,
    "processor": processor,
    "fairness": fairness,
    "connections": connections,
    "restart": restart,
    "growth": growth,
    "memory": memory,
    "soak": soak,
}
