"""Choosing the bookies of an ensemble: the interface of a policy, and the default one.

An ensemble is a row of *seats*; entry n goes to the Qw seats from index n mod E on (`core.quorum`). A new
ledger has all its seats vacant, an ensemble change those of the bookies that failed. A policy sees the row
and the bookies that may be chosen, and gives one for each vacant seat. It knows neither clock nor sockets,
and draws only from the random source that it is given.

What is not a policy's business: whether a bookie can be reached (`client_aio.bookies.ensemble_finder` asks
again without
those that cannot), and whether it failed lately: `eligible` offers bookies in quarantine only where there are
too few others, so that a policy may take any candidate.

Placing ensembles over racks: a rack that goes dark must not take all copies of an entry along.

A rack is a label that a bookie announces (`bookie serve --rack`): whatever fails as one, a rack, a room or a
zone. Each write set, Qw neighbouring seats around the end of the ensemble, is to span at least two racks.
Bookies without a label count as one rack, since nothing says that they do not stand together.

The search. Racks are tried seat by seat, depth first, in the order of a random draw by weight, so that the
weights decide wherever the racks leave a choice. A first pass gives up a branch at the first write set on one
rack; where it finds nothing, a second one looks for the fewest such write sets. Both stop after a number of
steps that no ensemble of up to seven seats needs. The first pass then may have overlooked a way, and says of
its result what is true of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from client_aio.core.quorum import write_set

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from metadata.access.bookies import BookieRecord


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
        """Return the indexes of the vacant seats, ascending."""
        return tuple(index for index, bookie_id in enumerate(self.seats) if bookie_id is None)

    def filled(self, bookies: Sequence[str]) -> tuple[str, ...]:
        """Return the whole ensemble with these in the vacant seats."""
        following = iter(bookies)
        return tuple(next(following) if bookie_id is None else bookie_id for bookie_id in self.seats)

    def rack_of(self, bookie_id: str) -> str:
        """Return a bookie's rack label; "" for none, and for a bookie that nobody ever heard of."""
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
    """Return the candidates in a random order in which a heavier one tends to come earlier.

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
    """Return the writable bookies that may be chosen for `count` seats; fewer where there are no more.

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


_STEPS_MAX = 10_000


