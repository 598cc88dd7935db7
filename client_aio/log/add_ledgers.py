"""Adding closed ledgers to a log, all at once: the output of a batch job becomes visible in one step.

The addition is one compare-and-set of the log's list, after a takeover of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from client_aio.core.log_chain import TAG, Listing
from client_aio.log.ownership import claim
from client_aio.log.takeover import LogTakeover, is_met, read_log_metadata
from client_aio.log.truncation import ensure_log, finish_dropping
from metadata.errors import (
    BookKeeperError,
    InvalidArgumentError,
    NoSuchLedgerError,
    NoSuchLogError,
    StaleTransactionError,
)
from metadata.ids import LEDGER_ID_MAX, check_ledger_id
from metadata.model.log import LogRow, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from client_aio.context import ClientContext
    from metadata.access.logs import LogChanged, LogStore
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogHead

logger = logging.getLogger(__name__)


CONDEMNED = "condemned"
"""In a ledger's custom metadata: a sweep is about to delete the ledger, which must not be added to a log.

A sweeper sets this mark, then raises the version of the log's list, then looks whether the ledger is listed
after all. An addition reads the list, then looks for the mark, then changes the list by a compare-and-set
from the version it read. So either the sweeper finds the ledger listed, or the ledger is never listed."""

JOBS_LOG = "spark.log"
"""In a ledger's custom metadata: the log that a job made it for. The sweep of that log deletes the ledger
unless the log lists it. (`client_aio.spark.provenance` has the other keys of such a ledger.)"""

_CHECKS_AT_ONCE = 32
CONTENT_CHARACTERS_MAX = 100


@dataclass(frozen=True, slots=True)
class AddedToLog:
    """The result of `Client.add_to_log`."""

    repeated: bool
    """The transaction had been recorded before; nothing was changed."""
    rows: tuple[LogRow, ...]
    """The rows added, in their order."""


@dataclass(frozen=True, slots=True)
class Addition:
    """The arguments of one addition, checked."""

    ledger_ids: tuple[int, ...]
    transaction: Transaction | None
    replace: bool
    custom: Mapping[str, bytes]
    fits: Callable[[LogHead], None] | None = None
    """Checks the log's head in the same compare-and-set, unless `replace` is set; raises to refuse it."""

    @classmethod
    def check(
        cls,
        ledger_ids: Sequence[int],
        transaction: tuple[str, int] | None,
        replace: bool,
        custom: Mapping[str, bytes],
        content: str = "",
    ) -> Addition:
        """Check the caller's arguments, or raise InvalidArgumentError."""
        if not isinstance(ledger_ids, Sequence) or isinstance(ledger_ids, (str, bytes, bytearray)):
            raise InvalidArgumentError(f"{ledger_ids!r} is no sequence of ledger ids")
        ids = tuple(check_ledger_id(each) for each in ledger_ids)
        if len(set(ids)) != len(ids):
            raise InvalidArgumentError(f"a ledger is given twice in {list(ids)}")
        if transaction is not None:
            if not isinstance(transaction, Sequence) or len(transaction) != 2:
                raise InvalidArgumentError(f"transaction {transaction!r} is not a query id and a batch id")
            query_id, batch_id = transaction
            if not isinstance(query_id, str) or not 1 <= len(query_id) <= 200:
                raise InvalidArgumentError(f"query id {query_id!r} is not a string of 1 to 200 characters")
            if (
                not isinstance(batch_id, int)
                or isinstance(batch_id, bool)
                or not 0 <= batch_id <= LEDGER_ID_MAX
            ):
                raise InvalidArgumentError(f"batch id {batch_id!r} is not an integer from 0 to 2**63 - 1")
        if not isinstance(content, str) or len(content) > CONTENT_CHARACTERS_MAX:
            raise InvalidArgumentError(
                f"content {content!r} is not a string of at most {CONTENT_CHARACTERS_MAX} characters"
            )
        return cls(ids, None if transaction is None else Transaction(*transaction, content), replace, custom)

    def is_repeated(self, head: LogHead) -> bool:
        """Return whether the log has recorded this very transaction as the last one of its query.

        Raises:
            StaleTransactionError: it has recorded a later batch, or other records under this batch's number.
                Reported as a repetition, records that are in no log would count as added.
        """
        ours = self.transaction
        last = None if ours is None else head.last_transaction(ours.query_id)
        if ours is None or last is None or last.batch_id < ours.batch_id:
            return False
        if last.batch_id == ours.batch_id and ours.content in ("", last.content):
            return True
        is_same_number = last.batch_id == ours.batch_id
        found = (
            "other records under that number" if is_same_number else f"batch {last.batch_id} of that query"
        )
        raise StaleTransactionError(
            f"batch {ours.batch_id} of query {ours.query_id!r} is not added: log {head.name!r} has recorded "
            f"{found}, and only the very batch that a log recorded last can be repeated"
        )

    def check_fits(self, head: LogHead) -> None:
        """Raise the error with which `change` would refuse this head."""
        if self.fits is not None and not self.replace:
            self.fits(head)
        head.with_custom(self.custom)

    def change(self, head: LogHead, rows: Sequence[LogRow]) -> LogHead:
        """Return the head with the rows, the custom metadata and the transaction of this addition."""
        if self.replace:
            head = head.drop_all()
        elif self.fits is not None:
            self.fits(head)
        head = head.append(rows).with_custom(self.custom)
        return head if self.transaction is None else head.record(self.transaction)


