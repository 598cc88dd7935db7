"""Finding what crashes of log writers have left over: ledgers that no log lists, pages, unfinished deletions.

A ledger made for a log names it in its custom metadata. Whoever makes one lists it by a compare-and-set from
a state of the list that it read before. So: find the ledgers; then change the list's version; those that are
not listed then never will be (`client_aio.core.log_chain`).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from client_aio.log.log_ledger import TAG
from client_aio.log.truncation import delete_ledgers, finish_deletion, finish_dropping
from client_aio.unbounded.paged_fragments import forget_deleted
from metadata.access.fragments import LedgerNames
from metadata.access.logs import LogList, names_ever
from metadata.errors import BookKeeperError, InvalidArgumentError, NoSuchLedgerError, NoSuchLogError
from metadata.model.log import check_log_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from client_aio.context import ClientContext
    from metadata.model.log import LogHead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What `Client.sweep_log_orphans` has deleted."""

    ledgers: tuple[int, ...]
    """Ledgers that had been made for a log and were not listed."""
    pages: tuple[str, ...]
    """Pages of lists that no list referred to."""
    failures: tuple[str, ...]
    """What could not be swept, and why: the next call may."""


async def sweep(
    context: ClientContext,
    lists_of: Callable[[str], LogList],
    *,
    older_than_s: float,
    password: bytes,
) -> SweepReport:
    """Sweep all logs; see `Client.sweep_log_orphans`."""
    made = await _ledgers_made_for_logs(context, context.now_ms() - int(older_than_s * 1000))
    names = {*made, *await names_ever(context.ledgers.store)}
    ledgers: list[int] = []
    pages: list[str] = []
    failures: list[str] = []
    for name in sorted(names):
        lists = lists_of(name)
        with _noting(failures, f"log={name}"):
            ledgers += await _sweep_ledgers(context, lists, made.get(name, []), password)
        with _noting(failures, f"log={name}"):
            pages += await lists.sweep_pages()
            await lists.vacate()
    with _noting(failures, "the names of unbounded ledgers"):
        await LedgerNames(context.ledgers).vacate()
    with _noting(failures, "the pages of unbounded ledgers"):
        pages += await forget_deleted(context)
    return SweepReport(tuple(ledgers), tuple(pages), tuple(failures))


async def _ledgers_made_for_logs(context: ClientContext, made_before_ms: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    async for ledger_id in context.ledgers.ledger_ids(sync=True):
        try:
            metadata, _ = await context.ledgers.read(ledger_id)
        except NoSuchLedgerError:
            continue
        tag = metadata.custom.get(TAG)
        if tag is None or metadata.created_ms > made_before_ms:
            continue
        try:
            name = check_log_name(tag.decode())
        except (InvalidArgumentError, UnicodeDecodeError):
            logger.warning("ledger=%d names no log in its custom metadata: %r", ledger_id, tag)
            continue
        found.setdefault(name, []).append(ledger_id)
    return found


@contextmanager
def _noting(failures: list[str], what: str) -> Iterator[None]:
    """Let what fails of one not stop the others' sweep."""
    try:
        yield
    except BookKeeperError as error:
        failures.append(f"{what} could not be swept: {error}")
        logger.warning("%s", failures[-1])


async def _sweep_ledgers(
    context: ClientContext, lists: LogList, made: list[int], password: bytes
) -> list[int]:
    """Finish what one log has begun to delete, and delete the ledgers of `made` that it does not list."""
    left_over: list[int] = []

    async def bump(head: LogHead) -> LogHead | None:
        listed = {row.ledger_id for row in [*await lists.rows(head), *await lists.dropped_rows(head)]}
        left_over[:] = [ledger_id for ledger_id in made if ledger_id not in listed]
        return head if left_over else None

    try:
        head, version = await lists.read(sync=True, deleted_too=True)
        if head.is_deleted:
            await finish_deletion(context, lists, head, version, password)
            return await _sweep_ledgers(context, lists, made, password)
        head, version = await finish_dropping(context, lists, head, version, password)
        await lists.change(head, version, bump)
    except NoSuchLogError:
        left_over[:] = made  # A log of that name made later lists ledgers made later.
    await delete_ledgers(context, left_over, password)
    return left_over
