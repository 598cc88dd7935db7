"""The frame fuzzer, in small: a live bookie takes no harm, and neither does a good client beside it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = 4_000
WAIT_S = 120


@pytest.mark.long(40)
def test_mutated_frames_harm_neither_the_bookie_nor_a_good_client(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.fuzz_frames",
            "--frames", str(FRAMES), "--seed", "1", "--dir", str(tmp_path),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.endswith("unharmed\n"), ended.stdout
