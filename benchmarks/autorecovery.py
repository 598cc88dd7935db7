"""Auto recovery measured: a bookie lost for good under writers, and an audit of many ledgers.

    python -m benchmarks.autorecovery lost --bookies 10 --ledgers 500 --writers 10
    python -m benchmarks.autorecovery lost --losses 2 --separate 2 --kill worker
    python -m benchmarks.autorecovery lost --metadata zk --separate 3 --kill auditor --stop-metadata 20
    python -m benchmarks.autorecovery lost --entries 2000 --alternate 5
    python -m benchmarks.autorecovery audit --ledgers 100000
    python -m benchmarks.autorecovery leave --bookies 10 --ledgers 200 --writers 10
    python -m benchmarks.autorecovery rolling --bookies 10 --writers 10

`lost` kills a bookie and removes its directory. It prints the time until every ledger has all its copies
again, the bytes that were copied, and each writer's ensemble changes. It compares the latency of adds before
and meanwhile. With `--alternate`, it pauses auto recovery in turn, and compares the latency of adds while it
is paused and while it copies. Then every replica of every ledger is read. `audit` prints the auditor's first
pass, its memory, its steady reads from the metadata store, and the delay of its first task.

`leave` decommissions a bookie under writers by the command, which is killed twice (SIGKILL) and run again. It
prints failed adds, and whether the bookie ends empty and without a cookie. `rolling` restarts every bookie
under writers, and counts the errors that the application sees and the repair tasks that are made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.processes import ROOT, Child
from client_aio.autorecovery.service import AutoRecovery
from client_aio.autorecovery.survey import all_metadata, auto_recovery_state, ledgers_naming, survey
from client_aio.autorecovery.verification import Verification
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import Condition
from metadata.access.bookies import ensure_cluster
from metadata.access.ledgers import LedgerStore
from metadata.access.repair_tasks import RepairTasks
from metadata.backends.uri import open_store
from metadata.ids import KEY_COOKIES, KEY_REPAIR_TASKS
from metadata.model.ledger import LedgerMetadata
from tests.support.cluster import Cluster
from tests.support.zookeeper import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from client_aio.autorecovery.auditor import Auditor
    from metadata.store import MetadataStore
    from tests.support.cluster import BookieProcess

SHAPE: dict[str, Any] = {"ensemble_size": 4, "write_quorum": 3, "ack_quorum": 2}
ENTRY_BYTES = 1024
WAIT_S = 600.0


@dataclass
class Writer:
    """A ledger that is written to all the time, and the latency of its adds."""

    ledger: client_aio.LedgerWriter
    latencies: list[tuple[float, float]] = field(default_factory=list)
    failed: int = 0

    async def write(self) -> None:
        """Add entries, one after another, until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.ledger.add_entry(b"w" * ENTRY_BYTES)
            except client_aio.BookKeeperError as error:
                print(f"a writer failed: {error!r}")
                self.failed += 1
                return
            self.latencies.append((began, time.monotonic() - began))
            await asyncio.sleep(0.02)


def p99_ms(writers: list[Writer], since: float, until: float) -> float:
    """Return the 99th percentile of the adds that began within a time, in milliseconds."""
    found = [took for each in writers for began, took in each.latencies if since <= began < until]
    return statistics.quantiles(found, n=100)[98] * 1000 if len(found) > 1 else 0.0


async def fill(client: client_aio.Client, count: int, entries: int) -> list[int]:
    """Write ledgers and close them, some at once."""
    ledger_ids: list[int] = []
    waiting = iter(range(count))

    async def take_turns() -> None:
        for _ in waiting:
            async with client.create_ledger(**SHAPE) as ledger:
                await ledger.add_entries(bytes([number % 256]) * ENTRY_BYTES for number in range(entries))
            ledger_ids.append(ledger.ledger_id)

    await asyncio.gather(*(take_turns() for _ in range(8)))
    return ledger_ids


