"""The frame fuzzer, in small: a live bookie takes no harm, and neither does a good client beside it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = 20_000
WAIT_S = 120


async def test_mutated_frames_harm_neither_the_bookie_nor_a_good_client(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.fuzz_frames",
        "--frames", str(FRAMES), "--seed", "1", "--dir", str(tmp_path),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    text = output.decode()
    assert process.returncode == 0, text
    assert text.endswith("unharmed\n"), text
