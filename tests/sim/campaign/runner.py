"""Campaigns: many seeds over all profiles in several processes, with a summary that adds up.

Owns the order in which seeds are run, the processes, the progress line and the file of results. Seed n
of a campaign belongs to profile n mod the number of profiles, so that any range covers all of them alike. The
file keeps one record for each state of the files that run; a later run of the same goes on where the last
one ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sim.faults.kinds import KINDS
from tests.sim.profiles import draw_plan
from tests.sim.simulation import Result, run_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[3]
_RUN = ("bookie_aio", "client_aio", "metadata", "tests/sim")
"""What a run is made of, ..."""
NO_PART = (
    "client_aio/cli",
    "client_aio/spark",
    "client_aio/sync",
    "tests/sim/test_*",
    "tests/sim/crash",
    "tests/sim/mutants",
    "tests/sim/campaign/verdicts.py",
)
"""... but for what none of it imports."""

SEED_LIMIT_S = 120.0
"""Of processor time for one seed: those that need most take ten."""


class CampaignError(Exception):
    """A campaign cannot be gone on with; the message says why."""


class RunsInCirclesError(SystemExit):
    """A seed has taken more of the processor than any does that ends.

    Not an `Exception`: a task would keep that to itself, and the run go on without whoever runs in circles.
    """


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
    """How often each kind of fault has struck (`tests.sim.faults.kinds`)."""
    effects: Counter[str] = field(default_factory=Counter)
    """What came of them in networks, disks and the metadata store."""
    profiles: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, int, str, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the summary."""
        ratio = self.simulated_s / self.elapsed_s if self.elapsed_s else 0.0

        def table(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))

        return [
            f"faults: {table(self.faults)}",
            f"effects: {table(self.effects)}",
            f"{self.callbacks:,} callbacks, {self.processor_s:.1f} s of processor time, "
            f"at most {self.memory_mb} MB in one process",
            f"{self.seeds:,} seeds, {self.simulated_s / 3600:.2f} simulated hours in {self.elapsed_s:.1f} s "
            f"({ratio:.0f} × real time), {len(self.failures)} violations",
        ]


def run_seed(job: tuple[str, int]) -> tuple[Result, float, int]:
    """Run one seed, in whatever process; gives its result, the processor's seconds, and the memory in MB."""
    name, seed = job
    started = time.process_time()
    plan = draw_plan(name, seed)
    try:
        with _limited(SEED_LIMIT_S):
            result = run_plan(plan)
    except RunsInCirclesError as error:
        result = Result(plan, "Liveness", f"{error}\n{traceback.format_exc()}")
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return result, time.process_time() - started, memory_mb


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End what runs inside, as a run that failed, when it has taken so much of the processor."""

    def end(*_: object) -> None:
        raise RunsInCirclesError(f"not over after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds, 10.0)  # again, should it meet what runs in circles as well
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def jobs(names: list[str], seeds: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Deal the seeds out to the profiles."""
    for seed in seeds:
        yield names[seed % len(names)], seed


def run(names: list[str], seeds: range, *, processes: int = 2, stops: bool = False) -> Tally:
    """Run the seeds, and tell how it goes on standard error where that is a terminal.

    Raises:
        CampaignError: one of the processes was killed.
    """
    tally = Tally()
    started = time.perf_counter()
    for result, processor_s, memory_mb in _results(jobs(names, seeds), processes):
        name, seed = result.plan.profile, result.plan.seed
        tally.seeds += 1
        tally.simulated_s += result.seconds
        tally.processor_s += processor_s
        tally.callbacks += result.steps
        tally.memory_mb = max(tally.memory_mb, memory_mb)
        tally.profiles[name] += 1
        for what, count in (result.stats or {}).items():
            (tally.faults if what in KINDS else tally.effects)[what] += count
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
    tally.failures.sort()
    return tally


def _results(work: Iterator[tuple[str, int]], processes: int) -> Iterator[tuple[Result, float, int]]:
    """Run the jobs in processes of their own, a few ahead, and yield what each comes to as it ends."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_heed_termination)
    under_way: dict[Future[tuple[Result, float, int]], tuple[str, int]] = {}
    try:
        while True:
            with _uninterrupted():
                for job in itertools.islice(work, 4 * processes - len(under_way)):
                    under_way[pool.submit(run_seed, job)] = job
            if not under_way:
                return
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                del under_way[future]
                yield result
    except BrokenProcessPool as error:
        left = ", ".join(f"{name} {seed}" for name, seed in under_way.values())
        raise CampaignError(f"a process was killed; one of these was under way in it: {left}") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put interruptions off: a fork loses them, and who is forked is to leave them to the first process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_termination() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def version(root: Path = ROOT) -> tuple[str, str]:
    """Name what a run is made of: by its files' contents, and by the last commit that changed one of them.

    The contents stay what they are when commits are made anew, and documents may change beside a campaign,
    its own summary first of all. Both names have a mark where files differ from what was committed.
    """

    mark = "-dirty" if changed_files(root) else ""
    files = hashlib.sha256(_git(root, "ls-files", "--stage").encode()).hexdigest()[:12]
    commit = _git(root, "log", "-1", "--format=%h", "--abbrev=12")
    return f"files-{files}{mark}", f"{commit}{mark}" if commit else "unknown"


def changed_files(root: Path = ROOT) -> list[str]:
    """Return the files of a run that differ from what was committed."""
    return [
        line[2:].strip() for line in _git(root, "status", "--porcelain", "--untracked-files=all").splitlines()
    ]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments, "--", *_RUN, *(f":(exclude){one}" for one in NO_PART)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip("\n")


def go_on(
    path: Path, names: list[str], count: int, *, start: int | None = None, processes: int = 2
) -> dict[str, Any]:
    """Run `count` more seeds of the campaign of these files, and write what it comes to by now.

    It goes on behind the last seed it ran; `start` is the first one of a campaign that has not begun.

    Raises:
        CampaignError: files differ from what was committed, or the campaign has begun elsewhere, or a process
            was killed. What ran before that is in the file, in parts of 500 seeds.
    """
    records = json.loads(path.read_text()) if path.exists() else {}
    files, commit = version()
    if commit == "unknown":
        raise CampaignError("a campaign is of committed files, and there is no repository here")
    if changed := changed_files():
        raise CampaignError("a campaign is of files that are committed; these are not: " + ", ".join(changed))
    begun = records.get(files)
    if begun and start not in (None, begun["first_seed"], begun["next_seed"]):
        raise CampaignError(
            f"the campaign of these files has begun at seed {begun['first_seed']} and is at "
            f"{begun['next_seed']}; it cannot begin at {start}"
        )
    record = records.setdefault(
        files,
        {"commits": [], "first_seed": start or 0, "next_seed": start or 0, "seeds": 0, "simulated_s": 0.0,
         "elapsed_s": 0.0, "processor_s": 0.0, "callbacks": 0,
         "faults": {}, "effects": {}, "profiles": {}, "failures": []},
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
        for figure in ("faults", "effects", "profiles"):
            record[figure] = dict(sorted((Counter(record[figure]) + getattr(tally, figure)).items()))
        record["failures"] += [list(failure[:3]) for failure in tally.failures]
        written = path.with_name(f".{path.name}.new")  # an interruption leaves the one or the other
        written.write_text(json.dumps(records, indent=1) + "\n")
        written.replace(path)
        print(f"{record['seeds']:,} seeds, {len(record['failures'])} violations", flush=True)
        for failure in tally.failures:
            print(f"  {failure[0]} {failure[1]}: {failure[3][:300]}", flush=True)
    return dict(record)
