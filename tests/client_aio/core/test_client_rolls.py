"""Rolls: a new fragment that nobody's failure asks for, with nothing outstanding."""

from __future__ import annotations

from client_aio.core.add_window import AddWindow, Send
from client_aio.core.ensemble_change import (
    Drain,
    EnsembleChange,
    EnsembleChangeMachine,
    Find,
    FindAll,
    GiveUp,
    Reseat,
    Wait,
    Write,
)
from metadata.model.ledger import Fragment

BOOKIES, OTHERS = ("b1", "b2", "b3"), ("b4", "b5", "b6")
ALL = 0b111


class Ledger:
    """A window and its changer, with a roll asked for."""

    def __init__(self) -> None:
        self.window: AddWindow[str] = AddWindow(
            ledger_id=7, content_term=3, ensemble_size=3, write_quorum=3, ack_quorum=2
        )
        self.changer = EnsembleChangeMachine(self.window, Fragment(0, BOOKIES, 3), 10)
        self.sends = self.add("0") + self.add("1")
        self.changer.roll()

    def add(self, name: str) -> list[Send]:
        self.window.add(name.encode(), name)
        return self.window.flush()

    def acknowledge(self, *seats: int, entries: tuple[int, ...] = (0, 1)) -> list[str]:
        turns = [
            turn
            for send in self.sends
            if send.seat in seats and send.batch.first_entry in entries
            for turn in self.window.acknowledged(send)
        ]
        return [token for turn in turns for token in turn.tokens]

    def fail(self, seat: int) -> None:
        assert self.window.fail(seat, self.window.epoch(seat))


def test_a_roll_waits_for_what_was_sent_and_holds_what_is_added() -> None:
    ledger = Ledger()
    assert ledger.changer.next() == FindAll()
    assert ledger.changer.found_all(OTHERS) == Drain(0)
    assert ledger.add("2") == []
    assert ledger.acknowledge(0, 1, entries=(0,)) == ["0"]
    assert ledger.changer.drained() == Drain(0)
    assert ledger.acknowledge(0, 1, entries=(1,)) == ["1"]
    assert ledger.changer.drained() == Write(EnsembleChange(2, OTHERS, Fragment(0, BOOKIES, 3), 2))
    assert ledger.add("3") == []
    assert ledger.changer.written() == Reseat(OTHERS, ALL)
    assert ledger.window.commit_change(ALL) == []  # nothing is sent twice
    assert ledger.changer.reseated() is None
    assert ledger.changer.fragment == Fragment(2, OTHERS, 3)
    assert [(send.seat, send.batch.first_entry) for send in ledger.window.flush()] == [(0, 2), (1, 2), (2, 2)]
    assert not ledger.changer.is_roll_due


def test_a_roll_is_no_change_that_counts_and_counting_begins_anew() -> None:
    ledger = Ledger()
    ledger.changer.changes = 10
    ledger.acknowledge(0, 1)
    ledger.changer.next()
    ledger.changer.found_all(OTHERS)
    ledger.changer.written()
    assert ledger.changer.changes == 0


def test_nothing_is_acknowledged_while_the_roll_is_written() -> None:
    ledger = Ledger()
    ledger.changer.next()
    ledger.changer.found_all(OTHERS)
    ledger.acknowledge(0, 1)
    assert isinstance(ledger.changer.drained(), Write)
    assert ledger.window.is_frozen
    assert ledger.window.flush() == []


def test_without_others_the_same_bookies_go_on_in_a_new_fragment() -> None:
    ledger = Ledger()
    ledger.acknowledge(0, 1)
    assert ledger.changer.next() == FindAll()
    assert ledger.changer.not_found_all() == Write(EnsembleChange(2, BOOKIES, Fragment(0, BOOKIES, 3), 2))
    assert ledger.changer.written() == Reseat(BOOKIES, 0)
    assert ledger.window.commit_change(0) == []
    assert ledger.changer.reseated() is None
    assert len(ledger.add("2")) == 3


