"""Forces of a writer with deferred sync: making durable what the bookies have received.

Owns when a force is sent again: one is not always enough, since a bookie may fail on the way, and its
successor has to receive what it did. Does not own what a force makes durable, which the window decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio.core.add_window import AddWindow
    from metadata.errors import BookKeeperError


class Forces:
    """Moves the LAC of one window by forces, one after another.

    Args:
        force: asks the bookies once, and returns when all that have not failed have answered.
        failure: gives what the writer has failed of; None while it has not.
    """

    def __init__(
        self,
        window: AddWindow[Any],
        force: Callable[[], Awaitable[None]],
        failure: Callable[[], BookKeeperError | None],
    ) -> None:
        self._window = window
        self._force = force
        self._failure = failure
        self._lock = asyncio.Lock()
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Note that the window has moved, or that the writer has failed."""
        self._moved.set()

    async def up_to(self, last: int) -> None:
        """Return when the LAC is at `last`, which has been received.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        async with self._lock:
            while self._window.lac < last:
                if (failure := self._failure()) is not None:
                    raise failure.with_traceback(None)
                self._moved.clear()
                await self._force()
                if self._window.lac >= last:
                    return
                if self._window.is_frozen or not self._window.can_acknowledge:
                    self._moved.clear()  # Nothing that came so far makes another force of use.
                if self._failure() is None:
                    await self._moved.wait()
