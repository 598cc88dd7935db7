"""Stream a real file into a ledger, lose a bookie on the way, read everything back and compare.

    python examples/demo.py [--file FILE] [--no-spare] [--metadata zk [--kill-zookeeper-leader]]

Starts three bookies and a spare as separate processes, and adds the file line by line. By default the file is
the sources of Python's standard library, repeated to 30 MB. A third of the way the demo kills one of the
ledger's bookies with SIGKILL. It reads the ledger back through another client and compares SHA-256 sums. Then
it shows the ledger's fragments and stops everything.

The exit code is 1 if a sum differs, or if the ensemble did not change though a spare was there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from client_aio.cli.bench import Bursts, LatencyBuckets, take_oldest
from client_aio.cli.text import draw_ledger
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_BYTES = 30_000_000
IN_FLIGHT_MAX = 10_000
LINES_PER_BURST = 500
ENTRIES_MIN = 3  # one before the kill, one that misses the dead bookie, one after the change
ENTRY_BYTES_MAX = 1024 * 1024
CHANGE_TIMEOUT_S = 10.0
SHOW_EVERY_S = 0.5


def say(text: str = "") -> None:
    print(text, flush=True)


# --- the file ---


def read_source(path: str | None) -> list[bytes]:
    """Return the lines to stream, each with its newline."""
    if path is not None:
        data = Path(path).read_bytes()
        say(f"source     {path}: {len(data):,} bytes")
    else:
        folder = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test"}
        files = [
            file for file in sorted(folder.rglob("*.py")) if not skipped & set(file.relative_to(folder).parts)
        ]
        once = b"".join(file.read_bytes() for file in files)
        data = (once * (DEFAULT_BYTES // len(once) + 1))[:DEFAULT_BYTES]
        say(f"source     {len(files)} files of {folder}, repeated to {len(data):,} bytes")
    entries, cut_by = cut(data)
    if len(entries) < ENTRIES_MIN:
        raise SystemExit(f"{path} is too short to lose a bookie on the way: it has {len(data)} bytes")
    say(f"           {len(entries):,} entries, one for each {cut_by}")
    return entries


def cut(data: bytes) -> tuple[list[bytes], str]:
    """Cut into lines, each with its newline; cut the lines too where they are too few or too long."""
    *whole, rest = data.split(b"\n")
    lines = [line + b"\n" for line in whole] + ([rest] if rest else [])
    piece_bytes = ENTRY_BYTES_MAX
    if len(lines) < ENTRIES_MIN:
        piece_bytes = min(piece_bytes, max(1, len(data) // ENTRIES_MIN))
    if max(map(len, lines), default=0) <= piece_bytes:
        return lines, "line"
    pieces = [line[at : at + piece_bytes] for line in lines for at in range(0, len(line), piece_bytes)]
    return pieces, f"piece of a line, {piece_bytes:,} bytes or less"


# --- the cluster ---


@contextlib.asynccontextmanager
async def run_cluster(directory: Path, spares: int, metadata: str | None) -> AsyncIterator[dict[str, Any]]:
    """Run `bookie-aio cluster up`; yield its output once all its bookies serve."""
    command = [sys.executable, "-m", "client_aio.cli", "cluster", "up", "-n", "3", "--spares", str(spares)]
    command += ["--dir", str(directory), "--output", "jsonl"]
    if metadata is not None:
        command += ["--metadata", metadata]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the demo, which stops the cluster in order
    )
    assert process.stdout is not None
    assert process.stderr is not None
    heard: list[str] = []
    listener = asyncio.create_task(_listen(process.stderr, heard))
    try:
        line = await process.stdout.readline()
        if not line:
            await listener
            raise SystemExit("\n".join(["the cluster did not start:", *heard]))
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
        await listener
        say(f"stopped    all bookies (exit code {process.returncode})")


async def _listen(stream: asyncio.StreamReader, heard: list[str]) -> None:
    heard.extend([line.decode(errors="replace").rstrip() async for line in stream])


def kill_bookie(cluster: dict[str, Any], bookie_id: str) -> None:
    """Send SIGKILL to one bookie's process."""
    row = next(row for row in cluster["bookies"] if row["bookie_id"] == bookie_id)
    os.kill(row["pid"], signal.SIGKILL)
    print_over(f"kill -9    bookie {bookie_id} (pid {row['pid']}), one of the ledger's")


# --- progress ---


def print_over(text: str) -> None:
    """Print a line that stays, over the line of progress."""
    say(f"\r\x1b[K{text}" if sys.stdout.isatty() else text)


class ClientLog(logging.Handler):
    """Shows the log messages of the client between the lines of the demo."""

    def emit(self, record: logging.LogRecord) -> None:
        print_over(f"client     {record.getMessage()}")


