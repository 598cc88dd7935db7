"""Ensemble changes step by step; changes to the metadata until their outcome is definite (rules 9, 10)."""

from __future__ import annotations

import pytest

from client_aio.core.add_window import AddWindow, Send
from client_aio.core.ensemble_change import (
    Abandon,
    Closing,
    Copy,
    EnsembleChange,
    EnsembleChangeMachine,
    Find,
    GiveUp,
    MetadataUpdate,
    Reseat,
    Wait,
    Write,
)
from metadata.model.ledger import Fragment, LedgerMetadata

BOOKIES = ("b1", "b2", "b3")


def new_metadata() -> LedgerMetadata:
    return LedgerMetadata.new(7, ensemble_size=3, write_quorum=3, ack_quorum=2, bookies=BOOKIES)


class Ledger:
    """A window and its changer, as the shell would drive them."""

    def __init__(self, *, changes_max: int = 100, guaranteed_write_quorum: bool = False) -> None:
        self.window: AddWindow[str] = AddWindow(
            ledger_id=7, content_term=0, ensemble_size=3, write_quorum=3, ack_quorum=2,
            guaranteed_write_quorum=guaranteed_write_quorum,
        )  # fmt: skip
        self.changer = EnsembleChangeMachine(self.window, Fragment(0, BOOKIES), changes_max)

    def add(self, name: str) -> list[Send]:
        self.window.add(name.encode(), name)
        return self.window.flush()

    def acknowledge(self, sends: list[Send], *seats: int) -> list[str]:
        turns = [turn for send in sends if send.seat in seats for turn in self.window.acknowledged(send)]
        return [token for turn in turns for token in turn.tokens]

    def fail(self, seat: int) -> None:
        assert self.window.fail(seat, self.window.epoch(seat))


def test_a_failed_bookie_is_replaced_from_the_first_entry_not_acknowledged() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.add("a"), 0, 1)
    ledger.add("b")
    assert ledger.changer.next() is None
    ledger.fail(1)
    assert ledger.changer.next() == Find(0b010)
    new = ("b1", "b4", "b3")
    assert ledger.changer.found(new) == Write(EnsembleChange(1, new, Fragment(0, BOOKIES), 1))
    assert ledger.changer.written() == Reseat(new, 0b010)
    assert [(send.seat, send.batch.first_entry) for send in ledger.window.commit_change(0b010)] == [(1, 1)]
    assert ledger.changer.reseated() is None
    assert ledger.changer.fragment == Fragment(1, new)


def test_nothing_is_acknowledged_before_the_change_is_written() -> None:
    ledger = Ledger()
    sends = ledger.add("a")
    ledger.fail(2)
    ledger.changer.next()
    ledger.changer.found(("b1", "b2", "b4"))
    assert ledger.acknowledge(sends, 0, 1) == []
    assert ledger.window.lac == -1
    ledger.changer.written()
    ledger.window.commit_change(0b100)
    assert [turn.tokens for turn in ledger.window.advance()] == [["a"]]


def test_what_fails_while_bookies_are_looked_for_is_the_next_change() -> None:
    ledger = Ledger()
    ledger.fail(0)
    assert ledger.changer.next() == Find(0b001)
    ledger.fail(1)
    assert isinstance(ledger.changer.found(("b4", "b2", "b3")), Write)
    assert ledger.changer.written() == Reseat(("b4", "b2", "b3"), 0b001)
    ledger.window.commit_change(0b001)
    assert ledger.changer.reseated() == Find(0b010)


def test_failures_found_before_are_handled_together() -> None:
    ledger = Ledger()
    ledger.fail(0)
    ledger.fail(2)
    assert ledger.changer.next() == Find(0b101)


