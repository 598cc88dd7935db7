"""Choosing the bookies of an ensemble.

A policy sees the bookies that may be chosen and gives back the chosen ones, in seat order. Randomness comes
in as an argument. The default draws at random by weight, so that load spreads by capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from metadata.errors import NotEnoughBookiesError

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from metadata.bookies import BookieRecord


class PlacementPolicy(Protocol):
    """What a user implements to place ensembles otherwise."""

    def choose(
        self,
        count: int,
        candidates: Mapping[str, BookieRecord],
        *,
        kept: Sequence[str],
        rng: random.Random,
    ) -> list[str]:
        """Choose `count` distinct bookies among the candidates, to sit beside those `kept`.

        Raises:
            NotEnoughBookiesError: there are fewer candidates than that.
        """


class WeightedRandom:
    """Draws bookies at random, by weight, without replacement."""

    def choose(
        self,
        count: int,
        candidates: Mapping[str, BookieRecord],
        *,
        kept: Sequence[str],
        rng: random.Random,
    ) -> list[str]:
        """Choose as `PlacementPolicy.choose` says. Bookies of weight 0 come last."""
        if len(candidates) < count:
            raise NotEnoughBookiesError(
                f"{count} bookies are needed{_beside(kept)}, and {len(candidates)} can be chosen: "
                f"{', '.join(sorted(candidates)) or 'none'}"
            )

        # The smallest of exponential draws, by weight, are a draw without replacement
        # (Efraimidis and Spirakis, 2006).
        def key(bookie_id: str) -> tuple[bool, float]:
            weight = candidates[bookie_id].weight
            return (weight <= 0, rng.expovariate(weight if weight > 0 else 1.0))

        keys = {bookie_id: key(bookie_id) for bookie_id in sorted(candidates)}
        return sorted(keys, key=keys.__getitem__)[:count]


def _beside(kept: Sequence[str]) -> str:
    return f" beside {', '.join(kept)}" if kept else ""


def eligible(
    available: Mapping[str, BookieRecord],
    *,
    excluded: Collection[str],
    quarantined: Collection[str],
    count: int,
) -> dict[str, BookieRecord]:
    """Give the writable bookies that may be chosen; quarantined ones only where there are too few others."""
    writable = {
        bookie_id: record
        for bookie_id, record in available.items()
        if record.is_writable and bookie_id not in excluded
    }
    healthy = {bookie_id: record for bookie_id, record in writable.items() if bookie_id not in quarantined}
    return healthy if len(healthy) >= count else writable
