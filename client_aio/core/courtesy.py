"""How fast a worker may read, and how long it rests for the sake of others (rule 14). Pure.

`share` divides the bytes per second of a cluster among those who work. `TokenBucket` bounds those of one
worker. `Courtesy` has it yield to the requests of others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from metadata.access.repair_tasks import TaskRef

_LEAST_SHARE = 16


def share(total: float, by_hand: float, working: int) -> float:
    """Return how many bytes per second one worker may read.

    Args:
        total: the bound of all workers together.
        by_hand: what operators' repairs may read. Workers leave that to them, but for a sixteenth of `total`.
        working: how many workers are at work.
    """
    return max(total - by_hand, total / _LEAST_SHARE) / max(working, 1)


def is_urgent(ref: TaskRef) -> bool:
    """Return whether a task's ledger may have no copy to lose: it waits for nobody."""
    return ref.copies <= Courtesy.COPIES_AT_RISK


class TokenBucket:
    """Bounds the bytes per second of one worker. A taker goes into debt, and waits for as long as it owes."""

    def __init__(self, rate: float, burst: float) -> None:
        """Begin full.

        Args:
            rate: bytes per second; may be changed at any time.
            burst: the bytes that may pass at once after a pause.
        """
        self.rate = rate
        self._burst = burst
        self._left = burst
        self._at: float | None = None

    def take(self, amount: int, now: float) -> float:
        """Take some bytes; return how many seconds to wait before going on."""
        if self._at is not None:
            self._left = min(self._left + max(now - self._at, 0.0) * self.rate, self._burst)
        self._at = now
        self._left -= amount
        return max(-self._left / self.rate, 0.0)


class Step(NamedTuple):
    """A request of a repair to one bookie, or several at once, that were answered."""

    size: int
    """The bytes that were read."""
    took_s: float
    is_write: bool


class Courtesy:
    """How long a worker rests after each step, so that the requests of others keep their latency.

    A worker does one thing after another, and rests for as long as each took. So half of its time is left to
    others in any case. A step that took longer than steps do on idle bookies has waited for others, who wait
    for the worker likewise. So the rest grows with the ratio of the two. The rest is bounded: repair goes on
    beside any load. A ledger that may have no copy to lose is worth more than latency: nobody rests for it.
    """

    COPIES_AT_RISK = 1
    RATIO_MAX = 4.0
    REST_MAX_S = 0.5
    WINDOW = 256
    """An idle bookie's step is the quickest of between one and two windows of so many steps."""

    def __init__(self) -> None:
        """Begin without knowing how long a step takes."""
        self.is_urgent = False
        """Whether the ledger at work has at most `COPIES_AT_RISK` good copies of an entry."""
        self._since: float | None = None
        self._ratio = 1.0
        self._counts = [0, 0]
        self._quickest = [math.inf, math.inf]
        self._quickest_before = [math.inf, math.inf]

    def begin(self, now: float) -> None:
        """Begin to work; what lies before it is no work."""
        self._since = now

    def note(self, step: Step) -> None:
        """Learn from a step how long steps take."""
        kind = int(step.is_write)
        usual_s = min(self._quickest[kind], self._quickest_before[kind], step.took_s)
        self._ratio = min(step.took_s / usual_s, self.RATIO_MAX) if usual_s > 0 else 1.0
        self._quickest[kind] = min(self._quickest[kind], step.took_s)
        self._counts[kind] += 1
        if self._counts[kind] >= self.WINDOW:
            self._counts[kind] = 0
            self._quickest_before[kind], self._quickest[kind] = self._quickest[kind], math.inf

    def rest_s(self, now: float) -> float:
        """Return how long to rest for the work since the last rest. The caller calls `begin` behind it."""
        if self.is_urgent:
            return 0.0
        worked_s = 0.0 if self._since is None else max(now - self._since, 0.0)
        return min(worked_s * max(self._ratio, 1.0), self.REST_MAX_S)
