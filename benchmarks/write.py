"""Writing speed of the product, beside the ceiling and the disk, all in one run.

    python -m benchmarks.write [--rounds 3] [--seconds 5] [--dir DIR] [-o table|json] [--json FILE]

Measures for each load in turn, round after round: the raw disk, the ceiling (`fresh` and `recycled`), and the
product. The product is three bookies and a client, each in a process of its own. E = Qw = 3, Qa = 2, and the
metadata store is embedded. The same loop drives all of them (`benchmarks.load`). A machine's speed changes
from minute to minute, so the rounds alternate. Reports medians over the rounds, and ratios taken within each
round. The table goes to standard output; progress to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import rawdisk
from benchmarks.ceilings import run_ceiling
from benchmarks.load import Figures, Load, figures_of
from benchmarks.machine import machine
from benchmarks.processes import Child, start_module
from benchmarks.running import run

SHAPES = ((1024, 1000), (100, 10_000), (64 << 10, 64), (1024, 1))
BOOKIES = 3
KINDS = ("product", "fresh", "recycled")

Round = dict[str, Figures]


class Product:
    """A cluster of three bookies, started by `bookie-aio cluster up`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._log = directory, directory / "product.log"
        self._stack = contextlib.AsyncExitStack()
        self._uri = ""
        self._pids: list[int] = []

    async def __aenter__(self) -> Product:
        cluster = await Child.start(
            sys.executable, "-m", "client_aio.cli", "cluster", "up", "-n", str(BOOKIES),
            "--dir", str(self._directory / "cluster"), "-o", "jsonl",
            log=self._log,
        )  # fmt: skip
        await self._stack.enter_async_context(cluster)
        document = json.loads(await cluster.line())
        self._uri = document["metadata"]
        self._pids = [bookie["pid"] for bookie in document["bookies"]]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def run(self, load: Load) -> tuple[Figures, float]:
        """Write to a new ledger; returns the figures and the bookies' processor time for each add, in µs."""
        before = self._cpu_seconds()
        client = await start_module(
            "benchmarks.product_client",
            f"growing+{self._uri}", *load.arguments(),
            log=self._log,
        )  # fmt: skip
        async with client:
            figures = await figures_of(client, load)
        return figures, 1e6 * (self._cpu_seconds() - before) / figures.adds

    def _cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


async def one_round(directory: Path, load: Load) -> tuple[Round, dict[str, float]]:
    """Measure disk, ceiling and product once, each from a fresh start."""
    extra = await asyncio.to_thread(rawdisk.measure, directory, min(1.0, load.seconds))
    found: Round = {}
    for blocks in ("fresh", "recycled"):
        (found[blocks],) = await run_ceiling(directory, blocks, [load])
    with tempfile.TemporaryDirectory(dir=directory, prefix="product.") as home:
        async with Product(Path(home)) as product:
            # The first segment is there, and caches are warm, before anything counts.
            await product.run(Load(load.entry_bytes, load.in_flight, 0.5))
            found["product"], extra["bookies_us"] = await product.run(load)
    return found, extra


