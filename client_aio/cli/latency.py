"""Latencies in log-scaled buckets: percentiles without keeping every value.

Used where hdrhistogram is not installed. A value is counted with an error below 2 %: buckets grow by the
factor 2^(1/32). Pure: it is handed seconds and hands them back.
"""

import math
from collections import deque
from collections.abc import Iterator

Bursts = deque[tuple[int, float]]
"""How many entries were added at once, and when; the oldest first."""

_STEPS_PER_DOUBLING = 32
_LOWEST_S = 1e-6
_BUCKETS = 32 * _STEPS_PER_DOUBLING  # up to 71 minutes


def take_oldest(bursts: Bursts, count: int) -> Iterator[tuple[int, float]]:
    """Take `count` entries off the oldest bursts; yield how many of each, and when they were added."""
    while count:
        entries, added = bursts.popleft()
        taken = min(entries, count)
        if taken < entries:
            bursts.appendleft((entries - taken, added))
        count -= taken
        yield taken, added


class LatencyBuckets:
    """Counts of latencies."""

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._counts = [0] * _BUCKETS

    def record(self, seconds: float, count: int = 1) -> None:
        """Count a latency, `count` times."""
        if seconds > self.max_s:
            self.max_s = seconds
        step = int(math.log2(seconds / _LOWEST_S) * _STEPS_PER_DOUBLING) if seconds > _LOWEST_S else 0
        self._counts[min(step, _BUCKETS - 1)] += count
        self.count += count

    def percentile(self, percent: float) -> float:
        """Give the latency, in seconds, that `percent` of the values do not exceed; 0 without values."""
        rank = math.ceil(self.count * percent / 100)
        if rank >= self.count:
            return self.max_s
        seen = 0
        for step, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                middle: float = _LOWEST_S * 2 ** ((step + 0.5) / _STEPS_PER_DOUBLING)
                return min(middle, self.max_s)
        return self.max_s
