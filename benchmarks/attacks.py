"""Attacks on a live bookie, with a good client beside each of them.

    python -m benchmarks.attacks [--only NAME ...] [--seconds 10] [--json FILE]

Starts one bookie process for each attack. A good client in a process of its own adds 1 KiB every few
milliseconds, first alone and then beside the attack. The attackers are a stranger's connections to the
bookie's port; they know nothing of the metadata store. Afterwards SIGTERM has to end the bookie, while the
attack goes on.

The program fails (exit code 1) where one of these bounds is broken:

- the bookie's resident memory is at most 256 MiB at all times;
- no add of the good client fails;
- the p99 of its adds is at most three times the p99 without the attack, or 20 ms if that is more;
- the bookie ends within 5 s of SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import select
import socket
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.running import Workplace, run
from bookie_aio.wire.frames import encode_frame
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
P99_FLOOR_S = 0.020
SIGTERM_S_MAX = 5.0
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
        lambda: framed(ReadLac(draw.randrange(64), -1, 10**9, 30_000), 7),
    ]
    while True:
        yield b"".join(draw.choice(kinds)() for _ in range(32))


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
    "hostile-mix": (hostile_mix, 200),
    "bursts-of-connections": (bursts_of_connections, 500),
}
"""Name: what one connection sends, and the number of connections."""


def attack(address: str, name: str) -> None:
    """Send from all connections until the process is ended. A connection that is closed is made again."""
    draw, count = ATTACKS[name]
    host, port = split_address(address)
    sending: dict[socket.socket, tuple[Iterator[bytes], bytes]] = {}
    numbers = itertools.count()

    def connect() -> None:
        number = next(numbers)
        with suppress(OSError):
            one = socket.create_connection((host, port), timeout=5)
            one.setblocking(False)
            sending[one] = (draw(number), framed(Hello(3, 2**15, "attacker", "", ""), 0))

    while True:
        while len(sending) < count:
            connect()
        readable, writable, _ = select.select(list(sending), list(sending), [], 0.2)
        for one in readable:
            with suppress(BlockingIOError):
                try:
                    data = one.recv(1 << 20)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    one.close()
                    del sending[one]
        if not writable:
            continue
        for one in writable:
            if one not in sending:
                continue
            frames, rest = sending[one]
            rest = rest or next(frames, b"")
            if not rest:
                time.sleep(0.01)
                continue
            try:
                sending[one] = (frames, rest[one.send(rest) :])
            except BlockingIOError:
                continue
            except OSError:
                one.close()
                del sending[one]


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
    return statistics.quantiles(times, n=100)[98]


async def measure(directory: Path, name: str, seconds: float) -> dict[str, Any]:
    """Run one attack, and return its figures."""
    bookie = BookieProcess("b1", directory, f"sqlite://{directory / 'metadata.db'}")
    await bookie.start("--log-level", "warning")
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
        attacker = await _start("--attack", name, "--address", bookie.addresses[0])
        peak, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            peak = max(peak, resident_bytes(bookie.pid))
            await asyncio.sleep(0.05)
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
        await bookie.end()
    before = p99(rows, quiet_since, quiet_until)
    last = max(row[0] for row in rows)
    beside = max(p99(rows, quiet_until, attacked_until), attacked_until - last - 0.1)
    return {
        "attack": name,
        "connections": ATTACKS[name][1],
        "peak_mib": round(peak / 2**20, 1),
        "p99_before_ms": round(before * 1e3, 1),
        "p99_beside_ms": round(beside * 1e3, 1),
        "adds_beside": sum(1 for row in rows if quiet_until <= row[0] < attacked_until),
        "failed": sum(1 for row in rows if row[2]),
        "sigterm_s": round(sigterm_s, 2),
        "is_good": peak <= MEMORY_BYTES_MAX
        and beside <= max(P99_FACTOR_MAX * before, P99_FLOOR_S)
        and not any(row[2] for row in rows)
        and sigterm_s <= SIGTERM_S_MAX,
    }


async def _start(*arguments: str, stdout: int | None = None) -> asyncio.subprocess.Process:
    module = ("-m", "benchmarks.attacks")
    return await asyncio.create_subprocess_exec(sys.executable, *module, *arguments, stdout=stdout)


async def _collect(lines: asyncio.StreamReader, rows: list[list[Any]]) -> None:
    while (line := await lines.readline()).endswith(b"\n"):
        rows.append(json.loads(line))


async def measure_all(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run the attacks one after another, print a table, and return the figures."""
    rows = []
    for name in names:
        with Workplace(None, "attack.") as place:
            row = await measure(place.path, name, seconds)
            rows.append(row)
            verdict = "ok" if row["is_good"] else "BROKEN"
            print(
                f"{name:22} {row['connections']:4} connections  peak {row['peak_mib']:6} MiB  p99 "
                f"{row['p99_before_ms']:6} → {row['p99_beside_ms']:6} ms  {row['adds_beside']:6,} adds, "
                f"{row['failed']} failed  SIGTERM {row['sigterm_s']:4} s  {verdict}",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack a live bookie, with a good client beside.")
    parser.add_argument("--only", nargs="*", choices=ATTACKS, metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0, help="the length of each attack")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--good", metavar="URI", help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.good:
        run(be_good(arguments.good))
    elif arguments.attack:
        attack(arguments.address, arguments.attack)
    else:
        rows = run(measure_all(arguments.only or list(ATTACKS), arguments.seconds))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1))
        return 0 if all(row["is_good"] for row in rows) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
