"""Kill writers or bookies at a random moment, and verify that no acknowledged entry is lost.

    python -m benchmarks.crash_recovery [--runs 50] [--seed 1] [--variant bookies|writer|spare|recoverers|all]

`bookies`: a writer has 200 adds in flight; `kill -9` of all three bookies, together or one by one, then a
restart. A fresh client opens the ledger with `recover=True`. `writer`: `kill -9` of the writer's process
instead, and two clients recover at once. `spare`: `kill -9` of one bookie out of four. The writer goes on
over an ensemble change and closes the ledger itself. `recoverers`: the writer stops with its window full. Two
or five clients recover at once, and one of four bookies is killed while they do.

Each run is checked through fresh clients. Every acknowledged entry is there. All entries equal the written
ones, in order and without a gap. No entry above the closed last entry is served. Ledgers of earlier runs on
the same cluster are unchanged. A moment is a number of acknowledgements and then a part of a group commit's
time, both drawn from the seed. The first failure ends the program with exit code 1. It prints the seed of the
run and keeps the directory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import client_aio
from benchmarks.crash_writer import Writer, payload
from benchmarks.processes import start_module
from benchmarks.running import Workplace, run
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IN_FLIGHT = 200
ACKS_MAX = 20_000
RUNS_PER_CLUSTER = 10
PHASE_TIMEOUT_S = 60.0
RECOVERY_TIME_S = 0.08
"""About the time of a recovery by several clients: a kill comes anywhere within one."""
GROUP_TIME_S = 0.003
"""About the time of a group commit under this load: a kill comes anywhere within one."""


class Violation(Exception):
    """An acknowledged entry was lost or changed, or an entry was served that must not be."""


@dataclass
class Run:
    """The steps and results of one run."""

    seed: int
    ledger_id: int
    issued: int
    acknowledged: int  # entries
    kept: int = 0  # entries of the closed ledger
    seconds: float = 0.0


def need(condition: bool, message: str) -> None:
    """Raise Violation unless the condition holds."""
    if not condition:
        raise Violation(message)


# --- the three ways to die -----------------------------------------------------------------------


async def write_and_kill_bookies(cluster: Cluster, rng: random.Random, seed: int) -> Run:
    """Kill all bookies while the writer's window is full, and start them again."""
    victims = list(cluster.bookies.values())
    rng.shuffle(victims)
    first_at = rng.randrange(ACKS_MAX) if rng.random() < 0.9 else 0
    # The last two go together: with one of three left nothing is acknowledged any more.
    apart = rng.choice((0, 0, 1, rng.randrange(500)))
    moments = [(first_at, victims[:1]), (first_at + apart, victims[1:])]
    async with client_aio.connect(cluster.uri, replacement_retry_s=0.1) as client:
        ledger = await client.create_ledger()
        writer = Writer(ledger, seed, IN_FLIGHT)

        loop = asyncio.get_running_loop()

        def watch() -> None:
            while moments and writer.acknowledged >= moments[0][0]:
                for victim in moments.pop(0)[1]:
                    assert victim.child is not None
                    loop.call_later(rng.uniform(0, GROUP_TIME_S), victim.child.kill)

        writer.watchers.append(watch)
        await writer.run()  # to the failure that the kill brings
        need(not moments, f"the writer failed before the kill: {writer.failure!r}")
        await cluster.kill()
        await ledger.abort()
    need(writer.out_of_order == 0, f"{writer.out_of_order} acknowledgements out of order")
    await cluster.start()
    return Run(seed, ledger.ledger_id, writer.issued, writer.acknowledged + 1)


async def write_and_kill_writer(cluster: Cluster, rng: random.Random, seed: int) -> Run:
    """Kill the writer's process; its printed acknowledgements count."""
    stop_at = rng.randrange(ACKS_MAX)
    log = cluster["b1"].log.with_name("writer.log")
    child = await start_module("benchmarks.crash_writer", cluster.uri, str(seed), str(IN_FLIGHT), log=log)
    async with child:
        ledger_id = int((await child.line(lambda line: line.startswith("ledger "))).split()[1])
        acknowledged = -1
        while acknowledged < stop_at:
            acknowledged = int((await child.line()).split()[1])
        child.kill()
        with contextlib.suppress(RuntimeError):  # its end
            while True:
                # A last line may be torn: print and kill race.
                words = (await child.line()).split()
                if len(words) == 2:
                    acknowledged = max(acknowledged, int(words[1]))
    return Run(seed, ledger_id, acknowledged + 1 + IN_FLIGHT, acknowledged + 1)


