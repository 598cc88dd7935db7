"""Metrics of a bookie since its start: groups of the storage engine, and requests. Pure.

Owns the names under which `bookie info` shows them. Does not own the gauges of connections (`server.bookie`)
and of segments (`storage.engine`).
"""

from __future__ import annotations

from itertools import accumulate

from bookie_aio.wire.messages import Op

_BUCKETS = 24
"""Bucket n counts the values of n bits: below 2**n, and not below half of that. The last one has no bound."""


class Histogram:
    """Counts of values, in buckets that are powers of two."""

    def __init__(self) -> None:
        self.counts = [0] * _BUCKETS
        self.total = 0
        self.highest = 0

    def add(self, value: int) -> None:
        """Count a value."""
        self.counts[min(value.bit_length(), _BUCKETS - 1)] += 1
        self.total += value
        self.highest = max(self.highest, value)

    def percentile(self, share: float) -> int:
        """Return the upper bound of the bucket in which that share of the values is reached; 0 for none."""
        count = sum(self.counts)
        for bucket, reached in enumerate(accumulate(self.counts)):
            if count and reached >= share * count:
                return min(1 << bucket, self.highest)
        return 0


class StorageMetrics:
    """Counts of the storage engine: groups, their sizes, and the time of their fsyncs in microseconds."""

    def __init__(self) -> None:
        self.groups = 0
        self.records = 0
        self.group_bytes = Histogram()
        self.sync_us = Histogram()
        self.close_error = ""

    def count_group(self, records: int, size: int, synced_s: float) -> None:
        """Count a group that became durable: its records, its bytes, the seconds of its fsync."""
        self.groups += 1
        self.records += records
        self.group_bytes.add(size)
        self.sync_us.add(round(synced_s * 1e6))

    def as_dict(self) -> dict[str, object]:
        """Return the counts as JSON objects. Percentiles are upper bounds, within a factor of two."""
        count = max(1, self.groups)
        return {
            "groups": {
                "count": self.groups,
                "records": self.records,
                "bytes": self.group_bytes.total,
                "bytes_mean": self.group_bytes.total // count,
                "bytes_p50": self.group_bytes.percentile(0.5),
                "bytes_max": self.group_bytes.highest,
            },
            "fsync_us": {
                "mean": self.sync_us.total // count,
                "p50": self.sync_us.percentile(0.5),
                "p99": self.sync_us.percentile(0.99),
                "max": self.sync_us.highest,
                "histogram": self.sync_us.counts,
            },
        }


class RequestMetrics:
    """Counts of requests, entries, bytes and refusals. `failures` counts by the name of the status."""

    def __init__(self) -> None:
        self.requests = dict.fromkeys(map(int, Op), 0)
        self.entries_added = 0
        self.bytes_added = 0
        self.entries_repaired = 0
        self.bytes_read = 0
        self.refused_terms = 0
        self.fences = 0
        self.failures: dict[str, int] = {}

    def to_json(self) -> dict[str, object]:
        return {
            **vars(self),
            "requests": {Op(op).name.lower(): count for op, count in self.requests.items()},
        }
