"""Finding bookies: for a new ledger's ensemble, and in place of failed ones.

The shell around `client_aio.core.placement`. A bookie counts as found only when it is connected. A dead
bookie whose registration has not expired yet is therefore no candidate.

Where fewer bookies than seats are found, seats are left to bookies that are down (rule 9). Every write set
keeps Qa bookies that were found. A new ensemble names bookies that have a cookie. An ensemble change
leaves such seats as they are. The caller treats these seats as failed from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from client_aio.bookies.connection import BookieConnection
from client_aio.bookies.pool import RECENT_S
from client_aio.core.placement import Choice, PlacementPolicy, Seating, eligible, seats_to_leave
from client_aio.core.quorum import can_acknowledge, indexes_of
from metadata.awake import awake_wait
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    InvalidArgumentError,
    MetadataError,
    NotEnoughBookiesError,
)
from metadata.owned_task import failure_of

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from client_aio.bookies.pool import BookiePool
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)

_GRACE_S = 0.3
"""How long a bookie may let the others wait that suffice without it."""
_DRAWS = 8
"""How often seats are drawn for bookies that are down, while the policy warns of the result."""


class Sizes(NamedTuple):
    """The sizes of a ledger's ensembles, and whether each entry must reach its whole write set."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    is_guaranteed: bool = False

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Sizes:
        """Return those of a ledger."""
        return cls(
            metadata.ensemble_size,
            metadata.write_quorum,
            metadata.ack_quorum,
            metadata.guaranteed_write_quorum,
        )


class Found(NamedTuple):
    """An ensemble, and what is known of the bookies of the seats that were vacant.

    Attributes:
        bookies: the ensemble, in seat order.
        filled: the mask of the seats whose bookies were found.
        connections: of the bookies of the vacant seats. A bookie that is down has an error.
    """

    bookies: tuple[str, ...]
    filled: int
    connections: dict[str, BookieConnection | BookKeeperError]


class _Vacancy(NamedTuple):
    """The seats to fill.

    Attributes:
        seats: the bookies that stay, None for a vacant seat.
        former: the former ensemble; empty for a new one.
        excluded: bookies that must not be chosen.
        may_leave: whether seats may be left to bookies that are down.
    """

    ledger_id: int
    seats: tuple[str | None, ...]
    sizes: Sizes
    former: tuple[str, ...]
    excluded: Collection[str]
    may_leave: bool

    @property
    def goes_on_without(self) -> bool:
        """Return whether a writer goes on while these seats are vacant: it looks again a moment later.

        It must not wait for a bookie that hangs: meanwhile it would replace no other bookie, nor roll.
        """
        vacant = sum(1 << index for index, name in enumerate(self.seats) if name is None)
        return bool(self.former) and self.leaves_enough(vacant)

    def leaves_enough(self, left: int) -> bool:
        """Return whether every write set keeps Qa bookies without the seats of a mask."""
        return self.may_leave and can_acknowledge(left, *self.sizes[:3])


