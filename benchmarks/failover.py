"""The delay that failures of other processes cause, with real processes on this machine.

    python -m benchmarks.failover [kill takeover slow idle lost] [--rounds 100] [-o table|json] [--json FILE]

`kill`: `kill -9` of a bookie of a writer's ensemble, with 100 adds of 1 KiB in flight and a spare bookie.
Measures the time from the kill to the first acknowledgement of an add that was made after it. Also measures
the longest time without any acknowledgement in the second after it.

`takeover`: a writer dies with 1,000 entries that no bookie knows to be acknowledged. A new client is
connected already. Measures its time to fence and recover that ledger, to create another, and to have its
first add acknowledged.

`slow`: SIGSTOP of one bookie of three with Qa = 2 and 1,000 adds of 1 KiB in flight. Measures adds per second
in the two seconds before and after it. Also measures the largest growth of the writer's memory. The bookie
counts as failed, and is sent nothing more, when it owes acknowledgements for too much.

`idle`: a writer adds one entry and is idle; a reader tails. Measures the time from the acknowledgement to the
entry's arrival.

`lost`: three bookies with the defaults. One of them is lost in one of four ways, alone or together with the
writer of a log. Another client opens the log. Measures its time from then, when the loss is known, to its
first acknowledged append. A writer that is not lost goes on appending until it is fenced. In every second
round the client has read the log before, and has connections. The four ways:

- *kill*: `kill -9` of the bookie;
- *stop*: SIGSTOP of the bookie;
- *drop*: a proxy between this client and the bookie passes nothing on, and keeps all connections;
- *host*: as *stop*, and the bookie's registration has gone, as when a host loses its power.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import time
from contextlib import aclosing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import client_aio
from benchmarks.running import Workplace, run
from tests.support.cluster import Cluster
from tests.support.links import Links

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ENTRY = random.Random(1).randbytes(1024)
TAIL_ENTRIES = 1000
SLOW_WINDOW_S = 2.0
STATM = Path("/proc/self/statm")

Samples = dict[str, list[float]]


class Pump:
    """Keeps a window of adds full. If it `is_noting`, it notes when each was made and acknowledged."""

    def __init__(self, ledger: client_aio.LedgerWriter, in_flight: int, *, is_noting: bool = True) -> None:
        self._is_noting = is_noting
        self.count = 0
        self._ledger = ledger
        self._in_flight = in_flight
        self._room = asyncio.Event()
        self._outstanding = 0
        self.acknowledged: list[tuple[float, float]] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            made_at = time.perf_counter()
            for _ in range(self._in_flight - self._outstanding):
                self._outstanding += 1
                self._ledger.add_entry(ENTRY).add_done_callback(partial(self._done, made_at))
            self._room.clear()
            await self._room.wait()

    def _done(self, made_at: float, future: asyncio.Future[int]) -> None:
        self._outstanding -= 1
        if not future.cancelled() and future.exception() is None:
            self.count += 1
            if self._is_noting:
                self.acknowledged.append((made_at, time.perf_counter()))
        self._room.set()

    async def stop(self) -> None:
        """Make no more adds, and wait for those that were made."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._ledger.flush()


