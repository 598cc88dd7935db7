"""How the failure of a writer reaches those who wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from metadata.errors import BookKeeperError


def fail_all(
    futures: Iterable[asyncio.Future[int] | asyncio.Future[None] | None], error: BookKeeperError
) -> None:
    """Give an error to all that are not done, in order."""
    for future in futures:
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # looked at: one that nobody awaits does not fill the log


def with_message(error: BookKeeperError, message: str, entry_id: int) -> BookKeeperError:
    """Build an error of the same class with another message."""
    copy = type(error)(message, ledger_id=error.ledger_id, bookie_id=error.bookie_id)
    copy.entry_id = entry_id
    return copy
