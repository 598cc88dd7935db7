"""A replicated key-value store in memory, with a log and snapshots: primary and standby as two processes.

    python examples/kv_store.py [METADATA] [--rounds 5]

Starts both, and a cluster of three bookies where none is named. Writes through the primary, kills it with
SIGKILL, writes on through the other process, and repeats that. At the end checks that every acknowledged
write is there.

Prints how long each failover took, in two parts. Detection is the time until the standby knew: over ZooKeeper
the session timeout, with the embedded store milliseconds, by a lock. The second part is the time from then to
the first acknowledged write.

How it works, and what to keep when you build your own:

- A write is appended to the log, applied when that is acknowledged, and then answered. So memory never holds
  data that could be lost. A standby that reads the log has exactly the writes that were, or might have been,
  answered.
- The standby follows the log all the time. Elected, it opens the log, which fences the former primary. Then
  it reads the records that it has not seen yet, and serves. Election saves the two from fencing one another
  all the time; opening the log makes it safe.
- Every so many writes the primary puts a snapshot into a second log, and truncates both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import client_aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOG, SNAPSHOTS, SNAPSHOT_EVERY = "kv", "kv-snapshots", 500


# --- the server: one process of the two ---


class KeyValueStore:
    """The data, and the position of the last write in it."""

    def __init__(self, client: client_aio.Client) -> None:
        self.client = client
        self.data: dict[str, str] = {}
        self.position: Any = None
        self.log: Any = None  # what the primary writes to
        self.writes = 0
        self._snapshot: asyncio.Task[None] | None = None

    async def restore(self) -> None:
        """Load the newest snapshot."""
        with contextlib.suppress(client_aio.NoSuchLogError):
            async for record in self.client.read_log(SNAPSHOTS):
                text, self.data = json.loads(record.data)
                self.position = client_aio.Position.parse(text)

    async def catch_up(self, *, follow: bool) -> None:
        """Apply the records of the log behind this position.

        Without a snapshot that is position 0:0, not the log's beginning, which moves with the first snapshot.
        """
        while True:
            start = self.position or client_aio.Position(0, 0)
            try:
                async for record in self.client.read_log(LOG, start, follow=follow):
                    if record.position != self.position:  # that one is in the data
                        self.apply(record.position, record.data)
                return
            except client_aio.NoSuchLogError:
                if not follow:
                    return
                await asyncio.sleep(0.1)  # nobody has written yet
            except client_aio.LogTruncatedError:
                await self.restore()  # there is a newer snapshot

    def apply(self, position: Any, data: bytes) -> None:
        key, value = json.loads(data)
        self.data[key] = value
        self.position = position

    async def put(self, key: str, value: str) -> None:
        """Make a write; return when it is durable. After a BookKeeperError it may be durable or not."""
        if self.log is None:
            raise client_aio.LogFencedError("this is not the primary")
        record = json.dumps([key, value]).encode()
        self.apply(await self.append(record), record)
        self.writes += 1
        if self.writes % SNAPSHOT_EVERY == 0 and (self._snapshot is None or self._snapshot.done()):
            self._snapshot = asyncio.create_task(self.snapshot())

    def append(self, record: bytes) -> asyncio.Future[Any]:
        log: client_aio.LogWriter = self.log
        return log.append(record)

    async def lead(self, election: client_aio.LeaderElection) -> None:
        """Fence the former primary, and serve until the election is lost or somebody else opens the log."""
        with contextlib.suppress(client_aio.LogFencedError):
            async with self.client.open_log(LOG) as log:
                await self.catch_up(follow=False)
                self.log = log
                await election.lost()
        self.log = None

    async def snapshot(self) -> None:
        """Write a snapshot, then drop the records that it replaces; a crash in between only leaves more.

        Opening the snapshots for writing fences every former primary there. A write that succeeds after that
        proves that nobody led in between. Otherwise a primary that slept could append its old state behind a
        newer snapshot, and drop the newer one.
        """
        with contextlib.suppress(client_aio.BookKeeperError):
            async with self.client.open_log(SNAPSHOTS) as snapshots:
                await self.put("", "")
                position = self.position
                newest = await snapshots.append(json.dumps([str(position), self.data]).encode())
            await self.client.truncate_log(SNAPSHOTS, newest)
            await self.client.truncate_log(LOG, position)


async def serve(metadata: str, kind: type[KeyValueStore] = KeyValueStore) -> None:
    """Stand by, lead when elected, stand by again when fenced."""
    async with client_aio.connect(metadata, session_timeout_s=2) as client:
        store = kind(client)
        await store.restore()
        server = await asyncio.start_server(partial(answer, store), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, client_aio.LeaderElection(client, LOG, str(port).encode()) as election:
            print("serves", flush=True)
            while True:
                following = asyncio.create_task(store.catch_up(follow=True))
                await election.gained()
                print(f"elected {time.monotonic()}", flush=True)
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await store.lead(election)


async def answer(store: KeyValueStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection, a JSON array a line: ["put", key, value] or ["get", key]."""
    while line := await reader.readline():
        request: list[str] = json.loads(line)
        try:
            if store.log is None:
                said: Any = {"error": "not the primary"}
            elif request[0] == "put":
                await store.put(request[1], request[2])
                said = {"ok": True}
            else:
                said = {"value": store.data.get(request[1])}
        except client_aio.BookKeeperError as error:
            said = {"error": str(error)}
        writer.write(json.dumps(said).encode() + b"\n")
    writer.close()


