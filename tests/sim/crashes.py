"""`python -m tests.sim.crashes`: try the crash states of several recordings, in several processes.

python -m tests.sim.crashes --recordings 16 --part 0.1     one state in ten, chosen by chance
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from functools import partial

from tests.sim.crashstates import sweep


def main() -> int:
    """Do what the arguments say; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.crashes", description=__doc__)
    parser.add_argument("--recordings", type=int, default=16)
    parser.add_argument("--start", type=int, default=0, help="the first recording")
    parser.add_argument("--part", type=float, default=0.1, help="of all states of each")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    states, entries, kinds, failures = 0, 0, Counter[str](), list[str]()
    seeds = range(arguments.start, arguments.start + arguments.recordings)
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for result in pool.imap(partial(sweep, part=arguments.part), seeds):
            states += result.states
            entries += result.entries
            kinds += result.by_kind
            failures += result.failures
            print(f"{states:,} states, {len(failures)} bad", flush=True)
    print("\n".join(failures[:50]))
    print(", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items())))
    print(f"{states:,} crash states, {entries:,} acknowledged entries looked for, {len(failures)} bad")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
