"""Taking a log over: recover its last two ledgers, then change the list by compare-and-set, or start again.

`LogTakeover` checks first that the two ledgers can be recovered. A takeover that must fail fences nobody.

The shell around `client_aio.core.log_chain`. Opening a log for writing and adding closed ledgers share it.

`client_aio.log.roller` rolls from ledger to ledger.

`read_log_metadata` reads the list as an immutable view; `is_met` checks whether it holds a row.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from client_aio.admin.delete import delete_ledger
from client_aio.core.log_chain import to_recover
from client_aio.ledger.recovery import check_reach, recover_ledger
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    NoSuchKeyError,
    NoSuchLedgerError,
)
from metadata.owned_task import is_cancelled_alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.log_chain import Listing
    from client_aio.log.ledger import LogLedger
    from metadata.access.logs import LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead, LogRow, Position
    from metadata.store import Version

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LogMetadata:
    """A log's metadata at the time of the read."""

    name: str
    created_ms: int
    rows: tuple[LogRow, ...]
    """The log's ledgers, oldest first. At most the last two are not CLOSED."""
    begins_at: Position
    """Records before this position have been truncated."""
    custom: Mapping[str, bytes]
    transactions: Mapping[str, int]
    """The last batch of each query whose ledgers were added by `Client.add_to_log`."""


async def read_log_metadata(lists: LogStore) -> LogMetadata:
    """Read a log's metadata, every page of its list included; see `Client.log_metadata`."""
    while True:
        head, version = await lists.read(sync=True)
        try:
            rows = await lists.rows(head)
        except NoSuchKeyError as error:
            await lists.check_changed(version, error)
            continue
        return LogMetadata(
            lists.name,
            head.created_ms,
            tuple(rows),
            head.begins_at,
            head.custom,
            {each.query_id: each.batch_id for each in head.transactions},
        )


async def is_met(lists: LogStore, listing: Listing, head: LogHead) -> bool:
    """Return whether the list holds the row of a compare-and-set that met a changed list.

    Its first attempt may have succeeded unnoticed. A ledger that is listed must not be discarded.
    """
    if listing.row_id is None or listing.is_met_by(head):
        return listing.row_id is not None
    while True:
        try:
            return await lists.lists_row(head, listing.row_id)
        except NoSuchKeyError as error:  # The page is gone: the list has changed since, or is damaged.
            before, (head, _) = head, await lists.read(sync=True)
            if head == before:
                raise lists.damaged(error) from error


logger = logging.getLogger(__name__)


class LogTakeover:
    """One attempt to take a log over: what it needs is checked before any writer is fenced.

    Attributes:
        head: the head of the log's list as it was read, at `version`. The caller changes the list by a
            compare-and-set from that version. Where it succeeds, no other writer has listed a ledger since.
    """

    def __init__(
        self, context: ClientContext, head: LogHead, version: Version, ledgers: Sequence[_Unlocked]
    ) -> None:
        self._context = context
        self._ledgers = ledgers
        self.head = head
        self.version = version

    @classmethod
    async def prepare(
        cls,
        context: ClientContext,
        lists: LogStore,
        password: bytes,
        *,
        check: Callable[[LogHead], None] | None = None,
    ) -> LogTakeover:
        """Read a log's list, and check that its last two ledgers can be recovered. Nothing is fenced.

        Args:
            check: looks at the list first; its exceptions are passed on.

        Raises:
            NoSuchLogError: there is no such log.
            LedgerRecoveryError: too few bookies answer to find the end of a ledger that is not CLOSED.
            UnauthorizedAccessError: the password is not that of the log's ledgers.
        """
        head, version = await lists.read(sync=True)
        if check is not None:
            check(head)
        found = await _for_each(to_recover(head), lambda row: _unlock(context, row, password))
        return cls(context, head, version, [each for each in found if each is not None])

    async def fence(self) -> None:
        """Bring the log's last two ledgers to CLOSED: this fences every earlier writer.

        Raises:
            LedgerRecoveryError: too few bookies answered; try again later.
        """
        await _for_each(self._ledgers, self._recover)

    async def _recover(self, ledger: _Unlocked) -> None:
        ledger_id = ledger.metadata.ledger_id
        try:
            if not ledger.metadata.is_closed:
                await recover_ledger(self._context, ledger_id, ledger.digest, is_checked=True)
        except NoSuchLedgerError:
            _note_missing(ledger_id)


class _Unlocked(NamedTuple):
    """A ledger of the log, whose password is right."""

    metadata: LedgerMetadata
    digest: Digest


async def _unlock(context: ClientContext, row: LogRow, password: bytes) -> _Unlocked | None:
    try:
        metadata, _ = await context.ledgers.read(row.ledger_id)
        # Even where it is CLOSED: else the log's next ledger could get another password.
        digest = await context.unlock(metadata, password)
        if not metadata.is_closed:
            await check_reach(context, metadata, digest)
    except NoSuchLedgerError:
        _note_missing(row.ledger_id)
        return None
    return _Unlocked(metadata, digest)


def _note_missing(ledger_id: int) -> None:
    # Either the list has changed, and the compare-and-set will fail. Or somebody has deleted a ledger of the
    # log by hand, and no writer can add to that ledger any more.
    logger.warning("ledger=%d is listed in a log and does not exist", ledger_id)


async def _for_each(items: Sequence[Item], work: Callable[[Item], Awaitable[Result]]) -> list[Result]:
    """Do the same for all items at once; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(work(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        if any(map(is_cancelled_alone, tasks)):
            raise BookieUnavailableError("the work was cancelled by the application: try again") from None
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def discard(context: ClientContext, ledger: LogLedger, password: bytes) -> None:
    """Delete a ledger that has definitely not been listed; a failure leaves it to a sweep."""
    await ledger.abort()
    try:
        await delete_ledger(context, ledger.ledger_id, password)
    except BookKeeperError as error:
        logger.warning("ledger=%d was made for a log and is left over: %s", ledger.ledger_id, error)
