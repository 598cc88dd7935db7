"""Opening a ledger of a log for reading. Never fences."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from client_aio.reader import LedgerReader
from metadata.errors import BookieUnavailableError

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from metadata.log import LogRow

logger = logging.getLogger(__name__)


async def open_row(context: ClientContext, row: LogRow, password: bytes) -> LedgerReader:
    """Open a ledger by its metadata alone; of one that is not CLOSED, the LAC is yet to be asked for.

    Raises:
        NoSuchLedgerError: there is none. UnauthorizedAccessError: the password is not its own.
    """
    metadata, version = await context.ledgers.read(row.ledger_id)
    digest = await context.unlock(metadata, password)
    return LedgerReader(context, metadata, version, digest)


async def ask_lac(reader: LedgerReader) -> None:
    """Ask the bookies for a LAC, unless the ledger is CLOSED; too few answers are taken for what they say."""
    try:
        await reader.read_last_add_confirmed()
    except BookieUnavailableError as error:
        logger.warning("ledger=%d its LAC is not known for now: %s", reader.ledger_id, error)
