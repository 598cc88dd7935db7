"""Five processes fight for one unbounded ledger, with random SIGKILL and SIGSTOP; a reader follows.

    python -m benchmarks.duel_unbounded [--seconds 60] [--duellists 5] [--seed 1] [-o table|json]

Prints what happened and exits with 1 where something that was acknowledged was not read exactly once, in
order and at its position. `benchmarks.duel` has the rules of the fight.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import duel
from benchmarks.running import Workplace, run

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import client_aio

NAME = "fought-for"
FRAGMENT_BYTES = 20_000


async def take_over(client: client_aio.Client) -> client_aio.UnboundedLedgerWriter:
    """Take the ledger over; it is made by the first."""
    return await client.open_unbounded_ledger(NAME, fragment_bytes=FRAGMENT_BYTES)


async def read(client: client_aio.Client) -> AsyncGenerator[tuple[str, bytes], None]:
    """Follow the ledger from its beginning."""
    async with aclosing(client.read_unbounded_ledger(NAME)) as entries:
        async for entry in entries:
            yield str(entry.entry_id), entry.data


async def finish(client: client_aio.Client, data: bytes) -> str:
    """Add the last record, and leave the ledger."""
    async with client.open_unbounded_ledger(NAME) as ledger:
        return str(await ledger.add_entry(data))


KIND = duel.Kind("benchmarks.duel_unbounded", read, finish)


def main() -> int:
    """Run the duel, or one of those who fight it."""
    if sys.argv[1:2] == ["duellist"]:
        uri, tag = sys.argv[2:]
        fighting = duel.fight(
            uri, tag, take_over, lambda ledger: ledger.term, lambda ledger, data: ledger.add_entry(data)
        )
        run(fighting)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--duellists", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None, help="work here, and leave everything")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    chosen = parser.parse_args()
    with Workplace(chosen.dir, "duel-") as home:
        tally = run(
            duel.duel(KIND, home.path, seconds=chosen.seconds, duellists=chosen.duellists, seed=chosen.seed)
        )
        if tally.wrong:
            home.keep()
    if chosen.output == "json":
        print(json.dumps({**tally.summary(), "wrong": tally.wrong}))
    else:
        for name, value in tally.summary().items():
            print(f"{name:<28} {value}")
        print(*tally.wrong[:20], sep="\n")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