async def add_to_log(
    context: ClientContext, lists: LogStore, addition: Addition, password: bytes
) -> AddedToLog:
    """Take a log over and list closed ledgers; see `Client.add_to_log`."""
    try:
        return await _add(context, lists, addition, password)
    except StaleTransactionError:
        raise
    except (InvalidArgumentError, NoSuchLedgerError):
        # An earlier call may have added the ledgers, and a truncation may have deleted them since.
        if await _is_recorded(lists, addition):
            return AddedToLog(True, ())
        raise


async def _is_recorded(lists: LogStore, addition: Addition) -> bool:
    if addition.transaction is None:
        return False
    try:
        head, _ = await lists.read(sync=True)
    except NoSuchLogError:
        return False
    return addition.is_repeated(head)


async def _add(context: ClientContext, lists: LogStore, addition: Addition, password: bytes) -> AddedToLog:
    while True:
        try:
            added = await _try_to_add(context, lists, addition, password)
        except NoSuchLogError:
            continue  # The log has been deleted meanwhile, and is created anew.
        if added is not None:
            return added


async def _try_to_add(
    context: ClientContext, lists: LogStore, addition: Addition, password: bytes
) -> AddedToLog | None:
    """Take the log over and list the ledgers; return None where other clients changed it meanwhile."""
    # Before the log is created: on a retry, the log may have been deleted together with these ledgers.
    await _check_closed(context, lists.name, addition.ledger_ids, password)
    await ensure_log(context, lists, password)
    head, _ = await lists.read()
    if addition.is_repeated(head):
        return AddedToLog(True, ())
    takeover = await LogTakeover.prepare(context, lists, password)
    head, version = takeover.head, takeover.version
    # Before anything is fenced: an addition that is refused must not end a healthy writer.
    if addition.is_repeated(head):
        return AddedToLog(True, ())
    addition.check_fits(head)
    await _check_unlisted(context, lists, head, addition)
    await takeover.fence()
    if addition.replace and head.has_dropped:
        await finish_dropping(context, lists, head, version, password)
        return None  # A writer that took the log over meanwhile has not been fenced yet.
    rows = await _rows(context, head, addition.ledger_ids)
    # After the list was read: a sweep that sets CONDEMNED later raises the list's version after it.
    await claim(context, addition.ledger_ids, lists.name, partial(_check_addable, log_name=lists.name))
    listing = Listing(partial(addition.change, rows=rows), rows[-1].id if rows else None)
    changed = await lists.change_now(head, version, listing.apply)
    if not changed.is_done and not await is_met(lists, listing, changed.head):
        return None
    if addition.replace:
        await _finish(context, lists, changed, password)
    return AddedToLog(False, tuple(rows))


async def _finish(context: ClientContext, lists: LogStore, changed: LogChanged, password: bytes) -> None:
    """Delete the replaced ledgers; a failure leaves them to the next truncation or to a sweep."""
    try:
        await finish_dropping(context, lists, changed.head, changed.version, password)
    except BookKeeperError as error:
        logger.warning("log=%s ledgers that were replaced are left over: %s", lists.name, error)


async def _as_it_is(context: ClientContext, ledger_id: int) -> LedgerMetadata:
    """Read a ledger's metadata; where a server says that it is not CLOSED, read again with `sync`."""
    with contextlib.suppress(NoSuchLedgerError):
        metadata, _ = await context.ledgers.read(ledger_id)
        if metadata.is_closed:
            return metadata
    return (await context.ledgers.read(ledger_id, sync=True))[0]


