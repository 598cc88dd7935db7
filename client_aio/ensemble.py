"""Finding bookies: for a new ledger's ensemble, and in place of failed ones.

A bookie counts as found only when a connection to it stands, so that a dead bookie whose registration has
not expired yet is not put into a ledger's metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from client_aio.connection import BookieConnection
from client_aio.core.placement import PlacementPolicy, eligible
from client_aio.core.quorum import indexes_of

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from client_aio.pool import BookiePool


class EnsembleFinder:
    """Chooses bookies by a placement policy and connects to them."""

    def __init__(self, pool: BookiePool, policy: PlacementPolicy, rng: random.Random) -> None:
        self._pool = pool
        self._policy = policy
        self._rng = rng

    async def find(
        self, count: int, *, kept: Sequence[str] = (), avoided: Collection[str] = ()
    ) -> dict[str, BookieConnection]:
        """Find `count` bookies to sit beside those `kept`.

        Args:
            avoided: bookies to take only where there are too few others.

        Raises:
            NotEnoughBookiesError: fewer than that can be reached.
        """
        directory = self._pool.directory
        found: dict[str, BookieConnection] = {}
        unreachable: set[str] = set()
        while len(found) < count:
            missing = count - len(found)
            candidates = eligible(
                directory.available,
                excluded={*kept, *found, *unreachable},
                quarantined={*directory.quarantined(), *avoided},
                count=missing,
            )
            chosen = self._policy.choose(missing, candidates, kept=[*kept, *found], rng=self._rng)
            for bookie_id, outcome in (await self._pool.get_all(chosen)).items():
                if isinstance(outcome, BookieConnection):
                    found[bookie_id] = outcome
                else:
                    unreachable.add(bookie_id)
        return found

    async def replace(
        self, ensemble: Sequence[str], failed: int
    ) -> tuple[tuple[str, ...], dict[str, BookieConnection]]:
        """Find bookies for the seats of the mask `failed`; one that came back gets its own seat again.

        Returns:
            The new ensemble, and the connections to the bookies of the seats in the mask.
        """
        seats = list(indexes_of(failed))
        lost = {ensemble[index] for index in seats}
        kept = [bookie_id for bookie_id in ensemble if bookie_id not in lost]
        found = await self.find(len(seats), kept=kept, avoided=lost)
        changed = list(ensemble)
        newcomers = [bookie_id for bookie_id in found if bookie_id not in lost]
        for index in seats:
            if ensemble[index] not in found:
                changed[index] = newcomers.pop()
        return tuple(changed), found
