"""Measure the product beside its peers: `python -m benchmarks.peers`.

    python -m benchmarks.peers --json peers.json [--workloads 1k-1000,1k-1,…] [--systems product,bookkeeper,…]
                               [--rounds 3] [--warm-up 15] [--seconds 20] [--settle 15] [--dir DIR]
                               [--compiled PYTHON]

Round after round, workload after workload, all systems in turn. Each run is added to the JSON file as it
ends. A second start with the same file and settings skips the runs in the file. Workloads, systems and rounds
may be added. Needs Maven and a JDK (17 or newer). `--report` only prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import rawdisk
from benchmarks.machine import machine
from benchmarks.peers.bookkeeper import BookKeeper
from benchmarks.peers.kafka import Kafka
from benchmarks.peers.measuring import Times, measure
from benchmarks.peers.nats import Nats
from benchmarks.peers.ours import Ceiling, Product
from benchmarks.peers.results import Results
from benchmarks.peers.tables import tables
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.running import run

if TYPE_CHECKING:
    from benchmarks.peers.systems import System

DISK = "disk"


def systems_of(compiled: str | None) -> tuple[System, ...]:
    """Return all systems.

    Args:
        compiled: the interpreter of an environment with the compiled wheel.
    """
    return (
        Product(is_steady=True),
        Product(is_steady=True, is_compiled=True, python=compiled),
        Product(is_steady=False),
        Ceiling("recycled"),
        Ceiling("fresh"),
        BookKeeper(is_tuned=False),
        BookKeeper(is_tuned=True),
        Kafka(is_durable=True),
        Kafka(is_durable=False),
        Nats(is_durable=True),
        Nats(is_durable=False),
    )


SYSTEMS = systems_of(None)


async def matrix(
    results: Results,
    workloads: list[str],
    systems: list[System],
    rounds: int,
    times: Times,
    directory: Path,
    *,
    has_disk: bool,
) -> None:
    """Make the runs that are not there yet."""
    for round_ in range(rounds):
        if has_disk and not results.has(DISK, DISK, round_):
            figures = await asyncio.to_thread(rawdisk.measure, directory, min(2.0, times.measured_s))
            results.add({"workload": DISK, "system": DISK, "round": round_, **figures})
        for workload in (WORKLOADS[name] for name in workloads):
            for system in systems:
                if not system.can_run(workload) or results.has(workload.name, system.name, round_):
                    continue
                print(
                    f"round {round_ + 1} of {rounds}, {workload.title}: {system.title}",
                    file=sys.stderr,
                    flush=True,
                )
                one = {
                    "workload": workload.name,
                    "system": system.name,
                    "round": round_,
                    "is_durable": system.is_durable,
                    "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "load_before": os.getloadavg()[0],
                }
                try:
                    one |= await measure(system, workload, times, directory)
                except (RuntimeError, TimeoutError) as error:  # a system that cannot do it; the others go on
                    one["error"] = str(error)[-2000:]
                    print(f"failed: {error}", file=sys.stderr, flush=True)
                results.add(one)


def chosen(text: str | None, names: list[str]) -> list[str]:
    """Return the names of a comma-separated list, all of them by default."""
    wanted = names if text is None else text.split(",")
    unknown = set(wanted) - set(names)
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return wanted


def taken_up(path: Path, settings: dict[str, float]) -> Results:
    """Begin the file of the runs, or go on with it; ends the program where it has other settings."""
    try:
        return Results(path, machine(), settings)
    except ValueError as error:
        raise SystemExit(f"{error}: name another file by --json, or give the same times") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the product beside its peers.")
    parser.add_argument("--json", type=Path, default=Path("peers.json"), help="the file with all runs")
    parser.add_argument("--workloads", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--systems", help=f"of {','.join([DISK, *(s.name for s in SYSTEMS)])}")
    parser.add_argument(
        "--compiled",
        metavar="PYTHON",
        help="for product-compiled: the interpreter of an environment with the wheel (docs/WHEELS.md)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measured part")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds, until bytes are counted")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure")
    parser.add_argument("--report", action="store_true", help="print the tables of the file, measure nothing")
    arguments = parser.parse_args()
    workloads = chosen(arguments.workloads, list(WORKLOADS))
    names = chosen(arguments.systems, [DISK, *(system.name for system in SYSTEMS)])
    if arguments.systems and "product-compiled" in names and not arguments.compiled:
        raise SystemExit("product-compiled needs --compiled PYTHON: an environment with the compiled wheel")
    systems = [system for system in systems_of(arguments.compiled) if system.name in names]
    times = Times(arguments.warm_up, arguments.seconds, arguments.settle)
    settings = {"warm_up_s": times.warm_up_s, "measured_s": times.measured_s, "settle_s": times.settle_s}
    if arguments.report:
        results = Results.read(arguments.json)
    else:
        results = taken_up(arguments.json, settings)
        arguments.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench.") as directory:
            where = Path(directory).resolve()
            run(matrix(results, workloads, systems, arguments.rounds, times, where, has_disk=DISK in names))
    print(tables(results.document, SYSTEMS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
