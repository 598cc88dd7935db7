"""A ledger's metadata as one client knows them, and changes to them by compare-and-set.

The shell around `client_aio.core.ensemble_change.MetadataUpdate`: it makes the attempts, draws tokens, and
retries while the store is unavailable. Owns the metadata and version last known, which change only here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from client_aio.core.ensemble_change import Apply, Attempt, MetadataUpdate
from client_aio.core.repair_plan import replaced
from metadata.awake import Deadline
from metadata.errors import MetadataUnavailableError, VersionConflictError
from metadata.write_outcome import is_overwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.repair_plan import Part
    from metadata.model.ledger import Absent, Fragment, LedgerMetadata
    from metadata.store import Guard, Version

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


def bookies_of(fragments: Iterable[Fragment], first_entry: int) -> tuple[str, ...] | None:
    """Return the bookies of the fragment that begins at an entry; None for no such fragment."""
    return next((each.bookies for each in fragments if each.first_entry == first_entry), None)


class VersionedLedgerMetadata:
    """The metadata of one ledger, with their version. Updates must not run concurrently."""

    def __init__(self, context: ClientContext, metadata: LedgerMetadata, version: Version) -> None:
        self._context = context
        self.current = metadata
        self.version = version

    async def update(self, apply: Apply, guard: Guard | None = None) -> bool:
        """Apply a change, until its outcome is definite (rule 10).

        Cancelling leaves the outcome unknown.

        Args:
            guard: another key of the store; the change happens only while it is at that version.

        Returns:
            True if the change has happened. False if `apply` returned None for the metadata that are there
            now; `current` is then those metadata.

        Raises:
            MetadataUnavailableError: no definite outcome within `ensemble_change_timeout_s`.
            NoSuchLedgerError: the ledger has been deleted.
            GuardChangedError: the guard's key has changed, and the change never happens.
        """
        with Deadline(self._context.config.ensemble_change_timeout_s) as deadline:
            return await self._update(apply, guard, deadline)

    async def update_with(
        self, first_entry: int, apply: Callable[[LedgerMetadata, Sequence[str]], LedgerMetadata | None]
    ) -> bool:
        """Apply a change that depends on the bookies of a fragment; see `update`.

        Args:
            first_entry: of the fragment. The change is refused where there is none (any more).
        """

        def applied(now: LedgerMetadata) -> LedgerMetadata | None:
            bookies = bookies_of(now.fragments, first_entry)
            return None if bookies is None else apply(now, bookies)

        return await self.update(applied)

    async def replace_bookie(
        self, part: Part, old: str, new: str, absent: Absent | None = None, guard: Guard | None = None
    ) -> bool:
        """Put a bookie in another's place in one fragment (repair, rule 14); see `update`.

        Args:
            absent: a record to add with it.
            guard: as of `update`.

        Returns:
            False where the fragment differs from the plan: it was trimmed, or repaired by another client.
        """
        return await self.update(lambda now: replaced(now, part, old, new, absent), guard)

    async def _update(self, apply: Apply, guard: Guard | None, deadline: Deadline) -> bool:
        ledgers = self._context.ledgers
        update = MetadataUpdate(self.current, self.version, apply)
        attempt: Attempt | None = None
        token = ""
        while not update.is_refused:
            # Rule 10: all retries of an attempt have one token, by which the store knows a try that took
            # effect.
            if attempt is None or attempt.number != update.attempt().number:
                token = self._context.draw_token()
            attempt = update.attempt()
            try:
                version = await ledgers.compare_and_set(
                    attempt.metadata, attempt.version, token=token, guard=guard
                )
            except VersionConflictError:
                update.conflicted(*await self._read(deadline))
            except MetadataUnavailableError as error:
                # Unknown: the request may still take effect. The same one is retried until that is settled.
                await self._pause(deadline, error)
                found, now = await self._read(deadline)
                if is_overwritten(attempt.version, now):  # perhaps before the attempt was sent
                    update.conflicted(found, now)
            else:
                update.written(version)
                self.current, self.version = update.metadata, update.version
                return True
        self.current, self.version = update.metadata, update.version
        return False

    async def _read(self, deadline: Deadline) -> tuple[LedgerMetadata, Version]:
        while True:
            try:
                return await self._context.ledgers.read(self.current.ledger_id)
            except MetadataUnavailableError as error:
                await self._pause(deadline, error)

    async def _pause(self, deadline: Deadline, error: MetadataUnavailableError) -> None:
        if deadline.is_over:
            raise error
        ledger_id, what = self.current.ledger_id, "ledger=%d metadata not reachable, trying again: %s"
        self._context.reports.warn(logger, ("metadata", ledger_id), what, ledger_id, error)
        await asyncio.sleep(_RETRY_S)
