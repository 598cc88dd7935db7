"""Finding bookies: for a new ledger's ensemble, and in place of failed ones.

The shell around `client_aio.core.placement`. A bookie counts as found only when it is connected. A dead
bookie whose registration has not expired yet is therefore not put into a ledger's metadata.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from client_aio.bookies.connection import BookieConnection
from client_aio.core.placement import Choice, PlacementPolicy, Seating, eligible
from client_aio.core.quorum import indexes_of
from metadata.errors import BookKeeperError, InvalidArgumentError, MetadataError, NotEnoughBookiesError

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from client_aio.bookies.pool import BookiePool
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)


class EnsembleFinder:
    """Chooses bookies by a placement policy and connects to them."""

    def __init__(self, pool: BookiePool, policy: PlacementPolicy, rng: random.Random) -> None:
        self._pool = pool
        self._policy = policy
        self._rng = rng

    async def find(self, ledger_id: int, *, ensemble_size: int, write_quorum: int) -> tuple[str, ...]:
        """Find the first ensemble of a ledger.

        Raises:
            NotEnoughBookiesError: fewer bookies than seats can be reached, or the policy accepts none.
        """
        ensemble, _ = await self._fill(ledger_id, (None,) * ensemble_size, write_quorum)
        return ensemble

    async def find_next(
        self, metadata: LedgerMetadata, *, excluded: Collection[str] = ()
    ) -> tuple[tuple[str, ...], dict[str, BookieConnection]]:
        """Find an ensemble for a ledger's next fragment, independent of the present one.

        Args:
            metadata: those of the ledger, for its id and its quorums.
            excluded: as in `replace`.

        Returns:
            The ensemble, and the connections to its bookies.

        Raises:
            NotEnoughBookiesError: as `find`.
        """
        seats = (None,) * metadata.ensemble_size
        return await self._fill(metadata.ledger_id, seats, metadata.write_quorum, excluded=excluded)

    async def replace(
        self,
        metadata: LedgerMetadata,
        ensemble: Sequence[str],
        failed: int,
        *,
        excluded: Collection[str] = (),
    ) -> tuple[tuple[str, ...], dict[str, BookieConnection]]:
        """Find bookies for the seats of the mask `failed`. A bookie that came back gets its own seat again.

        Args:
            metadata: those of the ledger, for its id and its write quorum.
            ensemble: the present ensemble, in seat order.
            excluded: bookies that must not be chosen, whatever their state.

        Returns:
            The new ensemble, and the connections to the bookies of the seats in the mask.

        Raises:
            NotEnoughBookiesError: as `find`.
        """
        lost = set(indexes_of(failed))
        seats = tuple(None if index in lost else bookie_id for index, bookie_id in enumerate(ensemble))
        return await self._fill(
            metadata.ledger_id, seats, metadata.write_quorum, former=tuple(ensemble), excluded=excluded
        )

    async def _fill(
        self,
        ledger_id: int,
        seats: tuple[str | None, ...],
        write_quorum: int,
        *,
        former: tuple[str, ...] = (),
        excluded: Collection[str] = (),
    ) -> tuple[tuple[str, ...], dict[str, BookieConnection]]:
        directory = self._pool.directory
        kept = {bookie_id for bookie_id in seats if bookie_id is not None}
        # The bookies that lost these seats may be back: they are chosen if there are too few others.
        lost = [bookie_id for bookie_id in former if bookie_id not in kept]
        unreachable: set[str] = set()
        is_fresh = False
        while True:
            # The bookie that failed longest ago comes first, even if it lost its seat. Otherwise a bookie
            # that fails each time it is chosen would keep a bookie that has recovered from being chosen.
            quarantined = directory.quarantined()
            doubtful = [*(bookie_id for bookie_id in lost if bookie_id not in quarantined), *quarantined]
            count = seats.count(None)
            candidates = eligible(
                directory.available,
                excluded={*kept, *unreachable, *excluded},
                doubtful=doubtful,
                count=count,
            )
            if len(candidates) < count and not is_fresh:
                # A bookie that takes adds again says so in its record, which the watch of the list does not
                # cover.
                is_fresh = True
                with contextlib.suppress(MetadataError):
                    await directory.refresh()
                continue
            if len(candidates) < count:
                needed = "1 bookie is needed" if count == 1 else f"{count} bookies are needed"
                there = f"only {', '.join(sorted(candidates))}" if candidates else "no other one"
                raise NotEnoughBookiesError(
                    f"{needed}{_beside(kept)}, and {there} can be had",
                    ledger_id=ledger_id,
                )
            seating = Seating(seats, write_quorum, candidates, directory.last_known, former)
            choice = self._choose(seating)
            # If one cannot be reached, the policy is asked again: it places the whole row, not single seats.
            found = await self._pool.get_all(choice.bookies)
            connections = {
                bookie_id: outcome
                for bookie_id, outcome in found.items()
                if isinstance(outcome, BookieConnection)
            }
            if len(connections) == count:
                break
            unreachable.update(found.keys() - connections.keys())
        ensemble = seating.filled(choice.bookies)
        if choice.warning:
            logger.warning("ledger=%d ensemble=%s %s", ledger_id, ",".join(ensemble), choice.warning)
        return ensemble, connections

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


def _beside(kept: Collection[str]) -> str:
    return f" beside {', '.join(sorted(kept))}" if kept else ""
