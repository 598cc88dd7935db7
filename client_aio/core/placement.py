"""Choosing the bookies of an ensemble: the interface of a policy, and the default one.

An ensemble is a row of *seats*. Entry n goes to the Qw seats that start at index n mod E (`core.quorum`). All
seats of a new ledger are vacant; in an ensemble change, the seats of failed bookies are vacant. A policy sees
the row and the candidates, and chooses one candidate for each vacant seat. It uses neither clock nor sockets,
and draws only from the random source that it is given.

A policy may take any candidate. It need not check whether a bookie can be reached:
`client_aio.bookies.ensemble_finder` asks again without unreachable bookies. It need not check whether a
bookie failed lately: `eligible` offers bookies in quarantine only if there are too few others.

Where fewer bookies than seats can be reached, some seats are left to bookies that are down (rule 9). A policy
then sees these as seats that stay. `seats_to_leave` chooses them: each write set keeps Qa bookies that can
be reached.

`WeightedRandom` is the default policy. It draws in proportion to weight and free space (`shares`). A bookie
whose disks are nearly full comes last: it gets no new ledger before it is read-only, if there are others.

`RackAware` places ensembles so that the failure of one rack does not lose all copies of an entry. A rack is a
label that a bookie announces (`bookie serve --rack`), for bookies that fail together: a rack, a room or a
zone. Each write set, Qw neighbouring seats around the end of the ensemble, should span at least two racks.
Bookies without a label count as one rack, since they may stand together.

The search of `RackAware` tries racks seat by seat, depth first, in the order of a random draw by weight. So
the weights decide wherever the racks leave a choice. A first pass abandons a branch at the first write set on
one rack. If it finds nothing, a second pass looks for the fewest such write sets. Both stop after a number of
steps that no ensemble of up to seven seats needs. The first pass may then have missed a solution; the warning
of the choice is computed from the result itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from client_aio.core.quorum import can_acknowledge, write_set

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from metadata.access.bookies import BookieRecord

FREE_SHARE_MIN = 0.05
"""The least share of a bookie with little free space, compared with the bookie that has the most."""
_STEPS_MAX = 10_000
_STEPS_OF_SEATS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Seating:
    """An ensemble with vacant seats, as a policy sees it.

    Attributes:
        seats: the bookies that stay, in seat order; None for a vacant seat. Bookies that are down may be
            among them, also in a new ledger.
        write_quorum: how many neighbouring seats (around the end) keep one entry.
        candidates: the bookies that may be chosen, by id; at least as many as there are vacant seats.
        records: the last known registrations of the bookies that stay; some may be missing.
        former: the former ensemble; empty for a new ledger. A bookie that is given back its own seat costs
            least.
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
        """Return a bookie's rack label; "" for none, and for a bookie that was never registered."""
        record = self.candidates.get(bookie_id) or self.records.get(bookie_id)
        return record.rack if record else ""


class Choice(NamedTuple):
    """The choice of a policy.

    Attributes:
        bookies: distinct candidates, one for each vacant seat, in ascending order of the seats.
        warning: for the log, the goal that the choice misses; "" for none.
    """

    bookies: Sequence[str]
    warning: str = ""


class PlacementPolicy(Protocol):
    """An extension point: a user's policy is passed to `connect(..., placement=...)`."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose a bookie for each vacant seat.

        The client calls it on its event loop for each new ensemble and each ensemble change. It must be
        quick, and draw only from `rng`.

        Raises:
            NotEnoughBookiesError: the policy accepts none of the candidates. A ledger is then not created. A
                writer goes on without a replacement as long as Qa bookies answer, and retries later (rule 9).
        """


class WeightedRandom:
    """Draws bookies at random by the weight they announce, without replacement: the default."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose as `PlacementPolicy.choose` says. Bookies of weight 0 come last."""
        drawn = weighted_order(seating.candidates, rng)[: len(seating.vacant)]
        return Choice(back_in_own_seats(seating, drawn))


def shares(candidates: Mapping[str, BookieRecord]) -> dict[str, float]:
    """Return the weight of each candidate in a draw: its own weight, times its share of free space.

    The bookie with the most free space has the share 1. The others' shares are in proportion, and at least
    `FREE_SHARE_MIN`: a new, empty bookie does not get every new ledger. A bookie that announces no free space
    has the share 1.
    """
    most = max((record.free_bytes or 0 for record in candidates.values()), default=0)
    return {
        bookie_id: record.weight
        * (1.0 if record.free_bytes is None or not most else max(record.free_bytes / most, FREE_SHARE_MIN))
        for bookie_id, record in candidates.items()
    }


def weighted_order(candidates: Mapping[str, BookieRecord], rng: random.Random) -> list[str]:
    """Return the candidates in a random order in which a heavier one tends to come earlier.

    Any prefix of it is a draw by weight without replacement (`shares`). Candidates of weight 0 come behind
    the others, and bookies whose disks are nearly full last: those should not be read-only soon.
    """
    weights = shares(candidates)

    # Exponential draws with the weights as rates, in ascending order (Efraimidis and Spirakis, 2006).
    def key(bookie_id: str) -> tuple[bool, bool, float]:
        weight = weights[bookie_id]
        draw = rng.expovariate(weight if weight > 0 else 1.0)
        return (candidates[bookie_id].is_tight, weight <= 0, draw)

    keys = {bookie_id: key(bookie_id) for bookie_id in sorted(candidates)}
    return sorted(keys, key=keys.__getitem__)


