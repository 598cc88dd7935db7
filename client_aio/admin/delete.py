"""Deleting a ledger: the metadata first, then a fence and a tombstone at its bookies (rule 15).

The order matters. Once the metadata are gone no client can close the ledger, change its ensemble or recover
it, so it never comes back. In the other order, a writer could go on adding at bookies that had dropped the
ledger. The bookies are told so that they refuse late adds at once. A bookie that cannot be reached compares
its ledgers with the metadata store from time to time, and checks again before it drops one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import Delete, Done, ReadLac, ReadLacAnswer
from client_aio.unbounded.paged_fragments import forget, spans
from metadata.errors import BookKeeperError, MetadataCorruptError, VersionConflictError
from metadata.ids import NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio.context import ClientContext
    from metadata.model.ledger import LedgerMetadata

logger = logging.getLogger(__name__)


async def delete_ledger(
    context: ClientContext,
    ledger_id: int,
    password: bytes,
    *,
    check: Callable[[LedgerMetadata], Awaitable[bool]] | None = None,
) -> bool:
    """Delete a ledger, and tell its bookies.

    Args:
        check: says by the ledger's metadata whether to delete it, and may raise. The ledger is deleted only
            while its metadata are those that were checked; otherwise they are read and checked again.

    Returns:
        Whether the ledger was deleted.

    Raises:
        NoSuchLedgerError: there is no such ledger.
        UnauthorizedAccessError: the password is not the ledger's. Nothing was done.
        MetadataUnavailableError: the metadata may be gone, now or later; no bookie was told.
        MetadataCorruptError: the ledger's metadata do not parse. Nothing was done.

    Cancelling leaves the ledger as it was, or deleted, with some bookies not told.
    """
    while True:
        metadata, version = await context.ledgers.read(ledger_id)
        digest = await context.unlock(metadata, password)
        if check is not None and not await check(metadata):
            return False
        bookies = await _bookies(context, metadata)
        try:
            await context.ledgers.delete(ledger_id, None if check is None else version)
        except VersionConflictError:
            continue
        break
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
    return True


async def _bookies(context: ClientContext, metadata: LedgerMetadata) -> set[str]:
    """Return the bookies that may hold entries of a ledger, as far as its pages can be read."""
    bookies = {bookie for fragment in metadata.fragments for bookie in fragment.bookies}
    try:
        async for span in spans(context, metadata):
            bookies.update(bookie for fragment in span.fragments for bookie in fragment.bookies)
    except MetadataCorruptError as error:
        # A ledger with damaged pages can be deleted all the same: its bookies find out by themselves.
        logger.warning("ledger=%d not all of its bookies are known: %s", metadata.ledger_id, error)
    return bookies


async def _tell(context: ClientContext, ledger_id: int, bookie_id: str, token: bytes | None) -> None:
    """Fence the ledger at a bookie, and delete it there; after a failure the bookie finds out by itself."""
    timeout_s = context.config.read_timeout_s
    try:
        connection = await context.pool.get(bookie_id)
        fence = ReadLac(ledger_id, TERM_FINAL, NO_ENTRY, 0)
        await connection.call(fence, ReadLacAnswer, timeout_s=timeout_s, ledger_id=ledger_id, auth=token)
        await connection.call(Delete(ledger_id), Done, timeout_s=timeout_s, ledger_id=ledger_id, auth=token)
    except BookKeeperError as error:
        logger.warning("ledger=%d bookie=%s was not told of its deletion: %s", ledger_id, bookie_id, error)
