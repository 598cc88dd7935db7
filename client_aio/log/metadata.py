"""Reading a log's list: an immutable view of all of it, and whether it holds a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.errors import NoSuchKeyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from client_aio.core.log_chain import Listing
    from metadata.access.logs import LogStore
    from metadata.model.log import LogHead, LogRow, Position


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
    """The highest batch of each query whose ledgers were added by `Client.add_to_log`."""


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
            lists.name, head.created_ms, tuple(rows), head.begins_at, head.custom, dict(head.transactions)
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