async def kill(home: Path, rounds: int) -> Samples:
    """Kill a bookie, and look at the acknowledgements around that."""
    rng, first, gaps = random.Random(1), list[float](), list[float]()
    async with Cluster(home, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        for _ in range(rounds):
            async with client.create_ledger() as ledger:
                pump = Pump(ledger, 100)
                await asyncio.sleep(0.2 + rng.uniform(0, 0.05))
                victim = cluster[rng.choice(ledger.metadata.last_fragment.bookies)]
                killed_at = time.perf_counter()
                await victim.kill()
                await asyncio.sleep(1.0)
                await pump.stop()
            seen = [at for made_at, at in pump.acknowledged if made_at > killed_at]
            around = [at for _, at in pump.acknowledged if at > killed_at - 0.01]
            first.append(1e3 * (min(seen) - killed_at))
            gaps.append(1e3 * max(b - a for a, b in pairwise(around)))
            await victim.start()
    return {"to the next acknowledged add, ms": first, "longest pause, ms": gaps}


async def takeover(home: Path, rounds: int) -> Samples:
    """Recover a dead writer's ledger through another client, and write on."""
    taken = []
    async with Cluster(home) as cluster:
        for _ in range(rounds):
            async with client_aio.connect(cluster.uri) as dying, client_aio.connect(cluster.uri) as client:
                ledger = await dying.create_ledger()
                # In one event-loop iteration every entry states the LAC of before: no bookie learns of acks.
                await asyncio.gather(*[ledger.add_entry(ENTRY) for _ in range(TAIL_ENTRIES)])
                await ledger.abort()
                begun = time.perf_counter()
                reader = await client.open_ledger(ledger.ledger_id, recover=True)
                assert reader.last_add_confirmed == TAIL_ENTRIES - 1
                following = await client.create_ledger()
                await following.add_entry(ENTRY)
                taken.append(1e3 * (time.perf_counter() - begun))
                await following.close()
                await client.delete_ledger(following.ledger_id)
                await client.delete_ledger(ledger.ledger_id)
    return {"to the first acknowledged add, ms": taken}


async def slow(home: Path, rounds: int) -> Samples:
    """Stop one bookie of three, and compare what the writer does before and after."""
    before, after, ratio, growth = list[float](), list[float](), list[float](), list[float]()
    for number in range(rounds):
        place = home / str(number)
        place.mkdir()
        async with Cluster(place) as cluster, client_aio.connect(cluster.uri) as client:
            ledger = await client.create_ledger()
            pump = Pump(ledger, 1000, is_noting=False)
            await asyncio.sleep(1.0)
            pump.count = 0
            memory, most = _resident_mib(), 0.0
            await asyncio.sleep(SLOW_WINDOW_S)
            before.append(pump.count / SLOW_WINDOW_S)
            victim = cluster[ledger.metadata.last_fragment.bookies[-1]]
            pump.count = 0
            victim.stop()
            ends_at = time.perf_counter() + SLOW_WINDOW_S
            while time.perf_counter() < ends_at:
                await asyncio.sleep(0.01)
                most = max(most, _resident_mib())
            after.append(pump.count / SLOW_WINDOW_S)
            ratio.append(100 * after[-1] / before[-1])
            growth.append(most - memory)
            victim.resume()
            await pump.stop()
            await ledger.close()
    return {
        "adds/s before": before,
        "adds/s with a stopped bookie": after,
        "… in %": ratio,
        "memory beyond, MiB": growth,
    }


async def idle(home: Path, rounds: int) -> Samples:
    """Add one entry at a time with pauses, and tail."""
    found, rng = list[float](), random.Random(1)
    async with (
        Cluster(home) as cluster,
        client_aio.connect(cluster.uri) as writing,
        client_aio.connect(cluster.uri) as reading,
    ):
        ledger = await writing.create_ledger()
        reader = await reading.open_ledger(ledger.ledger_id)
        async with aclosing(reader.tail()) as entries:
            for _ in range(rounds):
                await ledger.add_entry(ENTRY)
                acknowledged_at = time.perf_counter()
                await anext(entries)
                found.append(1e3 * (time.perf_counter() - acknowledged_at))
                await asyncio.sleep(rng.uniform(0, 0.1))
        await ledger.close()
    return {"to the reader, ms": found}


async def lost(home: Path, rounds: int) -> Samples:
    """Lose one bookie of three, alone or with a log's writer, and take the log over."""
    defaults = client_aio.ClientConfig()
    taken = {f"{way}, {who}": list[float]() for who in _WHO for way in ("kill", "stop", "drop", "host")}
    rng = random.Random()
    async with Cluster(home) as cluster, Links(cluster.uri) as links:
        for number in range(rounds):
            for what, samples in taken.items():
                way, _, who = what.partition(", ")
                name = f"{way}.{_WHO.index(who)}.{number}"
                victim = rng.choice(sorted(cluster.bookies))
                async with (
                    links.connect("writer", config=defaults) as writing,
                    links.connect("standby", config=defaults) as standby,
                ):
                    log = await writing.open_log(name)
                    for _ in range(10):
                        await log.append(ENTRY)
                    if number % 2:
                        assert len([record async for record in standby.read_log(name)]) >= 9
                    await _lose(way, cluster, links, standby, victim)
                    appending = None
                    if who == _WHO[0]:
                        appending = asyncio.create_task(_append_until_fenced(log))
                    else:
                        await log.abort()
                    begun = time.perf_counter()
                    following = await standby.open_log(name)
                    await following.append(ENTRY)
                    samples.append(1e3 * (time.perf_counter() - begun))
                    if appending is not None:
                        await appending
                    await following.abort()
                await _restore(way, cluster, links, victim)
    return {f"{what}: to the first acknowledged append, ms": samples for what, samples in taken.items()}


_WHO = ("a bookie", "writer too")


async def _append_until_fenced(log: client_aio.LogWriter) -> None:
    with suppress(client_aio.LogFencedError):
        while True:
            await log.append(ENTRY)
    await log.abort()


async def _lose(way: str, cluster: Cluster, links: Links, standby: client_aio.Client, victim: str) -> None:
    if way == "kill":
        await cluster[victim].kill()
    elif way == "drop":
        links["standby", victim].black_hole()
    else:
        cluster[victim].stop()
    while way == "host" and victim in standby.bookies:  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0.01)


async def _restore(way: str, cluster: Cluster, links: Links, victim: str) -> None:
    if way == "kill":
        await cluster[victim].start()
    elif way == "drop":
        await links["standby", victim].restore()
    else:
        cluster[victim].resume()
    async with client_aio.connect(cluster.uri) as client:
        while len(client.bookies) < len(cluster.bookies):  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.05)


def _resident_mib() -> float:
    return int(STATM.read_text().split()[1]) * resource.getpagesize() / 2**20


MEASUREMENTS: dict[str, tuple[Callable[[Path, int], Awaitable[Samples]], int]] = {
    "kill": (kill, 1),
    "takeover": (takeover, 1),
    "slow": (slow, 20),  # one round in so many: each takes seconds
    "idle": (idle, 1),
    "lost": (lost, 1),
}


async def main() -> int:
    parser = argparse.ArgumentParser(description="How long the failures of others are felt.")
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"of {', '.join(MEASUREMENTS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--json", type=Path, help="also written to this file")
    arguments = parser.parse_args()
    for name in arguments.what:
        if name not in MEASUREMENTS:
            parser.error(f"{name!r} is none of {', '.join(MEASUREMENTS)}")
    results: dict[str, Samples] = {}
    with Workplace(None, "failover.") as place:
        for name in arguments.what or MEASUREMENTS:
            measure, share = MEASUREMENTS[name]
            home = place.path / name
            home.mkdir()
            results[name] = await measure(home, max(1, arguments.rounds // share))
            if arguments.output == "table":
                for what, samples in results[name].items():
                    print(f"{name:9} {what:52} {_summary(samples)}", flush=True)
    if arguments.output == "json":
        print(json.dumps(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    return 0


def _summary(samples: list[float]) -> str:
    ordered = sorted(samples)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"least {ordered[0]:>9,.1f}   median {statistics.median(ordered):>9,.1f}   p99 {p99:>9,.1f}   "
        f"most {ordered[-1]:>9,.1f}   of {len(ordered)}"
    )


if __name__ == "__main__":
    sys.exit(run(main()))
