"""Marking: what the server asks and changes of a bookie's marks of lost data (rule 4).

Owns the records of marks of all ledgers, of their bound, and of lifts. Does not own which ledgers are marked
(`bookie_aio.storage.ledgers.marks`), nor when a mark may be lifted (`bookie_aio.server.healing`).

Invariants:

- A mark counts from its acceptance on. A bound or a lift counts only when it is durable and indexed. All
  records accepted before a lift are then durable too, the copies that made good the loss among them.
- The lift of one ledger's marks is one record with the term that the ledger is held under from then on. So no
  crash leaves a ledger without its marks and without its fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.storage.journal import Change
from bookie_aio.storage.ledgers.marks import NO_LEDGER
from bookie_aio.storage.segment import format as form

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.storage.journal import Done
    from bookie_aio.storage.ledgers.checkpoint import LedgerState
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates


class Marking:
    """The marks of one engine. Each method that accepts a record raises DiskFullError if there is no room.

    A mark counts in memory then, and with the next checkpoint.
    """

    def __init__(self, ledgers: LedgerStates, accept: Callable[[bytes, Change, Done], LedgerState]) -> None:
        """Share the engine's ledgers; `accept` accepts a change and returns its ledger's state."""
        self._ledgers = ledgers
        self._accept = accept
        self.in_question_below = 0
        """Ledgers below this id may be about to get marks: no entry of theirs is denied. In memory only."""

    @property
    def is_unbounded(self) -> bool:
        """Return whether a mark concerns every ledger, those that will be created as well."""
        return self._ledgers.marks.is_unbounded

    @property
    def concerns_all(self) -> bool:
        """Return whether data was lost that may concern any ledger, or any up to a bound."""
        return self._ledgers.marks.number > 0

    @property
    def number(self) -> int:
        """Return the highest number of the marks of all ledgers that count; 0: there is none."""
        return self._ledgers.marks.number

    @property
    def bound(self) -> int:
        """Return the highest ledger id that a mark of all ledgers concerns; −1: there is no such mark."""
        return self._ledgers.marks.bound

    def of(self, ledger_id: int) -> int:
        """Return the highest number of the ledger's marks that count; 0: it has none."""
        return self._ledgers.mark_of(ledger_id)

    def has_lift(self, ledger_id: int, number: int) -> bool:
        """Return whether the ledger's marks were lifted up to a number; a later mark of it may count."""
        state = self._ledgers.get(ledger_id)
        return state is not None and state.lifted >= number

    def tell(self, ledger_id: int) -> int:
        """Return what `of` returns, to a client that is going to verify the ledger.

        Damage that is found from now on gets a mark with a higher number.
        """
        return self._ledgers.marks.tell(ledger_id, self._ledgers.get(ledger_id))

    def told(self, number: int) -> int:
        """Return the highest number that a client may know, `number` at most."""
        return self._ledgers.marks.told(number)

    @property
    def numbers(self) -> tuple[int, int]:
        """Return the highest number of any mark or lift, and the one up to which those of all have ended."""
        return self._ledgers.marks.numbers

    def list_marked(self) -> list[int]:
        """Return the ids of the ledgers that have a mark of their own, ascending."""
        return sorted(self._ledgers.states.damaged_ids())

    def list_excused(self, from_ledger: int, count_max: int, above: int) -> tuple[list[int], int]:
        """Return the excused ones among up to `count_max` ledgers with a state, and where to go on or −1.

        A ledger is excused that was evicted here once, or whose mark was lifted with a number above `above`.
        By the metadata of that time the bookie owed nothing more of it.
        """
        ids, following = self._ledgers.list(from_ledger, count_max)
        states = ((one, self._ledgers.get(one)) for one in ids)
        found = [one for one, state in states if state and (state.was_evicted or state.lifted > above)]
        return found, following

    def has_ended_since(self, ended: int) -> bool:
        """Return whether marks of all ledgers above a number have ended; later ones may count."""
        return self._ledgers.marks.numbers[1] > ended

    def mark_again(self, done: Done) -> None:
        """Accept that data was lost of the ledgers that the ended marks of all ledgers concerned.

        Also where marks count: those of an earlier call that found no room are in memory only.
        """
        self._mark_all(NO_LEDGER if self.is_unbounded else self._ledgers.marks.ended_bound, done)

    def mark_all(self, up_to: int, done: Done) -> None:
        """Accept that data of any ledger up to an id was lost, and fences as well.

        Where an earlier mark has no bound yet, this one has none either, until `bound_to`. The caller may
        have asked for the id before the earlier loss.
        """
        self._mark_all(NO_LEDGER if self.is_unbounded else self._bound(up_to), done)

    def _mark_all(self, bound: int, done: Done) -> None:
        marks = self._ledgers.marks
        number = marks.draw()
        marks.learn_mark(number, bound)  # from now on, durable or not, also without room for the record
        self._accept(form.mark_all_row(number, bound), _mark_of_all(number, bound), done)

    def bound_to(self, number: int, up_to: int, done: Done) -> None:
        """Accept that no mark of all ledgers up to a number concerns an id above `up_to`.

        The caller took the number before it asked which ids had been given out. Otherwise a loss in between
        would get a bound that is too low. Ids that this bookie has a state of stay concerned in any case.
        """
        bound = self._bound(up_to)
        self._accept(form.mark_all_row(number, bound), _mark_of_all(number, bound), done)

    def _bound(self, up_to: int) -> int:
        return max(up_to, self._ledgers.states.highest_id, 0)

    def lift(self, ledger_id: int, number: int, term: int, done: Done) -> None:
        """Accept that the ledger's marks up to a number are lifted, and hold the ledger under a term.

        Where no later mark counts, the lift has a number of its own, which is above all of before. It tells
        which lifts are of after a copy of the metadata (`AgeFile.marks_at`).

        The term counts from this call on, the lift from `done` on. Raises NoSuchLedgerError once a tombstone
        was accepted.
        """
        if self.of(ledger_id) <= number:
            number = self._ledgers.marks.draw()
        state = self._ledgers.get(ledger_id)
        before = state.term if state is not None else 0
        change = Change(form.KIND_LIFT, ledger_id, term=term, before=before, number=number)
        state = self._accept(form.lift_row(ledger_id, number, term), change, done)
        state.term = max(state.term, term)

    def end_all(self, number: int, done: Done) -> None:
        """Accept that the marks of all ledgers up to a number end.

        From `done` on, each ledger up to the bound that no lift names counts as fenced by the final term.
        """
        fenced = self._ledgers.marks.bound
        change = Change(form.KIND_LIFT, 0, is_for_all=True, number=number, bound=fenced)
        self._accept(form.lift_all_row(number, fenced), change, done)


def _mark_of_all(number: int, bound: int) -> Change:
    return Change(form.KIND_MARK, 0, is_for_all=True, number=number, bound=bound)
