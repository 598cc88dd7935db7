"""`python -m tests.sim.campaign.verdicts`: run the same seeds on every Python found, and compare verdicts.

python -m tests.sim.campaign.verdicts --seeds 196            four seeds of each of 49 profiles, on each
python -m tests.sim.campaign.verdicts --python /opt/python3.13 --python python3.12
python -m tests.sim.campaign.verdicts --tell --seeds 196     only this interpreter: one line for each seed

Since Python 3.12 `asyncio.wait_for` schedules callbacks differently, so traces differ between versions. The
verdict of a seed must not. Each interpreter gets an environment of its own, made as `make` makes one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.sim.campaign import runner
from tests.sim.campaign.run_key import ROOT
from tests.sim.profiles import all_profiles
from tests.support.pythons import environment, interpreters, version_of


def tell(seeds: range) -> None:
    """Run the seeds here, and print what each comes to."""
    tally = runner.run(all_profiles(), seeds)
    bad = {(name, seed): broken for name, seed, broken, _ in tally.failures}
    for name, seed in runner.jobs(all_profiles(), seeds):
        print(f"{name} {seed} {bad.get((name, seed), 'all invariants hold')}")
    print(f"# {tally.callbacks:,} callbacks, {tally.simulated_s:.0f} simulated s in {tally.elapsed_s:.0f} s")


def verdicts(python: str, seeds: range) -> tuple[list[str], str]:
    """Return the verdicts of an interpreter, and what the runs took."""
    command = [
        python,
        "-m",
        "tests.sim.campaign.verdicts",
        "--tell",
        "--start",
        f"{seeds.start}",
        "--seeds",
        f"{len(seeds)}",
    ]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *lines, figures = told.stdout.splitlines()
    return lines, figures.removeprefix("# ")


def compare(pythons: dict[str, str], seeds: range) -> int:
    """Run the seeds on all of them; gives how many verdicts differ."""
    by_version: dict[str, list[str]] = {}
    for version, python in pythons.items():
        by_version[version], figures = verdicts(python, seeds)
        good = sum(line.endswith("all invariants hold") for line in by_version[version])
        print(f"Python {version}: {len(seeds)} seeds, {good} good; {figures}", flush=True)
    differing = 0
    for rows in zip(*by_version.values(), strict=True):
        if len(set(rows)) > 1:
            differing += 1
            print("\n".join(f"  {version}: {row}" for version, row in zip(by_version, rows, strict=True)))
    print(f"{differing} of {len(seeds)} verdicts differ between Python {', '.join(by_version)}")
    return differing


def main() -> int:
    """Do what the arguments say; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.campaign.verdicts", description=__doc__.splitlines()[0].partition(": ")[2]
    )
    parser.add_argument("--seeds", type=int, default=176, help="how many, dealt out to all profiles")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--python", action="append", help="this interpreter, as it is; by default one of each version"
    )
    parser.add_argument("--tell", action="store_true", help="only this interpreter")
    arguments = parser.parse_args()
    seeds = range(arguments.start, arguments.start + arguments.seeds)
    if arguments.tell:
        tell(seeds)
        return 0
    if arguments.python:
        pythons = {version_of(python): python for python in arguments.python}
    else:
        pythons = {version: environment(version, python) for version, python in interpreters().items()}
    return 1 if compare(pythons, seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
