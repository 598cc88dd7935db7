"""Measure the product alone, part by part: `python -m benchmarks.suite [PART …]`.

    python -m benchmarks.suite [closed open ensembles ledgers tail reads processor fairness connections
        restart growth memory soak] [--json suite.json] [--plots DIR] [--seconds 10] [--warm-up 3] [--scale 1]
        [--soak-minutes 20] [--dir DIR] [--draw-only]

Each case is added to the JSON file as it ends, with the machine, the settings and the load average before. A
part that is measured again replaces its former figures. `--scale 0.01` stores a hundredth, to try all parts
quickly. `--plots` draws the file's figures (matplotlib, in the extra [bench]).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.running import run
from benchmarks.suite import parts
from benchmarks.suite.bench import Bench


def begin(path: Path) -> dict[str, Any]:
    """Return the document to add to: what the file holds, on the machine of now."""
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    return {"machine": machine(), "parts": known}


async def measure(names: list[str], bench: Bench, path: Path, document: dict[str, Any]) -> None:
    """Measure parts, one after another."""
    for name in names:
        part: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "settings": {"seconds": bench.seconds, "warm_up_s": bench.warm_up_s, "scale": bench.scale},
            "cases": {},
        }
        document["parts"][name] = part
        async with contextlib.aclosing(parts.PARTS[name](bench)) as cases:
            load_before = os.getloadavg()[0]
            async for case, figures in cases:
                part["cases"][case] = {**figures, "load_before": load_before}
                write(path, document)
                print(f"{name:10} {case:36} {summary(figures)}", flush=True)
                load_before = os.getloadavg()[0]


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace the file at once, so that it is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(written, path)


def summary(figures: dict[str, Any]) -> str:
    """Return the figures that a person looks at first."""
    names = ("adds_per_s", "entries_per_s", "client_us", "bookies_us", "bookie_us", "bookie_mib", "seconds")
    shown = [f"{name} {figures[name]:,.1f}" for name in names if name in figures]
    latency = figures.get("latency_ms")
    if latency:
        shown.append(f"p50 {latency['p50']:.2f} ms, p99 {latency['p99']:.2f} ms")
    if "device_bytes_per_payload_byte" in figures:
        shown.append(f"device bytes {figures['device_bytes_per_payload_byte']:.2f}")
    return ", ".join(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the product from all sides.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts.PARTS)}; default: all")
    parser.add_argument("--json", type=Path, default=Path("suite.json"), help="the file with what was found")
    parser.add_argument("--plots", type=Path, help="draw what the file holds into this directory")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measured part")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks what is stored")
    parser.add_argument("--soak-minutes", type=float, default=20.0)
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure")
    parser.add_argument("--draw-only", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(parts.PARTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(parts.PARTS)}")
    if not arguments.draw_only:
        parts.soak_minutes = arguments.soak_minutes
        arguments.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="bench.") as directory:
            bench = Bench(Path(directory).resolve(), arguments.seconds, arguments.warm_up, arguments.scale)
            names = arguments.parts or list(parts.PARTS)
            run(measure(names, bench, arguments.json, begin(arguments.json)))
    if arguments.plots is not None:
        from benchmarks.suite import plots

        plots.draw(json.loads(arguments.json.read_text()), arguments.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