@dataclass
class Progress:
    """Rate and latencies so far, on one line that is written again and again on a terminal."""

    total_bytes: int
    started: float
    entries: int = 0
    bytes: int = 0
    latency: LatencyBuckets = field(default_factory=LatencyBuckets)
    shown_at: float = 0.0
    shown_entries: int = 0

    def add(self, bursts: Bursts, acknowledged: int, now: float) -> None:
        """Count acknowledged entries, the oldest of the bursts."""
        self.entries += acknowledged
        for count, added in take_oldest(bursts, acknowledged):
            self.latency.record(now - added, count)

    def finish(self, ledger: client_aio.LedgerWriter, now: float) -> None:
        """Count the last entry, and print the figures of the whole run."""
        self.entries, self.bytes = ledger.last_add_confirmed + 1, ledger.length
        self.show(now, last=True)

    def show(self, now: float, *, last: bool = False) -> None:
        """Print the figures, if it is time to."""
        since = now - (self.shown_at or self.started)
        if since < SHOW_EVERY_S and not last:
            return
        average = last or not sys.stdout.isatty()
        if last:
            rate = self.entries / max(now - self.started, 1e-9)
        else:
            rate = (self.entries - self.shown_entries) / since
        p50, p99, p999 = (self.latency.percentile(percent) * 1e3 for percent in (50, 99, 99.9))
        text = (
            f"{'write':<10} {self.bytes / self.total_bytes:>4.0%}  {self.entries:>9,} entries"
            f"  {rate:>9,.0f}/s  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  p99.9 {p999:6.1f} ms"
        )
        if average:
            print_over(text)
        else:
            print(f"\r\x1b[K{text}", end="", flush=True)
        self.shown_at, self.shown_entries = now, self.entries


# --- writing and reading ---


@dataclass
class Event:
    """Something that is done once so many bytes are acknowledged."""

    at_bytes: int
    action: Any


