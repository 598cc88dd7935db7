"""Deleting what a driver left that died before it could commit: ledgers that bear a log's tag, in no log.

Each is *condemned* before it is deleted, so that a driver that was only slow cannot make it visible any more:

1. Its metadata are marked, by compare-and-set. Whoever would add it to a log looks there after reading the
   log's list, and refuses.
2. The version of the log's list is bumped. A driver that had looked before the mark was set fails its
   compare-and-set, and looks again.
3. The list is read once more. What is listed by now was committed before the bump, and stays (the mark then
   means nothing); the rest never will be, and is deleted.

The grace period is therefore no matter of safety: a job that runs for longer than it, and is swept, fails.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import client_aio
from client_aio.log.add_ledgers import CONDEMNED
from client_aio.spark import provenance
from client_aio.spark.commits import listed_in
from metadata.errors import BookKeeperError, NoSuchLedgerError, NoSuchLogError, VersionConflictError

if TYPE_CHECKING:
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead

logger = logging.getLogger(__name__)

GRACE_S = 24 * 3600.0


async def sweep_orphans(uri: str, *, log: str, grace_s: float = GRACE_S, password: bytes = b"") -> list[int]:
    """Delete the ledgers that Spark jobs wrote for a log, older than the grace period, that it does not list.

    Looks at the metadata of every ledger. Safe at any time; a job that still runs, and began before the grace
    period, fails at its commit. Cancelling leaves the rest to the next call.

    Args:
        password: of the ledgers that have one.

    Returns:
        The ids of the ledgers deleted.

    Raises:
        MetadataUnavailableError: the metadata store cannot be reached.
        UnauthorizedAccessError: ledgers have a password, and this is not it. Nothing was deleted.
    """
    async with client_aio.connect(uri) as client:
        now_ms = client._context.now_ms()
        made = await _made_for(client, log)
        old = [one.ledger_id for one in made if one.created_ms <= now_ms - grace_s * 1000]
        locked = {one.ledger_id: one for one in made if one.password is not None}
        for one in [*locked.values()][:1]:
            await client._context.unlock(one, password)
        listed = await listed_in(client, log)
        condemned = [each for each in old if each not in listed and await condemn(client, each)]
        if not condemned:
            return []
        await _bump(client, log)
        listed = await listed_in(client, log)
        deleted = []
        for ledger_id in condemned:
            if ledger_id in listed:
                continue
            try:
                await client.delete_ledger(ledger_id, password=password if ledger_id in locked else b"")
            except BookKeeperError as error:
                logger.warning("ledger=%d was left over and is not deleted yet: %s", ledger_id, error)
            else:
                deleted.append(ledger_id)
        return deleted


async def _bump(client: client_aio.Client, log: str) -> None:
    """Change the version of a log's list, so that a change from an earlier one conflicts."""
    lists = client._lists(log)

    async def same(head: LogHead) -> LogHead:
        return head

    with contextlib.suppress(NoSuchLogError):
        head, version = await lists.read(sync=True)
        await lists.change(head, version, same)


async def condemn(client: client_aio.Client, ledger_id: int) -> bool:
    """Mark a ledger so that nobody adds it to a log; False where it is gone."""
    ledgers = client._context.ledgers
    while True:
        try:
            metadata, version = await ledgers.read(ledger_id)
            if CONDEMNED in metadata.custom:
                return True
            marked = replace(metadata, custom={**metadata.custom, CONDEMNED: b"1"})
            await ledgers.compare_and_set(marked, version, token=client._context.draw_token())
        except NoSuchLedgerError:
            return False
        except VersionConflictError:
            continue  # its writer lives, or somebody else sweeps
        return True


async def _made_for(client: client_aio.Client, log: str) -> list[LedgerMetadata]:
    found = []
    async for ledger_id in client.list_ledgers():
        with contextlib.suppress(NoSuchLedgerError):
            metadata = await client.ledger_metadata(ledger_id)
            if metadata.custom.get(provenance.LOG) == log.encode():
                found.append(metadata)
    return found