def test_a_seat_that_stays_empty_does_not_keep_a_roll_from_being_made() -> None:
    ledger = Ledger()
    ledger.fail(2)
    assert ledger.changer.next() == Find(0b100)
    assert ledger.changer.not_found() == Drain(0b100)
    ledger.acknowledge(0, 1)
    assert ledger.changer.drained() == Write(EnsembleChange(2, BOOKIES, Fragment(0, BOOKIES, 3), 2))
    assert ledger.changer.written() == Reseat(BOOKIES, 0)
    ledger.window.commit_change(0)
    assert ledger.changer.reseated() == Find(0b100)
    assert ledger.changer.not_found() == Wait(is_frozen=False)
    assert [send.seat for send in ledger.window.flush() or ledger.add("2")] == [0, 1]


def test_a_failure_that_what_was_sent_waits_for_is_mended_first() -> None:
    ledger = Ledger()
    ledger.changer.next()
    assert ledger.changer.found_all(OTHERS) == Drain(0)
    ledger.fail(1)
    assert ledger.changer.drained() == Drain(0b010)  # two are enough
    ledger.fail(2)
    assert ledger.changer.drained() == Find(0b110)
    mended = ("b1", "b7", "b8")
    assert ledger.changer.found(mended) == Write(EnsembleChange(0, mended, Fragment(0, BOOKIES, 3)))
    assert ledger.changer.written() == Reseat(mended, 0b110)
    ledger.sends += ledger.window.commit_change(0b110)
    assert ledger.changer.reseated() == Drain(0)
    assert ledger.acknowledge(0, 1) == ["0", "1"]
    assert ledger.changer.drained() == Write(EnsembleChange(2, OTHERS, Fragment(0, mended, 3), 2))
    assert ledger.changer.changes == 1


def test_a_roll_without_others_goes_on_with_those_that_have_replaced_some_meanwhile() -> None:
    ledger = Ledger()
    ledger.changer.next()
    assert ledger.changer.not_found_all() == Drain(0)
    ledger.fail(0)
    ledger.fail(1)
    assert ledger.changer.drained() == Find(0b011)
    mended = ("b7", "b8", "b3")  # which have come up
    assert ledger.changer.found(mended) == Write(EnsembleChange(0, mended, Fragment(0, BOOKIES, 3)))
    assert ledger.changer.written() == Reseat(mended, 0b011)
    ledger.sends += ledger.window.commit_change(0b011)
    assert ledger.changer.reseated() == Drain(0)
    assert ledger.acknowledge(0, 1) == ["0", "1"]
    assert ledger.changer.drained() == Write(EnsembleChange(2, mended, Fragment(0, mended, 3), 2))
    assert ledger.changer.written() == Reseat(mended, 0)


def test_below_the_ack_quorum_a_roll_changes_nothing_about_giving_up() -> None:
    ledger = Ledger()
    ledger.changer.next()
    ledger.changer.found_all(OTHERS)
    ledger.fail(1)
    ledger.fail(2)
    assert ledger.changer.drained() == Find(0b110)
    assert isinstance(ledger.changer.not_found(), GiveUp)


def test_failures_of_those_who_leave_do_not_concern_the_new_fragment() -> None:
    ledger = Ledger()
    ledger.changer.next()
    ledger.changer.found_all(OTHERS)
    ledger.acknowledge(0, 1)
    ledger.changer.drained()
    ledger.fail(2)
    ledger.changer.written()
    ledger.window.commit_change(ALL)
    assert ledger.changer.reseated() is None
    assert not ledger.window.failed


def test_a_roll_that_is_put_off_leaves_nothing_behind() -> None:
    ledger = Ledger()
    assert ledger.changer.next() == FindAll()
    assert ledger.changer.roll_later() is None
    assert len(ledger.add("2")) == 3
    ledger.changer.roll()
    assert ledger.changer.next() == FindAll()
