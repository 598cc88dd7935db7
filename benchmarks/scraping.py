"""Metrics: the cost of scraping every second, and whether the histograms tell the truth.

    python -m benchmarks.scraping [processor] [agreement] [cost] [--pairs 6] [--seconds 8] [--dir DIR]

Three bookies run with `--http`; E = Qw = 3 and Qa = 2; this process writes, and scrapes.

- *cost*: windows with and without a scrape of each bookie and of the client every second, in pairs whose
  order alternates. The result is the median of the ratios within the pairs, with their quartiles and bounds.
  Many short windows (`--pairs 100 --seconds 1`) tell more than few long ones: the machine changes meanwhile.
- *processor*: the processor time of a bookie for one scrape, while nothing else happens. It is exact where
  the machine is too noisy for the ratios.
- *agreement*: p50 and p99 of an add as this process measures them, entry by entry, in rounds. Beside them
  stand those of the client's histogram and of the bookies'. An add is measured from its call to the done
  callback of its future. A percentile of a histogram is interpolated within its bucket, as Prometheus does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import client_aio
from benchmarks.processes import start_module
from benchmarks.running import Workplace, run
from client_aio import metrics
from metadata.access.bookies import split_address

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERVAL_S = 1.0
_IN_FLIGHT = (1, 100, 1000)
_PARTS = ["processor", "agreement", "cost"]
_IDLE_SCRAPES = 30
_PAIRS_OF_A_LEDGER = 10
_TICKS = os.sysconf("SC_CLK_TCK")
_HISTOGRAMS = ("bookie_aio_add_seconds", "bookie_aio_client_add_seconds")


async def get(address: str, path: str) -> bytes:
    """Ask for a path, and return the body."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"{address}{path} answered {head!r}")
    return body


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def buckets(text: bytes) -> dict[float, float]:
    """Return the cumulative buckets of the one histogram of adds in a scrape, by upper bound."""
    found: dict[float, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        if family.name in _HISTOGRAMS:
            for sample in family.samples:
                if "le" in sample.labels:
                    found[float(sample.labels["le"])] = sample.value
    return found


def difference(later: dict[float, float], earlier: dict[float, float]) -> dict[float, float]:
    """Return the cumulative buckets of what was counted between two scrapes."""
    return {bound: count - earlier[bound] for bound, count in later.items()}


def summed(several: Sequence[dict[float, float]]) -> dict[float, float]:
    """Return the cumulative buckets of several histograms together."""
    return {bound: sum(one[bound] for one in several) for bound in several[0]}


def quantile(share: float, cumulative: dict[float, float]) -> float:
    """Return a percentile, interpolated within its bucket, as `histogram_quantile` does."""
    rank = share * max(cumulative.values())
    below, reached = 0.0, 0.0
    for bound, count in sorted(cumulative.items()):
        if count >= rank:
            if bound == float("inf") or count == reached:
                return below
            return below + (bound - below) * (rank - reached) / (count - reached)
        below, reached = bound, count
    return below


@dataclass
class Driver:
    """Adds entries with a fixed number in flight, and measures each."""

    writer: client_aio.LedgerWriter
    in_flight: int
    payload: bytes
    latencies: list[float] = field(default_factory=list)
    entries: int = 0
    _outstanding: int = 0
    _failed: BaseException | None = None
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, seconds: float, *, is_measured: bool) -> float:
        """Add for some seconds, wait for the last, and return the entries acknowledged per second."""
        now, began, before = time.perf_counter, time.perf_counter(), self.entries
        while now() - began < seconds and self._failed is None:
            for _ in range(self.in_flight - self._outstanding):
                self._add(now(), is_measured=is_measured)
            self._room.clear()
            await self._room.wait()
        while self._outstanding:
            self._room.clear()
            await self._room.wait()
        if self._failed is not None:
            raise self._failed
        return (self.entries - before) / (now() - began)

    def _add(self, began: float, *, is_measured: bool) -> None:
        self._outstanding += 1

        def done(future: asyncio.Future[int]) -> None:
            self._outstanding -= 1
            if (error := future.exception()) is not None:
                self._failed = self._failed or error
                self._room.set()
                return
            self.entries += 1
            if is_measured:
                self.latencies.append(time.perf_counter() - began)
            self._room.set()

        self.writer.add_entry(self.payload).add_done_callback(done)


