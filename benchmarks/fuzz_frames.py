"""Mutated frames against a live bookie, with a good client beside them.

    python -m benchmarks.fuzz_frames [--frames 1000000] [--seed 1] [--connections 32]

Starts one bookie process. Many connections at a time each send a stream of `benchmarks.mutations` and end.
The bookie must close each of them in time, and each of its answers must be well-formed. Half of the
connections first wait for the answer to each well-formed request, however extreme. Each of these answers must
come. All along a good client adds entries and reads them back, and a PING must be answered within its
deadline. At the end the bookie is killed and started again, and must still have everything.

The program fails (exit code 1) when an add of the good client fails or an entry reads back changed. It also
fails when the bookie dies, hangs, answers INTERNAL_ERROR, logs an error, or grows by more than 64 MiB.
Connection number N of a seed always sends the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import cast

import client_aio
from benchmarks.mutations import Mutator, Streams
from benchmarks.running import Workplace, run
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser
from bookie_aio.wire.many import parse_done
from bookie_aio.wire.messages import Done, Failure, Info, Op, Ping, Status, decode_answer
from client_aio.bookies.connection import BookieConnection, connect
from metadata.access.bookies import split_address
from metadata.errors import ProtocolError
from tests.support.cluster import BookieProcess

GROWTH_BYTES_MAX = 64 << 20
CLOSE_TIMEOUT_S = 20.0
PING_TIMEOUT_S = 5.0
PING_PAUSE_S = 0.05
LOCAL_ADDRESSES = 50  # each has its own ports, so that those of ended connections may rest for a minute
GOOD_REQUESTS_MAX = 6  # that the good client sends in a round
WARM_UP_SEED = 2**32


class Harmed(Exception):
    """The bookie broke a rule."""


class FuzzConnection(asyncio.Protocol):
    """Sends the drawn bytes, checks the form of the answers, and waits for the end."""

    def __init__(self, streams: Streams, statuses: Counter[str]) -> None:
        self._streams, self._statuses = streams, statuses
        self._parser = FrameParser(FRAME_BYTES_MAX)
        self._answers = 0
        self._is_sent = False
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._streams.well_formed)
        self._send_wrong()

    def _send_wrong(self) -> None:
        if self._answers >= self._streams.answers and not self._is_sent:
            assert self._transport is not None
            self._is_sent = True
            self._transport.write(self._streams.wrong)
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        try:
            for header, body in self._parser.frames():
                op, request_id, answer = decode_answer(header)
                status = answer.status if isinstance(answer, Failure) else Status.OK
                named = len(parse_done(request_id, body)) if op in (Op.ADDS, Op.WRITE_LACS) else 1
                self._statuses[status.name] += named
                self._answers += named
        except ProtocolError as error:
            self._end(f"an answer is malformed: {error}")
        self._send_wrong()

    def connection_lost(self, exc: Exception | None) -> None:
        owed = self._streams.answers - self._answers
        self._end(f"closed, owing {owed} answers" if owed > 0 else None)

    def _end(self, complaint: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(complaint)


class Fuzzer:
    """Keeps so many connections busy until enough frames are sent."""

    def __init__(self, address: str, seed: int, spared: frozenset[int]) -> None:
        self._host, self._port = split_address(address)
        self._seed, self._spared = seed, spared
        self._next = 0
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.connections = self.frames = 0

    async def run(self, frames: int, connections: int) -> None:
        """Send at least so many frames.

        Raises:
            Harmed: a connection was not closed in time, or got something malformed.
        """
        enough = self.frames + frames
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(self._work(enough))

    async def _work(self, enough: int) -> None:
        while self.frames < enough:
            number, self._next = self._next, self._next + 1
            mutator = Mutator(random.Random(f"{self._seed}/{number}"), self._spared)
            streams = mutator.draw()
            self.kinds.update(mutator.counts)
            self.frames += sum(mutator.counts.values())
            self.connections += 1
            try:
                await asyncio.wait_for(self._send(number, streams), CLOSE_TIMEOUT_S)
            except TimeoutError:
                raise Harmed(f"connection {number} of seed {self._seed} was not closed in time") from None

    async def _send(self, number: int, streams: Streams) -> None:
        transport, protocol = await asyncio.get_running_loop().create_connection(
            lambda: FuzzConnection(streams, self.statuses),
            self._host,
            self._port,
            local_addr=(f"127.0.1.{1 + number % LOCAL_ADDRESSES}", 0),
        )
        try:
            complaint = await protocol.ended
        finally:
            transport.abort()
        if complaint is not None:
            raise Harmed(f"connection {number} of seed {self._seed}: {complaint}")


class GoodClient:
    """Adds and reads on one ledger; everything has to succeed and to be identical."""

    def __init__(self, ledger: client_aio.LedgerWriter) -> None:
        self.ledger = ledger
        self.added = self.read = self.rounds = 0

    @staticmethod
    def payload(entry_id: int) -> bytes:
        return b"good entry %d;" % entry_id * (1 + entry_id % 50)

    async def run(self) -> None:
        """Work until cancelled."""
        rng = random.Random(0)
        while True:
            first = self.added
            self.rounds += 1
            count = rng.randint(1, 40)
            futures = [self.ledger.add_entry(self.payload(first + number)) for number in range(count)]
            if await asyncio.gather(*futures) != list(range(first, first + count)):
                raise Harmed(f"the good client's adds from {first} on got other ids")
            self.added += count
            start = rng.randrange(self.added)
            await check_entries(self.ledger, start, min(start + 100, self.added) - 1)
            self.read += min(start + 100, self.added) - start


async def check_entries(
    ledger: client_aio.LedgerWriter | client_aio.LedgerReader, first: int, last: int
) -> None:
    """Read a range and compare."""
    expected = first
    async for entry in ledger.read(first, last):
        if (entry.entry_id, entry.data) != (expected, GoodClient.payload(expected)):
            raise Harmed(f"entry {expected} of the good client reads back as {entry!r:.200}")
        expected += 1
    if expected != last + 1:
        raise Harmed(f"the good client's entries {first} to {last} end at {expected}")


class Watch:
    """Looks after the bookie: it answers in time, and stays small."""

    def __init__(self, bookie: BookieProcess) -> None:
        self._bookie = bookie
        self.slowest_ping_s = 0.0
        self.peak_bytes = 0
        self.connection: BookieConnection | None = None

    def resident_bytes(self) -> int:
        """Return the bookie's resident memory."""
        status = Path(f"/proc/{self._bookie.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    async def requests(self) -> int:
        """Return how many requests the bookie has taken so far, but for greetings and PINGs."""
        assert self.connection is not None
        _, body = await self.connection.call(Info(), Done, timeout_s=PING_TIMEOUT_S)
        counts = json.loads(bytes(body))["counters"]["requests"]
        return sum(count for op, count in counts.items() if op not in ("hello", "ping"))

    async def run(self) -> None:
        """Watch until cancelled."""
        connection = await connect(
            self._bookie.addresses[0], bookie_id="", instance_id="", timeout_s=PING_TIMEOUT_S
        )
        self.connection = connection
        try:
            while True:
                sent_at = time.perf_counter()
                await connection.call(Ping(), Done, timeout_s=PING_TIMEOUT_S)
                self.slowest_ping_s = max(self.slowest_ping_s, time.perf_counter() - sent_at)
                self.peak_bytes = max(self.peak_bytes, self.resident_bytes())
                await asyncio.sleep(PING_PAUSE_S)
        finally:
            connection.close()


def check_log(log: Path) -> int:
    """Return the number of lines of the bookie's log; none may be an error or hold a traceback."""
    lines = 0
    with log.open(errors="replace") as file:
        for line in file:
            lines += 1
            if "traceback" in line.lower() or " ERROR " in line[:60] or " CRITICAL " in line[:60]:
                raise Harmed(f"the bookie's log says: {line[:2000]}")
    return lines


async def create(client: client_aio.Client) -> client_aio.LedgerWriter:
    """Create a ledger on one bookie."""
    return await client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1)


