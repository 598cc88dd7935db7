"""The limits of the storage engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.maintenance.scrubber import ScrubConfig
from bookie_aio.storage.segment.allocator import SpaceLimits


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The engine's limits."""

    segment_bytes: int = 128 * 1024 * 1024
    group_bytes_max: int = 4 * 1024 * 1024
    short_sync_s: float = 0.0015
    """The event loop waits itself for the sync of a small record while syncs take no longer; 0: never."""
    space: SpaceLimits = field(default_factory=SpaceLimits)
    files_max: int = 512
    """Files of sealed segments and indexes that are open at once."""
    page_cache_bytes: int = 1024 * 1024 * 1024
    """Bytes written last that are left in the system's page cache, for readers close behind the writers."""
    heads_bytes_max: int = 32 * 1024 * 1024
    """Bytes of heads of sealed indexes in memory: 12 for each page of 102 runs."""
    locations_bytes_max: int = 32 * 1024 * 1024
    """Bytes of the locations of ledgers that were read: 48 for each ledger in each segment."""
    live_ledgers_max: int = 4096
    """States of ledgers that are kept as objects and written with each checkpoint; a fourth of all ledgers if
    that is more. The other states are in a table, at 168 bytes each."""
    compaction: CompactionConfig = field(default_factory=CompactionConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
