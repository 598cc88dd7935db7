"""Truncating and deleting logs, and sweeping the leftovers of crashed log writers.

A truncation or deletion changes the list first and deletes the ledgers after. The list's head keeps the
dropped rows until their ledgers are deleted (`metadata.model.log`). So a crash in between loses no ledger:
the next truncation, deletion or sweep deletes it.

A sweep deletes ledgers and pages that no log lists, and finishes deletions. A ledger made for a log names the
log in its custom metadata. Its maker lists it by a compare-and-set from a version of the list that it read
before. So a sweep finds the ledgers, then raises the version of the list. A ledger that is not listed then
never will be (`client_aio.core.log_chain`). A ledger that was claimed for a log and never listed is not
deleted but freed: an application made it (`client_aio.log.ownership`).

Ages are those of the metadata store. By two machines' clocks, a sweeper whose clock is ahead would delete
what was made a moment ago.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from client_aio.admin.delete import delete_ledger
from client_aio.core.log_chain import TAG, owner_of, to_recover
from client_aio.log.ownership import free
from client_aio.log.reader import ask_lac, open_row
from client_aio.unbounded.paged_fragments import forget_deleted
from metadata.access.fragments import LedgerNames
from metadata.access.logs import names_ever
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    LogExistsError,
    NoSuchLedgerError,
    NoSuchLogError,
    UnauthorizedAccessError,
    VersionConflictError,
)
from metadata.model.log import Position, check_log_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from client_aio.context import ClientContext
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, LogRow
    from metadata.store import Version


logger = logging.getLogger(__name__)

_DELETIONS = 8
"""How many ledgers are deleted at once."""
_LEDGERS_PER_REPORT = 32


async def truncate_log(
    context: ClientContext, lists: LogStore, before: Position, password: bytes
) -> list[LogRow]:
    """Drop the rows before a position, and delete their ledgers; see `Client.truncate_log`."""
    head, version = await lists.read(sync=True)
    incarnation = version.incarnation
    head, version = await finish_dropping(context, lists, head, version, password)
    while True:
        lists.check_same(version, incarnation)
        await _check_password(context, head, password)
        bounded = await _bounded(context, head, before, password)

        async def apply(found: LogHead, known: LogHead = head, bounded: Position = bounded) -> LogHead | None:
            # `bounded` holds for the list `known` alone: another list may even be another log's of this name.
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
    """Compare the password with that of the newest ledger, before the list drops rows: no way leads back.

    Raises:
        UnauthorizedAccessError: the password is not that of the ledger.
    """
    for row in reversed(head.newest):
        try:
            metadata, _ = await context.ledgers.read(row.ledger_id)
        except NoSuchLedgerError:
            continue
        await context.unlock(metadata, password)
        return


async def _bounded(context: ClientContext, head: LogHead, before: Position, password: bytes) -> Position:
    """Return the position, lowered until only CLOSED ledgers and records already acknowledged lie before it.

    A ledger that is missing takes no more adds. Somebody deleted it by hand; or the list has changed, and the
    result is not used.

    Raises:
        InvalidArgumentError: the position lies behind the last ledger.
    """
    last = head.rows.last_key
    if before.ledger_id > (-1 if last is None else last) and before > head.begins_at:
        raise InvalidArgumentError(
            f"log {head.name!r} cannot be truncated before {before}: its last ledger is {last}"
        )
    for row in to_recover(head):
        with suppress(NoSuchLedgerError):
            if row.id < before.ledger_id:
                metadata, _ = await context.ledgers.read(row.ledger_id)
                if not metadata.is_closed:
                    return Position(row.id, 0)
            elif row.id == before.ledger_id:
                reader = await open_row(context, row, password)
                await ask_lac(reader)
                return min(before, Position(row.id, reader.last_add_confirmed + 1))
    return before


async def _beginning(context: ClientContext, lists: LogStore, head: LogHead, before: Position) -> Position:
    """Return the new beginning of a log that is truncated before a position: behind the last record dropped.

    The position itself would not do, since ids have gaps. A reader of all dropped records stands at the end
    of their last ledger. It must not find that the log was truncated behind its position.
    """
    upto = before.ledger_id if before.entry_id else before.ledger_id - 1
    while rows := await lists.rows_up_to(head, upto):
        for row in reversed(rows):
            try:
                metadata, _ = await context.ledgers.read(row.ledger_id)
            except NoSuchLedgerError:
                return min(before, Position(row.id + 1, 0))  # The end of a deleted ledger is not known.
            if metadata.last_entry is None:
                return before  # The ledger being written: `_bounded` has asked for its end.
            if metadata.last_entry >= 0:
                return min(before, Position(row.id, metadata.last_entry + 1))
        upto = rows[0].id - 1
    return head.begins_at  # No record lies between that and the first row.


async def ensure_log(context: ClientContext, lists: LogStore, password: bytes) -> None:
    """Create the log unless it exists; finish the deletion of a former log of the name first."""
    while True:
        try:
            head, version = await lists.read(sync=True, deleted_too=True)
        except NoSuchLogError:
            await lists.create(custom={}, created_ms=context.now_ms())
            return
        if not head.is_deleted:
            return
        await finish_deletion(context, lists, head, version, password)


async def create_log(
    context: ClientContext, lists: LogStore, custom: Mapping[str, bytes], password: bytes, *, exist_ok: bool
) -> None:
    """Create a log without a ledger; see `Client.create_log`."""
    while True:
        try:
            head, version = await lists.read(sync=True, deleted_too=True)
        except NoSuchLogError:
            if await lists.create(custom=custom, created_ms=context.now_ms()):
                return
            continue
        if not head.is_deleted:
            if exist_ok:
                return
            raise LogExistsError(f"there is a log {lists.name!r} already")
        await finish_deletion(context, lists, head, version, password)


async def delete_log(context: ClientContext, lists: LogStore, password: bytes) -> None:
    """Delete a log with all its ledgers; see `Client.delete_log`."""
    head, version = await lists.read(sync=True, deleted_too=True)
    while not head.is_deleted:
        head, version = await finish_dropping(context, lists, head, version, password)
        await _check_password(context, head, password)

        def apply(found: LogHead, known: LogHead = head) -> LogHead | None:
            # Another list may be another log's of this name, whose password was not compared.
            return found.delete() if found == known and not found.has_dropped else None

        changed = await lists.change_now(head, version, apply)
        head, version = changed.head, changed.version
    await finish_deletion(context, lists, head, version, password)


async def finish_deletion(
    context: ClientContext, lists: LogStore, head: LogHead, version: Version, password: bytes
) -> None:
    """Delete the ledgers of a log that is marked as deleted, then the log."""
    assert head.is_deleted
    try:
        head, version = await finish_dropping(context, lists, head, version, password)
        if not head.is_deleted:
            return  # Another client has finished, and another log has been made under this name.
        await lists.delete(version)
    except (NoSuchLogError, VersionConflictError):
        logger.info("log=%s somebody else has finished deleting it", lists.name)
    await lists.sweep_pages()


async def finish_dropping(
    context: ClientContext, lists: LogStore, head: LogHead, version: Version, password: bytes
) -> tuple[LogHead, Version]:
    """Delete the ledgers that the list has dropped, and remove them from its head.

    Any number of clients may do this at once.
    """
    while head.has_dropped:
        rows = await lists.dropped_rows(head)
        await delete_ledgers(context, [row.ledger_id for row in rows], password, owner=lists.name)
        changed = await lists.finish_dropping(head, version)
        if head.dropped == changed.head.dropped:
            break
        head, version = changed.head, changed.version
    return head, version


async def delete_ledgers(
    context: ClientContext, ledger_ids: list[int], password: bytes, *, owner: str
) -> None:
    """Delete ledgers of a log, some at a time; a ledger that is gone already is no failure.

    A ledger that does not belong to the log is left alone: another log may list it.

    Raises:
        BookKeeperError: the first failure; all ledgers have been tried.
    """
    turns = asyncio.Semaphore(_DELETIONS)

    async def is_own(metadata: LedgerMetadata) -> bool:
        return owner_of(metadata) == owner

    async def delete(ledger_id: int) -> None:
        async with turns:
            try:
                if not await delete_ledger(context, ledger_id, password, check=is_own):
                    logger.error(
                        "ledger=%d is not deleted with log=%s: it does not belong to it", ledger_id, owner
                    )
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


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of `Client.sweep_log_orphans`."""

    ledgers: tuple[int, ...]
    """Deleted ledgers: they had been made for a log and were not listed."""
    pages: tuple[str, ...]
    """Deleted pages: no list referred to them."""
    failures: tuple[str, ...]
    """The parts that could not be swept, and why. The next call may succeed."""


