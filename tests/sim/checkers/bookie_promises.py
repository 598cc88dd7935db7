"""The promises of bookies: an answer on the wire binds the bookie that gave it.

Owns the record of every acknowledgement, fence and "no such entry" of every bookie. It covers all ledgers:
bounded ones, those of logs, and unbounded ones. `tests.sim.cluster.wiretap` reports to it. The names:

- NoForgottenAdd: no bookie says "no such entry" of an entry that it had acknowledged, under that content
  term, before it was asked. Entries that were deleted, trimmed or evicted (`tests.sim.faults.upkeep`) are
  exempt.
- FencesHold: after a bookie answered a higher term, it acknowledges no ordinary add and no recovery add of a
  lower one. Nor does it answer any other request that carries a lower term and was sent after that.
- TombstonesHold: no bookie acknowledges an add to a ledger after it said that the ledger is deleted.
- DoubtTakesNoAdds: a bookie that said in answer to a LAC read that it lost data of a ledger acknowledges no
  ordinary add sent to that ledger afterwards, until the mark is lifted (rule 4).
- DoubtDeniesNothing: nor does it say "no such entry" to a read of that ledger sent afterwards.
- LiftedHoldsAll: a bookie lifts a mark only of a ledger that is CLOSED, or in whose last fragment it is not
  (rule 4). From then on it denies no entry that it owes of a CLOSED ledger.
- LiftedIsFenced: from then on it takes no ordinary add to a ledger that is CLOSED.
- LiftsHold: a mark that was lifted does not count again; a later mark has a higher number.
- OnlyTheDeletedIsDropped: no bookie says that a ledger is deleted while its metadata are there (rule 15). A
  ledger that was created below the id floor is exempt: its creator died, or its request was late. The end of
  what the event of a set-back covers counts as a floor. So does the floor of the metadata that an older copy
  has replaced: a bookie has dropped the id by those, and could not be asked whether it is free.
- FloorHolds: nobody adds to a ledger that was created below the id floor. Its creator finds that floor behind
  the creation, unless an older copy has come in between.
- OpenLedgersAreNotFenced: no bookie refuses a term as too low while the ledger's metadata say OPEN.
- LacIsAcknowledged: no bookie states a LAC of a bounded ledger that is not acknowledged.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from metadata.ids import KEY_ID_FLOOR, KEY_LEDGERS, KEY_SET_BACKS, ledger_id_of
from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from metadata.store import Version
    from tests.sim.checkers.invariants import History, LedgerRecord
    from tests.sim.cluster.metadata import TreeCopy


class Answered(NamedTuple):
    """When a bookie first answered under a term."""

    at: float
    number: int
    """Of the history's events then."""