# --- the driver: what uses the store, and kills its primary ---


class Caller:
    """Talks to the primary."""

    def __init__(self, election: client_aio.LeaderElection) -> None:
        self._election = election
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, *request: str) -> Any:
        """Ask the processes until a primary answers without an error."""
        while True:
            try:
                if self._streams is None:
                    port = await self._election.leader()
                    self._streams = await asyncio.open_connection("127.0.0.1", int(port or 0))
                reader, writer = self._streams
                writer.write(json.dumps(request).encode() + b"\n")
                said = json.loads(await reader.readline() or b'{"error": "gone"}')
                if "error" not in said:
                    return said
            except OSError:
                pass
            self._streams = None
            await asyncio.sleep(0.005)


async def start(metadata: str) -> asyncio.subprocess.Process:
    command = (sys.executable, sys.argv[0], metadata, "--serve")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()  # it serves
    return process


async def elected(process: asyncio.subprocess.Process) -> float:
    """Return the time at which a process was elected; all processes of a machine share the clock."""
    assert process.stdout is not None
    return float((await process.stdout.readline()).split()[1])


async def drive(metadata: str, rounds: int) -> bool:
    """Write, kill, write on; then check that every acknowledged write is there."""
    primary = await start(metadata)
    await elected(primary)
    standby = await start(metadata)
    written, rest_ms = dict[str, str](), list[float]()
    try:
        async with client_aio.connect(metadata) as client:
            caller = Caller(client_aio.LeaderElection(client, LOG))
            for number in range(rounds):
                for each in range(700):
                    await caller.call("put", key := f"key-{each}", value := f"{number}.{each}")
                    written[key] = value
                primary.kill()
                killed_at = time.monotonic()
                await caller.call("put", key := f"after-{number}", "1")
                acknowledged_at, elected_at = time.monotonic(), await elected(standby)
                written[key] = "1"
                rest_ms.append(1e3 * (acknowledged_at - elected_at))
                print(f"failover {number + 1}: {1e3 * (elected_at - killed_at):6.0f} ms detection, "
                      f"{rest_ms[-1]:5.0f} ms for the rest", flush=True)  # fmt: skip
                await primary.wait()
                primary, standby = standby, await start(metadata)
            found = {key: (await caller.call("get", key))["value"] for key in written}
    finally:
        for process in (primary, standby):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lost = [key for key in written if found[key] != written[key]]
    print(f"median of the rest: {statistics.median(rest_ms):.0f} ms")
    print(f"LOST: {lost}" if lost else f"EQUAL: all {len(written):,} keys have the last value acknowledged")
    return not lost


@contextlib.asynccontextmanager
async def local_cluster() -> AsyncIterator[str]:
    """Run a cluster while the context is open; yield its metadata URI."""
    with tempfile.TemporaryDirectory(prefix="kv-store.") as home:
        command = ("-m", "client_aio.cli", "cluster", "up", "-n", "3", "--dir", home, "-o", "jsonl")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            yield json.loads(await process.stdout.readline())["metadata"]
        finally:
            process.terminate()
            await process.wait()


async def main(kind: type[KeyValueStore] = KeyValueStore) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("metadata", nargs="?", help="of a cluster that runs; default: one is started")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help="be one of the two")
    arguments = parser.parse_args()
    if arguments.serve:
        await serve(arguments.metadata, kind)
    if arguments.metadata is not None:
        return 0 if await drive(arguments.metadata, arguments.rounds) else 1
    async with local_cluster() as metadata:
        return 0 if await drive(metadata, arguments.rounds) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
