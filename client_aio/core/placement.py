"""Choosing the bookies of an ensemble: the interface of a policy, and the default one.

An ensemble is a row of *seats*; entry n goes to the Qw seats from index n mod E on (`core.quorum`). A new
ledger has all its seats vacant, an ensemble change those of the bookies that failed. A policy sees the row
and the bookies that may be chosen, and gives one for each vacant seat. It knows neither clock nor sockets,
and draws only from the random source that it is given.

What is not a policy's business: whether a bookie can be reached (`client_aio.ensemble` asks again without
those that cannot), and whether it failed lately: `eligible` offers bookies in quarantine only where there are
too few others, so that a policy may take any candidate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from metadata.bookies import BookieRecord


@dataclass(frozen=True, slots=True)
class Seating:
    """An ensemble with vacant seats, as a policy sees it.

    Attributes:
        seats: the bookies that stay, in seat order; None: vacant.
        write_quorum: how many neighbouring seats (around the end) keep one entry.
        candidates: who may be chosen, by id; at least as many as there are vacant seats.
        records: the registrations of those that stay, as last heard of; one may be missing.
        former: who sat where before; empty for a new ledger. One who comes back to its own seat costs least.
    """

    seats: tuple[str | None, ...]
    write_quorum: int
    candidates: Mapping[str, BookieRecord]
    records: Mapping[str, BookieRecord] = field(default_factory=dict)
    former: tuple[str, ...] = ()

    @property
    def vacant(self) -> tuple[int, ...]:
        """Give the indexes of the vacant seats, ascending."""
        return tuple(index for index, bookie_id in enumerate(self.seats) if bookie_id is None)

    def filled(self, bookies: Sequence[str]) -> tuple[str, ...]:
        """Give the whole ensemble with these in the vacant seats."""
        following = iter(bookies)
        return tuple(next(following) if bookie_id is None else bookie_id for bookie_id in self.seats)

    def rack_of(self, bookie_id: str) -> str:
        """Give a bookie's rack label; "" for none, and for a bookie that nobody ever heard of."""
        record = self.candidates.get(bookie_id) or self.records.get(bookie_id)
        return record.rack if record else ""


class Choice(NamedTuple):
    """What a policy gives back.

    Attributes:
        bookies: distinct candidates, one for each vacant seat, ascending.
        warning: what the choice fails to keep, for the log; "" when there is nothing to say.
    """

    bookies: Sequence[str]
    warning: str = ""


class PlacementPolicy(Protocol):
    """What a user implements to place ensembles otherwise; handed to `connect(..., placement=...)`."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose a bookie for each vacant seat. Synchronous, quick, and drawing only from `rng`.

        Raises:
            NotEnoughBookiesError: none of the candidates would do. A ledger is then not created; a writer
                goes on without a replacement as long as Qa bookies answer, and asks again later (rule 9).
        """


class WeightedRandom:
    """Draws bookies at random by the weight they announce, without replacement: the default."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose as `PlacementPolicy.choose` says. Bookies of weight 0 come last."""
        drawn = weighted_order(seating.candidates, rng)[: len(seating.vacant)]
        return Choice(back_in_own_seats(seating, drawn))


def weighted_order(candidates: Mapping[str, BookieRecord], rng: random.Random) -> list[str]:
    """Give the candidates in a random order in which a heavier one tends to come earlier.

    Any beginning of it is a draw by weight without replacement; those of weight 0 come last.
    """

    # Exponential draws with the weights as rates, in ascending order (Efraimidis and Spirakis, 2006).
    def key(bookie_id: str) -> tuple[bool, float]:
        weight = candidates[bookie_id].weight
        return (weight <= 0, rng.expovariate(weight if weight > 0 else 1.0))

    keys = {bookie_id: key(bookie_id) for bookie_id in sorted(candidates)}
    return sorted(keys, key=keys.__getitem__)


def back_in_own_seats(seating: Seating, chosen: Sequence[str]) -> list[str]:
    """Reorder a choice so that everybody in it who sat in a vacant seat before sits there again."""
    seats = list(chosen)
    if seating.former:
        for position, index in enumerate(seating.vacant):
            if seating.former[index] in seats:
                other = seats.index(seating.former[index])
                seats[position], seats[other] = seats[other], seats[position]
    return seats


def eligible(
    available: Mapping[str, BookieRecord],
    *,
    excluded: Collection[str],
    doubtful: Sequence[str],
    count: int,
) -> dict[str, BookieRecord]:
    """Give the writable bookies that may be chosen for `count` seats; fewer where there are no more.

    Args:
        excluded: never given.
        doubtful: given only as far as there are too few others, the first of them first.
    """
    writable = {
        bookie_id: record
        for bookie_id, record in available.items()
        if record.is_writable and bookie_id not in excluded
    }
    chosen = {bookie_id: record for bookie_id, record in writable.items() if bookie_id not in doubtful}
    for bookie_id in doubtful:
        if len(chosen) >= count:
            break
        if bookie_id in writable:
            chosen[bookie_id] = writable[bookie_id]
    return chosen


class Quarantine:
    """Which bookies failed within the last `duration_s` seconds of the caller's clock."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._failed_at_s: dict[str, float] = {}  # in ascending order of the times

    def note_failure(self, bookie_id: str, now_s: float) -> None:
        """Put a bookie into quarantine, or keep it there for longer."""
        self._failed_at_s.pop(bookie_id, None)
        self._failed_at_s[bookie_id] = now_s

    def members(self, now_s: float) -> list[str]:
        """Give the bookies in quarantine, the one that failed longest ago first."""
        for bookie_id, at_s in list(self._failed_at_s.items()):
            if at_s + self._duration_s > now_s:
                break
            del self._failed_at_s[bookie_id]
        return list(self._failed_at_s)
