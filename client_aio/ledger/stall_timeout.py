"""The timeout of a window that stands still."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from metadata.errors import OperationTimeoutError
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_aio.core.add_window import AddWindow


class StallWatch:
    """Tells when no add has been acknowledged for too long, though some wait.

    Args:
        on_stalled: called once, with the error for them.
    """

    def __init__(
        self, window: AddWindow[Any], on_stalled: Callable[[OperationTimeoutError], None], timeout_s: float
    ) -> None:
        self._window = window
        self._on_stalled = on_stalled
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._reported, self._since = NO_ENTRY, self._loop.time()
        self._timer = self._loop.call_later(timeout_s / 4, self._look)

    def stop(self) -> None:
        """Watch no more."""
        self._timer.cancel()

    def _look(self) -> None:
        window, now = self._window, self._loop.time()
        reported = window.last_entry_reported
        if reported == window.last_add_pushed or reported != self._reported:
            self._reported, self._since = reported, now
        elif now - self._since >= self._timeout_s:
            self._on_stalled(
                OperationTimeoutError(
                    f"entry {reported + 1} of ledger {window.ledger_id} was not acknowledged by "
                    f"{window.ack_quorum} bookies within {self._timeout_s:g} s",
                    ledger_id=window.ledger_id,
                    entry_id=reported + 1,
                )
            )
            return
        self._timer = self._loop.call_later(self._timeout_s / 4, self._look)