async def write_and_kill_one(cluster: Cluster, rng: random.Random, seed: int) -> Run:
    """Kill one bookie of the ensemble; the spare takes its place, and everything is acknowledged."""
    strike_at = rng.randrange(ACKS_MAX)
    entries = strike_at + 1 + rng.randrange(5000)
    async with client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            victim = cluster[rng.choice(ledger.metadata.last_fragment.bookies)]
            writer = Writer(ledger, seed, IN_FLIGHT)

            def strike() -> None:
                if writer.acknowledged >= strike_at and victim.child is not None:
                    victim.child.kill()

            writer.watchers.append(strike)
            await writer.run(entries)
            need(writer.failure is None, f"an add failed although there is a spare: {writer.failure!r}")
            need(writer.acknowledged == entries - 1, "not everything was acknowledged")
        last = ledger.metadata.last_fragment.bookies
    need(writer.out_of_order == 0, f"{writer.out_of_order} acknowledgements out of order")
    if entries - strike_at > 2 * IN_FLIGHT:
        need(victim.bookie_id not in last, f"the dead bookie is still in the ensemble {last}")
    await victim.kill()
    await victim.start()
    return Run(seed, ledger.ledger_id, entries, entries, kept=entries)


# --- checks ---------------------------------------------------------------------------------------


