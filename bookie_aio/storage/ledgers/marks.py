"""Marks of lost data: the ledgers that a bookie lost data of, and the losses made good since (rule 4). Pure.

A *mark* has a number, which is higher than the numbers of all marks before it. There are marks of one ledger,
and marks of all ledgers. A mark of all ledgers is *bounded* by the highest ledger id that had been given out
at the time of the loss. Ledgers with a higher id cannot have lost anything. A start finds damage before it
can ask for that id. So the mark is unbounded at first, and concerns every id until it is bounded.

A mark of one ledger *concerns listed entries only* where a block fails whose entries are known by an index.
Each of them is answered with *unknown*, and nothing else was forgotten. By any other mark the ledger is *in
doubt*: entries may have been lost that nothing lists, and fences.

A mark is lifted when the bookie holds all that it owes of the ledger again. A *lift* names the highest number
that it lifts. So damage that is found later, under a higher number, is not lifted with it.

    marks of a ledger that count = marks with a number above the ledger's highest lift

All values here only grow: the highest mark, the highest lift, the bound. So a start may learn them in any
order. A checkpoint may be newer than a segment that is replayed over it.

The marks of all ledgers end together once nothing that was given out up to the bound can need them (`owes
nothing` is decided by `bookie_aio.core.healing`). From then on every ledger up to the bound that has no lift
of its own counts as *fenced* by the final term. The fences that were lost belonged to such ledgers.

A number is `segment id × 2^32` at least, for a segment id that no earlier life of the bookie has used. So
numbers grow even where a start could not read the numbers that were given before.

The form in a checkpoint, little-endian:

      0  u64  the highest number of any mark
      8  u64  the highest number of an unbounded mark of all ledgers, 0: there was none
     16  u64  the highest number that the bound is valid for, 0: none
     24  i64  the bound, −1: none
     32  u64  the number up to which the marks of all ledgers have ended, 0: none
     40  i64  the highest id that counts as fenced, −1: none
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from bookie_aio.storage.segment import format as form
from metadata.ids import LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie_aio.storage.segment.replay import Replayed
    from bookie_aio.wire.blocks import Buffer

MARKS = struct.Struct("<QQQqQq")
NO_LEDGER = -1
_SEGMENT_SHIFT = 32


class MarkedState(Protocol):
    """The state of a ledger (`checkpoint.LedgerState`), as far as marks are concerned."""

    marked: int
    lifted: int

    @property
    def is_in_doubt(self) -> bool: ...

    def mark(self, number: int, *, is_of_listed: bool = False, is_proven: bool = True) -> None: ...


class Marks:
    """The marks of all ledgers, and the numbers of all marks of one bookie.

    `number` is the highest number of the marks of all ledgers that count, 0 for none. `bound` is the highest
    id that they concern, `NO_LEDGER` for none. `is_unbounded`: they concern every id, also ids that will be
    given out.
    """

    __slots__ = (
        "_bound", "_bounded", "_ended", "_fenced", "_last", "_told", "_unbounded",
        "bound", "is_unbounded", "number",
    )  # fmt: skip

    def __init__(self, *values: int) -> None:
        """Start without marks, or with the fields of the packed form."""
        fields = values or (0, 0, 0, NO_LEDGER, 0, NO_LEDGER)
        self._last, self._unbounded, self._bounded, self._bound, self._ended, self._fenced = fields
        self._told = self._last
        self.number, self.bound, self.is_unbounded = 0, NO_LEDGER, False
        self._settle()

    def _settle(self) -> None:
        number = max(self._unbounded, self._bounded)
        self.number = number if number > self._ended else 0
        self.is_unbounded = self._unbounded > max(self._bounded, self._ended)
        self.bound = LEDGER_ID_MAX if self.is_unbounded else self._bound if self.number else NO_LEDGER

    @classmethod
    def parse(cls, data: Buffer) -> Marks:
        """Parse the packed form."""
        return cls(*MARKS.unpack(data))

    def packed(self) -> bytes:
        """Return the form in a checkpoint."""
        return MARKS.pack(self._last, self._unbounded, self._bounded, self._bound, self._ended, self._fenced)

    # --- numbers -------------------------------------------------------------------------------

    def begin(self, segment_id: int) -> None:
        """Number the marks of this life. No earlier life has used the segment id, nor a higher one."""
        self._last = max(self._last, segment_id << _SEGMENT_SHIFT)
        self._told = self._last  # a client may have asked an earlier life

    def draw(self) -> int:
        """Return the number of a new mark."""
        self._last += 1
        return self._last

    def learn(self, number: int) -> None:
        """Take note of the number of a mark or a lift that was read from the disk."""
        self._last = max(self._last, number)

    def told(self, number: int) -> int:
        """Return the highest number up to `number` that a client may know; it may not have told the truth."""
        return min(number, self._told)

    def is_told(self, number: int) -> bool:
        """Return whether a client may know the mark of that number, and may be about to have it lifted."""
        return number <= self._told

    def tell(self, ledger_id: int, state: MarkedState | None) -> int:
        """Return what `of` returns, to a client that is going to verify the ledger.

        Damage that is found from now on gets a mark of its own, which the client's lift does not cover.
        """
        self._told = self._last
        return self.of(ledger_id, state)

    # --- marks of all ledgers ------------------------------------------------------------------

    def learn_mark(self, number: int, bound: int) -> None:
        """Take a mark of all ledgers, or a bound for the marks up to a number.

        Args:
            number: of the mark. A number that has been taken before is bounded, with all numbers below it.
            bound: the highest id concerned; `NO_LEDGER` where it is unknown.
        """
        self.learn(number)
        if bound == NO_LEDGER:
            self._unbounded = max(self._unbounded, number)
        else:
            self._bounded, self._bound = max(self._bounded, number), max(self._bound, bound)
        self._settle()

    def learn_end(self, number: int, fenced: int) -> None:
        """Take that the marks of all ledgers up to a number have ended, and the ids that count as fenced."""
        self.learn(number)
        self._ended, self._fenced = max(self._ended, number), max(self._fenced, fenced)
        self._settle()

    @property
    def numbers(self) -> tuple[int, int]:
        """Return the highest number of any mark or lift, and the one up to which those of all have ended."""
        return self._last, self._ended

    @property
    def ended_bound(self) -> int:
        """Return the highest id that ended marks of all ledgers concerned; `NO_LEDGER`: none has ended."""
        return self._fenced

    # --- learning at a start -------------------------------------------------------------------

    def learn_from(self, replayed: Replayed, state: Callable[[int], MarkedState]) -> None:
        """Learn the marks and the lifts that stand in a segment; `state` returns the state of a ledger."""
        for number, bound in replayed.marks_of_all:
            self.learn_mark(number, bound)
        for number, fenced in replayed.ends_of_all:
            self.learn_end(number, fenced)
        for ledger_id, number, is_of_listed in replayed.marks:
            state(ledger_id).mark(number, is_of_listed=is_of_listed)
            self.learn(number)
        for ledger_id, number in replayed.lifts.items():
            one = state(ledger_id)
            one.lifted = max(one.lifted, number)
            self.learn(number)

    def learn_rows(self, rows: Sequence[form.Row]) -> None:
        """Learn the marks of all ledgers in rows that are written again, and the numbers in the others."""
        for row in rows:
            if row.kind == form.KIND_MARK and row.is_of_all:
                self.learn_mark(row.first, row.lac)
            elif row.kind in (form.KIND_MARK, form.KIND_LIFT):
                self.learn(row.first)

    # --- one ledger ----------------------------------------------------------------------------

    def of(self, ledger_id: int, state: MarkedState | None) -> int:
        """Return the highest number of the ledger's marks that count; 0: it has none."""
        number = self.number if ledger_id <= self.bound else 0
        if state is None:
            return number
        number = max(number, state.marked)
        return number if number > state.lifted else 0

    def is_in_doubt(self, ledger_id: int, state: MarkedState | None) -> bool:
        """Return whether entries of the ledger may have been lost that nothing lists.

        A mark of all ledgers leaves no other conclusion.
        """
        number = self.number if ledger_id <= self.bound else 0
        if state is None:
            return number > 0
        return number > state.lifted or state.is_in_doubt

    def is_fenced(self, ledger_id: int, state: MarkedState | None) -> bool:
        """Return whether the ledger counts as fenced, since its marks ended with those of all ledgers."""
        return ledger_id <= self._fenced and (state is None or state.lifted < self._ended)

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        is_marked = bool(self.number)
        return {
            "all_damaged": is_marked,
            "all_damaged_up_to": self.bound if is_marked and not self.is_unbounded else None,
            "last_mark": self._last,
        }
