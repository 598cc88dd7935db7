"""The planted bugs fit the code, and a few of them are caught here; `make mutants` hunts all of them."""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim.campaign.shrinking import shrink
from tests.sim.mutants.__main__ import ROOT, everything, hunt
from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan

QUICK = (3, 9, 11, 12, 13, 41, 42, 43, 44, 45, 46, 48, 49, 53, 55, 56, 60)
"""Caught within a handful of seeds: if one is not, the simulator has gone blind."""


def _plants(number: int) -> str:
    mutant = next(each for each in everything() if each.number == number)
    try:
        mutant.plant()
    except (LookupError, AttributeError, ImportError) as error:
        return f"{number} {mutant.title}: {error}"
    return ""


def _that_do_not_fit(numbers: list[int]) -> list[str]:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [failed for failed in pool.map(_plants, numbers, chunksize=1) if failed]


def test_every_planted_bug_still_fits_the_code() -> None:
    numbers = [mutant.number for mutant in everything()]
    assert len(set(numbers)) == len(numbers), sorted(numbers)
    # A new process forks hundreds of times in a third of the time: it is a tenth as large as this one.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as small:
        assert not small.submit(_that_do_not_fit, numbers).result()


def test_every_test_that_is_to_catch_a_bug_is_there() -> None:
    """A hunt that runs no test catches nothing."""
    missing = []
    for mutant in everything():
        path, _, name = mutant.tests[0].partition("::") if mutant.tests else ("", "", "")
        word = mutant.tests[2].split()[0] if "-k" in mutant.tests else name.rpartition("::")[2]
        text = (ROOT / path).read_text() if path else ""
        if path and not re.search(rf"(def|class) \w*{word}", text):
            missing.append((mutant.number, mutant.tests))
    assert not missing


@pytest.mark.parametrize("number", QUICK)
def test_an_easy_bug_is_caught(number: int) -> None:
    outcome = hunt((number, 60))
    assert outcome.seeds is not None, outcome


def _shrunk(number: int) -> tuple[int, int, str, str, str]:
    _plants(number)
    for seed in range(20):
        plan = draw_plan("rolling-restarts", seed)
        result = run_plan(plan)
        if not result.is_good:
            smaller = shrink(plan, result, runs_max=12)
            return len(plan.faults), len(smaller.plan.faults), result.name, smaller.name, smaller.story
    raise AssertionError("no seed failed")


def test_a_failing_seed_is_cut_down_to_one_that_fails_alike_and_tells_its_story() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        before, after, name, again, story = pool.apply(_shrunk, (11,))
    assert after < before
    assert again == name
    assert f"!!! {name}" in story.splitlines()[-1]
