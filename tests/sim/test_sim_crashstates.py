"""Crash states of the storage engine: some of them, chosen by chance, and that a loss would be seen."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.sim.crashstates import Sweep, sweep
from tests.sim.mutants.__main__ import everything


def test_whatever_a_power_cut_leaves_nothing_acknowledged_is_lost() -> None:
    result = sweep(1, part=0.01)
    assert result.states > 200
    assert result.by_kind["write_and_sync"] > 50
    assert not result.failures


def _with_bug(number: int) -> Sweep:
    next(mutant for mutant in everything() if mutant.number == number).plant()
    return sweep(1, part=0.01)


@pytest.mark.parametrize("number", [1, 26])
def test_lost_syncs_are_seen(number: int) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_with_bug, (number,)).failures
