"""Ledgers under older metadata: what the checker finds, and what it excuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from metadata.model.ledger import LedgerMetadata
from tests.sim.checkers import older_metadata
from tests.sim.checkers.invariants import History

if TYPE_CHECKING:
    from tests.sim.checkers.invariants import LedgerRecord


def _of_before(entries: int) -> tuple[History, LedgerRecord, LedgerMetadata]:
    """Return a history, its ledger of before with acknowledged entries, and the older metadata of that."""
    history = History(lambda: 0.0)
    record = history.ledger(7)
    record.issued, record.acked = [b"x"] * entries, entries - 1
    older = LedgerMetadata.new(
        7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=("b1", "b2", "b3"), created_ms=0
    )
    older_metadata.begin(record, older.to_json())
    return history, record, older.begin_recovery()


@pytest.mark.parametrize("is_told", [True, False])
def test_older_metadata_may_cut_off_only_what_nobody_has_told_of(is_told: bool) -> None:
    history, record, older = _of_before(5)
    history.is_set_back_told = is_told
    older_metadata.changed(history, record, older.close(2, 3).to_json())
    assert record.is_excused is not is_told
    found = history.violation.name if history.violation is not None else ""
    assert found == ("NoDivergenceBetweenClientAndMetaData" if is_told else "")


def test_nothing_is_acknowledged_behind_the_end_by_older_metadata() -> None:
    history, record, older = _of_before(5)
    older_metadata.changed(history, record, older.close(4, 5).to_json())
    assert history.violation is None
    history.confirmed("c1", 7, 5)
    assert history.violation is not None
    assert history.violation.name == "NoDivergenceBetweenClientAndMetaData"


def test_a_ledger_that_bookies_were_made_to_forget_need_not_be_closed() -> None:
    history, record, _ = _of_before(5)
    history.words.is_in_doubt("b1", 7)
    assert not older_metadata.cannot_be_closed(history, record, "b1")
    history.words.is_in_doubt("b2", 7)
    assert older_metadata.cannot_be_closed(history, record, "b1")
    assert record.is_excused


def test_what_only_older_metadata_led_to_need_not_stay_when_the_newest_return() -> None:
    history, record, older = _of_before(5)
    record.issued.append(b"x")  # never acknowledged: a recovery has kept it
    older_metadata.changed(history, record, older.close(5, 6).to_json())
    history.read("c1", 7, 5, b"x")
    assert history.violation is None
    assert record.needed == 5
    older_metadata.end(record)
    assert record.needed == 4