def test_the_same_bookies_again_write_nothing_and_get_what_they_owe() -> None:
    ledger = Ledger()
    sends = ledger.add("a")
    ledger.acknowledge(sends, 1)
    ledger.fail(1)
    ledger.changer.next()
    assert ledger.changer.found(BOOKIES) == Reseat(BOOKIES, 0b010)
    resent = ledger.window.commit_change(0b010)
    assert [(send.seat, send.batch.first_entry) for send in resent] == [(1, 0)]
    ledger.changer.reseated()
    # What it acknowledged under its former connection counts no more: it has to say so again.
    assert ledger.acknowledge(sends, 1, 2) == []
    assert ledger.acknowledge(resent, 1) == ["a"]


def test_a_fragment_that_starts_at_the_same_entry_is_replaced_in_place() -> None:
    metadata = new_metadata()
    first = EnsembleChange(5, ("b4", "b2", "b3"), metadata.last_fragment).apply(metadata)
    assert first is not None
    second = EnsembleChange(5, ("b5", "b2", "b3"), first.last_fragment).apply(first)
    assert second is not None
    assert [fragment.bookies for fragment in second.fragments] == [BOOKIES, ("b5", "b2", "b3")]


def test_without_other_bookies_writing_goes_on_at_the_ack_quorum_and_not_below() -> None:
    ledger = Ledger()
    ledger.fail(0)
    assert ledger.changer.next() == Find(0b001)
    assert ledger.changer.not_found() == Wait(is_frozen=False)
    assert ledger.acknowledge(ledger.add("a"), 1, 2) == ["a"]
    ledger.fail(1)
    assert ledger.changer.next() == Find(0b011)
    assert isinstance(ledger.changer.not_found(), GiveUp)


def test_no_more_changes_than_allowed() -> None:
    ledger = Ledger(changes_max=1)
    ledger.fail(0)
    ledger.changer.next()
    ledger.changer.found(("b4", "b2", "b3"))
    ledger.changer.written()
    ledger.window.commit_change(0b001)
    assert ledger.changer.reseated() is None
    ledger.fail(0)
    assert ledger.changer.next() == Wait(is_frozen=False)
    ledger.fail(1)
    step = ledger.changer.next()
    assert isinstance(step, GiveUp)
    assert "changed 1 times" in step.why


# --- guaranteed write quorum (rule 11) ---


def test_a_replacement_holds_what_was_acknowledged_before_the_metadata_name_it() -> None:
    ledger = Ledger(guaranteed_write_quorum=True)
    sends = ledger.add("a")
    assert ledger.acknowledge(sends, 0, 1) == ["a"]  # acknowledged; b3 is slow
    ledger.add("b")
    ledger.fail(0)
    ledger.changer.next()
    new = ("b4", "b2", "b3")
    assert ledger.changer.found(new) == Copy(new, 0b001)
    copies = ledger.window.seat_replacements(0b001)
    assert [(send.seat, send.batch.first_entry) for send in copies] == [(0, 0)]  # not "b": nobody has it yet
    assert ledger.window.seats_owing & ledger.window.replacements
    ledger.acknowledge(sends, 0)  # a late answer of the bookie that was replaced
    assert ledger.window.seats_owing & ledger.window.replacements
    ledger.acknowledge(copies, 0)
    assert not ledger.window.seats_owing & ledger.window.replacements
    # The fragment starts behind the last entry that all of its write set have, not behind the LAC.
    assert ledger.changer.copied() == Write(EnsembleChange(0, new, Fragment(0, BOOKIES)))
    assert ledger.changer.written() == Reseat(new, 0b001)
    assert [(send.seat, send.batch.first_entry) for send in ledger.window.commit_change(0b001)] == [(0, 1)]