async def write_lines(
    ledger: client_aio.LedgerWriter, lines: list[bytes], progress: Progress, events: list[Event]
) -> hashlib._Hash:
    """Add every line, with a bounded number in flight; return the sum over the bytes added."""
    digest = hashlib.sha256()
    now = asyncio.get_running_loop().time
    outstanding: deque[asyncio.Future[int]] = deque()
    bursts: Bursts = deque()
    in_flight_max = min(IN_FLIGHT_MAX, len(lines) // 4)  # of a short file not all at once
    for burst in _bursts(lines):
        bursts.append((len(burst), now()))
        outstanding.extend([ledger.add_entry(line) for line in burst])
        digest.update(b"".join(burst))
        while len(outstanding) > in_flight_max:
            await _take(ledger, outstanding, bursts, progress, events)
    while outstanding:
        await _take(ledger, outstanding, bursts, progress, events)
    for event in events:  # of a file that is too short for a third of it to be reached before the end
        await event.action()
    return digest


async def wait_for_replacement(metadata: str, ledger_id: int, dead: str) -> None:
    """Follow the ledger's metadata until a replacement has the dead bookie's seat, or for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CHANGE_TIMEOUT_S), await open_store(metadata) as store:
            ledgers = LedgerStore(store)
            async with contextlib.aclosing(ledgers.watch(ledger_id)) as changes:
                async for _ in changes:
                    ledger, _ = await ledgers.read(ledger_id)
                    if dead not in ledger.last_fragment.bookies:
                        return


def _bursts(lines: list[bytes]) -> Iterator[list[bytes]]:
    size = max(1, min(LINES_PER_BURST, len(lines) // 20))
    for start in range(0, len(lines), size):
        yield lines[start : start + size]


async def _take(
    ledger: client_aio.LedgerWriter,
    outstanding: deque[asyncio.Future[int]],
    bursts: Bursts,
    progress: Progress,
    events: list[Event],
) -> None:
    """Wait until the oldest add is acknowledged, and count it with all entries that were added with it."""
    await outstanding[0]
    moment, acknowledged = asyncio.get_running_loop().time(), 0
    while outstanding and outstanding[0].done():
        outstanding.popleft()
        acknowledged += 1
    progress.add(bursts, acknowledged, moment)
    progress.bytes = ledger.length
    progress.show(moment)
    while events and progress.bytes >= events[0].at_bytes:
        await events.pop(0).action()


async def read_back(metadata: str, ledger_id: int) -> tuple[str, int, Any]:
    """Read the ledger through a client of its own; return SHA-256, number of entries and metadata."""
    digest, entries = hashlib.sha256(), 0
    now = asyncio.get_running_loop().time
    started = now()
    async with client_aio.connect(metadata) as client, client.open_ledger(ledger_id) as reader:
        async with contextlib.aclosing(reader.read_batches(0, reader.last_add_confirmed)) as batches:
            async for batch in batches:
                digest.update(batch.buffer)
                entries += len(batch.offsets) - 1
        ledger_metadata = await client.ledger_metadata(ledger_id)
    seconds = now() - started
    say(f"read       {entries:>15,} entries  {entries / seconds:>9,.0f}/s, through a fresh client")
    return digest.hexdigest(), entries, ledger_metadata


# --- the whole ---


async def run(arguments: argparse.Namespace, directory: Path) -> int:
    """Run the demo in an empty directory; return the exit code."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # ends as Ctrl-C does
    lines = read_source(arguments.file)
    async with contextlib.AsyncExitStack() as stack:
        zookeeper = None
        if arguments.metadata == "zk":
            zookeeper = await start_zookeeper(stack, directory / "zookeeper")
        spares = 0 if arguments.no_spare else 1
        cluster = await stack.enter_async_context(
            run_cluster(
                directory / "cluster", spares, f"zk://{zookeeper.addresses}/demo" if zookeeper else None
            )
        )
        names = ", ".join(row["bookie_id"] for row in cluster["bookies"])
        say(f"cluster    bookies {names}; metadata in {cluster['metadata']}")
        return await stream_and_compare(arguments, lines, cluster, zookeeper)


async def stream_and_compare(
    arguments: argparse.Namespace, lines: list[bytes], cluster: dict[str, Any], zookeeper: Any
) -> int:
    """Write, kill, read back, compare."""
    total = sum(map(len, lines))
    loop = asyncio.get_running_loop()
    async with client_aio.connect(cluster["metadata"]) as client:
        async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as ledger:
            say(f"ledger     {ledger.ledger_id} on {', '.join(ledger.metadata.last_fragment.bookies)}")

            victim = ledger.metadata.last_fragment.bookies[1]

            async def kill() -> None:
                kill_bookie(cluster, victim)

            async def kill_leader() -> None:
                leader = await asyncio.to_thread(zookeeper.leader)
                print_over(f"kill -9    the ZooKeeper leader, {leader.address}")
                await asyncio.to_thread(leader.kill)

            events = [Event(total // 3, kill)]
            if arguments.kill_zookeeper_leader:
                events.append(Event(total // 2, kill_leader))
            progress = Progress(total, loop.time())
            # The last entry waits, so that a short file is not through before the bookie is missed.
            digest = await write_lines(ledger, lines[:-1], progress, events)
            if not arguments.no_spare:
                await wait_for_replacement(cluster["metadata"], ledger.ledger_id, victim)
            digest.update(lines[-1])
            await ledger.add_entry(lines[-1])
            progress.finish(ledger, loop.time())
            written = digest.hexdigest()
        say(f"closed     at entry {ledger.last_add_confirmed:,}, {ledger.length:,} bytes")
    read, entries, metadata = await read_back(cluster["metadata"], ledger.ledger_id)
    say()
    say(draw_ledger(metadata))
    say()
    say(f"written    sha256 {written}")
    say(f"read back  sha256 {read}")
    if read != written or entries != len(lines):
        say(f"DIFFERENT: {len(lines):,} entries were written and {entries:,} read back")
        return 1
    if victim in metadata.last_fragment.bookies and not arguments.no_spare:
        say("NO ENSEMBLE CHANGE: a spare was there, and the dead bookie was not replaced")
        return 1
    changed = (
        f"{len(metadata.fragments)} fragments" if not arguments.no_spare else "no spare, at the ack quorum"
    )
    say(f"EQUAL: {entries:,} entries, every byte, with a bookie lost on the way ({changed})")
    return 0


async def start_zookeeper(stack: contextlib.AsyncExitStack, directory: Path) -> Any:
    """Start three ZooKeeper servers out of pyspark's jars, as the tests do."""
    sys.path.insert(0, str(ROOT))
    from tests.support.zookeeper import ZooKeeperEnsemble

    say("zookeeper  starting three servers")
    ensemble = ZooKeeperEnsemble(directory)
    starting = asyncio.create_task(asyncio.to_thread(ensemble.start))

    async def end() -> None:
        # A thread cannot be cancelled: were it not waited for, it would start servers behind our back.
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.to_thread(ensemble.kill)

    stack.push_async_callback(end)
    await asyncio.shield(starting)
    return ensemble


def main() -> int:
    """Parse the arguments, run, clean up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", help="stream this file instead of the standard library's sources")
    parser.add_argument("--no-spare", action="store_true", help="no spare bookie: go on at the ack quorum")
    parser.add_argument("--metadata", choices=("sqlite", "zk"), default="sqlite", help="the metadata store")
    parser.add_argument("--kill-zookeeper-leader", action="store_true", help="with zk: midway")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="the event loop")
    parser.add_argument(
        "--dir", type=Path, help="keep everything in this directory; default: a temporary one"
    )
    arguments = parser.parse_args()
    if arguments.kill_zookeeper_leader and arguments.metadata != "zk":
        parser.error("--kill-zookeeper-leader goes with --metadata zk")
    if arguments.file and not Path(arguments.file).is_file():
        parser.error(f"there is no file {arguments.file}")
    logging.basicConfig(handlers=[ClientLog()])
    factory = None
    if arguments.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="bookie-aio-demo-"))
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(run(arguments, directory.resolve()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except (client_aio.BookKeeperError, OSError) as error:
        say(f"FAILED: {type(error).__name__}: {error}")
        return 1
    finally:
        if arguments.dir is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
