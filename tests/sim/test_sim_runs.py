"""Seeds of every profile, as `.ci/run` plays them; `make sim` plays more."""

from __future__ import annotations

import pytest

from tests.sim.campaign import runner
from tests.sim.profiles import all_profiles, draw_plan

SEEDS = len(all_profiles())
"""Each profile once."""


@pytest.mark.long(60)
def test_no_invariant_breaks_in_the_first_seeds() -> None:
    tally = runner.run(all_profiles(), range(SEEDS))
    print("\n".join(tally.lines()))
    assert tally.seeds == SEEDS
    assert not [(draw_plan(name, seed).command, text) for name, seed, _, text in tally.failures]


@pytest.mark.parametrize("name", all_profiles())
def test_every_profile_strikes_with_faults(name: str) -> None:
    assert any(draw_plan(name, seed).faults for seed in range(10))


def test_no_plan_loses_a_bookie_for_good_that_some_ledger_cannot_do_without() -> None:
    """With guaranteed write quorum such a ledger, and all others of that ensemble, could never be closed."""
    wiping = 0
    for name, seed in [(name, seed) for name in all_profiles() for seed in range(100)]:
        plan = draw_plan(name, seed)
        if any(fault.kind == "disk_wiped" for fault in plan.faults):
            wiping += 1
            sizes = [
                actor.settings["quorums"]["ensemble_size"]
                for actor in plan.actors
                if "quorums" in actor.settings
            ]
            assert sizes, f"{name} {seed} says nowhere how large its ensembles are"
            assert max(sizes) < len(plan.bookies), f"{name} {seed}"
    assert wiping > 100  # all of `wiped-disks`, and a share of `disk-faults`
