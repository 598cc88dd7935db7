"""Campaigns: many seeds over all profiles in several processes, with a summary that adds up.

Owns the order in which seeds are run, the processes, the progress line and the file of results. Seed n
of a campaign belongs to profile n mod the number of profiles, so that any range covers all of them alike. The
file keeps one record for each state of the files that run; a later run of the same goes on where the last
one ended.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sim import (
    profiles_further,
    profiles_logs,
    profiles_logs_further,
    profiles_refusals,
    profiles_terms,
    profiles_unbounded,
    profiles_volume,
)
from tests.sim.profiles import PROFILES, draw_plan
from tests.sim.simulation import Result, run_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent.parent
FURTHER = (
    profiles_logs,
    profiles_unbounded,
    profiles_further,
    profiles_logs_further,
    profiles_refusals,
    profiles_terms,
    profiles_volume,
)
"""Modules that enter profiles of their own into the table."""
_RUN = ("bookie_aio", "client_aio", "metadata", "tests/sim")
"""What a run is made of, ..."""
NO_PART = (
    "client_aio/cli",
    "client_aio/spark",
    "client_aio/sync",
    "tests/sim/test_*",
    "tests/sim/crashes.py",
    "tests/sim/crashstates.py",
    "tests/sim/mutants",
    "tests/sim/verdicts.py",
)
"""... but for what none of it imports."""


@dataclass
class Tally:
    """What a number of runs came to."""

    seeds: int = 0
    simulated_s: float = 0.0
    elapsed_s: float = 0.0
    processor_s: float = 0.0
    callbacks: int = 0
    memory_mb: int = 0
    """The most that one process has ever had."""
    faults: Counter[str] = field(default_factory=Counter)
    profiles: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, int, str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Give the summary."""
        ratio = self.simulated_s / self.elapsed_s if self.elapsed_s else 0.0
        faults = ", ".join(f"{name} {count:,}" for name, count in sorted(self.faults.items()))
        return [
            f"faults: {faults}",
            f"{self.callbacks:,} callbacks, {self.processor_s:.1f} s of processor time, "
            f"at most {self.memory_mb} MB in one process",
            f"{self.seeds:,} seeds, {self.simulated_s / 3600:.2f} simulated hours in {self.elapsed_s:.1f} s "
            f"({ratio:.0f} × real time), {len(self.failures)} violations",
        ]


def run_seed(job: tuple[str, int]) -> tuple[Result, float, int]:
    """Run one seed, in whatever process; gives its result, the processor's seconds, and the memory in MB."""
    name, seed = job
    started = time.process_time()
    result = run_plan(draw_plan(name, seed))
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return result, time.process_time() - started, memory_mb


def jobs(names: list[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Deal the seeds out to the profiles."""
    for seed in seeds:
        yield names[seed % len(names)], seed


def run(names: list[str], seeds: range, *, processes: int = 2, stops: bool = False) -> Tally:
    """Run the seeds, and tell how it goes on standard error where that is a terminal."""
    tally = Tally()
    started = time.perf_counter()
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        for row in pool.imap_unordered(run_seed, jobs(names, seeds), chunksize=4):
            result, processor_s, memory_mb = row
            name, seed = result.plan.profile, result.plan.seed
            tally.seeds += 1
            tally.simulated_s += result.seconds
            tally.processor_s += processor_s
            tally.callbacks += result.steps
            tally.memory_mb = max(tally.memory_mb, memory_mb)
            tally.profiles[name] += 1
            tally.faults.update(result.stats or {})
            tally.elapsed_s = time.perf_counter() - started
            if not result.is_good:
                tally.failures.append((name, seed, result.name, result.text))
                if stops:
                    break
            if sys.stderr.isatty() and tally.seeds % 20 == 0:
                print(
                    f"\r{tally.seeds:,} of {len(seeds):,} seeds, {len(tally.failures)} bad",
                    end="",
                    file=sys.stderr,
                )
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return tally


def version(root: Path = ROOT) -> tuple[str, str]:
    """Name what a run is made of: by its files' contents, and by the last commit that changed one of them.

    The contents stay what they are when commits are made anew, and documents may change beside a campaign,
    its own summary first of all. Both names have a mark where files differ from what was committed.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *_RUN, *(f":(exclude){one}" for one in NO_PART)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    mark = "-dirty" if git("status", "--porcelain") else ""
    files = hashlib.sha256(git("ls-files", "--stage").encode()).hexdigest()[:12]
    commit = git("log", "-1", "--format=%h", "--abbrev=12")
    return f"files-{files}{mark}", f"{commit}{mark}" if commit else "unknown"


def go_on(path: Path, names: list[str], count: int, *, start: int = 0, processes: int = 2) -> dict[str, Any]:
    """Run `count` more seeds of the campaign of these files, and write what it comes to by now.

    It goes on behind the last seed it ran; `start` is the first one of a campaign that has not begun.
    """
    records = json.loads(path.read_text()) if path.exists() else {}
    files, commit = version()
    record = records.setdefault(
        files,
        {"commits": [], "first_seed": start, "next_seed": start, "seeds": 0, "simulated_s": 0.0,
         "elapsed_s": 0.0, "processor_s": 0.0, "callbacks": 0,
         "faults": {}, "profiles": {}, "failures": []},
    )  # fmt: skip
    if commit not in record["commits"]:
        record["commits"].append(commit)
    while count > 0:
        part = min(count, 500)
        count -= part
        tally = run(names, range(record["next_seed"], record["next_seed"] + part), processes=processes)
        record["next_seed"] += part
        for figure in ("seeds", "simulated_s", "elapsed_s", "processor_s", "callbacks"):
            record[figure] += getattr(tally, figure)
        for figure in ("faults", "profiles"):
            record[figure] = dict(sorted((Counter(record[figure]) + getattr(tally, figure)).items()))
        record["failures"] += [list(failure[:3]) for failure in tally.failures]
        path.write_text(json.dumps(records, indent=1) + "\n")
        print(f"{record['seeds']:,} seeds, {len(record['failures'])} violations", flush=True)
        for failure in tally.failures:
            print(f"  {failure[0]} {failure[1]}: {failure[3][:300]}", flush=True)
    return dict(record)


def all_profiles() -> list[str]:
    """Give the names of all profiles, in order."""
    return sorted(PROFILES)