async def verify(client: client_aio.Client) -> bool:
    """Read every copy of every entry; return whether all are good."""
    verification = Verification(client._context)
    found = [one async for one in verification.run(all_metadata(client._context))]
    totals = verification.totals
    print(f"read {totals.intact:,} copies of entries of {totals.ledgers:,} ledgers: {totals.by_condition}")
    for one in [each for each in found if each.condition][:10]:
        print(one)
    return not totals.condition


async def until(is_met: Callable[[], Awaitable[bool]], step_s: float = 0.1) -> None:
    """Poll until a condition holds; the metadata store may be stopped meanwhile."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(client_aio.MetadataUnavailableError):
                if await is_met():
                    return
            await asyncio.sleep(step_s)


async def lose(
    options: argparse.Namespace,
    cluster: Cluster,
    stack: AsyncExitStack,
    directory: Path,
    stop_metadata: Callable[[float], Awaitable[None]],
) -> bool:
    """Lose bookies under writers, and watch the copies come back."""
    client = await stack.enter_async_context(client_aio.connect(cluster.uri))
    helpers = dict(
        [await recovery_process(options, cluster, directory, number) for number in range(options.separate)]
    )
    for helper in helpers.values():
        stack.push_async_callback(helper.end)
    began = time.monotonic()
    await fill(client, options.ledgers, options.entries)
    print(f"{options.ledgers} ledgers of {options.entries} entries in {time.monotonic() - began:.1f} s")
    writers = [Writer(await client.create_ledger(**SHAPE)) for _ in range(options.writers)]
    writing = [asyncio.create_task(each.write()) for each in writers]
    quiet_from = time.monotonic()
    for number in range(options.losses):
        await asyncio.sleep(10)
        victim = cluster[f"b{number + 1}"]
        quiet_from = await lose_one(options, client, victim, writers, helpers, quiet_from, stop_metadata)
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing, return_exceptions=True)
    changes = [len(each.ledger.metadata.fragments) - 1 for each in writers]
    failed = sum(each.failed for each in writers)
    print(f"\nensemble changes of each writer: {changes}; writers that failed: {failed}")
    for each in writers:
        await each.ledger.close()
    is_whole = await verify(client)
    return is_whole and not failed and max(changes, default=0) <= options.losses


async def lose_one(
    options: argparse.Namespace,
    client: client_aio.Client,
    victim: BookieProcess,
    writers: list[Writer],
    helpers: dict[str, Child],
    quiet_from: float,
    stop_metadata: Callable[[float], Awaitable[None]],
) -> float:
    """Lose one bookie for good; returns when every copy was there again."""
    killed_at = time.monotonic()
    await victim.kill()
    shutil.rmtree(victim.directory)
    await asyncio.sleep(1)
    before = await survey(client._context)
    print(
        f"\nlost {victim.bookie_id}: {before.condition.name}, "
        f"ledgers by good copies: {before.under_replicated}"
    )
    read_before = sum(one.bytes_read for one in before.auto_recovery.workers)

    tasks = RepairTasks(client._context.ledgers.store)

    async def has_tasks() -> bool:
        return bool(await tasks.refs())

    await until(has_tasks)
    first_task = time.monotonic() - killed_at
    if options.kill and len(helpers) > 1:
        await kill_one(options, client, helpers)
    if options.stop_metadata:
        await stop_metadata(options.stop_metadata)

    async def is_healthy() -> bool:
        nonlocal before
        # A survey reads all metadata, in the process whose adds are measured.
        if await tasks.refs():
            return False
        before = await survey(client._context)
        return before.condition is Condition.HEALTHY

    async with alternating(options, client, writers):
        await until(is_healthy, 0.5)
    whole_at = time.monotonic()
    took = whole_at - killed_at
    read = sum(one.bytes_read for one in before.auto_recovery.workers) - read_before
    print(
        f"first task after {first_task:.1f} s; whole after {took:.1f} s, with {options.delay:.0f} s of delay"
    )
    print(f"workers read {read:,} bytes, copied and verified: {read / (took - first_task):,.0f} bytes/s")
    print(
        f"p99 of adds: {p99_ms(writers, quiet_from, killed_at):.1f} ms before, "
        f"{p99_ms(writers, killed_at + first_task, whole_at):.1f} ms while the copies were made"
    )
    print(f"after: {before.condition.name}, {[each.text for each in before.problems]}")
    return whole_at


@contextlib.asynccontextmanager
async def alternating(
    options: argparse.Namespace, client: client_aio.Client, writers: list[Writer]
) -> AsyncIterator[None]:
    """Pause auto recovery and let it go on in turn; print the latency of adds in both."""
    if not options.alternate:
        yield
        return
    tasks = RepairTasks(client._context.ledgers.store)
    turns: list[tuple[float, float, float]] = []  # when it was paused, went on, and was paused again

    async def take_turns() -> None:
        while True:
            await tasks.pause(True)
            paused_at = time.monotonic()
            await asyncio.sleep(options.alternate)
            await tasks.pause(False)
            resumed_at = time.monotonic()
            await asyncio.sleep(options.alternate)
            turns.append((paused_at, resumed_at, time.monotonic()))

    turning = asyncio.create_task(take_turns())
    try:
        yield
    finally:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)
        await tasks.pause(False)
    pairs = [(p99_ms(writers, paused, on), p99_ms(writers, on, end)) for paused, on, end in turns]
    print("p99 of adds in ms, paused and repairing, in turn: "
          + "  ".join(f"{paused:.1f}→{repairing:.1f}" for paused, repairing in pairs))  # fmt: skip
    if pairs:
        ratios = [repairing / paused for paused, repairing in pairs]
        print(f"ratios: median {statistics.median(ratios):.2f}, most {max(ratios):.2f}")


async def kill_one(options: argparse.Namespace, client: client_aio.Client, helpers: dict[str, Child]) -> None:
    """Kill the process that audits, or one whose worker is in the middle of a ledger."""
    name: str | None = None

    async def is_found() -> bool:
        nonlocal name
        state = await auto_recovery_state(client._context)
        busy = [one.name for one in state.workers if one.ledger_id is not None]
        candidates = [state.auditor] if options.kill == "auditor" else busy
        name = next((one for one in candidates if one in helpers), None)
        return name is not None

    await until(is_found, 0.01)
    assert name is not None
    helpers.pop(name).kill()
    print(f"the process of the {options.kill} was killed")


async def recovery_process(
    options: argparse.Namespace, cluster: Cluster, directory: Path, number: int
) -> tuple[str, Child]:
    """Start `autorecovery run`; return its name, too."""
    child = await Child.start(
        sys.executable, "-m", "client_aio.cli", "autorecovery", "run", "-o", "jsonl",
        "--metadata", cluster.uri, "--lost-bookie-delay", str(options.delay),
        log=directory / f"recovery{number}.log",
    )  # fmt: skip
    name: str = json.loads(await child.line())["name"]
    child.ignore_output()
    return name, child


async def lost(options: argparse.Namespace) -> bool:
    """Run `lost`."""
    with tempfile.TemporaryDirectory(prefix="autorecovery-", dir=options.dir) as name, ExitStack() as servers:
        return await lost_in(options, Path(name), servers)


async def lost_in(options: argparse.Namespace, directory: Path, servers: ExitStack) -> bool:
    """Run `lost` in a directory."""
    uri = options.metadata
    server: ZooKeeperServer | None = None
    if uri == "zk":
        (directory / "zookeeper").mkdir()
        server = servers.enter_context(ZooKeeperServer(directory / "zookeeper"))
        uri = f"zk://{server.address}/ledgers"
    cluster = Cluster(directory, bookies=options.bookies, uri=uri)

    async def stop_metadata(seconds: float) -> None:
        """Stop the server, or hold the write lock of the embedded store: readers of it go on."""
        print(f"the metadata store is stopped for {seconds:.0f} s")
        if server is not None:
            server.pause()
            await asyncio.sleep(seconds)
            server.resume()
            return
        with closing(sqlite3.connect(directory / "metadata.db", isolation_level=None)) as store:
            store.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(seconds)

    if not options.separate:
        for bookie in cluster.bookies.values():
            bookie.arguments = ["--autorecovery", "--lost-bookie-delay", str(options.delay)]
    async with cluster, AsyncExitStack() as stack:
        return await lose(options, cluster, stack, directory, stop_metadata)


async def naming(client: client_aio.Client, bookie: str) -> int:
    """Return how many ledgers name a bookie in a fragment."""
    return len(await ledgers_naming(client._context, bookie))


async def beside_writers(
    options: argparse.Namespace,
    client: client_aio.Client,
    work: Callable[[], Awaitable[bool]],
    *,
    may_lack: bool = False,
) -> bool:
    """Do something beside writers, and then read every replica.

    Args:
        may_lack: whether replicas may lack entries: those on their way to a bookie that was restarted. The
            auditor's check finds them when the bookie has been back for the delay.
    """
    began = time.monotonic()
    await fill(client, options.ledgers, options.entries)
    print(f"{options.ledgers} ledgers of {options.entries} entries in {time.monotonic() - began:.1f} s")
    writers = [Writer(await client.create_ledger(**SHAPE)) for _ in range(options.writers)]
    writing = [asyncio.create_task(each.write()) for each in writers]
    quiet_from = time.monotonic()
    await asyncio.sleep(5)
    began = time.monotonic()
    is_good = await work()
    ended = time.monotonic()
    for task in writing:
        task.cancel()
    await asyncio.gather(*writing, return_exceptions=True)
    failed, adds = sum(each.failed for each in writers), sum(len(each.latencies) for each in writers)
    changes = [len(each.ledger.metadata.fragments) - 1 for each in writers]
    print(f"{adds:,} adds, {failed} failed; ensemble changes of each writer: {changes}")
    print(
        f"p99 of adds: {p99_ms(writers, quiet_from, began):.1f} ms before, "
        f"{p99_ms(writers, began, ended):.1f} ms meanwhile"
    )
    for each in writers:
        await each.ledger.close()
    is_whole = await verify(client)
    return is_good and not failed and (is_whole or may_lack)


async def leave(options: argparse.Namespace) -> bool:
    """Run `leave`."""
    with tempfile.TemporaryDirectory(prefix="leave-", dir=options.dir) as name:
        directory = Path(name)
        cluster = Cluster(directory, bookies=options.bookies, uri=options.metadata)
        async with cluster, client_aio.connect(cluster.uri) as client:
            return await beside_writers(options, client, partial(decommission, options, client, directory))


async def decommission(options: argparse.Namespace, client: client_aio.Client, directory: Path) -> bool:
    """Decommission b1 by the command, which is killed before it is done, and run again."""
    uri, store = client._context.ledgers.store.uri, client._context.ledgers.store
    began, left = time.monotonic(), await naming(client, "b1")
    print(f"\nb1 is to leave; {left} ledgers name it")
    for number in range(options.kills + 1):
        child = await Child.start(
            sys.executable, "-m", "client_aio.cli", "bookie", "decommission", "b1", "-o", "jsonl",
            "--metadata", uri, "--rate", str(options.rate), log=directory / f"decommission{number}.log",
        )  # fmt: skip
        if number == options.kills:
            print(f"{await child.line()} after {time.monotonic() - began:.1f} s")
            await child.wait()
            break
        until_left = left * (options.kills - number) // (options.kills + 1)

        async def has_moved(until_left: int = until_left) -> bool:
            return await naming(client, "b1") <= until_left

        await until(has_moved)
        child.kill()
        await child.wait()
        print(
            f"killed after {time.monotonic() - began:.1f} s, with {await naming(client, 'b1')} ledgers left"
        )
    cookies = await store.children(KEY_COOKIES)
    print(f"ledgers that name b1: {await naming(client, 'b1')}; its cookie is there: {'b1' in cookies}")
    return "b1" not in cookies and not await naming(client, "b1")


async def rolling(options: argparse.Namespace) -> bool:
    """Run `rolling`."""
    with tempfile.TemporaryDirectory(prefix="rolling-", dir=options.dir) as name:
        cluster = Cluster(Path(name), bookies=options.bookies, uri=options.metadata)
        for bookie in cluster.bookies.values():
            bookie.arguments = ["--autorecovery", "--lost-bookie-delay", str(options.delay)]
        async with cluster, client_aio.connect(cluster.uri) as client:
            return await beside_writers(
                options, client, partial(roll, options, client, cluster), may_lack=True
            )


async def roll(options: argparse.Namespace, client: client_aio.Client, cluster: Cluster) -> bool:
    """Restart every bookie, one after another; returns whether no task was made."""
    store, seen = client._context.ledgers.store, set()

    async def follow() -> None:
        async for _ in store.watch(KEY_REPAIR_TASKS):
            seen.update(await store.children(KEY_REPAIR_TASKS))

    following = asyncio.create_task(follow())
    for bookie in cluster.bookies.values():
        began = time.monotonic()
        await bookie.end()
        await bookie.start()
        print(f"{bookie.bookie_id} was away for {time.monotonic() - began:.1f} s")
        await asyncio.sleep(options.pause)
    print(f"the auditor looks on for {options.after:.0f} s")
    await asyncio.sleep(options.after)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    print(f"repair tasks that were made: {len(seen)} {sorted(seen)[:5]}")
    return not seen


def rss() -> int:
    """Return the resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


