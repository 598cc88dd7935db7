"""A storage that is killed while it seals, checkpoints, compacts and gives up segments loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.crash_storage import kill_and_check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", [1, 2])
async def test_kill_at_random_steps(tmp_path: Path, seed: int) -> None:
    steps = await kill_and_check(tmp_path / "bookie", 5, seed)
    assert sum(steps.values()) >= 5