class Bench:
    """One cluster, and one client of it."""

    def __init__(self, document: dict[str, Any], client: client_aio.Client) -> None:
        rows = document["bookies"]
        self.addresses = [row["http"] for row in rows]
        self.pids = [row["pid"] for row in rows]
        self.client = client
        self.registry = CollectorRegistry()
        metrics.register(client, registry=self.registry)

    async def scrape(self) -> None:
        """Scrape the bookies and the client once."""
        await asyncio.gather(*(get(address, "/metrics") for address in self.addresses))
        generate_latest(self.registry)

    async def _scrape_for_ever(self) -> None:
        """Scrape each target at an offset of its own, as Prometheus does.

        A window of n intervals has n scrapes of each.
        """
        due, turns = time.perf_counter(), len(self.addresses) + 1
        for turn in itertools.count():
            due += INTERVAL_S / turns
            await asyncio.sleep(max(0.0, due - INTERVAL_S / turns / 2 - time.perf_counter()))
            if turn % turns == len(self.addresses):
                generate_latest(self.registry)
            else:
                await get(self.addresses[turn % turns], "/metrics")

    async def window(self, driver: Driver, seconds: float, *, is_scraped: bool) -> dict[str, float]:
        """Return entries per second, and the bookies' processor time for an entry, of one window."""
        scraping = asyncio.create_task(self._scrape_for_ever()) if is_scraped else None
        before, entries = sum(map(cpu_s, self.pids)), driver.entries
        try:
            rate = await driver.run(seconds, is_measured=False)
        finally:
            if scraping is not None:
                scraping.cancel()
                with suppress(asyncio.CancelledError):
                    await scraping
        spent = sum(map(cpu_s, self.pids)) - before
        return {"entries_per_s": rate, "cpu_us": spent / (driver.entries - entries) * 1e6}

    async def cost(self, pairs: int, seconds: float, in_flight: int) -> dict[str, Any]:
        """Measure windows in pairs; each ledger is deleted after a few of them, since disks are finite."""
        ratios: dict[str, list[float]] = {"entries_per_s": [], "cpu_us": []}
        for begin in range(0, pairs, _PAIRS_OF_A_LEDGER):
            async with self.client.create_ledger() as writer:
                driver = Driver(writer, in_flight, bytes(1024))
                await driver.run(2.0, is_measured=False)
                for number in range(begin, min(pairs, begin + _PAIRS_OF_A_LEDGER)):
                    order = (False, True) if number % 2 else (True, False)
                    found = {each: await self.window(driver, seconds, is_scraped=each) for each in order}
                    for name, values in ratios.items():
                        values.append(found[True][name] / found[False][name])
            await self.client.delete_ledger(writer.ledger_id)
        return {
            "in_flight": in_flight,
            "pairs": pairs,
            **{
                f"{name} with/without": {
                    "median": round(statistics.median(values), 4),
                    "quartiles": [round(each, 4) for each in statistics.quantiles(values)[::2]],
                    "least": round(min(values), 4),
                    "greatest": round(max(values), 4),
                }
                for name, values in ratios.items()
            },
        }

    async def processor(self) -> dict[str, Any]:
        """Measure a bookie's processor time for a scrape, beside that of doing nothing for as long."""
        spent = []
        for is_scraped in (False, True):
            before = sum(map(cpu_s, self.pids))
            for _ in range(_IDLE_SCRAPES):
                if is_scraped:
                    await self.scrape()
                await asyncio.sleep(0.3)  # older than what an endpoint keeps
            spent.append(sum(map(cpu_s, self.pids)) - before)
        scrape_ms = (spent[1] - spent[0]) / _IDLE_SCRAPES / len(self.pids) * 1e3
        return {
            "scrapes": _IDLE_SCRAPES,
            "bookie_ms_per_scrape": round(scrape_ms, 2),
            "share_of_a_core_at_one_a_second": f"{scrape_ms / 10:.2f} %",
            "bytes": len(await get(self.addresses[0], "/metrics")),
        }

    async def agreement(self, in_flight: int, seconds: float) -> dict[str, Any]:
        """Compare the percentiles that the driver measures with those of the histograms."""
        async with self.client.create_ledger() as writer:
            driver = Driver(writer, in_flight, bytes(1024))
            await driver.run(1.0, is_measured=False)
            await asyncio.sleep(0.3)
            mine = buckets(generate_latest(self.registry))
            theirs = [buckets(await get(address, "/metrics")) for address in self.addresses]
            await driver.run(seconds, is_measured=True)
            await asyncio.sleep(0.3)
            of_client = difference(buckets(generate_latest(self.registry)), mine)
            of_bookies = summed(
                [
                    difference(buckets(await get(address, "/metrics")), before)
                    for address, before in zip(self.addresses, theirs, strict=True)
                ]
            )
        await self.client.delete_ledger(writer.ledger_id)
        measured = sorted(driver.latencies)
        row: dict[str, Any] = {"in_flight": in_flight, "entries": len(measured)}
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            exact = measured[min(len(measured) - 1, int(share * len(measured)))]
            row[name] = {
                "measured_ms": round(exact * 1e3, 3),
                "client_ms": round(quantile(share, of_client) * 1e3, 3),
                "off_by_percent": round((quantile(share, of_client) / exact - 1) * 100, 1),
                "bookies_ms": round(quantile(share, of_bookies) * 1e3, 3),
            }
        return row


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the round whose p99 is off by the median, with what the p99 of all rounds are off by."""
    ordered = sorted(rows, key=lambda row: float(row["p99"]["off_by_percent"]))
    return {
        **ordered[len(ordered) // 2],
        "p99_off_by_percent": [row["p99"]["off_by_percent"] for row in ordered],
    }


async def bench(directory: Path, parts: list[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Run some parts on one cluster."""
    log = directory / "cluster.log"
    arguments = ("cluster", "up", "-n", "3", "--http", "-o", "jsonl", "--dir", str(directory / "cluster"))
    async with AsyncExitStack() as stack:
        child = await stack.enter_async_context(await start_module("client_aio.cli", *arguments, log=log))
        document = json.loads(await child.line())
        child.ignore_output()
        client = await stack.enter_async_context(client_aio.connect(document["metadata"]))
        bench = Bench(document, client)
        found: dict[str, Any] = {}
        if "processor" in parts:
            found["processor"] = await bench.processor()
        if "agreement" in parts:
            found["agreement"] = [
                spread([await bench.agreement(one, seconds / 2) for _ in range(pairs)]) for one in _IN_FLIGHT
            ]
        if "cost" in parts:
            found["cost"] = [await bench.cost(pairs, seconds, one) for one in _IN_FLIGHT[1:]]
        return found


def main() -> int:
    """Run it as the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=_PARTS, default=_PARTS, help="default: all of them")
    parser.add_argument("--pairs", type=int, default=6, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window")
    parser.add_argument("--dir", type=Path, default=None)
    asked = parser.parse_args()
    with Workplace(asked.dir, "scraping-") as place:
        result = run(bench(place.path, asked.parts, asked.pairs, asked.seconds))
    json.dump(result, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
