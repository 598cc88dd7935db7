"""Sealing an unbounded ledger that nobody can take over any more: the way on after a loss.

A takeover fails where bookies of the last fragment are lost for good: one of them may hold the next entry.
The ledger cannot go on behind what can be read, since the next writer would use ids again that an earlier one
had acknowledged: a position would have two values. So it is sealed there, with a record of what was given up
(`client_aio.ledger.accept_loss`). As before every takeover the term is raised first, and the bookies that
answer are fenced under it: a present writer that needs one of them ends.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from client_aio.core.takeover import take_over
from client_aio.ledger.accept_loss import close_with_loss
from client_aio.ledger.recovery import Recovery, check_reach
from client_aio.unbounded.paged_fragments import VersionedFragments
from metadata.access.bookies import SetBacks, not_free_below
from metadata.errors import InvalidArgumentError, LedgerRecoveryError, RecordsLostError
from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)


async def seal_with_loss(
    context: ClientContext, ledger_id: int, digest: Digest
) -> tuple[LedgerMetadata, Version]:
    """Seal an unbounded ledger behind what can be read, where its end cannot be decided.

    Cancelling leaves the ledger as it was, to be taken over, or sealed.

    Raises:
        InvalidArgumentError: the end can be decided, so the ledger can be taken over. Nothing was given up.
        LedgerFencedError: another client has taken the ledger over meanwhile.
        Otherwise as `recover_with_loss`.
    """
    held = VersionedFragments(context, *await context.ledgers.read(ledger_id, sync=True))
    if held.current.is_closed:
        return held.current, held.version
    is_in_reach = await _is_in_reach(context, held.current, digest)
    if is_in_reach and held.current.state is LedgerState.OPEN:
        raise _can_be_taken_over(ledger_id)  # Before its writer is fenced.
    least = not_free_below((await SetBacks.read(context.ledgers.store)).events)
    if await held.update(partial(take_over, least=least)):
        if is_in_reach and await _is_decided(context, held.current, digest):
            raise _can_be_taken_over(ledger_id)
        await close_with_loss(context, held, digest)
    return held.current, held.version


async def _is_in_reach(context: ClientContext, metadata: LedgerMetadata, digest: Digest) -> bool:
    try:
        await check_reach(context, metadata, digest)
    except LedgerRecoveryError as error:
        logger.warning("%s", error)
        return False
    return True


async def _is_decided(context: ClientContext, metadata: LedgerMetadata, digest: Digest) -> bool:
    """Return whether a takeover finds the end; it writes entries back, and leaves the ledger IN_RECOVERY."""
    try:
        await Recovery(context, metadata, digest).run()
    except LedgerRecoveryError as error:
        logger.warning("%s", error)
        return False
    return True


def lost_behind(metadata: LedgerMetadata) -> RecordsLostError:
    """Build the error of reading on behind the end of a ledger that was sealed with a loss."""
    assert metadata.last_entry is not None
    following = metadata.last_entry + 1
    return RecordsLostError(
        f"ledger {metadata.ledger_id} was sealed with a loss: entries from {following} on may be lost",
        ledger_id=metadata.ledger_id,
        entry_id=following,
    )


def _can_be_taken_over(ledger_id: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"ledger {ledger_id} is unbounded, and can be taken over by open_unbounded_ledger: no loss has to be "
        "accepted. close(seal=True) then seals it",
        ledger_id=ledger_id,
    )
