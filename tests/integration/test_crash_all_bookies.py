"""The crash runs, in small: `kill -9` at a random moment loses nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

RUNS = 3
WAIT_S = 150


@pytest.mark.parametrize("variant", ["bookies", "writer", "spare"])
async def test_nothing_acknowledged_is_lost(variant: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.crash_recovery",
        "--runs", str(RUNS), "--seed", "100", "--variant", variant, "--dir", str(tmp_path),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    text = output.decode()
    assert process.returncode == 0, text
    assert f"{variant}: {RUNS} runs" in text
