"""Files, directories and metadata of another time: seeds that failed before bookies noticed them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.faults.files import ONE_FILE
from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan

SEEDS = [
    ("stale-files", 0),
    ("stale-files", 1),
    ("stale-files", 3),
    ("damaged-files", 11),
    ("damaged-files", 21),
    ("damaged-files", 22),
    ("damaged-files", 25),
    ("set-back-bookie", 0),
    ("set-back-bookie", 1),
    ("set-back-bookie", 3),
    ("set-back-metadata", 0),
    ("set-back-metadata", 1),
    ("set-back-metadata", 2),
    ("set-back-metadata", 4),
    ("set-back-metadata", 256),
    ("copied-bookie", 4),
]


@pytest.mark.parametrize(("profile", "seed"), SEEDS)
def test_what_is_of_another_time_is_noticed(profile: str, seed: int) -> None:
    """Entries were denied, tombstones forgotten, and ids given out twice."""
    result = run_plan(draw_plan(profile, seed))
    assert result.is_good, result.text


def test_each_kind_of_damage_to_a_file_strikes_soon() -> None:
    counts: Counter[str] = Counter()
    for seed in range(100, 160):
        result = run_plan(draw_plan("damaged-files", seed))
        assert result.is_good, result.text
        assert result.stats is not None
        counts.update({kind: result.stats.get(kind, 0) for kind in ONE_FILE})
        if all(counts[kind] for kind in ONE_FILE):
            return
    raise AssertionError(f"some kinds never struck: {counts}")
