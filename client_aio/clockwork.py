"""What a writer does by the clock: publishing its LAC when it is idle, and noticing that nothing moves.

Owns the two timers. Does not own the window that they look at, nor what a writer that is stuck leads to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from metadata.errors import OperationTimeoutError
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_aio.core.window import AddWindow


class LacPublisher:
    """Tells the bookies the LAC once no entry has told it for a while (rule 13).

    Args:
        publish: sends the window's LAC to the bookies.
    """

    def __init__(self, window: AddWindow[Any], publish: Callable[[], None], delay_s: float) -> None:
        self._window = window
        self._publish = publish
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._published = NO_ENTRY
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def moved(self) -> None:
        """Note that the LAC may have moved."""
        if self._timer is None and not self._is_stopped:
            self._timer = self._loop.call_later(self._delay_s, self._look, self._window.lac)

    def stop(self) -> None:
        """Publish nothing more, whatever late answers still come."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, lac_seen: int) -> None:
        self._timer = None
        window = self._window
        if window.lac == self._published:
            return
        if window.lac != lac_seen or window.last_add_pushed != window.last_entry_reported:
            # Still writing: what follows states the LAC, and the last of it comes back here.
            self.moved()
            return
        self._published = window.lac
        self._publish()


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
