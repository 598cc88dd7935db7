"""Attacks on a live bookie, with a good client beside each of them.

    python -m benchmarks.attacks [--only NAME ...] [--seconds 10] [--requests N] [--loop LOOP] [--json FILE]

Starts a bookie process for each attack, and another one as a control. A good client in a process of its own
adds 1 KiB every few milliseconds. It is alone first, then beside the same attack on the other bookie, then
beside the attack. The attackers are a stranger's connections to the bookie's port; they know nothing of the
metadata store. Afterwards SIGTERM has to end the bookie, while the attack goes on.

The program fails (exit code 1) where one of these bounds is broken:

- the bookie's resident memory is at most 256 MiB at all times;
- no add of the good client fails;
- the p99 of its adds is at most three times the larger p99 of the two times before. An attacker on the same
  machine takes processor time, which is no fault of the bookie;
- the bookie ends within 5 s of SIGTERM.

`--requests` ends an attack when each connection has so many answers, and the good client goes on until then.
The 200 connections of `hostile-mix` with 1,000 each make 200,000 hostile requests.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import selectors
import socket
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.running import Workplace, run
from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.many import encode_adds, encode_write_lacs
from bookie_aio.wire.messages import (
    Add,
    AddFlag,
    Delete,
    Force,
    Hello,
    Info,
    ListLedgers,
    Ping,
    ReadLac,
    WriteLac,
    encode_request,
)
from metadata.access.bookies import split_address
from metadata.ids import TERM_FINAL
from tests.support.cluster import BookieProcess
from tests.support.rawclient import block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bookie_aio.wire.messages import Message

MEMORY_BYTES_MAX = 256 << 20
P99_FACTOR_MAX = 3.0
SIGTERM_S_MAX = 5.0
BATCH = 32
"""Requests of a hostile mix that are sent at once."""
FUTURE = 1_000_000
"""Ledger ids from here on are not given out."""


def framed(request: Message, number: int, body: bytes = b"", auth: bytes | None = None) -> bytes:
    """Return a request as bytes."""
    return encode_frame(encode_request(request, number, auth), len(body)) + body


def part_frames(connection: int) -> Iterator[bytes]:
    """4.9 MiB of a frame of 5 MiB, and no more."""
    whole = framed(Add(FUTURE, 0, 0), 1, bytes(4900 * 1024))
    yield whole[:-1]
    yield from itertools.repeat(b"")


def dear_requests(connection: int) -> Iterator[bytes]:
    """INFO requests, 256 at a time, without an end."""
    yield from itertools.repeat(b"".join(framed(Info(), number) for number in range(256)))


def fences_of_future_ids(connection: int) -> Iterator[bytes]:
    """Fences of ids that nobody has."""
    for first in itertools.count(FUTURE + connection * 10**6, 256):
        yield b"".join(
            framed(ReadLac(one, TERM_FINAL, -1, 0), one % 2**31) for one in range(first, first + 256)
        )


def deletes_of_future_ids(connection: int) -> Iterator[bytes]:
    """Deletions of the ids that are given out next."""
    for first in itertools.count(connection, 256):
        yield b"".join(framed(Delete(one), one) for one in range(first + 100, first + 356))


def made_up_tokens(connection: int) -> Iterator[bytes]:
    """FORCE with tokens of nobody, to all ledgers there are."""
    draw = random.Random(connection)
    while True:
        yield b"".join(framed(Force(one % 64, 0), one, auth=draw.randbytes(32)) for one in range(256))


def junk_repairs(connection: int) -> Iterator[bytes]:
    """REPAIR of junk behind the ends of all ledgers there are."""
    while True:
        for ledger_id in range(1, 64):
            body = block(ledger_id, 10**6, [b"junk" * 100])
            yield framed(Add(ledger_id, 0, int(AddFlag.REPAIR)), ledger_id, body)


def crowds_of_adds(connection: int) -> Iterator[bytes]:
    """ADDS and WRITE_LACS of 256 each, to ids of nobody and of others, with made-up tokens."""
    draw = random.Random(connection)
    statement = LacStatement(0, 1, -1, 0, b"")
    while True:
        ids = [draw.choice((draw.randrange(64), FUTURE + draw.randrange(10**6))) for _ in range(256)]
        adds = [
            (Add(one, 0, 0), draw.choice((None, draw.randbytes(32))), block(one, 10**6, [b"junk"]))
            for one in ids
        ]
        yield b"".join(encode_adds(draw.randrange(2**31), adds))
        lacs = [(WriteLac(one, 0, statement), draw.choice((None, draw.randbytes(32)))) for one in ids]
        yield encode_write_lacs(draw.randrange(2**31), lacs)


def hostile_mix(connection: int) -> Iterator[bytes]:
    """All of the others, drawn at random, ending with a part of a frame now and then."""
    draw = random.Random(connection)
    kinds: list[Callable[[], bytes]] = [
        lambda: framed(Info(), 1),
        lambda: framed(ListLedgers(0), 2),
        lambda: framed(Ping(), 3),
        lambda: framed(ReadLac(draw.randrange(10**12), TERM_FINAL, -1, 0), 4),
        lambda: framed(Delete(draw.randrange(10**12)), 5),
        lambda: framed(Force(draw.randrange(64), 0), 6, auth=draw.randbytes(32)),
        lambda: framed(ReadLac(draw.randrange(64), -1, 10**9, 1_000), 7),
    ]
    while True:
        yield b"".join(draw.choice(kinds)() for _ in range(BATCH))


def bursts_of_connections(connection: int) -> Iterator[bytes]:
    """Nothing: the connection is closed after its greeting, and made again."""
    return iter(())


ATTACKS: dict[str, tuple[Callable[[int], Iterator[bytes]], int]] = {
    "part-frames": (part_frames, 300),
    "dear-requests": (dear_requests, 100),
    "fences-of-future-ids": (fences_of_future_ids, 8),
    "deletes-of-future-ids": (deletes_of_future_ids, 12),
    "made-up-tokens": (made_up_tokens, 50),
    "junk-repairs": (junk_repairs, 50),
    "crowds-of-adds": (crowds_of_adds, 50),
    "hostile-mix": (hostile_mix, 200),
    "bursts-of-connections": (bursts_of_connections, 500),
}
"""Name: what one connection sends, and the number of connections."""


class Answers:
    """Counts the frames of a stream."""

    def __init__(self) -> None:
        self.count = 0
        self._left = 0  # bytes of the present frame
        self._length = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                self.count += not self._left
            else:
                step = 4 - len(self._length)
                self._length += data[at : at + step]
                at += step
                if len(self._length) == 4:
                    self._left, self._length = int.from_bytes(self._length, "big"), b""


class Attacker:
    """The connections of one attack. One that is closed is made again.

    `requests`: what each connection sends before it is quiet; None stands for no end.
    """

    def __init__(self, address: str, name: str, requests: int | None) -> None:
        self._address = split_address(address)
        self._draw, self._count = ATTACKS[name]
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count()
        self._sending: dict[socket.socket, tuple[Iterator[bytes], bytes]] = {}
        self._answers: dict[socket.socket, Answers] = {}
        self.answered = 0

    def run(self) -> None:
        """Attack until the process is ended, or all requests are answered."""
        while self._requests is None or self.answered < self._requests * self._count:
            for _ in range(self._count - len(self._sending)):
                self._connect()
            for key, events in self._selector.select(0.2):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    if events & selectors.EVENT_READ:
                        self._receive(one)
                    if events & selectors.EVENT_WRITE:
                        self._send(one)
                except BlockingIOError:
                    continue
                except (OSError, StopIteration):
                    self._close(one)

    def _connect(self) -> None:
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(self._address)
        number = next(self._numbers)
        frames = self._draw(number)
        if self._requests is not None:
            frames = itertools.chain(itertools.islice(frames, self._requests // BATCH), itertools.repeat(b""))
        self._sending[one] = (frames, framed(Hello(3, 2**15, "attacker", "", ""), 0))
        self._answers[one] = Answers()
        self._selector.register(one, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _receive(self, one: socket.socket) -> None:
        data = one.recv(1 << 20)
        if not data:
            raise OSError("closed")
        answers = self._answers[one]
        before = answers.count
        answers.feed(data)
        self.answered += answers.count - before

    def _send(self, one: socket.socket) -> None:
        frames, rest = self._sending[one]
        rest = rest or next(frames)
        if rest:
            rest = rest[one.send(rest) :]
        else:
            self._selector.modify(one, selectors.EVENT_READ)
        self._sending[one] = frames, rest

    def _close(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        one.close()
        del self._sending[one], self._answers[one]


async def be_good(uri: str) -> None:
    """Add 1 KiB every few milliseconds; print when each add ended, its seconds, and its error."""
    async with (
        client_aio.connect(uri) as client,
        await client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as writer,
    ):
        while True:
            began = time.perf_counter()
            error = ""
            try:
                await writer.add_entry(bytes(1024))
            except client_aio.BookKeeperError as raised:
                error = repr(raised)
            print(json.dumps([time.time(), time.perf_counter() - began, error]), flush=True)
            await asyncio.sleep(0.004)


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 where it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def p99(rows: list[list[Any]], since: float, until: float) -> float:
    """Return the 99th percentile of the adds that ended between two times, in seconds."""
    times = sorted(row[1] for row in rows if since <= row[0] < until)
    if len(times) < 2:
        return until - since
    return float(statistics.quantiles(times, n=100)[98])


async def measure(
    directory: Path, name: str, seconds: float, requests: int | None, loop: str
) -> dict[str, Any]:
    """Run one attack, and return its figures."""
    bookie, other = (
        BookieProcess(name, directory, f"sqlite://{directory / name}.db") for name in ("b1", "other")
    )
    await asyncio.gather(*(one.start("--log-level", "warning", "--loop", loop) for one in (bookie, other)))
    rows: list[list[Any]] = []
    good = attacker = None
    try:
        good = await _start("--good", bookie.uri, stdout=asyncio.subprocess.PIPE)
        assert good.stdout is not None
        rows.append(json.loads(await good.stdout.readline()))
        collecting = asyncio.create_task(_collect(good.stdout, rows))
        quiet_since = time.time()
        await asyncio.sleep(seconds / 2)
        quiet_until = time.time()
        attacker = await _start("--attack", name, "--address", other.addresses[0])
        await asyncio.sleep(seconds / 2)
        attacker.kill()
        await attacker.wait()
        await other.kill()
        control_until = time.time()
        more = ("--requests", str(requests)) if requests else ()
        attacker = await _start("--attack", name, "--address", bookie.addresses[0], *more)
        peak, begun = 0, time.monotonic()
        while attacker.returncode is None if requests else time.monotonic() < begun + seconds:
            peak = max(peak, resident_bytes(bookie.pid))
            await asyncio.sleep(0.05)
        attack_s = time.monotonic() - begun
        attacked_until = time.time()
        good.kill()
        await collecting
        begun = time.monotonic()
        await bookie.end()
        sigterm_s = time.monotonic() - begun
    finally:
        for process in (good, attacker):
            if process is not None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await asyncio.gather(bookie.end(), other.end())
    before = p99(rows, quiet_since, quiet_until)
    control = p99(rows, quiet_until, control_until)
    last = max(row[0] for row in rows)
    beside = max(p99(rows, control_until, attacked_until), attacked_until - last - 0.1)
    return {
        "attack": name,
        "connections": ATTACKS[name][1],
        "peak_mib": round(peak / 2**20, 1),
        "p99_before_ms": round(before * 1e3, 1),
        "p99_control_ms": round(control * 1e3, 1),
        "p99_beside_ms": round(beside * 1e3, 1),
        "seconds": round(attack_s, 1),
        "adds_beside": sum(1 for row in rows if control_until <= row[0] < attacked_until),
        "failed": sum(1 for row in rows if row[2]),
        "sigterm_s": round(sigterm_s, 2),
        "is_good": peak <= MEMORY_BYTES_MAX
        and beside <= P99_FACTOR_MAX * max(before, control)
        and not any(row[2] for row in rows)
        and sigterm_s <= SIGTERM_S_MAX,
    }


async def _start(*arguments: str, stdout: int | None = None) -> asyncio.subprocess.Process:
    module = ("-m", "benchmarks.attacks")
    return await asyncio.create_subprocess_exec(sys.executable, *module, *arguments, stdout=stdout)


async def _collect(lines: asyncio.StreamReader, rows: list[list[Any]]) -> None:
    while (line := await lines.readline()).endswith(b"\n"):
        rows.append(json.loads(line))


async def measure_all(
    names: list[str], seconds: float, requests: int | None, loop: str
) -> list[dict[str, Any]]:
    """Run the attacks one after another, print a table, and return the figures."""
    rows = []
    for name in names:
        with Workplace(None, "attack.") as place:
            row = await measure(place.path, name, seconds, requests, loop)
            rows.append(row)
            verdict = "ok" if row["is_good"] else "BROKEN"
            print(
                f"{name:22} {row['connections']:4} connections  peak {row['peak_mib']:6} MiB  p99 "
                f"{row['p99_before_ms']:6} / {row['p99_control_ms']:6} → {row['p99_beside_ms']:6} ms  "
                f"{row['adds_beside']:6,} adds, {row['failed']} failed  {row['seconds']:5} s  "
                f"SIGTERM {row['sigterm_s']:4} s  {verdict}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack a live bookie, with a good client beside.")
    parser.add_argument("--only", nargs="*", choices=ATTACKS, metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="the length of each attack")
    parser.add_argument(
        "--requests", type=int, help="end an attack when each connection has so many answers (hostile-mix)"
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="the bookie's loop")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--good", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.good:
        run(be_good(arguments.good))
    elif arguments.attack:
        Attacker(arguments.address, arguments.attack, arguments.requests).run()
    else:
        names = arguments.only or list(ATTACKS)
        rows = run(measure_all(names, arguments.seconds, arguments.requests, arguments.loop))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1))
        return 0 if all(row["is_good"] for row in rows) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
