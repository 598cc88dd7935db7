"""`python -m tests.sim`: run seeds, replay one, shrink it, or go on with a campaign.

python -m tests.sim --seeds 2000                          all profiles, two processes
python -m tests.sim --profile split-brain --seeds 200 --start 1000
python -m tests.sim --profile chaos --seed 17 --timeline  replay one, and tell its story
python -m tests.sim --profile chaos --seed 17 --shrink    the smallest plan that fails alike
python -m tests.sim --campaign FILE --seeds 5000          5,000 more seeds of this code
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.sim.campaign.record import go_on
from tests.sim.campaign.runner import CampaignError, run
from tests.sim.campaign.shrinking import describe, shrink
from tests.sim.plan import PROFILES
from tests.sim.profiles import all_profiles, draw_plan
from tests.sim.simulation import run_plan


def main() -> int:
    """Do what the arguments say; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=all_profiles(), help="one profile; by default all of them")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--start", type=int, help="the first seed (0); of a campaign that has not begun")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--timeline", action="store_true", help="with --seed: tell the run's story")
    parser.add_argument("--lines", type=int, default=400, help="how much of the story")
    parser.add_argument("--shrink", action="store_true", help="with --seed: find a smaller plan that fails")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--campaign", type=Path, help="add the results to this file")
    arguments = parser.parse_args()
    if arguments.campaign and (arguments.profile or arguments.seed is not None):
        parser.error("a campaign is of all profiles: --campaign goes with neither --profile nor --seed")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except CampaignError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run(arguments: argparse.Namespace) -> int:
    names = [arguments.profile] if arguments.profile else all_profiles()
    if arguments.seed is not None:
        return _replay(names[arguments.seed % len(names)], arguments)
    if arguments.campaign:
        record = go_on(
            arguments.campaign, names, arguments.seeds, start=arguments.start, processes=arguments.processes
        )
        return 1 if record["failures"] else 0
    start = arguments.start or 0
    seeds = range(start, start + arguments.seeds)
    tally = run(names, seeds, processes=arguments.processes)
    for name, seed, _, text in sorted(tally.failures)[:20]:
        print(f"\n{name} seed {seed}\n{text[-1500:]}\n  {draw_plan(name, seed).command}")
    for line in tally.lines():
        print(line)
    return 1 if tally.failures else 0


def _replay(name: str, arguments: argparse.Namespace) -> int:
    assert name in PROFILES
    plan = draw_plan(name, arguments.seed)
    result = run_plan(plan, wants_story=True)
    if arguments.shrink and not result.is_good:
        result = shrink(plan, result)
    if arguments.timeline or arguments.shrink:
        print("\n".join(result.story.splitlines()[-arguments.lines :]))
    print(describe(result.plan))
    verdict = "all invariants hold" if result.is_good else result.text
    print(verdict)
    print(f"{result.seconds:.2f} simulated s, {result.steps:,} callbacks, digest {result.digest:08x}")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
