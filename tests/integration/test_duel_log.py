"""A short duel for a log, and that its judge sees what must not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.duel_log import duel
from benchmarks.duelling import Place, judge

if TYPE_CHECKING:
    from pathlib import Path


async def test_every_acknowledged_record_is_read_exactly_once_and_in_order(tmp_path: Path) -> None:
    verdict = await duel(tmp_path, seconds=4, fighters=5, seed=7)
    assert not verdict.faults
    assert verdict.counts["takeovers"] > 0  # on a busy machine the processes have hardly begun
    assert verdict.counts["acknowledged records"] > 0


NOTES = ["open", "try 1.1.0", "try 1.1.1", "ack 5:0 1.1.0", "ack 5:1 1.1.1", "try 2.1.0"]
READ: list[tuple[Place, str]] = [((5, 0), "1.1.0"), ((5, 1), "1.1.1")]


def test_the_judge_finds_nothing_where_nothing_is_wrong() -> None:
    for read in (READ, [*READ, ((6, 0), "2.1.0")]):
        verdict = judge(NOTES, read, dict(read))
        assert not verdict.faults
        assert verdict.counts["takeovers"] == 1
        assert verdict.counts["unknown records"] == 1
    assert "acknowledged records" in verdict.text()


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (READ[:1], "1.1.1 was acknowledged at (5, 1) and read 0 times"),
        (READ[::-1], "1.1.0 at (5, 0) was read after (5, 1)"),
        ([*READ, ((6, 0), "1.1.1")], "1.1.1 was read 2 times"),
        ([READ[0], ((5, 2), "1.1.1")], "1.1.1 was acknowledged at (5, 1) and read at (5, 2)"),
        ([*READ, ((6, 0), "9.9.9")], "9.9.9 was read, and nobody wrote it"),
        ([((4, 0), "1.1.1"), READ[0]], "1.1.0 was read after 1.1.1"),
    ],
)
def test_the_judge_finds_what_is_wrong(read: list[tuple[Place, str]], fault: str) -> None:
    assert fault in judge(NOTES, read, dict(read)).faults
    assert judge(NOTES, READ, {(5, 0): "x"}).faults
