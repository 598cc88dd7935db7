"""Crash states of the storage engine: some of them, chosen by chance, and that a loss would be seen."""

from __future__ import annotations

import multiprocessing
import random

import pytest

from tests.sim.crashstates import Sweep, judge, record, start_on_a_full_disk, states, sweep
from tests.sim.mutants.__main__ import everything
from tests.sim.quiet import quiet


def test_whatever_a_power_cut_leaves_nothing_acknowledged_is_lost() -> None:
    result = sweep(1, part=0.01, chains=1)
    assert result.states > 200
    assert result.by_kind["write_and_sync"] > 50
    assert not result.failures


def test_a_copy_that_may_be_in_the_page_cache_only_is_no_reason_to_cut_the_other_one() -> None:
    """A process is killed as it writes the tail elsewhere; the next one wants room, and has its power cut."""
    tried = 0
    with quiet():
        for number, step in enumerate(record(1, chains=0)):
            if step.call[0] != "write_and_sync" or number % 5:
                continue
            writing = [
                each for each in start_on_a_full_disk("killed", step) if each.call[0] == "write_and_sync"
            ]
            for again in start_on_a_full_disk("cut", writing[0]) if writing else ():
                for what, build in states(again, random.Random(number)):
                    if what == "chance":
                        tried += 1
                        assert not judge(again.facts, build()), f"step {number}, {again.call}"
    assert tried > 200


def _with_bug(number: int) -> Sweep:
    next(mutant for mutant in everything() if mutant.number == number).plant()
    return sweep(1, part=0.01, chains=1)


@pytest.mark.parametrize("number", [1, 26])
def test_lost_syncs_are_seen(number: int) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_with_bug, (number,)).failures
