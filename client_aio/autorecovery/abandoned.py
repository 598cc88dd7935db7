"""Finding the ledgers that are left by their writer or their recovery, and ending them (rule 12).

The shell around `client_aio.core.abandonment`, which says when a ledger counts as abandoned. An auditor finds
them, and a worker ends them. A ledger with a password is only reported: to fence it takes the password.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from client_aio.bookies.connection import list_entries
from client_aio.core.abandonment import Sight, Standing, may_be_left
from client_aio.core.audit import good_copies
from client_aio.core.digest import Digest
from client_aio.core.healing import OwnTerms
from client_aio.ledger.recovery import recover_ledger
from client_aio.unbounded.paged_fragments import VersionedFragments
from client_aio.unbounded.writer import open_term
from metadata.errors import BookKeeperError, LedgerRecoveryError, MetadataCorruptError, NoSuchLedgerError
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY
from metadata.model.ledger import LedgerState
from metadata.owned_task import for_each

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from client_aio.context import ClientContext
    from metadata.model.ledger import Fragment, LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)


def _usable(context: ClientContext) -> list[str]:
    return [name for name, one in context.pool.directory.available.items() if one.is_writable]


class AbandonedLedgers:
    """The ledgers that may be abandoned, as one auditor has seen them."""

    def __init__(self, context: ClientContext, grace_s: float, looks_at_once: int) -> None:
        self._context = context
        self._looks_at_once = looks_at_once
        self._standing = Standing(grace_s)

    async def look(self, candidates: Iterable[int], lost: Collection[str], count: int) -> dict[int, int]:
        """Look at ledgers; return those that are abandoned, with the good copies of their last fragments.

        Args:
            candidates: ledgers that are in recovery, or name a lost bookie in their last fragment.
            lost: the bookies that are lost.
            count: so many are looked at, at most.

        Raises:
            MetadataUnavailableError: the store does not answer.
        """
        now = asyncio.get_running_loop().time()
        gone = set(lost).difference(self._context.pool.directory.available)
        found: dict[int, int] = {}

        async def look(ledger_id: int) -> None:
            sight, copies = await self._see(ledger_id, gone)
            if self._standing.note(ledger_id, sight, now):
                found[ledger_id] = copies

        await for_each(self._standing.due(candidates, now, count), look, self._looks_at_once)
        return found

    async def _see(self, ledger_id: int, gone: set[str]) -> tuple[Sight | None, int]:
        try:
            metadata, _ = await self._context.ledgers.read(ledger_id, sync=True)
        except (NoSuchLedgerError, MetadataCorruptError):
            return None, 0
        fragment, last_listed = metadata.last_fragment, NO_ENTRY
        if metadata.is_closed:
            return None, 0
        if metadata.state is LedgerState.OPEN:
            if not may_be_left(fragment.bookies, gone, _usable(self._context)):
                return None, 0
            last_listed = await self._last_listed(metadata, fragment, gone)
            if last_listed < fragment.first_entry:
                return None, 0
        sight = Sight(metadata.state, metadata.term, fragment, last_listed)
        return sight, good_copies(fragment.bookies, metadata.write_quorum, gone)

    async def _last_listed(self, metadata: LedgerMetadata, fragment: Fragment, gone: set[str]) -> int:
        """Return the last entry that a fragment's bookies list; −1 for none, or where one does not answer."""
        last, timeout_s = NO_ENTRY, self._context.config.read_timeout_s
        for bookie_id in dict.fromkeys(fragment.bookies):
            if bookie_id in gone:
                continue
            try:
                connection = await self._context.pool.get_briefly(bookie_id)
                rows, _ = await list_entries(
                    connection, metadata.ledger_id, fragment.first_entry, ENTRY_ID_MAX, timeout_s
                )
            except BookKeeperError:
                return NO_ENTRY
            held = [row.entry_ids[-1] for row in rows if row.content_term >= fragment.content_term]
            last = max(last, *held) if held else last
        return last


async def end_abandoned(context: ClientContext, ledger_id: int, lost: Collection[str]) -> None:
    """Close an abandoned ledger, or take it over if it is unbounded. Does nothing if its writer has moved.

    Args:
        lost: the bookies that an auditor holds for lost now.

    Raises:
        NoSuchLedgerError: it was deleted.
        LedgerRecoveryError: it has a password, or too few bookies answer.
        BookKeeperError: another failure of bookies, or of the metadata store.
    """
    metadata, version = await context.ledgers.read(ledger_id, sync=True)
    fragment = metadata.last_fragment
    gone = set(lost).difference(context.pool.directory.available)
    is_open = metadata.state is LedgerState.OPEN
    if metadata.is_closed or (is_open and not may_be_left(fragment.bookies, gone, _usable(context))):
        return
    if metadata.password is not None:
        raise LedgerRecoveryError(
            "it is abandoned, and has a password: close it by `ledger recover`, or take it over",
            ledger_id=ledger_id,
        )
    logger.warning(
        "ledger=%d is %s and abandoned: it is closed, or taken over", ledger_id, metadata.state.value
    )
    await close_or_take_over(context, metadata, version, fragment)


async def close_or_take_over(
    context: ClientContext, metadata: LedgerMetadata, version: Version, fragment: Fragment
) -> bool:
    """Close a ledger, or take it over if it is unbounded, while its last fragment is this one.

    Returns:
        Whether that was done.
    """
    ledger_id = metadata.ledger_id
    if not metadata.is_unbounded:
        found, _ = await recover_ledger(context, ledger_id, Digest(ledger_id), only=fragment)
        return found.is_closed
    if metadata.last_fragment != fragment:
        return False
    held = VersionedFragments(context, metadata, version)
    # Only from this term: a writer that has taken the ledger over meanwhile keeps it.
    await open_term(context, held, Digest(ledger_id), OwnTerms(metadata.term))
    return True