def back_in_own_seats(seating: Seating, chosen: Sequence[str]) -> list[str]:
    """Reorder a choice so that each chosen bookie that sat in a vacant seat before sits there again."""
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
    """Return the writable bookies that may be chosen for `count` seats; fewer if there are no more.

    Args:
        excluded: never returned.
        doubtful: returned only as far as there are too few others, in this order.
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


def seats_to_leave(
    vacant: Sequence[int],
    count: int,
    *,
    ensemble_size: int,
    write_quorum: int,
    ack_quorum: int,
    rng: random.Random,
) -> int | None:
    """Choose vacant seats that get no bookie that can be reached, so that every write set keeps Qa others.

    The search begins at a random seat, and is exact for ensembles of usual size.

    Returns:
        The mask of `count` of the vacant seats; None where some write set would keep fewer than Qa bookies.
    """
    turn = rng.randrange(len(vacant)) if vacant else 0
    order = [*vacant[turn:], *vacant[:turn]]
    steps = 0

    def leave(start: int, mask: int, left: int) -> int | None:
        nonlocal steps
        if left == 0:
            return mask
        for at in range(start, len(order) - left + 1):
            steps += 1
            if steps > _STEPS_OF_SEATS_MAX:
                return None
            more = mask | 1 << order[at]
            if can_acknowledge(more, ensemble_size, write_quorum, ack_quorum):
                found = leave(at + 1, more, left - 1)
                if found is not None:
                    return found
        return None

    return leave(0, 0, count)


class RackAware:
    """Draws bookies by weight so that each write set spans at least two racks, if the candidates allow it.

    If they do not, as few write sets as possible are on one rack, and the choice carries a warning.
    """

    spans_racks = True
    """Auto recovery with this policy also spreads write sets that have come to be on one rack."""

    def choose(self, seating: Seating, rng: random.Random) -> Choice:
        """Choose as `PlacementPolicy.choose` says."""
        order = weighted_order(seating.candidates, rng)
        chosen = order[: len(seating.vacant)]
        if seating.write_quorum > 1:  # a write set of one bookie is always on one rack
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


def spread(
    ensemble: Sequence[str], write_quorum: int, racks: Mapping[str, str], candidates: Collection[str]
) -> tuple[int, str] | None:
    """Return the exchange of one bookie after which the fewest write sets are on one rack.

    Args:
        racks: the rack of each bookie that runs. An ensemble with another bookie is left as it is.
        candidates: the bookies that may be chosen, all of them running.

    Returns:
        The seat and its new bookie; None where no exchange of one bookie helps.
    """
    if write_quorum < 2 or any(name not in racks for name in ensemble):
        return None
    labels = [racks[name] for name in ensemble]
    fewest = len(write_sets_on_one_rack(labels, write_quorum))
    if not fewest:
        return None
    offered: dict[str, str] = {}  # one bookie of each rack
    for name in sorted(candidates):
        if name not in ensemble:
            offered.setdefault(racks[name], name)
    found = None
    for seat in range(len(ensemble)):
        for rack, name in offered.items():
            changed = [*labels[:seat], rack, *labels[seat + 1 :]]
            count = len(write_sets_on_one_rack(changed, write_quorum))
            if count < fewest:
                fewest, found = count, (seat, name)
    return found


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
        """Return a bookie for each vacant seat, with the fewest write sets on one rack that were found."""
        for fewest in (1, len(self._seating.seats) + 1):  # a result counts if it has fewer
            self._steps, self._fewest = 0, fewest
            self._visit(0, 0)
            if self._found is not None:
                break
        racks = self._found
        assert racks is not None
        following = {rack: iter(bookies) for rack, bookies in self._by_rack.items()}
        return [next(following[rack]) for rack in racks]

    def _write_sets_by_last_seat(self) -> list[list[tuple[int, ...]]]:
        """Return, for each vacant seat, the write sets of which it is the last seat to be filled."""
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
        # No result is better than no write set on one rack. The first pass also ends at its limit of steps.
        return self._fewest == 0 or (self._fewest == 1 and self._steps > _STEPS_MAX)

    def _racks_to_try(self) -> Iterator[str]:
        """Return the racks with bookies left, in the order of the draw."""
        left = [rack for rack, count in self._supply.items() if count]

        def next_of(rack: str) -> int:
            bookies = self._by_rack[rack]
            return self._rank[bookies[len(bookies) - self._supply[rack]]]

        yield from sorted(left, key=next_of)

    def _may_suffice(self, number: int) -> bool:
        """Return whether the remaining bookies could fill the remaining seats with no write set on one rack.

        Of n seats in a row, one of each Qw must be on another rack. So a rack fills at most n − n // Qw of
        them. This holds for new ensembles only: otherwise bookies that stay sit between the vacant seats.
        """
        if len(self._vacant) < len(self._racks):
            return True
        seats = len(self._vacant) - number
        most = seats - seats // self._seating.write_quorum
        return sum(min(count, most) for count in self._supply.values()) >= seats
