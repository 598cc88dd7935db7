"""Scenarios about logs, on `tests.scenarios.chain`; each is played again with its rule left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scenarios.chain import RULES, Chain
from tests.scenarios.script import check, play

SCENARIOS = sorted((Path(__file__).parent / "logs").glob("*.txt"))


def rule_of(path: Path) -> str:
    match = re.search(r"^# Without: (.+)$", path.read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario_of_a_log_goes_as_it_is_written_and_breaks_nothing(
    path: Path, request: pytest.FixtureRequest
) -> None:
    check(path, Chain(), rewrite=request.config.getoption("--rewrite-scenarios"))
    assert "!!" not in path.read_text()
    assert "# Guards" in path.read_text()


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario_of_a_log_breaks_an_invariant_where_its_rule_is_left_out(path: Path) -> None:
    assert "!!" in play(path.read_text(), Chain(without=rule_of(path)))


def test_every_rule_that_can_be_left_out_has_its_scenario() -> None:
    assert sorted(map(rule_of, SCENARIOS)) == sorted(RULES)
