"""A ledger belongs to one log: claiming ledgers for a log, freeing them, and deleting what no log lists.

A log deletes its ledgers when it is truncated. So a ledger that two logs listed would be lost to the second
one. The owner therefore stands in the ledger's own metadata, where one compare-and-set decides between logs.

    add:    read the list at version v ─▶ claim the ledger: always a write ─▶ list it, from version v
    free:   find a claimed ledger at version n that is not listed ─▶ raise the list's version ─▶ still not
            listed: take the owner out, from version n

Either the claim comes after version n, and the freeing conflicts. Or it comes before, and then the list was
read before its version was raised, or shows the ledger. So no ledger is listed that belongs to nobody.
Deleting a ledger by itself takes the same steps as freeing it.

A ledger that a log's writer makes has its owner from the beginning, in its custom metadata (`TAG`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from client_aio.admin.delete import delete_ledger
from client_aio.core.log_chain import owner_of
from metadata.errors import (
    InvalidArgumentError,
    LedgerListedError,
    NoSuchLedgerError,
    NoSuchLogError,
    VersionConflictError,
)
from metadata.model.log import check_log_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from client_aio.context import ClientContext
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead
    from metadata.store import Version

logger = logging.getLogger(__name__)

_CLAIMS_AT_ONCE = 32


async def claim(
    context: ClientContext,
    ledger_ids: Sequence[int],
    log_name: str,
    check: Callable[[LedgerMetadata], None],
) -> None:
    """Write the log into the metadata of ledgers, as their owner.

    The caller has read the log's list before, and lists the ledgers from that version of it. A crash in
    between leaves them claimed: the same log may claim them again, and `sweep_log_orphans` frees them.

    Args:
        check: called with a ledger's metadata before each attempt; raises where it may not be claimed.

    Raises:
        NoSuchLedgerError: a ledger does not exist.
        MetadataUnavailableError: some ledgers may be claimed, now or later.
    """
    room = asyncio.Semaphore(_CLAIMS_AT_ONCE)

    async def claim_one(ledger_id: int) -> None:
        token = context.draw_token()
        async with room:
            metadata, version = await context.ledgers.read(ledger_id)
            while True:
                check(metadata)
                try:
                    # Even where the log is the owner already: a freeing that is under way then conflicts.
                    await context.ledgers.compare_and_set(metadata.owned_by(log_name), version, token=token)
                    return
                except VersionConflictError:
                    metadata, version = await context.ledgers.read(ledger_id, sync=True)

    await asyncio.gather(*map(claim_one, ledger_ids))


async def free(context: ClientContext, ledger_id: int, version: Version) -> bool:
    """Take the owner out of a ledger that its log definitely does not list; see the module's docstring.

    Args:
        version: of the ledger, as read before the list's version was raised.

    Returns:
        Whether the ledger belongs to nobody now. False where it was claimed again, or is gone.
    """
    try:
        metadata, _ = await context.ledgers.read(ledger_id)
        await context.ledgers.compare_and_set(metadata.owned_by(""), version, token=context.draw_token())
    except (VersionConflictError, NoSuchLedgerError):
        return False
    logger.info("ledger=%d no longer belongs to log=%s, which does not list it", ledger_id, metadata.log)
    return True


async def delete_unlisted(
    context: ClientContext, lists_of: Callable[[str], LogStore], ledger_id: int, password: bytes
) -> None:
    """Delete a ledger that no log lists; see `Client.delete_ledger`.

    Raises:
        LedgerListedError: the log that it belongs to lists it. Nothing was done.
    """

    async def check(metadata: LedgerMetadata) -> bool:
        owner = owner_of(metadata)
        if owner is not None:
            await _check_unlisted(lists_of, owner, ledger_id)
        return True

    await delete_ledger(context, ledger_id, password, check=check)


async def _check_unlisted(lists_of: Callable[[str], LogStore], owner: str, ledger_id: int) -> None:
    """Check that a log does not list the ledger, and raise the version of its list."""
    try:
        lists = lists_of(check_log_name(owner))
        head, version = await lists.read(sync=True)
    except (NoSuchLogError, InvalidArgumentError):
        return  # A later log of the name lists ledgers that it makes or claims later.

    async def raise_version(found: LogHead) -> LogHead:
        if any(row.ledger_id == ledger_id for row in await lists.rows(found)):
            raise LedgerListedError(
                f"log {owner!r} lists ledger {ledger_id}: without the ledger, its readers fail there. "
                "Truncate or delete the log; or use force, where the ledger's records are lost already",
                ledger_id=ledger_id,
            )
        return found

    try:
        await lists.change(head, version, raise_version)
    except NoSuchLogError:
        return