class RackAware:
    """Draws bookies by weight so that each write set spans at least two racks, if the candidates allow it.

    Where they do not, as few write sets as possible are left on one rack, and the choice carries a warning.
    """

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose as `PlacementPolicy.choose` says."""
        order = weighted_order(seating.candidates, rng)
        chosen = order[: len(seating.vacant)]
        if seating.write_quorum > 1:  # a write set of one is on one rack, wherever it is
            chosen = _Search(seating, order).best()
        returned = back_in_own_seats(seating, chosen)
        if len(_alone(seating, returned)) <= len(_alone(seating, chosen)):
            chosen = returned
        return Choice(chosen, _warning(seating, chosen))


def write_sets_on_one_rack(racks: Sequence[str], write_quorum: int) -> list[int]:
    """Return the write sets, by starting index, whose seats are all on one rack.

    Args:
        racks: the rack of each seat.
    """
    return [
        start
        for start in range(len(racks))
        if len({racks[seat] for seat in write_set(start, len(racks), write_quorum)}) == 1
    ]


def _alone(seating: Seating, chosen: Sequence[str]) -> list[int]:
    racks = [seating.rack_of(bookie_id) for bookie_id in seating.filled(chosen)]
    return write_sets_on_one_rack(racks, seating.write_quorum)


def _warning(seating: Seating, chosen: Sequence[str]) -> str:
    starts = _alone(seating, chosen)
    if not starts:
        return ""
    ensemble = seating.filled(chosen)
    names = [ensemble[seat] for seat in write_set(starts[0], len(ensemble), seating.write_quorum)]
    rack = seating.rack_of(names[0])
    offered = sorted({seating.rack_of(bookie_id) or "(no label)" for bookie_id in seating.candidates})
    return (
        f"{len(starts)} of {len(ensemble)} write sets are on one rack only, {', '.join(names)} "
        f"on {f'rack {rack}' if rack else 'none that has a label'}; "
        f"the bookies to choose from are on {', '.join(offered)}"
    )


class _Search:
    """Finds racks for the vacant seats, and bookies for the racks."""

    def __init__(self, seating: Seating, order: Sequence[str]) -> None:
        self._seating = seating
        self._order = order
        self._vacant = seating.vacant
        self._racks = [None if seat is None else seating.rack_of(seat) for seat in seating.seats]
        self._supply = Counter(seating.rack_of(bookie_id) for bookie_id in order)
        self._rank = {bookie_id: rank for rank, bookie_id in enumerate(order)}
        self._by_rack: dict[str, list[str]] = {}
        for bookie_id in order:
            self._by_rack.setdefault(seating.rack_of(bookie_id), []).append(bookie_id)
        self._completed_by = self._write_sets_by_last_seat()
        self._steps = 0
        self._found: list[str] | None = None
        self._fewest = 0

    def best(self) -> list[str]:
        """Return a bookie for each vacant seat, with as few write sets on one rack as were found possible."""
        for fewest in (1, len(self._seating.seats) + 1):  # below which a result counts
            self._steps, self._fewest = 0, fewest
            self._visit(0, 0)
            if self._found is not None:
                break
        racks = self._found
        assert racks is not None
        following = {rack: iter(bookies) for rack, bookies in self._by_rack.items()}
        return [next(following[rack]) for rack in racks]

    def _write_sets_by_last_seat(self) -> list[list[tuple[int, ...]]]:
        """Give, for each vacant seat, the write sets of which it is the last one to be filled."""
        size = len(self._seating.seats)
        position = {seat: number for number, seat in enumerate(self._vacant)}
        completed: list[list[tuple[int, ...]]] = [[] for _ in self._vacant]
        for seats in {tuple(sorted(write_set(at, size, self._seating.write_quorum))) for at in range(size)}:
            vacant = [position[seat] for seat in seats if seat in position]
            if vacant:
                completed[max(vacant)].append(seats)
        return completed

    def _visit(self, number: int, alone: int) -> None:
        """Fill the vacant seats from `number` on; `alone` write sets are on one rack so far."""
        if number == len(self._vacant):
            self._fewest = alone
            self._found = [rack for seat in self._vacant if (rack := self._racks[seat]) is not None]
            return
        seat = self._vacant[number]
        for rack in list(self._racks_to_try()):
            self._steps += 1
            if (self._steps > _STEPS_MAX and self._found is not None) or self._is_over():
                break
            self._racks[seat] = rack
            self._supply[rack] -= 1
            more = alone + sum(
                all(self._racks[member] == rack for member in seats) for seats in self._completed_by[number]
            )
            if more < self._fewest and (self._fewest > 1 or self._may_suffice(number + 1)):
                self._visit(number + 1, more)
            self._supply[rack] += 1
            self._racks[seat] = None

    def _is_over(self) -> bool:
        # Nothing is better than no write set on one rack; and the first pass ends with its steps.
        return self._fewest == 0 or (self._fewest == 1 and self._steps > _STEPS_MAX)

    def _racks_to_try(self) -> Iterator[str]:
        """Return the racks with bookies left, in the order of the draw."""
        left = [rack for rack, count in self._supply.items() if count]

        def next_of(rack: str) -> int:
            bookies = self._by_rack[rack]
            return self._rank[bookies[len(bookies) - self._supply[rack]]]

        yield from sorted(left, key=next_of)

    def _may_suffice(self, number: int) -> bool:
        """Return whether what is left could fill the seats left, with no write set on one rack.

        In n seats in a row, one of each Qw must be on another rack, so a rack fills at most n − n // Qw. That
        is said of new ensembles only: elsewhere, those that stay stand between the seats.
        """
        if len(self._vacant) < len(self._racks):
            return True
        seats = len(self._vacant) - number
        most = seats - seats // self._seating.write_quorum
        return sum(min(count, most) for count in self._supply.values()) >= seats