def test_a_replacement_that_fails_before_it_holds_its_copies_ends_the_change_where_the_quorum_holds() -> None:
    ledger = Ledger(guaranteed_write_quorum=True)
    first = ledger.add("a")
    ledger.acknowledge(first, 0, 1)
    ledger.fail(0)
    ledger.changer.next()
    ledger.changer.found(("b4", "b2", "b3"))
    copies = ledger.window.seat_replacements(0b001)
    second = ledger.add("b")
    assert ledger.acknowledge(second, 1, 2) == []
    ledger.fail(0)
    assert ledger.changer.copied() == Abandon()
    ledger.window.abandon_change()
    # Two of those that the metadata name have it, and are enough (rule 9); not for the LAFR (rule 11).
    assert [turn.tokens for turn in ledger.window.advance()] == [["b"]]
    assert ledger.changer.abandoned() == Find(0b001)
    assert (ledger.changer.target, ledger.changer.fragment) == (BOOKIES, Fragment(0, BOOKIES))
    assert ledger.changer.not_found() == Wait(is_frozen=False)
    ledger.acknowledge(first, 2)
    ledger.acknowledge(copies, 0)
    assert (ledger.window.lac, ledger.window.lafr) == (1, -1)
    assert ledger.changer.changes == 0


def test_a_bookie_that_comes_back_after_such_a_change_gets_what_it_owes_and_nothing_is_written() -> None:
    ledger = Ledger(guaranteed_write_quorum=True)
    first = ledger.add("a")
    ledger.acknowledge(first, 0, 1, 2)
    second = ledger.add("b")
    ledger.acknowledge(second, 0, 1)
    ledger.fail(0)
    ledger.changer.next()
    ledger.changer.found(("b4", "b2", "b3"))
    ledger.window.seat_replacements(0b001)
    ledger.fail(0)
    ledger.changer.copied()
    ledger.window.abandon_change()
    assert ledger.changer.abandoned() == Find(0b001)
    assert ledger.changer.found(BOOKIES) == Copy(BOOKIES, 0b001)
    copies = ledger.window.seat_replacements(0b001)
    assert [(send.seat, send.batch.first_entry) for send in copies] == [(0, 1)]
    ledger.acknowledge(copies, 0)
    assert ledger.changer.copied() == Reseat(BOOKIES, 0b001)
    ledger.window.commit_change(0b001)
    assert ledger.changer.reseated() is None
    ledger.acknowledge(second, 2)
    assert ledger.window.lafr == 1


def test_below_the_ack_quorum_a_replacement_that_fails_is_replaced_in_the_same_change() -> None:
    ledger = Ledger(guaranteed_write_quorum=True)
    ledger.acknowledge(ledger.add("a"), 0, 1)
    ledger.fail(0)
    ledger.changer.next()
    ledger.changer.found(("b4", "b2", "b3"))
    former = ledger.window.seat_replacements(0b001)
    ledger.fail(2)
    ledger.fail(0)
    assert ledger.changer.copied() == Find(0b101)
    assert ledger.changer.not_found() == Wait(is_frozen=True)
    assert ledger.changer.next() == Find(0b101)
    assert ledger.changer.found(("b5", "b2", "b6")) == Copy(("b5", "b2", "b6"), 0b101)
    copies = ledger.window.seat_replacements(0b101)
    ledger.acknowledge(former, 0)
    assert ledger.window.seats_owing & ledger.window.replacements
    ledger.acknowledge(copies, 0, 2)
    step = ledger.changer.copied()
    assert step == Write(EnsembleChange(0, ("b5", "b2", "b6"), Fragment(0, BOOKIES)))


def test_a_newcomer_that_fails_while_a_later_one_copies_is_replaced_in_the_same_change() -> None:
    ledger = Ledger(guaranteed_write_quorum=True)
    ledger.acknowledge(ledger.add("a"), 0, 1)
    ledger.fail(0)
    ledger.fail(1)
    ledger.changer.next()
    assert ledger.changer.found(("b4", "b5", "b3")) == Copy(("b4", "b5", "b3"), 0b011)
    ledger.window.seat_replacements(0b011)
    ledger.fail(0)
    assert not ledger.window.awaits_copies
    assert ledger.changer.copied() == Find(0b001)
    assert ledger.changer.found(("b6", "b5", "b3")) == Copy(("b6", "b5", "b3"), 0b001)
    ledger.window.seat_replacements(0b001)
    assert ledger.window.awaits_copies
    ledger.fail(1)  # it came with the first one, and still owes its copy
    assert not ledger.window.awaits_copies
    assert ledger.changer.copied() == Find(0b010)


