"""Scenarios about terms: see `tests/scenarios/terms`, and `tests.scenarios.termstage` for their language."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.script import INDENT, check
from tests.scenarios.termstage import MISREADINGS, TermStage

FOLDER = Path(__file__).parent / "terms"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
EACH = pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
MISREAD = "\nmisread: "


@EACH
def test_scenario_of_terms_goes_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, TermStage(), rewrite=request.config.getoption("--rewrite-scenarios"))


@EACH
def test_no_invariant_is_broken_but_by_the_misreading(path: Path) -> None:
    as_it_is, misread, other = path.read_text().partition(MISREAD)
    assert "# Guards " in as_it_is
    assert "!!" not in as_it_is
    if misread:
        name, *outcome = other.rstrip().split("\n" + INDENT)
        assert name in MISREADINGS
        assert outcome
        assert all("!!" in line for line in outcome)


def test_each_misreading_has_its_scenario() -> None:
    texts = [path.read_text() for path in SCENARIOS]
    assert {name for name in MISREADINGS if any(MISREAD + name in text for text in texts)} == {*MISREADINGS}