def summary(load: Load, rounds: list[tuple[Round, dict[str, float]]]) -> dict[str, Any]:
    """Return medians, and ratios taken round by round."""

    row: dict[str, Any] = {"load": load.name, "entry_bytes": load.entry_bytes, "in_flight": load.in_flight}
    for kind in KINDS:
        each = [found[kind].to_dict() for found, _ in rounds]
        row[kind] = {name: statistics.median(figures[name] for figures in each) for name in each[0]}
    for kind in ("fresh", "recycled"):
        pairs = [(found["product"], found[kind]) for found, _ in rounds]
        row[f"rate_of_{kind}"] = statistics.median(ours.adds_per_s / top.adds_per_s for ours, top in pairs)
        row[f"p50_of_{kind}"] = statistics.median(ours.p50_ms / top.p50_ms for ours, top in pairs)
    for name in rounds[0][1]:
        row[name] = statistics.median(extra[name] for _, extra in rounds)
    row["rounds"] = [
        {**{kind: found[kind].to_dict() for kind in KINDS}, "extra": extra} for found, extra in rounds
    ]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Lay the summary out for a terminal 110 columns wide."""
    lines = [
        f"{'':24}{'product':>29}{'ceiling fresh':>20}{'recycled':>18}{'product/fresh':>18}",
        f"{'':24}{'adds/s':>10}{'p50 ms':>9}{'p99 ms':>10}"
        f"{'adds/s':>11}{'p50 ms':>9}{'adds/s':>10}{'p50 ms':>8}{'adds/s':>10}{'p50':>8}",
    ]
    for row in rows:
        product, fresh, recycled = (row[kind] for kind in KINDS)
        lines.append(
            f"{row['load']:24}{product['adds_per_s']:>10,.0f}{product['p50_ms']:>9.2f}{product['p99_ms']:>10.2f}"
            f"{fresh['adds_per_s']:>11,.0f}{fresh['p50_ms']:>9.2f}"
            f"{recycled['adds_per_s']:>10,.0f}{recycled['p50_ms']:>8.2f}"
            f"{100 * row['rate_of_fresh']:>9.0f}%{row['p50_of_fresh']:>7.2f}×"
        )
    lines.append("")
    for row in rows:
        megabytes = row["product"]["adds_per_s"] * row["entry_bytes"] * BOOKIES / 1e6
        lines.append(
            f"{row['load']:24}payload to disk {megabytes:,.0f} MB/s of {row['fresh_mb_per_s']:,.0f} fresh, "
            f"{row['recycled_mb_per_s']:,.0f} recycled; client {row['product']['client_us']:.1f} µs/add, "
            f"bookies {row['bookies_us']:.1f}"
        )
    disk = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name.endswith("_ms")}
    lines.append(
        f"raw fdatasync of a 4 KiB append: fresh p50 {disk['fresh_p50_ms']:.3f} ms, p99 "
        f"{disk['fresh_p99_ms']:.3f}; recycled p50 {disk['recycled_p50_ms']:.3f}, p99 "
        f"{disk['recycled_p99_ms']:.3f}"
    )
    return "\n".join(lines)


async def measure(loads: list[Load], rounds: int, directory: Path) -> list[dict[str, Any]]:
    """Measure all loads, round after round, and return a summary of each."""
    found: list[list[tuple[Round, dict[str, float]]]] = [[] for _ in loads]
    for number in range(rounds):
        for load, results in zip(loads, found, strict=True):
            print(f"round {number + 1} of {rounds}: {load.name}", file=sys.stderr)
            results.append(await one_round(directory, load))
    return [summary(load, results) for load, results in zip(loads, found, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure writing beside the ceiling and the disk.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each of the measurements")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--json", type=Path, help="write everything measured to this file as well")
    parser.add_argument("--entry-bytes", type=int, help="with --in-flight: one load instead of the four")
    parser.add_argument("--in-flight", type=int)
    arguments = parser.parse_args()
    if (arguments.entry_bytes is None) != (arguments.in_flight is None):
        parser.error("--entry-bytes and --in-flight go together")
    shapes = SHAPES if arguments.entry_bytes is None else ((arguments.entry_bytes, arguments.in_flight),)
    loads = [Load(entry_bytes, in_flight, arguments.seconds) for entry_bytes, in_flight in shapes]
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench.") as directory:
        rows = run(measure(loads, arguments.rounds, Path(directory).resolve()))
    document: dict[str, Any] = {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "settings": {
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "bookies": BOOKIES,
            "ensemble_size": 3,
            "write_quorum": 3,
            "ack_quorum": 2,
            "digest": "crc32c",
        },
        "loads": rows,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.output == "json":
        print(json.dumps(document, indent=2))
    else:
        print(table(rows))
        print(f"Python {document['machine']['python']}, {document['machine']['python_build']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