# --- changes to the metadata (rule 10) ---


def test_an_unknown_outcome_is_tried_again_as_it_was() -> None:
    metadata = new_metadata()
    update = MetadataUpdate(metadata, 4, Closing(9, 100, metadata.last_fragment).apply)
    first = update.attempt()
    assert update.attempt() == first
    update.conflicted(metadata, 5)
    assert update.attempt()._replace(version=4, number=0) == first
    assert (update.attempt().version, update.attempt().number) == (5, 1)
    update.written(6)
    assert (update.metadata.last_entry, update.version) == (9, 6)


def test_a_repair_of_an_earlier_fragment_is_kept() -> None:
    metadata = new_metadata().change_ensemble(5, ("b1", "b2", "b4"))
    change = EnsembleChange(9, ("b5", "b2", "b4"), metadata.last_fragment)
    update = MetadataUpdate(metadata, 1, change.apply)
    update.conflicted(metadata.replace_bookie(0, "b1", "b6"), 2)
    assert [fragment.bookies for fragment in update.attempt().metadata.fragments] == [
        ("b6", "b2", "b3"), ("b1", "b2", "b4"), ("b5", "b2", "b4"),
    ]  # fmt: skip


def test_a_change_that_others_have_written_over_recognises_its_work() -> None:
    metadata = new_metadata()
    change = EnsembleChange(5, ("b1", "b2", "b4"), metadata.last_fragment)
    assert not change.is_met_by(metadata)
    made = change.apply(metadata)
    assert made is not None
    repaired = made.replace_bookie(0, "b1", "b6")
    assert change.apply(repaired) is None
    assert change.is_met_by(repaired)
    assert not change.is_met_by(made.begin_recovery())
    assert not change.is_met_by(metadata.change_ensemble(5, ("b1", "b2", "b5")))


@pytest.mark.parametrize("end", [None, 8, 9])
def test_a_recovery_refuses_both_changes(end: int | None) -> None:
    metadata = new_metadata()
    taken = metadata.begin_recovery()
    if end is not None:
        taken = taken.close(end, 100)
    closing = Closing(9, 100, metadata.last_fragment)
    for apply in (closing.apply, EnsembleChange(3, ("b4", "b2", "b3"), metadata.last_fragment).apply):
        update = MetadataUpdate(metadata, 1, apply)
        assert not update.is_refused
        update.conflicted(taken, 2)
        assert update.is_refused
    assert closing.is_met_by(taken) == (end == 9)


def test_a_last_fragment_of_somebody_else_refuses_both_changes() -> None:
    known = new_metadata()
    other = known.change_ensemble(5, ("b4", "b2", "b3"))
    for apply in (
        Closing(9, 100, known.last_fragment).apply,
        EnsembleChange(9, ("b5", "b2", "b3"), known.last_fragment).apply,
    ):
        assert apply(other) is None


def test_seats_for_which_there_is_no_bookie_stay_failed() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.add("a"), 0, 1, 2)
    ledger.add("b")
    ledger.fail(1)
    ledger.fail(2)
    assert ledger.changer.next() == Find(0b110)
    new = ("b1", "b4", "b3")
    assert ledger.changer.found(new, 0b010) == Write(EnsembleChange(1, new, Fragment(0, BOOKIES), 1))
    assert ledger.changer.written() == Reseat(new, 0b010)
    sends = ledger.window.commit_change(0b010)
    assert [(send.seat, send.batch.first_entry) for send in sends] == [(1, 1)]
    assert ledger.window.failed == 0b100
    assert ledger.acknowledge(sends, 1) == []  # The failed seat is no second copy,
    assert ledger.changer.reseated() == Find(0b100)  # and a bookie is looked for again.
