"""The loads that every system gets."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.load import Load

WRITE, LOGS, READ, COLD, FOLLOW, FAILOVER, TAKEOVER = (
    "write", "logs", "read", "cold", "follow", "failover", "takeover",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A load, and what is measured of it.

    | kind | the driver |
    |---|---|
    | write | keeps a window full, one entry to each ledger in turn |
    | logs | the same, on the system's named logs; its ledgers, partitions or subjects where it has no such |
    | read | writes `read_entries`, and reads them again and again, from first to last |
    | cold | the same, once, after the pages of all files have been dropped from memory |
    | follow | appends `rate` entries a second; a follower in the same process takes their age |
    | failover | keeps a window full while the server that leads is killed: the longest pause |
    | takeover | a client writes, ends without a word together with a server, and another one goes on |
    """

    name: str
    title: str
    entry_bytes: int
    in_flight: int
    ledgers: int = 1
    read_entries: int = 0
    kind: str = WRITE
    rate: int = 0

    @property
    def is_read(self) -> bool:
        """Return whether reading is measured."""
        return self.kind in (READ, COLD)

    @property
    def needs_kill(self) -> bool:
        """Return whether a server is killed on the way."""
        return self.kind in (FAILOVER, TAKEOVER)

    def load(self, warm_up_s: float, seconds: float) -> Load:
        """Return the load as drivers take it."""
        return Load(
            self.entry_bytes, self.in_flight, seconds, warm_up_s, self.ledgers, self.read_entries,
            self.kind, self.rate,
        )  # fmt: skip


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1k-1000", "1 KiB, 1,000 in flight", 1024, 1000),
        Workload("1k-300", "1 KiB, 300 in flight", 1024, 300),
        Workload("100b-10000", "100 B, 10,000 in flight", 100, 10_000),
        Workload("64k-64", "64 KiB, 64 in flight", 64 << 10, 64),
        Workload("1k-1", "1 KiB, one in flight", 1024, 1),
        Workload("1k-ledgers", "1 KiB, 1,000 ledgers, 1,000 in flight", 1024, 1000, ledgers=1000),
        Workload("1k-logs", "1 KiB, 1,000 logs in turn, 1,000 in flight", 1024, 1000, 1000, kind=LOGS),
        Workload("1k-read", "catch-up read of 1 KiB entries", 1024, 1000, read_entries=500_000, kind=READ),
        Workload("1k-cold", "catch-up read from disk, 1 KiB", 1024, 1000, read_entries=500_000, kind=COLD),
        Workload("1k-follow", "append to follower, 1,000 of 1 KiB a second", 1024, 1, kind=FOLLOW, rate=1000),
        Workload("1k-failover", "a server killed under 1,000 in flight", 1024, 1000, kind=FAILOVER),
        Workload("1k-takeover", "a writer and a server lost together", 1024, 1000, kind=TAKEOVER),
    )
}
