"""Counters: what a bookie has done since its start. Owns the names under which `bookie info` shows them."""

from __future__ import annotations

from bookie_aio.wire.messages import Op


class Counters:
    """What has been done since the start, for `bookie info`."""

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
