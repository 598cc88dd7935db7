"""A placement policy of one's own: one copy of each entry near the writer, the others elsewhere.

    python examples/own_placement.py sqlite:///tmp/cluster/metadata.db r1

A policy sees the seats of an ensemble, some of them vacant, and the bookies that may be chosen. It returns
a bookie for each vacant seat. It is asked for a new ledger, and again whenever one of its bookies has failed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import client_aio

if TYPE_CHECKING:
    import random


class OneNearby:
    """Keeps exactly one bookie of the ensemble on the writer's own rack, where there is a choice."""

    def __init__(self, rack: str) -> None:
        self.rack = rack

    def choose(self, seating: client_aio.Seating, rng: random.Random) -> client_aio.Choice:
        """Put the nearest candidate into the first vacant seat, unless one of that rack keeps its seat."""
        candidates = sorted(seating.candidates)
        rng.shuffle(candidates)
        has_one = any(kept is not None and seating.rack_of(kept) == self.rack for kept in seating.seats)
        near = [name for name in candidates if seating.rack_of(name) == self.rack]
        first = [] if has_one else near[:1]
        # False sorts before True: those elsewhere come first.
        others = sorted(
            (name for name in candidates if name not in first),
            key=lambda name: seating.rack_of(name) == self.rack,
        )
        chosen = [*first, *others][: len(seating.vacant)]
        nearby = sum(seating.rack_of(name) == self.rack for name in seating.filled(chosen))
        return client_aio.Choice(chosen, "" if nearby == 1 else f"{nearby} bookies are on rack {self.rack}")


async def main(uri: str, rack: str) -> None:
    """Create a ledger and show where its bookies stand."""
    async with client_aio.connect(uri, placement=OneNearby(rack)) as client:
        async with client.create_ledger(ensemble_size=3) as ledger:
            await ledger.add_entry(b"near and far")
        for bookie_id in ledger.metadata.last_fragment.bookies:
            print(bookie_id, client.bookies[bookie_id].rack)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
