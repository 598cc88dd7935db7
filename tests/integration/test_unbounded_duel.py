"""A short duel for an unbounded ledger; the long one is `benchmarks.duel_unbounded`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.duel_unbounded import duel

if TYPE_CHECKING:
    from pathlib import Path


async def test_processes_that_fight_for_an_unbounded_ledger_lose_no_acknowledged_record(
    tmp_path: Path,
) -> None:
    verdict = await duel(tmp_path, seconds=8, fighters=3, seed=3)
    assert verdict.faults == []
    assert verdict.counts["takeovers"] > 1  # the referee's is one
    assert verdict.counts["acknowledged records"] > 1
    assert verdict.counts["kills"] + verdict.counts["stops"] > 0
