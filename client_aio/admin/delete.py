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
from client_aio.core.quorum import covers_all_write_sets
from client_aio.unbounded.paged_fragments import forget, spans
from metadata.errors import BookKeeperError, MetadataCorruptError, NoSuchLedgerError, VersionConflictError
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

    Bookies that have not answered by the return are told in the background, until the client is closed.
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
    telling = {
        asyncio.create_task(_tell(context, ledger_id, bookie_id, digest.token(bookie_id))): bookie_id
        for bookie_id in sorted(bookies)
    }
    ensemble = metadata.last_fragment.bookies

    def is_fenced(done: set[asyncio.Task[bool]]) -> bool:
        told = {telling[task] for task in done if not task.cancelled() and task.result()}
        mask = sum(1 << seat for seat, bookie_id in enumerate(ensemble) if bookie_id in told)
        sizes = metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum
        return covers_all_write_sets(mask, *sizes)

    try:
        # From then on no writer can acknowledge. A bookie that is not told finds out by its next sweep.
        timeout_s = context.config.connect_timeout_s
        untold = await context.pool.until_enough(telling, is_fenced, timeout_s=timeout_s)
    except BaseException:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
        raise
    # A bookie that has just come back may be in quarantine still, so that it was not waited for.
    for task in untold:
        context.finish_later(task)
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


async def _tell(context: ClientContext, ledger_id: int, bookie_id: str, token: bytes | None) -> bool:
    """Fence the ledger at a bookie, and delete it there. Return whether the bookie has fenced it.

    Both requests leave at once: a bookie that is slow gets them though nobody waits for its answers. After a
    failure the bookie finds out by itself.
    """
    timeout_s = context.config.read_timeout_s
    try:
        connection = await context.pool.get(bookie_id)
    except BookKeeperError as error:
        _warn(ledger_id, bookie_id, error)
        return False
    fence = ReadLac(ledger_id, TERM_FINAL, NO_ENTRY, 0)
    fenced, deleted = await asyncio.gather(
        connection.call(fence, ReadLacAnswer, timeout_s=timeout_s, ledger_id=ledger_id, auth=token),
        connection.call(Delete(ledger_id), Done, timeout_s=timeout_s, ledger_id=ledger_id, auth=token),
        return_exceptions=True,
    )
    for outcome in (fenced, deleted):
        if isinstance(outcome, NoSuchLedgerError):
            continue  # It has dropped the ledger: its tombstone refuses adds as a fence does.
        if isinstance(outcome, BookKeeperError):
            _warn(ledger_id, bookie_id, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    return not isinstance(fenced, BookKeeperError) or isinstance(fenced, NoSuchLedgerError)


def _warn(ledger_id: int, bookie_id: str, error: BookKeeperError) -> None:
    logger.warning("ledger=%d bookie=%s was not told of its deletion: %s", ledger_id, bookie_id, error)
