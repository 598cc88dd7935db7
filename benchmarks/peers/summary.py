"""The comparison in one table, for the README: a row for each workload, a column for each system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.results import medians, runs_of
from benchmarks.peers.workloads import WORKLOADS

if TYPE_CHECKING:
    from benchmarks.peers.results import Run

_COLUMNS = {
    "bookie-aio, compiled": ("product-compiled",),
    "bookie-aio": ("product",),
    "BookKeeper": ("bookkeeper", "bookkeeper-tuned"),
    "Kafka, flush": ("kafka-flush",),
    "Kafka, no fsync": ("kafka",),
    "NATS, no fsync": ("nats",),
}
"""The systems of each column: the best of them counts."""
_LATENCIES = ("1k-1", "1k-follow")
_ROWS = ("1k-1000", "100b-10000", "1k-ledgers", "1k-logs", *_LATENCIES, "1k-read")


def summary(document: dict[str, Any]) -> str:
    """Return the table, and the dates, rounds and settings of the runs it shows."""
    runs, settings = document["runs"], document["settings"]
    names = [name for name, systems in _COLUMNS.items() if any(_cell(runs, row, systems) for row in _ROWS)]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    shown: list[Run] = []
    for row in _ROWS:
        cells = [_cell(runs, row, _COLUMNS[name]) for name in names]
        if any(cells):
            figure = "p50, p99 ms" if row in _LATENCIES else "a second"
            lines.append(f"| {WORKLOADS[row].title}: {figure} | {' | '.join(one or '–' for one in cells)} |")
            shown += [
                run for name in names for one in _COLUMNS[name] for run in runs_of(runs, row, one).values()
            ]
    rounds = len({run["round"] for run in shown})
    days = sorted({run["at"][:10] for run in shown if "at" in run})
    dates = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "at an unknown date"
    table = "\n".join(lines)
    return f"{table}\n\nMeasured {dates}; medians of {rounds} rounds of {settings['measured_s']:g} s."


def _cell(runs: list[Run], workload: str, systems: tuple[str, ...]) -> str:
    """Return the figures of the best of some systems; "" where none was measured."""
    found = [one for system in systems if (one := medians(runs, workload, system)) is not None]
    if workload in _LATENCIES:
        figures = [(one["p50_ms"], one["p99_ms"]) for one in found]
        return ", ".join(f"{one:.2f}" for one in min(figures)) if figures else ""
    rates = [one["adds_per_s"] for one in found]
    return f"{max(rates):,.0f}" if rates else ""
