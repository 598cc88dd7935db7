"""The cost of rolling a log, and the cost of a long log.

    python -m benchmarks.rolling [throughput gap long] [--rounds 5] [--seconds 5] [--ledgers 20000]
                                 [--dir DIR] [--json FILE]

`throughput`: records of 1 KiB, 1,000 in flight. Three logs alternate: one that is not rolled, one that is
rolled every 64 MiB, and one every 4 MiB. Measures records per second, and the ratio to the log that is not
rolled in the same round.

`gap`: the longest time between two acknowledgements across 100 rolls (every 4 MiB), beside that over as many
records without a roll.

`long`: a log of that many ledgers, nearly all of them closed and empty and made as metadata. Measures the
time to open it, to append, to read from its middle and to truncate it there. It does so at 200 ledgers and at
the number given. It also prints the largest value in the metadata store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import client_aio
from benchmarks.running import Workplace, run
from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store
from metadata.model.ledger import LedgerMetadata
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from metadata.store import MetadataStore

RECORD = bytes(range(256)) * 4
IN_FLIGHT = 1000
MIB = 1 << 20
KINDS: dict[str, int | None] = {"none": None, "64 MiB": 64 * MIB, "4 MiB": 4 * MIB}
GAP_ROLLS = 100
BATCH = 500
OPENINGS = 7


class Pump:
    """Keeps a window of appends full, and notes when acknowledgements came."""

    def __init__(self, log: client_aio.LogWriter) -> None:
        self._log = log
        self._outstanding = 0
        self._room = asyncio.Event()
        self.count = 0
        self.at: list[float] = []
        """The times of acknowledgements, one for each event-loop iteration with any."""

    async def run(self, until: Callable[[], bool]) -> float:
        """Append until told, and return the seconds until all were acknowledged."""
        begun = time.perf_counter()
        while not until():
            for _ in range(IN_FLIGHT - self._outstanding):
                self._outstanding += 1
                self._log.append(RECORD).add_done_callback(self._done)
            self._room.clear()
            await self._room.wait()
        await self._log.flush()
        return time.perf_counter() - begun

    def _done(self, future: asyncio.Future[client_aio.Position]) -> None:
        future.result()
        self._outstanding -= 1
        self.count += 1
        if not self._room.is_set():
            self.at.append(time.perf_counter())
            self._room.set()


async def write(client: client_aio.Client, roll_bytes: int | None, until: Callable[[Pump, Any], bool]) -> Any:
    """Write to a new log until told; returns the pump, the seconds and the number of rolls."""
    async with client.open_log("rolling", roll_bytes=roll_bytes, roll_age_s=None) as log:
        pump = Pump(log)
        seconds = await pump.run(lambda: until(pump, log))
        rolls = log.rolls
    await client.delete_log("rolling")
    return pump, seconds, rolls


async def throughput(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Alternate the three kinds, several times."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    rolls = dict.fromkeys(KINDS, 0)
    async with Cluster(home) as cluster, client_aio.connect(cluster.uri) as client:
        await write(client, None, _for(1.0))  # warm
        for _ in range(arguments.rounds):
            for kind, roll_bytes in KINDS.items():
                pump, seconds, rolled = await write(client, roll_bytes, _for(arguments.seconds))
                rates[kind].append(pump.count / seconds)
                rolls[kind] += rolled
    rows: dict[str, Any] = {}
    for kind in KINDS:
        ratios = [rate / base for rate, base in zip(rates[kind], rates["none"], strict=True)]
        rows[kind] = {
            "records_per_s": statistics.median(rates[kind]),
            "of_none": statistics.median(ratios),
            "rolls": rolls[kind],
        }
        print(
            f"rolled every {kind:>6}: {rows[kind]['records_per_s']:>9,.0f} records/s, "
            f"{100 * rows[kind]['of_none']:5.1f} % of none, {rolls[kind]:,} rolls"
        )
    return rows


def _for(seconds: float) -> Callable[[Pump, Any], bool]:
    end = time.perf_counter() + seconds
    return lambda pump, log: time.perf_counter() >= end


async def gap(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the longest pause across rolls, and without."""
    async with Cluster(home) as cluster, client_aio.connect(cluster.uri) as client:
        await write(client, None, _for(1.0))
        with_rolls, _, rolls = await write(client, 4 * MIB, lambda pump, log: log.rolls >= GAP_ROLLS)
        without, _, _ = await write(client, None, lambda pump, log: pump.count >= with_rolls.count)
    row = {"rolls": rolls}
    for name, pump in (("with rolls", with_rolls), ("without", without)):
        gaps = sorted((1e3 * (b - a) for a, b in pairwise(pump.at)), reverse=True)
        row[name] = {"longest_ms": gaps[0], "p99_ms": gaps[len(gaps) // 100], "records": pump.count}
        print(
            f"{name:>10}: longest gap {gaps[0]:6.1f} ms, 99 % of them below "
            f"{gaps[len(gaps) // 100]:5.1f} ms, {pump.count:,} records"
            + (f", {rolls} rolls" if name == "with rolls" else "")
        )
    return row


async def long(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a short and a long log."""
    found: dict[str, Any] = {}
    async with (
        Cluster(home) as cluster,
        client_aio.connect(cluster.uri) as client,
        await open_store(cluster.uri, operation_timeout_s=10, session_timeout_s=10) as store,
    ):
        for count in (200, arguments.ledgers):
            found[str(count)] = row = await _measure_long(client, store, count)
            print(
                f"{count:>6,} ledgers: open {row['open_ms']:.1f} ms, first append {row['append_ms']:.1f} ms, "
                f"read from the middle {row['read_middle_ms']:.1f} ms, truncate there "
                f"{row['truncate_s']:.1f} s; "
                f"largest metadata value {row['largest_value']:,} bytes, {row['pages']} pages"
            )
    print(f"opening: {found[str(arguments.ledgers)]['open_ms'] / found['200']['open_ms']:.2f} times as long")
    return found


async def _measure_long(client: client_aio.Client, store: MetadataStore, count: int) -> dict[str, Any]:
    name = f"long-{count}"
    middle = await _build(client, LedgerStore(store, ids_drawn=1000), name, count)
    openings, appends = [], []
    for _ in range(OPENINGS):
        begun = time.perf_counter()
        log = await client.open_log(name)
        openings.append(1e3 * (time.perf_counter() - begun))
        begun = time.perf_counter()
        await log.append(RECORD)
        appends.append(1e3 * (time.perf_counter() - begun))
        await log.close()
    begun = time.perf_counter()
    async with aclosing(client.read_log(name, middle)) as records:
        record = await anext(records)
    read_ms = 1e3 * (time.perf_counter() - begun)
    assert record.position == middle, record
    largest, pages = await _largest(store, name)

    begun = time.perf_counter()
    dropped = await client.truncate_log(name, middle)
    truncate_s = time.perf_counter() - begun
    assert len(dropped) == count // 2
    async with aclosing(client.read_log(name)) as records:
        assert (await anext(records)).position == middle
    return {
        "open_ms": statistics.median(openings),
        "append_ms": statistics.median(appends),
        "read_middle_ms": read_ms,
        "truncate_s": truncate_s,
        "largest_value": max(largest, (await _largest(store, name))[0]),
        "pages": pages,
    }


async def _build(
    client: client_aio.Client, ledgers: LedgerStore, name: str, count: int
) -> client_aio.Position:
    """Make a log of closed, empty ledgers with one in the middle that has a record; returns its position."""
    bookies = sorted(client.bookies)
    middle = None
    for start in range(0, count, BATCH):
        ids = []
        for number in range(start, min(start + BATCH, count)):
            if number == count // 2:
                async with client.create_ledger() as ledger:
                    await ledger.add_entry(RECORD)
                ids.append(middle := ledger.ledger_id)
                continue
            metadata = LedgerMetadata.new(
                await ledgers.allocate_id(), ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=bookies
            )
            await ledgers.create_ledger(metadata.close(-1, 0))
            ids.append(metadata.ledger_id)
        added = await client.add_to_log(name, ids)
        for row in added.rows:
            if row.ledger_id == middle:
                position = client_aio.Position(row.id, 0)
    return position


async def _largest(store: MetadataStore, name: str) -> tuple[int, int]:
    """Return the size of the log's largest value, and the number of its pages."""
    pages = await store.children(f"log-pages/{name}")
    keys = [f"logs/{name}", *(f"log-pages/{name}/{page}" for page in pages)]
    return max([len((await store.read(key)).value) for key in keys]), len(pages)


PARTS: dict[str, Callable[[Path, argparse.Namespace], Awaitable[dict[str, Any]]]] = {
    "throughput": throughput,
    "gap": gap,
    "long": long,
}


async def measure(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the parts asked for, each on a cluster of its own."""
    found = {}
    for part in arguments.parts or list(PARTS):
        place = home / part
        place.mkdir(parents=True, exist_ok=True)
        print(f"{part} (load {os.getloadavg()[0]:.1f})")
        found[part] = await PARTS[part](place, arguments)
    return found


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--ledgers", type=int, default=20_000)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with Workplace(arguments.dir, "rolling.") as place:
        found = run(partial(measure, place.path, arguments)())
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
