"""The same seed gives the same run: again, in another process, under another PYTHONHASHSEED."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan

ROOT = Path(__file__).parent.parent.parent
RUNS = (
    ("chaos", 1),
    ("split-brain", 4),
    ("metadata-faults", 7),
    ("disk-faults", 3),
    ("repair-in-parallel", 2),
)
PROGRAM = """
import sys
from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan
for each in sys.argv[1:]:
    name, seed = each.split(":")
    result = run_plan(draw_plan(name, int(seed)), is_traced=True)
    print(name, seed, result.trace, result.digest, result.steps)
"""


def _in_a_process(hash_seed: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(f"{name}:{seed}" for name, seed in RUNS)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ended.stdout.splitlines()


def test_a_seed_gives_the_same_trace_in_every_process_and_for_every_hash_seed() -> None:
    here = []
    for name, seed in RUNS:
        result = run_plan(draw_plan(name, seed), is_traced=True)
        here.append(f"{name} {seed} {result.trace} {result.digest} {result.steps}")
    assert _in_a_process("1") == here
    assert _in_a_process("4711") == here


@pytest.mark.parametrize(("name", "seed"), RUNS)
def test_a_seed_gives_the_same_trace_again(name: str, seed: int) -> None:
    first, second = (run_plan(draw_plan(name, seed), is_traced=True) for _ in range(2))
    assert (first.trace, first.digest, first.steps) == (second.trace, second.digest, second.steps)


def test_another_seed_gives_another_trace() -> None:
    first, second = (run_plan(draw_plan("chaos", seed), is_traced=True) for seed in (1, 2))
    assert first.digest != second.digest
