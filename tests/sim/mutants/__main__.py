"""`python -m tests.sim.mutants`: plant each bug in turn, and tell after how many seeds it was caught.

python -m tests.sim.mutants               all of them, two processes
python -m tests.sim.mutants 8 17 --seeds 1000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.mutants import (
    auto_recovery,
    batches,
    crowd,
    logs_and_terms,
    lost_data,
    metadata_stores,
    protocol,
    server_and_recovery,
    storage,
)
from tests.sim.profiles import all_profiles, draw_plan
from tests.sim.simulation import run_plan

if TYPE_CHECKING:
    from tests.sim.mutants.planting import Mutant

ROOT = Path(__file__).parent.parent.parent.parent
TOTAL = 40
"""Numbers up to this one are the list that was to be planted; higher numbers were added later."""


class Outcome(NamedTuple):
    """What became of a mutant: `seeds` it took; `by` is the invariant, or the test, that broke."""

    number: int
    title: str
    seeds: int | None
    by: str
    profile: str


def everything() -> list[Mutant]:
    """Return the table."""
    return sorted(
        [
            *protocol.MUTANTS,
            *storage.MUTANTS,
            *logs_and_terms.MUTANTS,
            *server_and_recovery.MUTANTS,
            *lost_data.MUTANTS,
            *auto_recovery.MUTANTS,
            *metadata_stores.MUTANTS,
            *batches.MUTANTS,
            *crowd.MUTANTS,
        ],
        key=lambda mutant: mutant.number,
    )


def hunt(job: tuple[int, int]) -> Outcome:
    """Plant a mutant in a process of its own, and run seeds until one fails."""
    number, seeds_max = job
    mutant = next(each for each in everything() if each.number == number)
    if mutant.tests:
        return _hunt_by_tests(mutant)
    names = [name for name in mutant.profiles if name in all_profiles()]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _hunt_here(mutant, names, seeds_max, writer)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    seeds, by, profile = text.split("\t") if text else ("", "the hunt itself failed", "")
    return Outcome(number, mutant.title, int(seeds) if seeds else None, by, profile)


def _hunt_here(mutant: Mutant, names: list[str], seeds_max: int, writer: int) -> None:
    text = "\tnot caught\t"
    try:
        mutant.plant()
        for count in range(seeds_max):
            name = names[count % len(names)]
            result = run_plan(draw_plan(name, count // len(names)))
            if result.name == "Unexpected" and "tests/sim/" in result.text.splitlines()[-2]:
                raise RuntimeError(f"the simulator failed: {result.text[-200:]}")
            if not result.is_good:
                text = f"{count + 1}\t{result.name}\t{name}"
                break
    except Exception as error:
        text = f"\t{type(error).__name__}: {str(error)[:150]!r}\t"
    os.write(writer, text.encode())
    os._exit(0)


def _hunt_by_tests(mutant: Mutant) -> Outcome:
    environment = {**os.environ, "PLANTED_MUTANT": str(mutant.number)}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.sim.mutants.plugin", *mutant.tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    failed = [line for kind in ("FAILED tests/", "ERROR tests/") for line in lines if line.startswith(kind)]
    if ended.returncode == 1 and failed:
        return Outcome(
            mutant.number, mutant.title, 1, failed[0].split(" - ")[0].removeprefix("FAILED "), "tests"
        )
    return Outcome(
        mutant.number, mutant.title, None, f"not caught (pytest ended with {ended.returncode})", "tests"
    )


def main() -> int:
    """Do what the arguments say; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("numbers", type=int, nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=1000, help="at most so many for each")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    wanted = [
        each.number for each in everything() if not arguments.numbers or each.number in arguments.numbers
    ]
    started = time.perf_counter()
    outcomes = []
    print("| mutant | caught by | profile | seeds |\n|---|---|---|---|")
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for outcome in pool.imap(hunt, [(number, arguments.seeds) for number in wanted], chunksize=1):
            outcomes.append(outcome)
            seeds = "–" if outcome.seeds is None else f"{outcome.seeds}"
            print(
                f"| {outcome.number} {outcome.title} | {outcome.by} | {outcome.profile} | {seeds} |",
                flush=True,
            )
    caught = [outcome.seeds for outcome in outcomes if outcome.seeds is not None]
    if caught:
        elapsed = time.perf_counter() - started
        print(f"median {statistics.median(caught):g} seeds, most {max(caught)}; {elapsed:.0f} s")
    if not arguments.numbers:
        beyond = [outcome for outcome in outcomes if outcome.number > TOTAL]
        print(f"{sum(outcome.seeds is not None for outcome in beyond)} of {len(beyond)} further ones caught")
        outcomes = outcomes[:TOTAL]
    print(f"{sum(outcome.seeds is not None for outcome in outcomes)} of {len(outcomes)} caught")
    return 0 if len(caught) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