async def fuzz(directory: Path, frames: int, seed: int, connections: int) -> None:
    """Run it all and print the counts."""
    bookie = BookieProcess("b1", directory, f"sqlite://{directory / 'metadata.db'}")
    await bookie.start("--log-level", "warning")
    try:
        async with client_aio.connect(bookie.uri) as client:
            for _ in range(7):  # small ids are what mutations hit most easily
                await client.delete_ledger((await create(client)).ledger_id)
            async with await create(client) as ledger:
                good, watch = GoodClient(ledger), Watch(bookie)
                await measure(bookie, good, watch, (frames, seed, connections))
            await check_entries(await client.open_ledger(ledger.ledger_id), 0, good.added - 1)
        await bookie.kill()
        await bookie.start("--log-level", "warning")
        async with client_aio.connect(bookie.uri) as client:
            await check_entries(await client.open_ledger(ledger.ledger_id), 0, good.added - 1)
        await bookie.end()
    finally:
        await bookie.end()
    lines = check_log(bookie.log)
    print(
        f"after kill -9 and a restart all {good.added:,} entries are there; {lines:,} lines logged, no error"
    )


async def measure(bookie: BookieProcess, good: GoodClient, watch: Watch, task: tuple[int, int, int]) -> None:
    """Fuzz while the good client works and the watch looks."""
    frames, seed, connections = task
    spared = frozenset((good.ledger.ledger_id,))
    beside = [asyncio.create_task(good.run()), asyncio.create_task(watch.run())]
    try:
        # Growth is counted from a bookie that has seen its share of everything.
        fuzzer = Fuzzer(bookie.addresses[0], WARM_UP_SEED + seed, spared)
        await beside_others(fuzzer.run(min(3000, frames), connections), beside)
        before, watch.peak_bytes = watch.resident_bytes(), 0
        requests, rounds = await watch.requests(), good.rounds
        fuzzer = Fuzzer(bookie.addresses[0], seed, spared)
        started_at = time.perf_counter()
        await beside_others(fuzzer.run(frames, connections), beside)
        elapsed = time.perf_counter() - started_at
        # Taken as requests, and not the good client's; and what ended each connection.
        requests = await watch.requests() - requests - GOOD_REQUESTS_MAX * (good.rounds - rounds)
    finally:
        for other in beside:
            other.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    after = watch.resident_bytes()
    growth = max(after, watch.peak_bytes) - before
    for kind, count in sorted(fuzzer.kinds.items()):
        print(f"{count:>12,} {kind}")
    answers = ", ".join(f"{count:,} {status}" for status, count in fuzzer.statuses.most_common())
    print(
        f"{fuzzer.frames:,} frames over {fuzzer.connections:,} connections in {elapsed:.0f} s; at least "
        f"{requests + fuzzer.connections:,} looked at by the bookie, the others came behind a frame that "
        "ended their connection"
    )
    print(f"answers: {answers}")
    print(f"beside them: {good.added:,} entries added, {good.read:,} read back, all identical")
    print(f"slowest PING {watch.slowest_ping_s * 1e3:.0f} ms")
    print(
        f"resident memory {before / 2**20:.1f} MiB before, {watch.peak_bytes / 2**20:.1f} at the peak, "
        f"{after / 2**20:.1f} after"
    )
    if fuzzer.statuses[Status.INTERNAL_ERROR.name]:
        raise Harmed(f"{fuzzer.statuses[Status.INTERNAL_ERROR.name]} answers were INTERNAL_ERROR")
    if growth > GROWTH_BYTES_MAX:
        raise Harmed(f"the bookie grew by {growth / 2**20:.0f} MiB")


async def beside_others(coroutine: object, others: list[asyncio.Task[None]]) -> None:
    """Await it, unless one of the others fails before."""
    assert asyncio.iscoroutine(coroutine)
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            if other.done():
                other.result()
        await task
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def main() -> int:
    parser = argparse.ArgumentParser(description="Send mutated frames to a live bookie.")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=32, help="at a time")
    parser.add_argument("--dir", type=Path, help="where the bookie lives (default: a temporary directory)")
    arguments = parser.parse_args()
    with Workplace(arguments.dir, "fuzz.") as place:
        logging.basicConfig(filename=place.path / "client.log", level=logging.INFO)
        try:
            await fuzz(place.path, arguments.frames, arguments.seed, arguments.connections)
        except (Harmed, client_aio.BookKeeperError, OSError, RuntimeError) as error:
            print(f"FAILED with seed {arguments.seed}: {error!r}; see {place.path}")
            place.keep()
            return 1
    print("unharmed")
    return 0


if __name__ == "__main__":
    sys.exit(run(main()))
