"""The pure machines of the client, on stages written as text: see the files beside this one.

`pytest tests/scenarios --rewrite-scenarios` writes what really happens into the files; `git diff` shows it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.scene import Scene
from tests.scenarios.script import check, play

FOLDER = Path(__file__).parent
SCENARIOS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario_goes_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Scene(), rewrite=request.config.getoption("--rewrite-scenarios"))


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario_says_which_rule_it_guards_and_breaks_no_invariant(path: Path) -> None:
    text = path.read_text()
    head = text.partition("\n\nledger ")[0]
    assert all(line.startswith("#") or not line for line in head.splitlines())
    assert "# Guards rule" in head
    assert "!!" not in text


def test_a_wrong_expectation_fails_and_is_rewritten_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "wrong.txt"
    right = "# Head.\n\nledger E=1 Qw=1 Qa=1 on b1\n\nw adds 0\n    w → b1: add 0, LAC −1\n"
    path.write_text(right.replace("→ b1: add 0", "→ b1: add 7"))
    with pytest.raises(AssertionError):
        check(path, Scene(), rewrite=False)
    check(path, Scene(), rewrite=True)
    assert path.read_text() == right


@pytest.mark.parametrize(
    ("event", "words"),
    [("w sings", "not understood"), ("w → b1", "nothing is in flight"), ("w adds 5", "the next entry is 0")],
)
def test_an_event_that_cannot_happen_is_named_with_its_line(event: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"line 2: '{event}'.*{words}"):
        play(f"ledger E=1 Qw=1 Qa=1 on b1\n{event}\n", Scene())