class EnsembleFinder:
    """Chooses bookies by a placement policy and connects to them."""

    def __init__(self, pool: BookiePool, policy: PlacementPolicy, rng: random.Random) -> None:
        self._pool = pool
        self._policy = policy
        self._rng = rng
        self._left_out: tuple[str, ...] = ()  # the bookies of the last warning

    @property
    def spans_racks(self) -> bool:
        """Return whether the policy has write sets span racks."""
        return bool(getattr(self._policy, "spans_racks", False))

    async def find(self, ledger_id: int, sizes: Sizes, *, excluded: Collection[str] = ()) -> Found:
        """Find the ensemble of a new ledger or of a next fragment, independent of a present one.

        Args:
            excluded: as in `replace`.

        Raises:
            NotEnoughBookiesError: some write set would have fewer than Qa bookies that can be reached, or
                the policy accepts none. With guaranteed write quorum every seat needs such a bookie.
        """
        seats = (None,) * sizes.ensemble_size
        may_leave = not sizes.is_guaranteed
        return await self._fill(_Vacancy(ledger_id, seats, sizes, (), excluded, may_leave))

    async def replace(
        self,
        metadata: LedgerMetadata,
        ensemble: Sequence[str],
        failed: int,
        *,
        excluded: Collection[str] = (),
        may_leave: bool = False,
    ) -> Found:
        """Find bookies for the seats of the mask `failed`. A bookie that came back gets its own seat again.

        Args:
            metadata: those of the ledger, for its id and its quorums.
            ensemble: the present ensemble, in seat order.
            excluded: bookies that must not be chosen, whatever their state.
            may_leave: whether some of the seats may stay with their failed bookies. Never with guaranteed
                write quorum.

        Raises:
            NotEnoughBookiesError: no bookie was found, or too few.
        """
        lost = set(indexes_of(failed))
        seats = tuple(None if index in lost else bookie_id for index, bookie_id in enumerate(ensemble))
        may_leave = may_leave and not metadata.guaranteed_write_quorum
        return await self._fill(
            _Vacancy(metadata.ledger_id, seats, Sizes.of(metadata), tuple(ensemble), excluded, may_leave)
        )

    async def _fill(self, vacancy: _Vacancy) -> Found:
        directory, seats = self._pool.directory, vacancy.seats
        began = asyncio.get_running_loop().time()
        directory.refresh_soon()
        kept = {bookie_id for bookie_id in seats if bookie_id is not None}
        # The bookies that lost these seats may be back: they are chosen if there are too few others.
        lost = [bookie_id for bookie_id in vacancy.former if bookie_id not in kept]
        unreachable: set[str] = set()
        slow: set[str] = set()
        is_fresh = False
        while True:
            # The bookie that failed longest ago comes first, even if it lost its seat. Otherwise a bookie
            # that fails each time it is chosen would keep a bookie that has recovered from being chosen.
            quarantined = self._pool.doubtful()
            doubtful = [*(bookie_id for bookie_id in lost if bookie_id not in quarantined), *quarantined]
            count = seats.count(None)
            candidates = eligible(
                directory.available,
                excluded={*kept, *unreachable, *slow, *vacancy.excluded},
                doubtful=doubtful,
                count=count,
            )
            if len(candidates) < count and not is_fresh:
                # A bookie that takes adds again says so in its record, which the watch of the list does not
                # cover. Who fails at once goes by nothing older than its call.
                is_fresh = True
                with contextlib.suppress(MetadataError):
                    await directory.refresh_since(began - RECENT_S if vacancy.goes_on_without else began)
                continue
            seatings = [
                Seating(seats, vacancy.sizes.write_quorum, candidates, directory.last_known, vacancy.former)
            ]
            if len(candidates) < count:
                seatings = await self._with_seats_left(seatings[0], vacancy, slow)
            if not seatings and slow and not vacancy.goes_on_without:
                found = await self._pool.get_all_unless_changed(sorted(slow))
                if found is None:
                    unreachable.clear()  # One of these may be back, and do instead.
                else:
                    unreachable.update(name for name in slow if not isinstance(found[name], BookieConnection))
                slow.clear()
                continue
            if not seatings:
                raise _not_enough(vacancy, count, kept, candidates)
            seating, choice = self._choose_best(seatings)
            # If one cannot be reached, the policy is asked again: it places the whole row, not single seats.
            outcomes = await self._connect(vacancy, seating, choice)
            for bookie_id in choice.bookies:
                if not isinstance(outcomes.get(bookie_id), BookieConnection):
                    (unreachable if bookie_id in outcomes else slow).add(bookie_id)
            if not (unreachable | slow).intersection(choice.bookies):
                return self._found(vacancy, seating, choice, outcomes)

    async def _with_seats_left(self, seating: Seating, vacancy: _Vacancy, slow: set[str]) -> list[Seating]:
        """Return seatings in which bookies that are down have seats; none where too few bookies are left.

        Args:
            slow: bookies that have not answered yet; they come first.
        """
        vacant, candidates = seating.vacant, seating.candidates
        left_over = len(vacant) - len(candidates)
        if not vacancy.may_leave or not candidates:
            return []
        down: list[str] = []
        if vacancy.former:
            # A bookie that is back gets its own seat, so that it does not have two.
            vacant = tuple(index for index in vacant if vacancy.former[index] not in candidates)
        else:
            directory = self._pool.directory
            known = set(await directory.registered()) - candidates.keys() - {*vacancy.excluded}
            known.difference_update(directory.orders.leaving)  # They do not come back.
            down = sorted(known, key=lambda name: (name not in slow, name not in seating.records, name))
            if len(down) < left_over:
                return []
        found: dict[tuple[str | None, ...], Seating] = {}
        size, write_quorum, ack_quorum, _ = vacancy.sizes
        for _ in range(_DRAWS):
            left = seats_to_leave(
                vacant,
                left_over,
                ensemble_size=size,
                write_quorum=write_quorum,
                ack_quorum=ack_quorum,
                rng=self._rng,
            )
            if left is None:
                break
            row, places = list(seating.seats), indexes_of(left)
            names = [vacancy.former[index] for index in places] if vacancy.former else down
            for name, index in zip(names, places, strict=False):
                row[index] = name
            found[tuple(row)] = Seating(tuple(row), write_quorum, candidates, seating.records, vacancy.former)
        return list(found.values())

    def _choose_best(self, seatings: Sequence[Seating]) -> tuple[Seating, Choice]:
        """Return the first seating of which the policy does not warn; else the first."""
        choices: list[tuple[Seating, Choice]] = []
        for seating in seatings:
            choice = self._choose(seating)
            if not choice.warning:
                return seating, choice
            choices.append((seating, choice))
        return choices[0]

    async def _connect(
        self, vacancy: _Vacancy, seating: Seating, choice: Choice
    ) -> dict[str, BookieConnection | BookKeeperError]:
        """Connect to the chosen bookies; leave out those that let the others wait for too long.

        A bookie that hangs delays this by the whole connect timeout only if it is needed.
        """
        seat_of = dict(zip(choice.bookies, seating.vacant, strict=True))
        tasks = {asyncio.ensure_future(self._pool.get(name)): name for name in choice.bookies}
        not_kept = sum(1 << index for index, name in enumerate(vacancy.seats) if name is None)
        outcomes: dict[str, BookieConnection | BookKeeperError] = {}
        waiting = set(tasks)
        try:
            while waiting:
                left = not_kept
                for name, outcome in outcomes.items():
                    if isinstance(outcome, BookieConnection):
                        left &= ~(1 << seat_of[name])
                grace_s = _GRACE_S if vacancy.leaves_enough(left) else None
                done, waiting = await awake_wait(waiting, grace_s)
                if not done:
                    break
                for task in done:
                    error = failure_of(task, tasks[task])
                    if error is not None and not isinstance(error, BookKeeperError):
                        raise error
                    outcomes[tasks[task]] = task.result() if error is None else error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return outcomes

    def _found(
        self,
        vacancy: _Vacancy,
        seating: Seating,
        choice: Choice,
        outcomes: dict[str, BookieConnection | BookKeeperError],
    ) -> Found:
        ensemble = seating.filled(choice.bookies)
        if choice.warning:
            self._pool.directory.reports.warn(
                logger, ("placement", choice.warning), "ledger=%d ensemble=%s %s",
                vacancy.ledger_id, ",".join(ensemble), choice.warning,
            )  # fmt: skip
        filled = sum(1 << index for index in seating.vacant)
        left = tuple(
            name
            for index, name in enumerate(ensemble)
            if vacancy.seats[index] is None and not filled >> index & 1
        )
        for name in left:
            outcomes[name] = BookieUnavailableError(
                f"bookie {name} is down, or takes no adds", bookie_id=name
            )
        if not vacancy.former:
            self._note_left_out(vacancy.ledger_id, ensemble, left)
        return Found(ensemble, filled, outcomes)

    def _note_left_out(self, ledger_id: int, ensemble: tuple[str, ...], left: tuple[str, ...]) -> None:
        """Warn once for each set of bookies that new ensembles have to do without."""
        names = tuple(sorted(left))
        if names and names != self._left_out:
            logger.warning(
                "ledger=%d ensemble=%s begins without %s, down or read-only: its entries lack the copies "
                "there until `ledger repair` has made them",
                ledger_id, ",".join(ensemble), ", ".join(names),
            )  # fmt: skip
        self._left_out = names

    def _choose(self, seating: Seating) -> Choice:
        name = type(self._policy).__name__
        try:
            choice = self._policy.choose(seating, self._rng)
            chosen = set(choice.bookies)
        except BookKeeperError:
            raise
        except Exception as error:
            # User code: its failure must end this operation, and not the task of the ensemble changes.
            raise InvalidArgumentError(f"the placement policy {name} failed: {error!r}") from error
        if len(chosen) != len(choice.bookies) or len(chosen) != len(seating.vacant):
            raise InvalidArgumentError(
                f"the placement policy {name} chose {list(choice.bookies)} for {len(seating.vacant)} seats"
            )
        if not chosen <= seating.candidates.keys():
            raise InvalidArgumentError(
                f"the placement policy {name} chose {sorted(chosen - seating.candidates.keys())}, "
                f"which are not among the candidates {sorted(seating.candidates)}"
            )
        return choice


def _not_enough(
    vacancy: _Vacancy, count: int, kept: Collection[str], candidates: Collection[str]
) -> NotEnoughBookiesError:
    needed = "1 bookie is needed" if count == 1 else f"{count} bookies are needed"
    there = f"only {', '.join(sorted(candidates))}" if candidates else "no other one"
    why = ""
    if vacancy.sizes.is_guaranteed:
        why = ". With guaranteed write quorum no seat may be left to a bookie that is down"
    elif vacancy.may_leave and not vacancy.former:
        why = (
            f". Each write set needs {vacancy.sizes.ack_quorum} that can be reached, and E must be registered"
        )
    return NotEnoughBookiesError(
        f"{needed}{_beside(kept)}, and {there} can be had{why}", ledger_id=vacancy.ledger_id
    )


def _beside(kept: Collection[str]) -> str:
    return f" beside {', '.join(sorted(kept))}" if kept else ""
