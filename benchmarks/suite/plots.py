"""The suite's figures as pictures (SVG). Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

    Cases = dict[str, dict[str, Any]]


def draw(document: dict[str, Any], directory: Path) -> None:
    """Draw every part that the document holds."""
    directory.mkdir(parents=True, exist_ok=True)
    # The same figures give the same file.
    mpl.rcParams.update({"svg.hashsalt": "bookie-aio", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    for name, part in document["parts"].items():
        drawing = DRAWINGS.get(name)
        if drawing is not None and part["cases"]:
            drawing(part["cases"], directory)


def _save(directory: Path, name: str) -> None:
    plt.tight_layout()
    plt.savefig(directory / f"{name}.svg", metadata={"Date": None})
    plt.close()


def _closed(cases: Cases, directory: Path) -> None:
    _, (rates, latencies) = plt.subplots(1, 2, figsize=(9, 3.5))
    for entry_bytes in sorted({case["entry_bytes"] for case in cases.values()}):
        some = [case for case in cases.values() if case["entry_bytes"] == entry_bytes]
        windows = [case["in_flight"] for case in some]
        rates.plot(windows, [case["adds_per_s"] for case in some], "o-", label=f"{entry_bytes:,} B")
        latencies.plot(
            windows, [case["latency_ms"]["p50"] for case in some], "o-", label=f"{entry_bytes:,} B, p50"
        )
        latencies.plot(
            windows, [case["latency_ms"]["p99"] for case in some], "x--", label=f"{entry_bytes:,} B, p99"
        )
    _label(rates, "adds in flight", "adds per second", log="xy")
    _label(latencies, "adds in flight", "ms", log="xy")
    _save(directory, "closed")


def _percentiles(name: str, title: str) -> Callable[[Cases, Path], None]:
    def drawing(cases: Cases, directory: Path) -> None:
        _, axes = plt.subplots(figsize=(6, 3.5))
        for case, figures in cases.items():
            spread = {float(key[1:]): value for key, value in figures["latency_ms"].items() if key != "p100"}
            axes.plot([100 / (100 - each) for each in spread], list(spread.values()), "o-", label=case)
        _label(axes, "one add in so many is slower", title, log="xy")
        _save(directory, name)

    return drawing


def _ledgers(cases: Cases, directory: Path) -> None:
    _, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(
        [c["ledgers"] for c in cases.values()], [c["adds_per_s"] for c in cases.values()], "o-", label="1 KiB"
    )
    _label(axes, "ledgers written at once", "adds per second", log="xy")
    _save(directory, "ledgers")


def _growth(cases: Cases, directory: Path) -> None:
    _, (costs, latencies) = plt.subplots(1, 2, figsize=(9, 3.5))
    stored = [case["entries_stored"] for case in cases.values()]
    for name in ("client_us", "bookies_us"):
        costs.plot(stored, [case[name] for case in cases.values()], "o-", label=name)
    for each in ("p50", "p99"):
        latencies.plot(stored, [case["latency_ms"][each] for case in cases.values()], "o-", label=each)
    _label(costs, "entries stored", "µs of processor time for an add", log="x")
    _label(latencies, "entries stored", "ms", log="x")
    _save(directory, "growth")


def _soak(cases: Cases, directory: Path) -> None:
    (case,) = cases.values()
    samples = case["samples"]
    minutes = [sample["at_s"] / 60 for sample in samples]
    _, (disk, memory, latency) = plt.subplots(3, 1, figsize=(7, 6), sharex=True)
    disk.plot(minutes, [sample["disk_mib"] for sample in samples], label="files of three bookies")
    memory.plot(minutes, [sample["bookie_mib"] for sample in samples], label="largest bookie")
    for each in ("p50_ms", "p99_ms"):
        latency.plot(minutes, [sample[each] for sample in samples], label=each[:-3])
    _label(disk, "", "MiB")
    _label(memory, "", "MiB")
    _label(latency, "minutes", "ms", log="y")
    disk.set_ylim(bottom=0)
    memory.set_ylim(bottom=0)
    _save(directory, "soak")


def _label(axes: Axes, across: str, up: str, log: str = "") -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    axes.legend(fontsize=7)


DRAWINGS: dict[str, Callable[[Cases, Path], None]] = {
    "closed": _closed,
    "open": _percentiles("open", "ms since the add was due"),
    "ledgers": _ledgers,
    "tail": _percentiles("tail", "ms from writer to reader"),
    "fairness": _percentiles("fairness", "ms since the add was due"),
    "growth": _growth,
    "soak": _soak,
}
