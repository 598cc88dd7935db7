"""Cutting a log at its old end, and deleting it: the list first, the ledgers after.

What the list has dropped stays in its head until those ledgers are deleted (`metadata.model.log`), so a
crash in
between leaves nothing behind that nobody knows of: the next truncation, deletion or sweep finishes it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from client_aio.admin.delete import delete_ledger
from client_aio.core.log_chain import to_recover
from client_aio.log.reader import ask_lac, open_row
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    NoSuchLedgerError,
    NoSuchLogError,
    UnauthorizedAccessError,
    VersionConflictError,
)
from metadata.model.log import Position

if TYPE_CHECKING:
    from client_aio.context import ClientContext
    from metadata.access.logs import LogList
    from metadata.model.log import LogHead, LogRow
    from metadata.store import Version

logger = logging.getLogger(__name__)

_DELETIONS = 8
"""How many ledgers are deleted side by side."""


async def truncate_log(
    context: ClientContext, lists: LogList, before: Position, password: bytes
) -> list[LogRow]:
    """Drop what lies before a position, and delete the ledgers; see `Client.truncate_log`."""
    head, version = await lists.read(sync=True)
    incarnation = version.incarnation
    head, version = await finish_dropping(context, lists, head, version, password)
    while True:
        lists.check_same(version, incarnation)
        await _check_password(context, head, password)
        try:
            bounded = await _bounded(context, head, before, password)
        except NoSuchLedgerError:
            known, (head, version) = version, await lists.read(sync=True)
            if version == known:
                raise
            continue  # Others have cut the log, or made another one, since the list was read.

        async def apply(found: LogHead, known: LogHead = head, bounded: Position = bounded) -> LogHead | None:
            # How far another list may be cut is yet to be found out, be it another log's of this name.
            if found != known or found.has_dropped or bounded <= found.begins_at:
                return None
            cut_rows = await lists.cut_at(found, found.first_id_kept(bounded))
            wanted = found.truncate(bounded, cut_rows, await _beginning(context, lists, found, bounded))
            return None if wanted == found else wanted

        changed = await lists.change(head, version, apply)
        lists.check_same(changed.version, incarnation)
        if changed.is_done or (changed.version == version and not changed.head.has_dropped):
            break
        head, version = await finish_dropping(context, lists, changed.head, changed.version, password)
    dropped = await lists.dropped_rows(changed.head)
    await finish_dropping(context, lists, changed.head, changed.version, password)
    return dropped


async def _check_password(context: ClientContext, head: LogHead, password: bytes) -> None:
    """Compare the password with the newest ledger's, before the list is changed: what it drops is lost.

    Raises:
        UnauthorizedAccessError: it is not that.
    """
    for row in reversed(head.newest):
        try:
            metadata, _ = await context.ledgers.read(row.ledger_id)
        except NoSuchLedgerError:
            continue
        await context.unlock(metadata, password)
        return


async def _bounded(context: ClientContext, head: LogHead, before: Position, password: bytes) -> Position:
    """Give the position as far as only CLOSED ledgers lie before it, and no record that is yet to come.

    Raises:
        InvalidArgumentError: it lies behind the last ledger.
    """
    last = head.rows.last_key
    if before.ledger_id > (-1 if last is None else last) and before > head.begins_at:
        raise InvalidArgumentError(
            f"log {head.name!r} cannot be truncated before {before}: its last ledger is {last}"
        )
    for row in to_recover(head):
        if row.id < before.ledger_id:
            metadata, _ = await context.ledgers.read(row.ledger_id)
            if not metadata.is_closed:
                return Position(row.id, 0)
        elif row.id == before.ledger_id:
            reader = await open_row(context, row, password)
            await ask_lac(reader)
            return min(before, Position(row.id, reader.last_add_confirmed + 1))
    return before


async def _beginning(context: ClientContext, lists: LogList, head: LogHead, before: Position) -> Position:
    """Give where the log begins, truncated before a position: behind the last record that lies before it.

    That is not the position itself: ids have gaps, and whoever has read all that is dropped stands at the end
    of its last ledger.
    """
    upto = before.ledger_id if before.entry_id else before.ledger_id - 1
    while rows := await lists.rows_up_to(head, upto):
        for row in reversed(rows):
            try:
                metadata, _ = await context.ledgers.read(row.ledger_id)
            except NoSuchLedgerError:
                return min(before, Position(row.id + 1, 0))  # Nobody knows any more where it ended.
            if metadata.last_entry is None:
                return before  # the last one that is written; `_bounded` has asked for its end
            if metadata.last_entry >= 0:
                return min(before, Position(row.id, metadata.last_entry + 1))
        upto = rows[0].id - 1
    return head.begins_at  # no record lies between that and the first row


async def ensure_log(context: ClientContext, lists: LogList, password: bytes) -> None:
    """Create the log unless there is one; of one that is being deleted, finish that first."""
    while True:
        try:
            head, version = await lists.read(sync=True, deleted_too=True)
        except NoSuchLogError:
            await lists.create(custom={}, created_ms=context.now_ms())
            return
        if not head.is_deleted:
            return
        await finish_deletion(context, lists, head, version, password)


async def delete_log(context: ClientContext, lists: LogList, password: bytes) -> None:
    """Delete a log with all its ledgers; see `Client.delete_log`."""
    head, version = await lists.read(sync=True, deleted_too=True)
    while not head.is_deleted:
        head, version = await finish_dropping(context, lists, head, version, password)
        await _check_password(context, head, password)

        def apply(found: LogHead, known: LogHead = head) -> LogHead | None:
            # Of another one it is not known whose password it has, be it made anew under this name.
            return found.delete() if found == known and not found.has_dropped else None

        changed = await lists.change_now(head, version, apply)
        head, version = changed.head, changed.version
    await finish_deletion(context, lists, head, version, password)


async def finish_deletion(
    context: ClientContext, lists: LogList, head: LogHead, version: Version, password: bytes
) -> None:
    """Delete the ledgers of a log that is being deleted, then the log."""
    assert head.is_deleted
    try:
        head, version = await finish_dropping(context, lists, head, version, password)
        if not head.is_deleted:
            return  # Somebody else has finished, and another log has been made under this name.
        await lists.delete(version)
    except (NoSuchLogError, VersionConflictError):
        logger.info("log=%s somebody else has finished deleting it", lists.name)
    await lists.sweep_pages()


async def finish_dropping(
    context: ClientContext, lists: LogList, head: LogHead, version: Version, password: bytes
) -> tuple[LogHead, Version]:
    """Delete the ledgers that the list has dropped, and let it forget them.

    Any number of clients may do so at once.
    """
    while head.has_dropped:
        rows = await lists.dropped_rows(head)
        await delete_ledgers(context, [row.ledger_id for row in rows], password)
        changed = await lists.finish_dropping(head, version)
        if head.dropped == changed.head.dropped:
            break
        head, version = changed.head, changed.version
    return head, version


async def delete_ledgers(context: ClientContext, ledger_ids: list[int], password: bytes) -> None:
    """Delete ledgers, some at a time; those that are gone already do not matter.

    Raises:
        BookKeeperError: the first failure; the others have been tried.
    """
    turns = asyncio.Semaphore(_DELETIONS)

    async def delete(ledger_id: int) -> None:
        async with turns:
            try:
                await delete_ledger(context, ledger_id, password)
            except NoSuchLedgerError:
                pass
            except UnauthorizedAccessError:
                raise
            except BookKeeperError as error:
                logger.warning("ledger=%d was not deleted: %s", ledger_id, error)
                raise

    outcomes = await asyncio.gather(*map(delete, ledger_ids), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
