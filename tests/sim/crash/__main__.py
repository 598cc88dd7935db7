"""`python -m tests.sim.crash`: try the crash states of several recordings, in several processes.

python -m tests.sim.crash --recordings 16 --part 0.1     one state in ten, chosen by chance
python -m tests.sim.crash --chains --recordings 64       starts one upon another
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from functools import partial

from tests.sim.crash.chains import sweep_chains
from tests.sim.crash.states import Sweep, sweep


def main() -> int:
    """Do what the arguments say; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.crash", description=__doc__)
    parser.add_argument("--recordings", type=int, default=16)
    parser.add_argument("--start", type=int, default=0, help="the first recording")
    parser.add_argument("--part", type=float, default=0.1, help="of all states of each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--chains", action="store_true", help="starts one upon another instead")
    arguments = parser.parse_args()
    total = Sweep()
    seeds = range(arguments.start, arguments.start + arguments.recordings)
    work = sweep_chains if arguments.chains else partial(sweep, part=arguments.part)
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for result in pool.imap(work, seeds):
            total.add(result)
            print(f"{total.states:,} states, {len(total.failures)} bad", flush=True)
    print("\n".join(total.failures[:50]))
    print(", ".join(f"{kind} {count:,}" for kind, count in sorted(total.by_kind.items())))
    of_them = f" in {total.damaged:,} damaged chains and others" if arguments.chains else ""
    print(
        f"{total.states:,} crash states{of_them}, {total.entries:,} acknowledged entries looked for, "
        f"{len(total.failures)} bad"
    )
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
