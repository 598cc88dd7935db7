"""The measured runs: one JSON file to which runs are added, so that a long matrix can be resumed.

A run is named by workload, system and round. Medians are taken over the rounds. Ratios are taken within each
round before their median is, since a machine's speed changes from minute to minute.
"""

from __future__ import annotations

import json
import os
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Run = dict[str, Any]
FIGURES = (
    "adds_per_s", "p50_ms", "p99_ms", "p999_ms", "client_us", "servers_us", "server_mib",
    "process_bytes_per_payload_byte", "device_bytes_per_payload_byte", "failed", "pause_ms", "read_share",
)  # fmt: skip


class Results:
    """The runs of a file; every run is on disk once it is added."""

    def __init__(self, path: Path, machine: dict[str, Any], settings: dict[str, Any]) -> None:
        """Take up a file where it was left, or begin it.

        Raises:
            ValueError: it was measured with other settings.
        """
        self._path = path
        self.document: dict[str, Any] = {"machine": machine, "settings": settings, "runs": []}
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise ValueError(f"{path} was measured with {found['settings']}, not {settings}")
            self.document = found

    @classmethod
    def read(cls, path: Path) -> Results:
        """Take what is there, whatever it was measured with."""
        found = json.loads(path.read_text())
        return cls(path, found["machine"], found["settings"])

    def has(self, workload: str, system: str, round_: int) -> bool:
        """Return whether a run has been made."""
        return any(
            (run["workload"], run["system"], run["round"]) == (workload, system, round_)
            for run in self.document["runs"]
        )

    def add(self, run: Run) -> None:
        """Add a run."""
        self.document["runs"].append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(written, self._path)


def runs_of(runs: list[Run], workload: str, system: str) -> dict[int, Run]:
    """Return the runs of a workload on a system, by round."""
    return {
        run["round"]: run
        for run in runs
        if (run["workload"], run["system"]) == (workload, system) and "error" not in run
    }


def medians(runs: list[Run], workload: str, system: str) -> dict[str, float] | None:
    """Return the median of each figure over the rounds; None where there is no run."""
    found = list(runs_of(runs, workload, system).values())
    if not found:
        return None
    return {
        name: statistics.median(values)
        for name in FIGURES
        if (values := [r[name] for r in found if name in r])
    }


def ratio(
    runs: list[Run], workload: str, system: str, other: str, figure: str = "adds_per_s"
) -> float | None:
    """Return the median of the ratios of one system's figure to another's, over the rounds that have both."""
    ours, theirs = runs_of(runs, workload, system), runs_of(runs, workload, other)
    ratios = [ours[n][figure] / theirs[n][figure] for n in ours.keys() & theirs.keys() if theirs[n][figure]]
    return statistics.median(ratios) if ratios else None