class Words:
    """What the bookies of a run have said."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.promised: dict[tuple[str, int], dict[int, int]] = {}  # bookie, ledger → entry → event number
        self._given: dict[tuple[str, int], set[int]] = {}  # bookie, ledger → entries
        self.forgotten: set[tuple[str, int]] = set()  # bookie, ledger
        self._promised_under: dict[tuple[str, int, int], dict[int, int]] = {}  # ... and content term
        self.denied: dict[tuple[int, int], set[str]] = {}  # ledger, entry → who said no to a recovery read
        self._in_doubt: dict[tuple[str, int], int] = {}  # bookie, ledger → event number
        self._lifted: dict[tuple[str, int], tuple[int, int]] = {}  # bookie, ledger → mark, event number
        self.lifts = 0
        self._floor = self._raised_to = 0
        self._floor_ever = 0  # also of metadata that an older copy has replaced
        self._created: set[int] = set()
        self._late: set[int] = set()  # ledgers that were created below the floor
        self._late_before: set[int] = set()  # those of metadata that an older copy has replaced
        self._below_former: set[int] = set()  # of the others: below one that an older copy took back
        self._deleted: dict[tuple[str, int], float] = {}  # bookie, ledger → since when it says so
        self.fenced: dict[tuple[str, int], dict[int, Answered]] = {}  # bookie, ledger → term

    # --- the id floor --------------------------------------------------------------------------

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Take note of a change of the metadata store."""
        if value is None:
            return
        if key == KEY_ID_FLOOR:
            self._floor = max(self._floor, json.loads(value)["floor"])
            self._floor_ever = max(self._floor_ever, self._floor)
        elif key == KEY_SET_BACKS:
            self._raised_to = _raised_to(value)
        elif key.startswith(f"{KEY_LEDGERS}/"):
            ledger_id = ledger_id_of(key)
            if ledger_id in self._created:
                return
            self._created.add(ledger_id)
            if ledger_id < max(self._floor, self._raised_to):
                self._late.add(ledger_id)
                self._history.ignore(ledger_id)
            elif ledger_id < self._floor_ever:
                self._below_former.add(ledger_id)

    def set_back(self, copy: TreeCopy) -> None:
        """Note that a copy of the metadata was put in their place."""
        floor, events = copy.value(KEY_ID_FLOOR), copy.value(KEY_SET_BACKS)
        self._floor = 0 if floor is None else json.loads(floor)["floor"]
        self._raised_to = 0 if events is None else _raised_to(events)
        self._late_before |= self._late

    def is_late(self, ledger_id: int) -> bool:
        """Return whether the ledger was created below the id floor."""
        return ledger_id in self._late

    def adds(self, client: str, ledger_id: int) -> None:
        """Note that a client sends an add that is neither a recovery's nor a repair's."""
        self._history.require(
            ledger_id not in self._late or ledger_id in self._late_before,
            "FloorHolds",
            lambda: f"{client} adds to ledger {ledger_id}, which was created below the id floor",
        )

    # --- adds ----------------------------------------------------------------------------------

    def added(
        self, bookie: str, ledger_id: int, entries: range, *, content_term: int, term: int | None
    ) -> None:
        """Note that a bookie said OK to an add; `term` is None where fences do not concern it (rule 14)."""
        key, number = (bookie, ledger_id), len(self._history.events)
        promised = self.promised.setdefault(key, {})
        under = self._promised_under.setdefault((*key, content_term), {})
        for entry_id in entries:
            promised.setdefault(entry_id, number)
            under.setdefault(entry_id, number)
        now = self._history.now()
        since = self._deleted.get(key, now)
        self._history.require(
            since >= now,
            "TombstonesHold",
            lambda: f"{bookie} acknowledged {entries} of ledger {ledger_id}, said deleted at {since:.4f} s",
        )
        if term is not None:
            self._check_fences(bookie, ledger_id, term, f"acknowledged {entries}", self._is_of_now)
            self._holds(bookie, ledger_id, term)

    def gave(self, bookie: str, ledger_id: int, entries: range) -> None:
        """Note that a bookie gave entries to a reader: what it finds is durable."""
        self._given.setdefault((bookie, ledger_id), set()).update(entries)

    def given(self, bookie: str, ledger_id: int) -> Set[int]:
        """Return the entries that a bookie has given to a reader."""
        return self._given.get((bookie, ledger_id), frozenset())

    def has_shown(self, bookie: str, ledger_id: int, entry_id: int) -> bool:
        """Return whether a bookie has shown that it holds an entry: has acknowledged it, or given it.

        It may have stored the add of a writer that had closed the connection before the answer.
        """
        key = bookie, ledger_id
        return entry_id in self.promised.get(key, ()) or entry_id in self._given.get(key, ())

    def forget(self, bookie: str, ledger_id: int) -> None:
        """Let a bookie off what it promised of a ledger: it has nothing to do with it any more (rule 15).

        That it said OK stays a fact: a writer that is paused may count the answer later.
        """
        self.forgotten.add((bookie, ledger_id))
        for key in [each for each in self._promised_under if each[:2] == (bookie, ledger_id)]:
            del self._promised_under[key]

    def received(self, bookie: str, ledger_id: int, entries: range, term: int) -> None:
        """Note that a bookie said that it received an add with deferred sync: not that it is durable."""
        self._check_fences(bookie, ledger_id, term, f"received {entries}", self._is_of_now)

    def _check_fences(
        self, bookie: str, ledger_id: int, term: int, what: str, is_excused: Callable[[Answered], bool]
    ) -> None:
        for fence, answered in self.fenced.get((bookie, ledger_id), {}).items():
            self._history.require(
                fence <= term or is_excused(answered),
                "FencesHold",
                lambda fence=fence, answered=answered: (
                    f"{bookie} {what} of ledger {ledger_id} under term {term}, having answered a fence of "
                    f"term {fence} at {answered.at:.4f} s"
                ),
            )

    def _is_of_now(self, answered: Answered) -> bool:
        return answered.at >= self._history.now()

    def promised_under(self, bookie: str, ledger_id: int, content_term: int) -> dict[int, int]:
        """Return what a bookie has acknowledged of a ledger under a content term."""
        return self._promised_under.get((bookie, ledger_id, content_term), {})

    def fenced_or_deleted(self, bookie: str) -> list[int]:
        """Return the ledgers of which a bookie has answered a term above 0, or that they are deleted."""
        fenced = {
            ledger_id for (name, ledger_id), terms in self.fenced.items() if name == bookie and max(terms)
        }
        return sorted(fenced | {ledger_id for name, ledger_id in self._deleted if name == bookie})

    # --- terms ---------------------------------------------------------------------------------

    def answered(self, bookie: str, ledger_id: int, term: int, asked_at: int, *, raises: bool = True) -> None:
        """Note that a bookie answered a request that carries a term, and, if it `raises` it, holds that."""
        what = "answered what it was asked for later"
        self._check_fences(bookie, ledger_id, term, what, lambda fence: fence.number >= asked_at)
        if raises:
            self._holds(bookie, ledger_id, term)

    def _holds(self, bookie: str, ledger_id: int, term: int) -> None:
        now = Answered(self._history.now(), len(self._history.events))
        self.fenced.setdefault((bookie, ledger_id), {}).setdefault(term, now)

    def refused_term(self, bookie: str, ledger_id: int) -> None:
        """Note that a bookie refused a term as too low."""
        record = self._history.ledger(ledger_id)
        metadata = record.metadata
        self._history.require(
            metadata is None
            or record.is_deleted
            or record.is_fenced_by_older
            or metadata.is_unbounded
            or metadata.state is not LedgerState.OPEN,
            "OpenLedgersAreNotFenced",
            lambda: f"{bookie} refuses the writer's term for ledger {ledger_id}, which is OPEN",
        )

    # --- absence -------------------------------------------------------------------------------

    def deleted(self, bookie: str, ledger_id: int) -> None:
        """Note that a bookie said that a ledger is deleted."""
        if ledger_id not in self._below_former:
            self.drops(bookie, ledger_id)
        self._deleted.setdefault((bookie, ledger_id), self._history.now())

    def drops(self, bookie: str, ledger_id: int) -> None:
        """Note that a bookie is about to bury a ledger, or says that it has."""
        record = self._history.ledger(ledger_id)
        self._history.require(
            record.metadata is None or record.is_gone or ledger_id in self._late,
            "OnlyTheDeletedIsDropped",
            lambda: f"{bookie} says that ledger {ledger_id} is deleted, which is there",
        )

    def has_not(self, bookie: str, ledger_id: int, entry_id: int, content_term: int, asked_at: int) -> None:
        """Note that a bookie said "no such entry"."""
        self._check_lifted(bookie, ledger_id, entry_id, asked_at)
        record, since = self._history.ledger(ledger_id), self._in_doubt.get((bookie, ledger_id))
        self._history.require(
            since is None or asked_at <= since or record.is_gone or _is_trimmed(record, entry_id),
            "DoubtDeniesNothing",
            lambda: f"{bookie} denies entry {entry_id} of ledger {ledger_id}, of which it lost data",
        )
        promised = self.promised_under(bookie, ledger_id, content_term).get(entry_id)
        if promised is None or promised >= asked_at:
            return
        if record.is_gone or _is_trimmed(record, entry_id):
            return
        self._history.fail(
            "NoForgottenAdd",
            f'{bookie} says "no such entry" of entry {entry_id} of ledger {ledger_id}, content term '
            f"{content_term}, which it acknowledged",
        )

    def denies(self, bookie: str, ledger_id: int, entry_id: int) -> None:
        """Note that a bookie said "no such entry" to a recovery read."""
        self.denied.setdefault((ledger_id, entry_id), set()).add(bookie)

    # --- damage --------------------------------------------------------------------------------

    def is_in_doubt(self, bookie: str, ledger_id: int) -> None:
        """Note that a bookie said that it may have had more of a ledger than it lists."""
        self._in_doubt.setdefault((bookie, ledger_id), len(self._history.events))

    def ends_doubt(self, bookie: str, ledger_id: int | None) -> None:
        """Note that a bookie lifts its marks of a ledger, or of all for None. Later ones may count."""
        for key in list(self._in_doubt):
            if key[0] == bookie and ledger_id in (None, key[1]):
                del self._in_doubt[key]

    def is_doubted_by_others(self, ledger_id: int, bookie: str) -> bool:
        """Return whether another bookie said that of a ledger, and has not lifted its mark."""
        return any(one == ledger_id and name != bookie for name, one in self._in_doubt)

    def named_mark(self, bookie: str, ledger_id: int, asked: int, mark: int) -> None:
        """Note that a bookie named the mark of a ledger, or lifted the marks up to `asked`, 0 for none."""
        key, number = (bookie, ledger_id), len(self._history.events)
        lifted, _ = self._lifted.get(key, (0, 0))
        self._history.require(
            not mark or mark > lifted,
            "LiftsHold",
            lambda: f"{bookie} has mark {mark} of ledger {ledger_id}, of which it had lifted {lifted}",
        )
        if asked and not mark:  # and `ends_doubt` has heard of it
            self.lifts += 1
            self._lifted[key] = (asked, number)
            metadata = self._history.ledger(ledger_id).metadata
            self._history.require(
                metadata is None
                or metadata.is_closed
                or (metadata.is_unbounded and bookie not in metadata.last_fragment.bookies),
                "LiftedHoldsAll",
                lambda: f"{bookie} lifted the mark of ledger {ledger_id}, which may take more entries",
            )

    def _check_lifted(self, bookie: str, ledger_id: int, entry_id: int, asked_at: int) -> None:
        _, lifted_at = self._lifted.get((bookie, ledger_id), (0, 0))
        record = self._history.ledger(ledger_id)
        metadata = record.metadata
        if not lifted_at or asked_at < lifted_at or metadata is None or record.is_gone:
            return
        if metadata.is_unbounded or not metadata.is_closed or entry_id > (metadata.last_entry or 0):
            return
        seats = metadata.fragment_of(entry_id).bookies
        size = metadata.ensemble_size
        write_set = {seats[(entry_id + at) % size] for at in range(metadata.write_quorum)}
        self._history.require(
            bookie not in write_set,
            "LiftedHoldsAll",
            lambda: f"{bookie} denies entry {entry_id} of ledger {ledger_id}, whose mark it lifted",
        )

    def took_ordinary(self, bookie: str, ledger_id: int, entries: range, asked_at: int) -> None:
        """Note that a bookie said OK to an add that is neither a recovery's nor a repair's."""
        since = self._in_doubt.get((bookie, ledger_id))
        self._history.require(
            since is None or asked_at <= since,
            "DoubtTakesNoAdds",
            lambda: f"{bookie} took {entries} of ledger {ledger_id}, of which it said that it lost data",
        )
        metadata = self._history.ledger(ledger_id).metadata
        _, lifted_at = self._lifted.get((bookie, ledger_id), (0, 0))
        self._history.require(
            not lifted_at or asked_at < lifted_at or metadata is None or not metadata.is_closed,
            "LiftedIsFenced",
            lambda: (
                f"{bookie} took {entries} of ledger {ledger_id}, which is closed, and whose mark it lifted"
            ),
        )

    # --- the LAC -------------------------------------------------------------------------------

    def stated(self, bookie: str, ledger_id: int, lac: int) -> None:
        """Note the LAC that a bookie states."""
        record = self._history.ledger(ledger_id)
        if ledger_id in self._history.ignored:
            return
        if lac > record.acked:
            self._history.settle("writer")
        self._history.require(
            lac <= record.acked,
            "LacIsAcknowledged",
            lambda: f"{bookie} states LAC {lac} of ledger {ledger_id}; acknowledged up to {record.acked}",
        )


def _is_trimmed(record: LedgerRecord, entry_id: int) -> bool:
    metadata = record.metadata
    return metadata is not None and metadata.is_unbounded and entry_id < metadata.first_entry


def _raised_to(events: bytes) -> int:
    return max((event["raised_to"] for event in json.loads(events)["events"]), default=0)
