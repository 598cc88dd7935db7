"""A bookie whose segments are small, so that sealing, spare files and a full disk come within a second.

    python -m tests.support.smallstorage bookie serve …

Everything else of it is the production bookie.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bookie_aio.config import Limits
from bookie_aio.wire.frames import FRAME_BYTES_MAX, entry_room
from client_aio.cli.main import main
from client_aio.cli.settings import variable_of

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
_BESIDE_A_FRAME = 8 * 1024
"""Of a segment: its header, and those of a group."""


def variables(storage: Mapping[str, float]) -> dict[str, str]:
    """Return the environment variables that set keys of [bookie.storage], and frames that fit segments."""
    frame = min(FRAME_BYTES_MAX, int(storage["segment_bytes"]) - _BESIDE_A_FRAME)
    room = min(Limits().entry_bytes_max, entry_room(frame))
    limits = {"frame_bytes_max": frame, "entry_bytes_max": room, "read_bytes_max": room}
    values = {f"storage.{key}": value for key, value in storage.items()}
    values |= {f"limits.{key}": value for key, value in limits.items()}
    return {variable_of(f"bookie.{key}"): str(value) for key, value in values.items()}


if __name__ == "__main__":
    os.environ.update(variables(SMALL))
    main()
