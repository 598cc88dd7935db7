"""Taking a log over: recover its last two ledgers, then change the list by compare-and-set, or start again.

The shell around `client_aio.core.log_chain`. Opening a log for writing and adding closed ledgers share it.
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
    """Read a log's list, and bring its last two ledgers to CLOSED: this fences every earlier writer.

    That holds for the list as it was read. The caller changes the list by a compare-and-set from the version
    returned: where it succeeds, no other writer has listed a ledger since.

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
        # Even where it is CLOSED: else the log's next ledger could get another password.
        digest = await context.unlock(metadata, password)
        if not metadata.is_closed:
            await recover_ledger(context, row.ledger_id, digest)
    except NoSuchLedgerError:
        # Either the list has changed, and the compare-and-set will fail. Or somebody has deleted a ledger of
        # the log by hand, and no writer can add to that ledger any more.
        logger.warning("ledger=%d is listed in a log and does not exist", row.ledger_id)


async def discard(context: ClientContext, ledger: LogLedger, password: bytes) -> None:
    """Delete a ledger that has definitely not been listed; a failure leaves it to a sweep."""
    await ledger.abort()
    try:
        await delete_ledger(context, ledger.ledger_id, password)
    except BookKeeperError as error:
        logger.warning("ledger=%d was made for a log and is left over: %s", ledger.ledger_id, error)
