"""A bookie whose segments are small, so that sealing, spare files and a full disk come within a second.

    python -m tests.support.smallstorage bookie serve …

Everything else of it is the production bookie.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from client_aio.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Mapping

SEGMENT_BYTES = 2 * 1024 * 1024
SMALL: Mapping[str, float] = {
    "segment_bytes": SEGMENT_BYTES,
    "group_bytes_max": 512 * 1024,
    "space.reserve_bytes": 512 * 1024,
    "space.spare_bytes_max": 2 * SEGMENT_BYTES,
    "space.retry_s": 0.2,
    "compaction.pause_s": 0.2,
}
"""Keys of [bookie.storage]."""


def variables(storage: Mapping[str, float]) -> dict[str, str]:
    """Return the environment variables that set keys of [bookie.storage]."""
    names = {key: f"bookie.storage.{key}".replace(".", "_").upper() for key in storage}
    return {f"BOOKIE_AIO_{names[key]}": str(value) for key, value in storage.items()}


if __name__ == "__main__":
    os.environ.update(variables(SMALL))
    main()
