"""Taking a log over: its last two ledgers recovered, then the list changed, or all of it again.

The shell around `client_aio.core.log_chain`. Shared by opening a log for writing and by adding closed
ledgers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from client_aio.admin.delete import delete_ledger
from client_aio.core.log_chain import to_recover
from client_aio.ledger.recovery import recover_ledger
from metadata.errors import BookKeeperError, NoSuchLedgerError

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from client_aio.log.log_ledger import LogLedger
    from metadata.access.logs import LogStore
    from metadata.model.log import LogHead, LogRow
    from metadata.store import Version

logger = logging.getLogger(__name__)


async def recovered(context: ClientContext, lists: LogStore, password: bytes) -> tuple[LogHead, Version]:
    """Read a log's list, and bring its last two ledgers to CLOSED: every earlier writer is shut out.

    Unless the list has changed since: whoever changes it from this version has what it says to itself.

    Raises:
        NoSuchLogError: there is no such log.
        LedgerRecoveryError: too few bookies answered; try again later.
        UnauthorizedAccessError: the password is not that of the log's ledgers. Nothing was fenced.
    """
    head, version = await lists.read(sync=True)
    tasks = [asyncio.create_task(_close(context, row, password)) for row in to_recover(head)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return head, version


async def _close(context: ClientContext, row: LogRow, password: bytes) -> None:
    try:
        metadata, _ = await context.ledgers.read(row.ledger_id)
        # Also where it is CLOSED: the log's next ledger would have another password.
        digest = await context.unlock(metadata, password)
        if not metadata.is_closed:
            await recover_ledger(context, row.ledger_id, digest)
    except NoSuchLedgerError:
        # Either the list has changed, and all of this is done again; or somebody has deleted a ledger of
        # the log by hand, and nobody can write to it any more.
        logger.warning("ledger=%d is listed in a log and does not exist", row.ledger_id)


async def discard(context: ClientContext, ledger: LogLedger, password: bytes) -> None:
    """Delete a ledger that has definitely not been listed; what fails is left to be swept."""
    await ledger.abort()
    try:
        await delete_ledger(context, ledger.ledger_id, password)
    except BookKeeperError as error:
        logger.warning("ledger=%d was made for a log and is left over: %s", ledger.ledger_id, error)
