"""A short duel for an unbounded ledger (the long one is `benchmarks.duel_unbounded`), and what it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import duel
from benchmarks.duel_unbounded import KIND

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 8.0


async def test_processes_that_fight_for_a_ledger_lose_no_acknowledged_record(tmp_path: Path) -> None:
    tally = await duel.duel(KIND, tmp_path, seconds=SECONDS, duellists=3, seed=3)
    figures = tally.summary()
    assert tally.wrong == []
    assert tally.takeovers > 3
    assert len(tally.acknowledged) > 100, figures
    assert tally.kills + tally.stops > 3


def test_what_must_not_be_is_found() -> None:
    tally = duel.Tally()
    for line in ("took 1", "sent 0", "sent 1", "sent 2", "sent 3", "done 0 0", "done 1 1", "done 3 3"):
        tally.note("0.1", line)
    for position, data in enumerate([b"0.1 0", b"0.1 2", b"0.1 2", b"0.1 1", b"9.9 0"]):
        tally.see(str(position), data)
    tally.see("0", b"0.1 0")
    tally.check()
    assert [words for words in tally.wrong if "read twice" in words] == ["0 was read twice"]
    assert [words.split(" ", 2)[2] for words in tally.wrong if "acknowledged" in words] == [
        "was acknowledged at 1, where b'0.1 2' is",
        "was acknowledged at 3, where b'0.1 1' is",
    ]
    assert any("is at 1 and at 2" in words for words in tally.wrong)
    assert any("at 3 comes after 2" in words for words in tally.wrong)
    assert any("sent by nobody" in words for words in tally.wrong)
