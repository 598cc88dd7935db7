"""Whether a writer still has its ledger, where the metadata store was set back to an older copy.

Rule 10 lets the metadata decide between a writer and a recovery. An older copy has a ledger OPEN that a
recovery has closed since. Its writer, which knows nothing of that, may replace bookies that were fenced, and
have entries acknowledged behind the end. Or it closes the ledger at another end. The fenced bookies still
know. So while an event of a set-back covers a ledger (rule 15), its writer asks them before it changes its
metadata. It goes on when so many say "not fenced" that the others are too few for a fence (rule 12b).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import ReadLac
from client_aio.core.quorum import covers_all_write_sets
from client_aio.ledger.futures import fenced_by_term
from client_aio.ledger.recovery_scope import ask_lac, events_of, recovery_scope
from metadata.awake import Deadline
from metadata.errors import (
    BookKeeperError,
    LedgerFencedError,
    MetadataUnavailableError,
    NotEnoughBookiesError,
)
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


async def check_standing(context: ClientContext, metadata: LedgerMetadata, digest: Digest, term: int) -> None:
    """Return once it is known that no recovery has fenced the ledger of a writer of before.

    Where no event of a set-back covers the ledger, this reads the events only. Cancelling changes nothing.

    Args:
        metadata: as the writer last wrote them.
        term: the writer's.

    Raises:
        LedgerFencedError: a bookie refuses the term.
        NotEnoughBookiesError: within `ensemble_change_timeout_s` too few bookies of the last fragment said
            that they are not fenced.
        MetadataUnavailableError: the metadata store did not answer in time.
    """
    ledger_id, config = metadata.ledger_id, context.config
    key, what = ("standing", ledger_id), "ledger=%d waits, since a recovery may have fenced it: %s"
    with Deadline(config.ensemble_change_timeout_s) as deadline:
        while True:
            try:
                doubts = await _doubts(context, metadata, digest, term, deadline)
            except MetadataUnavailableError as error:
                if deadline.is_over:
                    raise
                doubts = str(error)
            if not doubts:
                return
            if deadline.is_over:
                raise NotEnoughBookiesError(
                    f"the metadata store was set back, so a recovery may have closed ledger {ledger_id}, and "
                    f"too few of its bookies say that none has: {doubts}. Bring them back, and recover the "
                    "ledger",
                    ledger_id=ledger_id,
                )
            context.reports.warn(logger, key, what, ledger_id, doubts)
            await asyncio.sleep(_RETRY_S)


async def _doubts(
    context: ClientContext, metadata: LedgerMetadata, digest: Digest, term: int, deadline: Deadline
) -> str:
    """Ask the bookies of the last fragment once; return why too few count, and nothing where enough do."""
    # An unbounded ledger that was taken over since has a term of then.
    if all(term >= one.raised_to for one in await events_of(context.ledgers.store, metadata.ledger_id)):
        return ""
    scope, bookies = await recovery_scope(context, metadata), metadata.last_fragment.bookies
    sizes = (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    request = ReadLac(metadata.ledger_id, term, NO_ENTRY, 0)
    seats = {
        asyncio.ensure_future(ask_lac(context, digest, name, request)): seat
        for seat, name in enumerate(bookies)
    }
    waiting, unknown = set(seats), (1 << len(bookies)) - 1
    errors = dict.fromkeys(bookies, "it gives no answer")
    try:
        while waiting:
            done, waiting = await deadline.wait(waiting)
            if not done:
                break
            for task in done:
                name = bookies[seats[task]]
                try:
                    is_doubted = task.result().is_damaged or name in scope.unjudged
                except LedgerFencedError as error:
                    raise fenced_by_term(metadata.ledger_id, error) from None
                except BookKeeperError as error:
                    errors[name] = str(error)
                    continue
                if is_doubted:  # its fence may be among what it lost
                    errors[name] = "it lost data of the ledger"
                else:
                    unknown &= ~(1 << seats[task])
            if not covers_all_write_sets(unknown, *sizes):
                return ""
    finally:
        for task in seats:
            task.cancel()
        await asyncio.gather(*seats, return_exceptions=True)
    return "; ".join(f"{name} ({errors[name]})" for seat, name in enumerate(bookies) if unknown >> seat & 1)
