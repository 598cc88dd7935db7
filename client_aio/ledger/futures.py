"""Those who wait until an entry is acknowledged, beside the entry's own future."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from metadata.errors import BookKeeperError


def fail_all(futures: Iterable[asyncio.Future[Any] | None], error: BookKeeperError) -> None:
    """Give an error to all that are not done, in order.

    Without a traceback: each raising of an error adds to the one that it has, with the frames of who called.
    """
    for future in futures:
        if future is not None and not future.done():
            future.set_exception(error.with_traceback(None))
            future.exception()  # looked at: one that nobody awaits does not fill the log


class EntryWaiters:
    """Waiters for entries, in the order of the entries."""

    def __init__(self) -> None:
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def wait_for(self, entry_id: int) -> None:
        """Wait until `reached` tells of this entry or a later one; raises what `fail` is given."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((entry_id, waiter))
        await waiter

    def reached(self, entry_id: int) -> None:
        """Wake those who wait for this entry or an earlier one."""
        while self._waiters and self._waiters[0][0] <= entry_id:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BookKeeperError) -> None:
        """Give an error to all."""
        fail_all([waiter for _, waiter in self._waiters], error)
        self._waiters.clear()
