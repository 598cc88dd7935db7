"""Seeds in several processes, and the sum of what they come to.

Owns the order in which seeds run, the processes and the progress line. Seed n belongs to profile n mod the
number of profiles, so any range of seeds covers all profiles alike.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sim.faults.kinds import KINDS
from tests.sim.profiles import draw_plan
from tests.sim.simulation import Result, run_plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