async def write_and_abandon(cluster: Cluster, rng: random.Random, seed: int) -> Run:
    """Stop a writer while its window is full."""
    stop_at = rng.randrange(ACKS_MAX // 10)
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        writer = Writer(ledger, seed, IN_FLIGHT)
        writing = asyncio.create_task(writer.run())
        stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def watch() -> None:
            if writer.acknowledged >= stop_at and not stopping.done():
                stopping.set_result(None)

        writer.watchers.append(watch)
        await stopping
        await ledger.abort()
        await writing
    need(writer.out_of_order == 0, f"{writer.out_of_order} acknowledgements out of order")
    return Run(seed, ledger.ledger_id, writer.issued, writer.acknowledged + 1)


# --- recovery ------------------------------------------------------------------------------------


async def recover_by_one(cluster: Cluster, run: Run, rng: random.Random) -> None:
    """Recover through one fresh client."""
    await recover(cluster.uri, run, 1)


async def recover_by_two(cluster: Cluster, run: Run, rng: random.Random) -> None:
    """Recover through two at once."""
    await recover(cluster.uri, run, 2)


async def recover_by_many(cluster: Cluster, run: Run, rng: random.Random) -> None:
    """Recover through two or five at once while a bookie dies."""
    victim = cluster[rng.choice(list(cluster.bookies))]
    assert victim.child is not None
    asyncio.get_running_loop().call_later(rng.uniform(0, RECOVERY_TIME_S), victim.child.kill)
    await recover(cluster.uri, run, rng.choice((2, 5)))
    await victim.kill()
    await victim.start()


async def recover(uri: str, run: Run, clients: int) -> None:
    """Open with `recover=True` through fresh clients, all at once; all must find the same end."""

    async def one() -> int:
        async with client_aio.connect(uri) as client:
            reader = await client.open_ledger(run.ledger_id, recover=True)
            need(reader.is_closed, "a recovered ledger is not closed")
            return reader.last_add_confirmed + 1

    found = await asyncio.gather(*(one() for _ in range(clients)))
    need(len(set(found)) == 1, f"recoverers disagree on the end: {found}")
    need(run.kept in (0, found[0]), f"recovery changed a closed ledger from {run.kept} to {found[0]} entries")
    run.kept = found[0]


async def check(uri: str, run: Run) -> None:
    """Read everything through a fresh client and compare."""
    need(run.kept >= run.acknowledged, f"{run.acknowledged} acknowledged, but only {run.kept} kept")
    need(run.kept <= run.issued, f"{run.kept} kept, but only {run.issued} were ever issued")
    async with client_aio.connect(uri) as client:
        reader = await client.open_ledger(run.ledger_id)
        need(reader.is_closed, "the ledger is open again")
        need(
            reader.last_add_confirmed == run.kept - 1, f"its last entry moved to {reader.last_add_confirmed}"
        )
        expected, length = 0, 0
        async for entry in reader.read(0, run.kept - 1):
            need(entry.entry_id == expected, f"entry {entry.entry_id} where {expected} should be")
            need(entry.data == payload(run.seed, expected), f"entry {expected} is not what was written")
            expected += 1
            length += len(entry.data)
        need(expected == run.kept, f"reading ended at entry {expected} of {run.kept}")
        need(reader.length == length, f"the length is {reader.length}, not {length}")
        for beyond in (run.kept, run.kept + IN_FLIGHT):
            try:
                served = [entry async for entry in reader.read(beyond, beyond)]
            except client_aio.NoSuchEntryError:
                continue
            need(False, f"{len(served)} entries are served above the last one, {run.kept - 1}")


@dataclass(frozen=True)
class Variant:
    """A way to end a run's ledger, and a way to recover it."""

    bookies: int
    write: Callable[[Cluster, random.Random, int], Awaitable[Run]]
    recover: Callable[[Cluster, Run, random.Random], Awaitable[None]]


VARIANTS = {
    "bookies": Variant(3, write_and_kill_bookies, recover_by_one),
    "writer": Variant(3, write_and_kill_writer, recover_by_two),
    "spare": Variant(4, write_and_kill_one, recover_by_one),
    "recoverers": Variant(4, write_and_abandon, recover_by_many),
}


async def one_run(cluster: Cluster, variant: str, seed: int) -> Run:
    """Write, kill, restart, recover, check."""
    how, rng = VARIANTS[variant], random.Random(seed)
    started_at = time.perf_counter()
    async with asyncio.timeout(PHASE_TIMEOUT_S):
        run = await how.write(cluster, rng, seed)
    async with asyncio.timeout(PHASE_TIMEOUT_S):
        await how.recover(cluster, run, rng)
    async with asyncio.timeout(PHASE_TIMEOUT_S):
        await check(cluster.uri, run)
    run.seconds = time.perf_counter() - started_at
    print(
        f"{variant} seed {seed}: ledger {run.ledger_id}, {run.issued:,} issued, "
        f"{run.acknowledged:,} acknowledged, {run.kept:,} kept, {run.seconds:.1f} s",
        flush=True,
    )
    return run


async def run_variant(variant: str, runs: int, seed: int, directory: Path) -> list[Run]:
    """Do so many runs, with a fresh cluster now and then."""
    found: list[Run] = []
    for start in range(0, runs, RUNS_PER_CLUSTER):
        home = directory / f"{variant}-{start}"
        home.mkdir()
        here: list[Run] = []
        async with Cluster(home, bookies=VARIANTS[variant].bookies) as cluster:
            for number in range(start, min(start + RUNS_PER_CLUSTER, runs)):
                try:
                    here.append(await one_run(cluster, variant, seed + number))
                    # Ledgers of earlier runs must outlive the kills of the later ones.
                    await check(cluster.uri, here[number - start - 1])
                except Exception as error:
                    print(
                        f"{variant} seed {seed + number} FAILED: {error!r}; see {home}; again with: "
                        f"--variant {variant} --runs 1 --seed {seed + number}",
                        flush=True,
                    )
                    raise
        found += here
        shutil.rmtree(home)
    return found


async def main() -> int:
    parser = argparse.ArgumentParser(description="Kill, restart, recover, compare.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next has the next")
    parser.add_argument("--variant", choices=[*VARIANTS, "all"], default="bookies")
    parser.add_argument("--dir", type=Path, help="where clusters are kept (default: a temporary directory)")
    arguments = parser.parse_args()
    with Workplace(arguments.dir, "crash.") as place:
        logging.basicConfig(filename=place.path / "client.log", level=logging.INFO)
        for variant in VARIANTS if arguments.variant == "all" else [arguments.variant]:
            try:
                found = await run_variant(variant, arguments.runs, arguments.seed, place.path)
            except (Violation, client_aio.BookKeeperError, TimeoutError, RuntimeError):
                logging.exception("the run failed")
                place.keep()
                return 1
            acknowledged, kept = sum(one.acknowledged for one in found), sum(one.kept for one in found)
            print(
                f"{variant}: {len(found)} runs, {acknowledged:,} entries acknowledged, {kept:,} kept, "
                "none lost, none changed, none served above the end"
            )
    return 0


if __name__ == "__main__":
    sys.exit(run(main()))
