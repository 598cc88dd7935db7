"""Seeds of every profile, as `.ci/run` plays them; `make sim` plays more."""

from __future__ import annotations

import pytest

from tests.sim import campaign
from tests.sim.profiles import draw_plan

SEEDS = 200


def test_no_invariant_breaks_in_two_hundred_seeds() -> None:
    tally = campaign.run(campaign.all_profiles(), range(SEEDS))
    print("\n".join(tally.lines()))
    assert tally.seeds == SEEDS
    assert not [(draw_plan(name, seed).command, text) for name, seed, _, text in tally.failures]


@pytest.mark.parametrize("name", campaign.all_profiles())
def test_every_profile_strikes_with_faults(name: str) -> None:
    assert any(draw_plan(name, seed).faults for seed in range(10))