async def sweep(
    context: ClientContext,
    lists_of: Callable[[str], LogStore],
    *,
    older_than_s: float,
    password: bytes,
    on_progress: Callable[[int, int | None, str], None] = lambda *_: None,
) -> SweepReport:
    """Sweep all logs; see `Client.sweep_log_orphans`.

    Args:
        on_progress: called with what was done, of how much if that is known, and of what.
    """
    found = await _ledgers_of_logs(context, on_progress)
    names = {*found, *await names_ever(context.ledgers.store)}
    ledgers: list[int] = []
    pages: list[str] = []
    failures: list[str] = []
    for number, name in enumerate(sorted(names)):
        on_progress(number, len(names), "logs")
        lists = lists_of(name)
        with _noting(failures, f"log={name}"):
            ledgers += await _sweep_ledgers(context, lists, found.get(name, []), older_than_s, password)
        with _noting(failures, f"log={name}"):
            pages += await lists.sweep_pages()
            await lists.vacate()
    with _noting(failures, "the names of unbounded ledgers"):
        await LedgerNames(context.ledgers).vacate()
    with _noting(failures, "the pages of unbounded ledgers"):
        pages += await forget_deleted(context)
    return SweepReport(tuple(ledgers), tuple(pages), tuple(failures))


class _Owned(NamedTuple):
    """A ledger that belongs to a log, as found before the log's list is looked at."""

    ledger_id: int
    version: Version
    is_claimed: bool
    """Whether an application made it, and it was added to the log, or was to be."""


