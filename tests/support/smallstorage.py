"""A bookie whose segments are small, so that sealing, spare files and a full disk come within a second.

    python -m tests.support.smallstorage bookie serve …

Everything else of it is the production bookie: the command line has no setting for these limits.
"""

from __future__ import annotations

from functools import partial

from bookie_aio.storage.engine import StorageConfig
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from client_aio.cli import bookie
from client_aio.cli.main import main

SEGMENT_BYTES = 2 * 1024 * 1024
SMALL = partial(
    StorageConfig,
    segment_bytes=SEGMENT_BYTES,
    group_bytes_max=512 * 1024,
    space=SpaceLimits(reserve_bytes=512 * 1024, spare_bytes_max=2 * SEGMENT_BYTES, retry_s=0.2),
    compaction=CompactionConfig(pause_s=0.2),
)

if __name__ == "__main__":
    vars(bookie)["StorageConfig"] = SMALL
    main()
