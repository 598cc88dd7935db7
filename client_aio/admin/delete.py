"""Deleting a ledger: the metadata first, then a fence and a tombstone at its bookies (rule 15).

The order is the point. Once the metadata is gone nobody can close the ledger, change its ensemble or recover
it, so it never comes back; the other way round, a writer could go on at bookies that had forgotten it. The
bookies are told so that late adds are refused at once; those that cannot be reached look for themselves, now
and then, and each of them makes sure of it before it drops anything.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import Delete, Done, ReadLac, ReadLacAnswer
from client_aio.unbounded.paged_fragments import forget, spans
from metadata.errors import BookKeeperError, MetadataCorruptError
from metadata.ids import NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)


async def delete_ledger(context: ClientContext, ledger_id: int, password: bytes) -> None:
    """Delete a ledger, and tell its bookies.

    Raises:
        NoSuchLedgerError: there is none.
        UnauthorizedAccessError: the password is not the ledger's. Nothing was done.
        MetadataUnavailableError: the metadata may be gone, now or later; no bookie was told.
        MetadataCorruptError: the ledger's metadata does not parse. Nothing was done.
    """
    metadata, _ = await context.ledgers.read(ledger_id)
    digest = await context.unlock(metadata, password)
    bookies = await _bookies(context, metadata)
    await context.ledgers.delete(ledger_id)
    if metadata.unbounded is not None:
        await forget(context, metadata)
    telling = [
        asyncio.create_task(_tell(context, ledger_id, bookie_id, digest.token(bookie_id)))
        for bookie_id in sorted(bookies)
    ]
    try:
        await asyncio.wait(telling, timeout=context.config.connect_timeout_s)
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)


async def _bookies(context: ClientContext, metadata: LedgerMetadata) -> set[str]:
    """Return the bookies that may hold some of a ledger, as far as its pages can be read."""
    bookies = {bookie for fragment in metadata.fragments for bookie in fragment.bookies}
    try:
        async for span in spans(context, metadata):
            bookies.update(bookie for fragment in span.fragments for bookie in fragment.bookies)
    except MetadataCorruptError as error:
        # A ledger that is damaged can be deleted all the same: bookies that are not told look for themselves.
        logger.warning("ledger=%d not all of its bookies are known: %s", metadata.ledger_id, error)
    return bookies


async def _tell(context: ClientContext, ledger_id: int, bookie_id: str, token: bytes | None) -> None:
    """Fence the ledger at a bookie, and have it dropped there; what fails is left to the bookie."""
    timeout_s = context.config.read_timeout_s
    try:
        connection = await context.pool.get(bookie_id)
        fence = ReadLac(ledger_id, TERM_FINAL, NO_ENTRY, 0)
        await connection.call(fence, ReadLacAnswer, timeout_s=timeout_s, ledger_id=ledger_id, auth=token)
        await connection.call(Delete(ledger_id), Done, timeout_s=timeout_s, ledger_id=ledger_id, auth=token)
    except BookKeeperError as error:
        logger.warning("ledger=%d bookie=%s was not told of its deletion: %s", ledger_id, bookie_id, error)