async def make(options: argparse.Namespace, store: MetadataStore) -> None:
    """Make the metadata of ledgers that nobody wrote, one in 100 of them open."""
    await ensure_cluster(store, draw_id=lambda: "0" * 32, now_ms=0)
    rng, ledgers = random.Random(1), LedgerStore(store)
    names = [f"b{number}" for number in range(1, options.bookies + 1)]
    waiting = iter(range(options.ledgers))
    began = time.monotonic()

    async def create() -> None:
        for ledger_id in waiting:
            metadata = LedgerMetadata.new(ledger_id, bookies=rng.sample(names, 4), **SHAPE)
            await ledgers.create_ledger(metadata.close(99, 102_400) if ledger_id % 100 else metadata)

    await asyncio.gather(*(create() for _ in range(32)))
    print(f"{options.ledgers:,} ledgers made in {time.monotonic() - began:.1f} s, one in 100 of them open")


async def watch_audit(options: argparse.Namespace, auditor: Auditor, calls: dict[str, int]) -> None:
    """Print the first pass, the steady reads, and the delay of the first task."""
    before = rss()

    async def has_passed(passes: int = 1) -> bool:
        return auditor.record.passes >= passes

    async def has_lost() -> bool:
        return bool(auditor.states.lost)

    async def has_tasks(count: int = 1) -> bool:
        return len(await auditor._tasks.refs()) >= count

    await until(has_passed)
    gc.collect()
    print(
        f"first pass: {auditor.record.pass_s:.1f} s, {calls['read']:,} reads and "
        f"{calls['children']:,} listings; memory grew by {(rss() - before) / 2**20:.1f} MiB"
    )
    calls.update(read=0, children=0)
    passes, began = auditor.record.passes, time.monotonic()
    await until(partial(has_passed, passes + 2))
    minutes = (time.monotonic() - began) / 60
    reads, listings = calls["read"] / minutes, calls["children"] / minutes
    print(f"steady: {reads:,.0f} reads and {listings:,.0f} listings a minute")
    await until(has_lost, 0.02)
    began = time.monotonic()
    await until(has_tasks, 0.02)
    print(f"first task {time.monotonic() - began:.2f} s after the delay of {options.delay:.0f} s")
    count = min(AutoRecoveryConfig().tasks_max, options.ledgers // 2)
    await until(partial(has_tasks, count))
    print(f"{count:,} tasks {time.monotonic() - began:.1f} s after the delay")


async def audit(options: argparse.Namespace) -> bool:
    """Run `audit`."""
    with tempfile.TemporaryDirectory(prefix="audit-", dir=options.dir) as name:
        uri = options.metadata or f"sqlite://{ROOT / name}/metadata.db"
        async with await open_store(uri, create=True) as store:
            await make(options, store)
            calls = {"read": 0, "children": 0}
            for call in calls:
                setattr(store, call, counted(calls, call, getattr(store, call)))
            gc.collect()
            config = AutoRecoveryConfig(lost_bookie_delay_s=options.delay)
            async with (
                client_aio.connect(store) as client,
                AutoRecovery(client, config, repairs=False) as recovery,
            ):
                assert recovery.auditor is not None
                await watch_audit(options, recovery.auditor, calls)
    return True


def counted(calls: dict[str, int], name: str, method: Any) -> Any:
    """Return a method that counts its calls."""

    async def call(*arguments: Any, **more: Any) -> Any:
        calls[name] += 1
        return await method(*arguments, **more)

    return call


def main() -> int:
    """Run one of them; the exit code is 0 if all went well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    losing = commands.add_parser("lost", help="lose bookies under writers")
    losing.add_argument("--ledgers", type=int, default=500)
    losing.add_argument("--entries", type=int, default=200, help="of 1 KiB, of each ledger")
    losing.add_argument("--writers", type=int, default=10)
    losing.add_argument("--losses", type=int, default=1, help="one after another")
    losing.add_argument("--delay", type=float, default=5.0)
    losing.add_argument("--separate", type=int, default=0, help="so many processes beside bookies without")
    losing.add_argument(
        "--kill", choices=("auditor", "worker"), help="kill that one of these processes meanwhile"
    )
    losing.add_argument(
        "--stop-metadata", type=float, default=0.0, help="stop the metadata store for so many seconds"
    )
    losing.add_argument(
        "--alternate", type=float, default=0.0, metavar="SECONDS",
        help="pause auto recovery and let it go on, for so long each, and compare the latency of adds",
    )  # fmt: skip
    auditing = commands.add_parser("audit", help="audit many ledgers")
    auditing.add_argument("--ledgers", type=int, default=100_000)
    auditing.add_argument("--delay", type=float, default=100.0)
    leaving = commands.add_parser("leave", help="decommission a bookie under writers")
    leaving.add_argument("--rate", type=float, default=4.0, help="MiB a second that the command reads")
    leaving.add_argument("--kills", type=int, default=2, help="so often the command is killed")
    restarting = commands.add_parser("rolling", help="restart every bookie under writers")
    restarting.add_argument("--delay", type=float, default=60.0)
    restarting.add_argument("--pause", type=float, default=2.0, help="seconds between two restarts")
    restarting.add_argument("--after", type=float, default=15.0, help="seconds to look on afterwards")
    for each in (leaving, restarting):
        each.add_argument("--ledgers", type=int, default=200)
        each.add_argument("--entries", type=int, default=200, help="of 1 KiB, of each ledger")
        each.add_argument("--writers", type=int, default=10)
    for each in (losing, auditing, leaving, restarting):
        each.add_argument("--bookies", type=int, default=10)
        each.add_argument(
            "--metadata", help="a store that is empty, or zk: a server of its own; default: an embedded one"
        )
        each.add_argument("--dir", default=".", help="where the files are made, and removed")
    options = parser.parse_args()
    options.dir = Path(options.dir).resolve()
    run = {"lost": lost, "audit": audit, "leave": leave, "rolling": rolling}[options.command]
    return 0 if asyncio.run(run(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
