"""The text of a scenario: what happens stands at the margin, what comes of it is indented below.

    # A comment, or the head of the file, stays as it is.
    w adds 0
        w → b1 b2 b3: add 0, LAC −1

Owns parsing, replaying and writing back. What the lines mean is `tests.scenarios.world`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

INDENT = "    "


class Stage(Protocol):
    """Where a scenario takes place."""

    def do(self, event: str) -> list[str]:
        """Let something happen; returns what comes of it, a line each.

        Raises:
            ValueError: the event is not understood, or cannot happen now.
        """


def play(text: str, stage: Stage) -> str:
    """Replay a scenario and give its text with what really comes of each event.

    Raises:
        ValueError: an event is not understood, or cannot happen; with the number of its line.
    """
    played: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(INDENT):
            continue  # what was expected
        if not line or line.startswith("#"):
            played.append(line)
            continue
        try:
            outcome = stage.do(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {line!r}: {error}") from error
        played.append(line)
        played += [INDENT + effect for effect in outcome]
    return "\n".join(played) + "\n"


def check(path: Path, stage: Stage, *, rewrite: bool) -> None:
    """Replay a file; what it expects must be what happens. With `rewrite` what happens is written there."""
    expected = path.read_text()
    played = play(expected, stage)
    if rewrite:
        path.write_text(played)
    else:
        assert played.splitlines() == expected.splitlines()
