"""Taking an unbounded ledger over: from whoever wrote it, to a writer under a term of one's own.

The shell around `client_aio.core.terms`. Takeovers may run at the same time: each has a term of its own, a
later one shuts an earlier one out wherever they meet, and the last one whose compare-and-set to OPEN happens
writes. One that fails on the way leaves the ledger IN_RECOVERY, to be taken over by anybody.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from client_aio.config import WriteOptions
from client_aio.core.terms import TermOpening, take_over
from client_aio.creating import start_writer
from client_aio.failing import taken_over
from client_aio.recovery import Recovery
from client_aio.unbounded.fragments import HeldFragments
from client_aio.unbounded.writer import UnboundedLedgerWriter
from metadata.errors import InvalidArgumentError, LedgerClosedError, LedgerRecoveryError

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.ledger import LedgerMetadata

logger = logging.getLogger(__name__)


async def take_ledger_over(
    context: ClientContext, ledger_id: int, password: bytes, fragment_bytes: int
) -> UnboundedLedgerWriter:
    """Take a ledger over, and open it for writing; see `UnboundedClient.open_unbounded_ledger`."""
    metadata, version = await context.ledgers.read(ledger_id)
    if not metadata.is_unbounded:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is a bounded one: it has one writer, and is not taken over",
            ledger_id=ledger_id,
        )
    digest = await context.unlock(metadata, password)
    held = HeldFragments(context, metadata, version)
    if not await held.update(take_over):
        raise sealed(held.current)
    known = held.current
    logger.info("ledger=%d taken over under term %d", ledger_id, known.term)
    opening = await _find_end(context, held, digest)
    if not (await held.update(opening.apply) or opening.is_met_by(held.current)):
        raise taken_over(held.current)
    writer = UnboundedLedgerWriter(
        context,
        held.current,
        held.version,
        digest,
        WriteOptions(),
        term=known.term,
        last_entry=opening.last_entry,
        length=opening.length,
        fragment_bytes=fragment_bytes,
    )
    return await start_writer(context, writer)


async def _find_end(context: ClientContext, held: HeldFragments, digest: Digest) -> TermOpening:
    """Fence the last fragment, write back what it holds, and choose bookies for the next one."""
    known = held.current
    recovery = Recovery(context, known, digest)
    try:
        last_entry, length = await recovery.run()
    except LedgerRecoveryError as error:
        await held.refresh()
        if held.current.term != known.term:
            # What could not be decided is decided by somebody else by now.
            raise taken_over(held.current) from error
        raise
    bookies, _ = await context.finder.find_next(known)
    return TermOpening(known, recovery.fragments, last_entry, length, bookies)


def sealed(metadata: LedgerMetadata) -> LedgerClosedError:
    """Build the error of a ledger that takes no more entries."""
    return LedgerClosedError(
        f"ledger {metadata.ledger_id} has been sealed at entry {metadata.last_entry}",
        ledger_id=metadata.ledger_id,
    )
