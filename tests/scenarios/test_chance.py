"""The pure machines of the client under random events: see `tests.scenarios.chance`.

A failure shows the whole scenario that led to it. As a file in this folder it is replayed at every run.
"""

from __future__ import annotations

import pytest

from tests.scenarios.chance import Chance
from tests.scenarios.scene import Scene
from tests.scenarios.script import play

SEEDS = 40
SHAPES = [(1, 1, 1), (2, 2, 1), (3, 2, 2), (3, 3, 2), (3, 3, 3), (4, 3, 2), (5, 3, 3)]


@pytest.mark.parametrize("guaranteed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_happens_what_must_hold_holds_and_the_ledger_can_be_closed(
    shape: tuple[int, int, int], guaranteed: bool
) -> None:
    for seed in range(SEEDS):
        Chance(seed, shape, guaranteed=guaranteed).run()


def test_a_seed_decides_everything_and_what_came_of_it_is_a_scenario() -> None:
    first, second = Chance(7, (3, 3, 2), guaranteed=False), Chance(7, (3, 3, 2), guaranteed=False)
    first.run()
    second.run()
    assert first.text == second.text
    assert play(first.text, Scene()) == first.text + "\n"


def test_an_invariant_that_breaks_is_told_with_the_scenario() -> None:
    chance = Chance(1, (3, 3, 2), guaranteed=False)
    chance.scene.acknowledged[99] = b"never written"
    with pytest.raises(AssertionError, match="!! 99 was acknowledged, and the ledger ends at"):
        chance.run()
