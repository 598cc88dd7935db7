"""What a log looks like from outside: a view of its list that changes no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.errors import NoSuchKeyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from metadata.log import LogRow, Position
    from metadata.logs import LogList


@dataclass(frozen=True, slots=True)
class LogMetadata:
    """A log's metadata, as they were when they were read."""

    name: str
    created_ms: int
    rows: tuple[LogRow, ...]
    """Its ledgers, oldest first. At most the last two of them are not CLOSED."""
    begins_at: Position
    """Records before this position have been truncated."""
    custom: Mapping[str, bytes]
    transactions: Mapping[str, int]
    """The highest batch of each query whose ledgers were added by `Client.add_to_log`."""


async def read_log_metadata(lists: LogList) -> LogMetadata:
    """Read a log's metadata, every page of its list included; see `Client.log_metadata`."""
    while True:
        head, version = await lists.read(sync=True)
        try:
            rows = await lists.rows(head)
        except NoSuchKeyError:
            if (await lists.read(sync=True))[1] == version:
                raise  # A page is missing for good.
            continue
        return LogMetadata(
            lists.name, head.created_ms, tuple(rows), head.begins_at, head.custom, dict(head.transactions)
        )