async def _ledgers_of_logs(
    context: ClientContext, on_progress: Callable[[int, int | None, str], None]
) -> dict[str, list[_Owned]]:
    found: dict[str, list[_Owned]] = {}
    count = 0
    async for ledger_id in context.ledgers.ledger_ids(sync=True):
        count += 1
        if count % _LEDGERS_PER_REPORT == 0:
            on_progress(count, None, "ledgers")
        try:
            metadata, version = await context.ledgers.read(ledger_id)
        except NoSuchLedgerError:
            continue
        owner = owner_of(metadata)
        if owner is None:
            continue
        try:
            name = check_log_name(owner)
        except InvalidArgumentError:
            logger.warning("ledger=%d names no log in its metadata: %r", ledger_id, owner)
            continue
        is_claimed = TAG not in metadata.custom
        found.setdefault(name, []).append(_Owned(ledger_id, version, is_claimed))
    return found


@contextmanager
def _noting(failures: list[str], what: str) -> Iterator[None]:
    """Note a failure, and let the sweep go on with the next log."""
    try:
        yield
    except BookKeeperError as error:
        failures.append(f"{what} could not be swept: {error}")
        logger.warning("%s", failures[-1])


async def _sweep_ledgers(
    context: ClientContext, lists: LogStore, owned: list[_Owned], older_than_s: float, password: bytes
) -> list[int]:
    """Finish the deletions that one log has begun; delete or free the ledgers of `owned` that it lacks.

    Returns:
        The ids of the ledgers deleted.
    """
    left_over: list[_Owned] = []

    async def bump(head: LogHead) -> LogHead | None:
        listed = {row.ledger_id for row in [*await lists.rows(head), *await lists.dropped_rows(head)]}
        left_over[:] = await _without_young(
            context, [each for each in owned if each.ledger_id not in listed], older_than_s
        )
        return head if left_over else None

    try:
        head, version = await lists.read(sync=True, deleted_too=True)
        if head.is_deleted:
            await finish_deletion(context, lists, head, version, password)
            return await _sweep_ledgers(context, lists, owned, older_than_s, password)
        head, version = await finish_dropping(context, lists, head, version, password)
        await lists.change(head, version, bump)
    except NoSuchLogError:
        # A later log of that name lists ledgers made, or claimed, later.
        left_over[:] = await _without_young(context, owned, older_than_s)
    made = [each.ledger_id for each in left_over if not each.is_claimed]
    await delete_ledgers(context, made, password, owner=lists.name)
    for each in left_over:
        if each.is_claimed:
            await free(context, each.ledger_id, each.version)
    return made


async def _without_young(context: ClientContext, owned: list[_Owned], older_than_s: float) -> list[_Owned]:
    """Leave out the ledgers that were made for a log less than so long ago, and those that are gone."""
    if older_than_s <= 0:
        return owned
    old: list[_Owned] = []
    for each in owned:
        with suppress(NoSuchLedgerError):
            if each.is_claimed or await context.ledgers.age_s(each.ledger_id) >= older_than_s:
                old.append(each)
    return old