async def _check_closed(
    context: ClientContext, log_name: str, ledger_ids: Sequence[int], password: bytes
) -> None:
    """Raise unless each ledger may be added to the log, and has its password.

    Raises:
        InvalidArgumentError: a ledger is unbounded, not CLOSED, condemned, or another log's.
        NoSuchLedgerError: a ledger does not exist. UnauthorizedAccessError: the password is not its own.
    """
    room = asyncio.Semaphore(_CHECKS_AT_ONCE)

    async def check(ledger_id: int) -> None:
        async with room:
            metadata = await _as_it_is(context, ledger_id)
            _check_addable(metadata, log_name)
            # With another password, readers and takeovers of the log would fail here.
            await context.unlock(metadata, password)

    await asyncio.gather(*map(check, ledger_ids))


def _check_addable(metadata: LedgerMetadata, log_name: str) -> None:
    ledger_id = metadata.ledger_id
    if metadata.unbounded is not None:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is the unbounded ledger {metadata.unbounded.name!r}: only bounded "
            "ledgers can be added to a log"
        )
    if not metadata.is_closed:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is {metadata.state.value}: only CLOSED ledgers can be added to a log"
        )
    _check_maker(ledger_id, metadata.custom, log_name)
    if metadata.log not in ("", log_name):
        raise InvalidArgumentError(
            f"ledger {ledger_id} belongs to log {metadata.log!r}, which deletes it when it is truncated: log "
            f"{log_name!r} needs a copy of its own. If log {metadata.log!r} does not list it, `log sweep` "
            "(`sweep_log_orphans`) frees it"
        )
    if CONDEMNED in metadata.custom:
        raise InvalidArgumentError(
            f"ledger {ledger_id} is condemned: a sweep took it for one that was left over"
        )


def _check_maker(ledger_id: int, custom: Mapping[str, bytes], log_name: str) -> None:
    """Refuse a ledger that another log's truncation or sweep may delete.

    A log's writer lists the ledgers that it makes itself, from a version of the list that it read before. A
    sweep relies on that: a ledger with the writer's mark that is not listed never will be. So this refuses
    such a ledger even in the log that it was made for.
    """
    maker = custom.get(TAG)
    if maker is None and custom.get(JOBS_LOG) != log_name.encode():
        maker = custom.get(JOBS_LOG)
    if maker is not None:
        raise InvalidArgumentError(
            f"ledger {ledger_id} was made for log {maker.decode(errors='replace')!r}, and may be deleted "
            f"when that one is truncated or swept: log {log_name!r} needs a copy of its own"
        )


async def _check_unlisted(context: ClientContext, lists: LogStore, head: LogHead, addition: Addition) -> None:
    """Refuse a ledger that the log lists or has dropped: replacing it by itself would list and delete it.

    The whole list is read where `replace` deletes ledgers, and where a ledger belongs to this log already.
    Otherwise its newest rows are enough.
    """
    # A ledger is listed under its own id, or a higher one.
    below = {each for each in addition.ledger_ids if each < head.id_min}
    if not below:
        return
    is_whole = addition.replace or await _is_any_claimed(context, below, lists.name)
    rows = (await read_log_metadata(lists)).rows if is_whole else head.newest
    listed = sorted(below.intersection(row.ledger_id for row in rows))
    if listed:
        raise InvalidArgumentError(
            f"log {lists.name!r} has ledger {listed[0]} already: repeat no addition "
            "whose outcome is unknown but by its transaction"
        )
    dropped = below.intersection(row.ledger_id for row in await lists.dropped_rows(head))
    if dropped:
        raise InvalidArgumentError(
            f"ledger {min(dropped)} is about to be deleted: log {lists.name!r} has dropped it"
        )


async def _is_any_claimed(context: ClientContext, ledger_ids: Iterable[int], log_name: str) -> bool:
    """Return whether some ledger has the log as its owner: an addition to this log has claimed it before.

    Called after the list was read. A ledger is claimed before it is listed, so none that is listed is missed.
    """
    room = asyncio.Semaphore(_CHECKS_AT_ONCE)

    async def is_claimed(ledger_id: int) -> bool:
        async with room:
            return (await context.ledgers.read(ledger_id, sync=True))[0].log == log_name

    return any(await asyncio.gather(*map(is_claimed, ledger_ids)))


async def _rows(context: ClientContext, head: LogHead, ledger_ids: Sequence[int]) -> list[LogRow]:
    """Return a row for each ledger, under the least id that keeps the order: its own or an allocated one."""
    now_ms, id_min = context.now_ms(), head.id_min
    rows = []
    for ledger_id in ledger_ids:
        row_id = ledger_id if ledger_id >= id_min else await context.ledgers.allocate_id(at_least=id_min)
        rows.append(LogRow(row_id, ledger_id, now_ms))
        id_min = row_id + 1
    return rows
