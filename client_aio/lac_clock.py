"""Publishing the LAC and LAFR of idle writers, by one timer for all writers of a client (rule 13).

Owns the timer. Does not own the windows that it reads, nor sending the LAC.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bookie_aio.wire.messages import MANY_MAX
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_aio.core.add_window import AddWindow

_NOTHING = (NO_ENTRY, NO_ENTRY)
_NEVER = (NO_ENTRY - 1, NO_ENTRY - 1)
_PUBLISHED_BESIDE_ADDS = 32


class LacClock:
    """The one timer by which all writers of a client notice that they are idle.

    It ticks twice within the delay, and only while some LAC has moved lately. With a thousand writers, a
    timer for each would cost more than its adds. For the same reason only a few writers publish at one tick
    while others add: each LAC is a record at the bookies. Where nobody has added since the last tick, as many
    publish as share a frame. If more are idle, the others publish at the next ticks, in order.
    """

    def __init__(self, delay_s: float) -> None:
        self._period_s = delay_s / 2
        self._moved: dict[LacPublisher, None] = {}  # in the order of their moves
        self._timer: asyncio.TimerHandle | None = None
        self._has_busy = False  # Some writer was not idle at the last tick.

    def watch(self, publisher: LacPublisher) -> None:
        """Call a publisher's `look` at each tick, until it returns True."""
        self._moved[publisher] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)

    def forget(self, publisher: LacPublisher) -> None:
        """Stop calling a publisher."""
        self._moved.pop(publisher, None)
        if not self._moved and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _is_timed(self) -> bool:
        return self._timer is not None  # Read anew: mypy holds it for None after `self._timer = None`.

    def _tick(self) -> None:
        self._timer = None
        moved, self._moved = self._moved, {}
        may_publish = _PUBLISHED_BESIDE_ADDS if self._has_busy else MANY_MAX
        self._has_busy = False
        for publisher in moved:
            if not publisher.look(may_publish=may_publish > 0):
                self._moved[publisher] = None
                self._has_busy |= publisher.is_busy
            elif publisher.has_published:
                may_publish -= 1
        if self._moved and not self._is_timed:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._tick)


class LacPublisher:
    """Publishes the LAC to the bookies once no entry has stated it for a while (rule 13).

    With guaranteed write quorum the LAFR, which is stated with it, may move later. Then both are published
    again: a recovery with a bookie away has nothing to write back up to the LAFR.

    Args:
        publish: sends the window's LAC and LAFR to the bookies.
    """

    def __init__(self, window: AddWindow[Any], publish: Callable[[], None], clock: LacClock) -> None:
        self._window = window
        self._publish = publish
        self._clock = clock
        self._published, self._seen = _NOTHING, _NEVER  # LAC and LAFR
        self._is_watched = False
        self._is_stopped = False
        self.has_published = False  # by the last `look`
        self.is_busy = False  # as the last `look` found it

    def moved(self) -> None:
        """Note that the LAC may have moved."""
        if not self._is_watched and not self._is_stopped:
            self._is_watched, self._seen = True, _NEVER
            self._clock.watch(self)

    def again(self) -> None:
        """Note that some bookie may not have been told the LAC: it did not answer, or was replaced."""
        self._published = _NOTHING
        self.moved()

    def stop(self) -> None:
        """Publish nothing more, even if late answers still move the LAC."""
        self._is_stopped = True
        self._clock.forget(self)

    def look(self, *, may_publish: bool = True) -> bool:
        """Publish if nothing has moved since the last call.

        Returns:
            False if the publisher must be called again at the next tick.
        """
        window = self._window
        self.has_published = self.is_busy = False
        stated, seen = (window.lac, window.lafr_to_state), self._seen
        if self._is_stopped or stated == self._published:
            self._is_watched = False
            return True
        self._seen = stated
        if window.lac != seen[0] or window.last_add_pushed != window.last_entry_reported:
            # The writer is not idle: its next entries state the LAC.
            self.is_busy = True
            return False
        if not may_publish or (window.lac == self._published[0] and stated != seen):
            return False  # the LAFR alone waits until it stands still
        self._is_watched, self._published = False, stated
        self.has_published = True
        self._publish()
        return True
