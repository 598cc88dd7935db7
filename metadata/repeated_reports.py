"""Reports of what may happen again and again: one at once, and then ever more rarely, with a count.

A writer that waits for its bookies tries once a second, and a peer may send any number of bad frames. A log
line for each would hide the others. `RepeatedReports` owns the counts and their timers. Its users say what is
the same report (the key), and how a report is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    import logging
    from collections.abc import Callable, Hashable

    Write = Callable[[int], None]

PERIOD_S = 60.0
KEYS_MAX = 32
"""Beyond so many keys at a time, all others count as one: peers cannot make up reasons without end."""


@dataclass(slots=True)
class _Repeated:
    write: Write
    period_s: float
    timer: asyncio.TimerHandle
    count: int = 0


class RepeatedReports:
    """Counts reports by their keys.

    The first report of a key is written at once, and further ones are counted. At the end of a period the
    last one is written with their count. A key of which nothing comes for a period begins anew.

    Args:
        longest_s: each period is twice as long as the one before, up to this.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, longest_s: float, keys_max: int = KEYS_MAX
    ) -> None:
        self._loop = loop
        self._longest_s = longest_s
        self._keys_max = keys_max
        self._repeated: dict[Hashable, _Repeated] = {}

    def is_crowded_for(self, key: Hashable) -> bool:
        """Return whether there is no room for the key: the caller reports it under a common one."""
        return key not in self._repeated and len(self._repeated) >= self._keys_max

    def report(self, key: Hashable, write: Write) -> None:
        """Write a report, or count it.

        Args:
            write: writes the report, at once or later. Its argument is how many there were since the last one
                was written, 0 for the first one.
        """
        found = self._repeated.get(key)
        if found is None:
            self._repeated[key] = _Repeated(write, PERIOD_S, self._after(PERIOD_S, key))
            write(0)
        else:
            found.write = write
            found.count += 1

    def warn(self, logger: logging.Logger, key: Hashable, message: str, *values: object) -> None:
        """Log a warning with these values, or count it."""

        def write(count: int) -> None:
            if count:
                logger.warning(message + " (%d times since the last report)", *values, count)
            else:
                logger.warning(message, *values)

        self.report("other warnings" if self.is_crowded_for(key) else key, write)

    def _after(self, period_s: float, key: Hashable) -> asyncio.TimerHandle:
        return self._loop.call_later(period_s, self._end_period, key)

    def _end_period(self, key: Hashable) -> None:
        repeated = self._repeated[key]
        if not repeated.count:
            del self._repeated[key]
            return
        repeated.write(repeated.count)
        repeated.count = 0
        repeated.period_s = min(2 * repeated.period_s, self._longest_s)
        repeated.timer = self._after(repeated.period_s, key)

    def close(self, *, writes_counts: bool = True) -> None:
        """Write the counts that are left, if wanted, and cancel the timers."""
        for repeated in self._repeated.values():
            repeated.timer.cancel()
            if repeated.count and writes_counts:
                repeated.write(repeated.count)
        self._repeated.clear()
