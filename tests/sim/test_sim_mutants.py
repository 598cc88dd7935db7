"""The planted bugs fit the code, and a few of them are caught here; `make mutants` hunts all of them."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.sim.mutants.__main__ import everything, hunt

QUICK = (3, 9, 11, 12, 13)
"""Caught within a handful of seeds: if one is not, the simulator has gone blind."""


def _plants(number: int) -> str:
    mutant = next(each for each in everything() if each.number == number)
    try:
        mutant.plant()
    except (LookupError, AttributeError, ImportError) as error:
        return f"{number} {mutant.title}: {error}"
    return ""


def test_every_planted_bug_still_fits_the_code() -> None:
    numbers = [mutant.number for mutant in everything()]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        assert not [failed for failed in pool.map(_plants, numbers, chunksize=1) if failed]


@pytest.mark.parametrize("number", QUICK)
def test_an_easy_bug_is_caught(number: int) -> None:
    outcome = hunt((number, 60))
    assert outcome.seeds is not None, outcome
