"""The loads that every system gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Entries to write, or (`read_entries` above zero) to write once and then read again and again."""

    name: str
    title: str
    entry_bytes: int
    in_flight: int
    ledgers: int = 1
    read_entries: int = 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("1k-1000", "1 KiB, 1,000 in flight", 1024, 1000),
        Workload("1k-300", "1 KiB, 300 in flight", 1024, 300),
        Workload("100b-10000", "100 B, 10,000 in flight", 100, 10_000),
        Workload("64k-64", "64 KiB, 64 in flight", 64 << 10, 64),
        Workload("1k-1", "1 KiB, one in flight", 1024, 1),
        Workload("1k-ledgers", "1 KiB, 1,000 ledgers, 1,000 in flight", 1024, 1000, ledgers=1000),
        Workload("1k-read", "catch-up read of 1 KiB entries", 1024, 1000, read_entries=500_000),
    )
}
