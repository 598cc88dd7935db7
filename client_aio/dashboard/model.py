"""A cluster as it is known: what is wrong, its bookies and ledgers, the repair, and what happened. Pure.

`ClusterModel` takes what an observer reads (`note_…`), and answers what a page or a terminal shows. It knows
no clock. `now` is the caller's monotonic time, in seconds; `at` is the wall clock, for people only.

Bounds. The model keeps:

- the rows of `LEDGERS_KEPT` ledgers, the newest ones; all ledgers are counted and audited;
- the last `EVENTS_KEPT` events. Events of one kind about one thing within 10 s are one event with a count;
- `SERIES_POINTS` points for each curve, three curves for each bookie.

Invariant: the first pass over the metadata makes no event.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from client_aio.core.audit import Condition, LedgerIndex, Pace, Problem, judge
from client_aio.core.log_chain import owner_of
from client_aio.dashboard.vitals import BookieState, EventRing, Figures, Scrape, Series, ledgers_text
from metadata.access.repair_tasks import COPIES_MAX, AuditorRecord
from metadata.model.ledger import LedgerState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from client_aio.core.audit import Layout
    from metadata.access.bookies import BookieRecord, Order
    from metadata.access.repair_tasks import RepairTask, TaskRef, WorkerRecord
    from metadata.errors import MetadataCorruptError
    from metadata.model.ledger import LedgerMetadata

LEDGERS_KEPT = 100_000
_DIGITS = re.compile(r"([0-9]+)")
_LAYOUTS_SHARED = 10_000


class LedgerRow(NamedTuple):
    """A ledger, for lists and searches."""

    ledger_id: int
    state: str
    name: str
    """Of an unbounded ledger."""
    log: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    fragments: int
    first_entry: int
    last_entry: int | None
    length: int | None
    created_ms: int
    term: int
    layout: Layout
    has_loss: bool

    @classmethod
    def of(cls, metadata: LedgerMetadata, layout: Layout) -> LedgerRow:
        """Return the row of a ledger."""
        return cls(
            metadata.ledger_id,
            metadata.state.value,
            metadata.unbounded.name if metadata.unbounded is not None else "",
            owner_of(metadata) or "",
            metadata.ensemble_size,
            metadata.write_quorum,
            metadata.ack_quorum,
            len(metadata.rows),
            metadata.first_entry,
            metadata.last_entry,
            metadata.length,
            metadata.created_ms,
            metadata.term,
            layout,
            bool(metadata.absent) or metadata.given_up is not None,
        )


class LedgerQuery(NamedTuple):
    """The terms of a search for ledgers."""

    text: str = ""
    """A ledger's id, or a part of its name or of its log's name."""
    state: str = ""
    bookie: str = ""
    lacking: bool = False
    """Only ledgers of which copies are lacking, or soon will be."""
    page: int = 1


class LackingRow(NamedTuple):
    """A ledger of which copies are lacking."""

    ledger_id: int
    copies: int | None
    """Good copies of the scarcest entry; None where only racks are concerned."""
    bookies: tuple[str, ...]
    """Bookies that are down."""
    status: str
    """"repairing", "waiting", "failed", "open" (its writer replaces the bookie) or "not due"."""
    ref: TaskRef | None
    task: RepairTask | None
    worker: str


@dataclass(slots=True)
class RecoveryView:
    """Auto recovery, as it was read last."""

    auditor: str | None = None
    record: AuditorRecord = field(default_factory=AuditorRecord)
    workers: list[WorkerRecord] = field(default_factory=list)
    is_paused: bool = False
    refs: list[TaskRef] = field(default_factory=list)
    tasks: dict[int, RepairTask] = field(default_factory=dict)
    """The contents of some tasks, by ledger."""

    @property
    def by_copies(self) -> Counter[int]:
        """Return how many tasks there are, by the number of good copies as far as it is known."""
        found = ((ref.copies, self.tasks.get(ref.ledger_id)) for ref in self.refs)
        return Counter(copies if task is None else task.good_copies(copies) for copies, task in found)


class _Unread:
    """The ledgers that are listed, and whose metadata were never read."""

    def __init__(self) -> None:
        self.is_late = False
        """Some of them have been so for a while."""
        self._ledger_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._ledger_ids)

    def note(self, ledger_ids: Iterable[int]) -> None:
        """Take the place of what was listed before."""
        self._ledger_ids = set(ledger_ids)
        self.is_late = self.is_late and bool(self._ledger_ids)

    def drop(self, ledger_id: int) -> bool:
        """Remove a ledger that was read, or deleted. Returns whether it was there."""
        was_there = ledger_id in self._ledger_ids
        self._ledger_ids.discard(ledger_id)
        self.is_late = self.is_late and bool(self._ledger_ids)
        return was_there


class ClusterModel:
    """The cluster as it is known."""

    def __init__(self) -> None:
        self.revision = 0
        """Grows with each change."""
        self.bookies: dict[str, BookieState] = {}
        self.recovery = RecoveryView()
        self.events = EventRing()
        self.logs: list[str] = []
        self.metadata_error = "the metadata are not read yet"
        """Why the metadata cannot be read; "" while they can."""
        self.metadata_at: float | None = None
        """When the metadata store answered last, by the wall clock."""
        self.ledgers_listed = 0
        self.is_complete = False
        """The metadata of all ledgers that were listed first have been read."""
        self.pace: Pace | None = None
        """Of the repair that is under way."""
        self.repair_bytes_per_s = Series()
        self.index = LedgerIndex()
        self._rows: dict[int, LedgerRow] = {}
        self._newest: list[int] = []  # a heap of the ledgers that have rows, the lowest id first
        self._order: list[int] | None = None
        self._unreadable: set[int] = set()
        self._unread = _Unread()
        self._states: dict[int, LedgerState] = {}
        self._losses: set[int] = set()
        self._given_up: set[int] = set()
        self._shared: dict[Layout, Layout] = {}
        self._worker_bytes: tuple[float, dict[str, int]] | None = None
        self._changes = 0  # of what the metadata of ledgers say
        self._views = 0  # of auto recovery
        self._left = 0  # ledgers to be repaired
        self._problems: tuple[int, list[Problem]] | None = None
        self._copies: tuple[object, Counter[int]] | None = None
        self._lacking: tuple[object, list[LackingRow]] | None = None

    # --- what the observer reads -----------------------------------------------------------------

    def note_metadata(self, error: str, at: float) -> None:
        """Note that the metadata store answered (""), or why it did not."""
        if error and not self.metadata_error:
            self.events.add(at, "metadata", "", f"the metadata store does not answer: {error}")
        elif not error and self.metadata_error and self.metadata_at is not None:
            self.events.add(at, "metadata", "", "the metadata store answers again")
        if error != self.metadata_error:
            self.revision += 1
        self.metadata_error = error
        if not error:
            self.metadata_at = at

    def note_bookies(
        self,
        running: Mapping[str, BookieRecord],
        orders: Mapping[str, Order],
        registered: Collection[str],
        *,
        now: float,
        at: float,
    ) -> None:
        """Note which bookies are registered now, the operator's orders, and which have a cookie."""
        is_first = not self.bookies
        for name in {*running, *registered, *self.index.bookies()} - self.bookies.keys():
            self.bookies[name] = BookieState(name, is_silent=False)
            if not is_first and name in running:
                self.events.add(at, "bookie back", name, f"bookie {name} is new")
            elif is_first and name not in running:
                self.bookies[name].away_since = now
        for name in list(self.bookies):
            one, record = self.bookies[name], running.get(name)
            if record is None and name not in registered and not self.index.ledgers_of(name):
                del self.bookies[name]
                continue
            self._note_registration(one, record, now, at)
            order = orders.get(name)
            if order != one.order and not is_first:
                mode = order.mode if order is not None else "under no order any more"
                self.events.add(at, "bookie changed", name, f"bookie {name} is {mode}")
            one.order = order
        self.bookies = {name: self.bookies[name] for name in sorted(self.bookies, key=_as_people_sort)}
        self.revision += 1

    def _note_registration(
        self, one: BookieState, record: BookieRecord | None, now: float, at: float
    ) -> None:
        before, one.record = one.record, record
        if record is None and before is not None:
            one.away_since = one.away_since if one.is_silent and one.away_since is not None else now
            one.is_silent = False
            ledgers = len(self.index.ledgers_of(one.bookie_id))
            named = f"; it is named by {ledgers_text(ledgers)}" if ledgers else ""
            self.events.add(at, "bookie lost", one.bookie_id, f"bookie {one.bookie_id} is down{named}")
        elif record is not None and one.last_record is not None and before is None:
            one.away_since = None
            self.events.add(at, "bookie back", one.bookie_id, f"bookie {one.bookie_id} is back")
        elif record is not None and before is not None and record.nonce != before.nonce:
            self.events.add(at, "bookie back", one.bookie_id, f"bookie {one.bookie_id} was started again")
        elif record is not None and before is not None and record.is_writable != before.is_writable:
            state = "takes entries again" if record.is_writable else "is read-only"
            self.events.add(at, "bookie changed", one.bookie_id, f"bookie {one.bookie_id} {state}")
        if record is not None:
            one.away_since = one.away_since if one.is_silent else None
            one.last_record = record

    def note_figures(
        self,
        bookie_id: str,
        figures: Figures | None,
        scrape: Scrape | None = None,
        *,
        now: float,
        at: float,
    ) -> None:
        """Note a bookie's answer to INFO; None for no answer. Metrics of another process do not count."""
        one = self.bookies.get(bookie_id)
        if one is None or one.record is None:
            return
        if figures is None:
            if not one.is_silent:
                one.is_silent, one.away_since = True, now
                self.events.add(at, "bookie silent", bookie_id, f"bookie {bookie_id} gives no answer")
                self.revision += 1
            return
        if one.is_silent:
            self.events.add(at, "bookie back", bookie_id, f"bookie {bookie_id} answers again")
            self.revision += 1
        one.is_silent, one.away_since, one.figures, one.figures_at = False, None, figures, now
        one.scrape = scrape if scrape is not None and scrape.nonce == one.record.nonce else None

    def note_sample(self) -> None:
        """Append a point to the curves of all bookies."""
        for one in self.bookies.values():
            one.sample()
        self.revision += 1

    def note_listing(self, ledger_ids: Sequence[int]) -> list[int]:
        """Note all ledgers that there are, ascending. Those that are gone are removed.

        Returns the ledgers whose metadata have not been read, ascending.
        """
        listed = set(ledger_ids)
        self.ledgers_listed = len(listed)
        for ledger_id in [one for one in self._states.keys() | self._unreadable if one not in listed]:
            self.drop(ledger_id)
        unread = [one for one in ledger_ids if not self.knows(one)]
        self._unread.note(unread)
        self.revision += 1
        return unread

    def drop(self, ledger_id: int) -> None:
        """Remove a ledger that was deleted."""
        self._unread.drop(ledger_id)
        self.index.drop(ledger_id)
        self._states.pop(ledger_id, None)
        self._rows.pop(ledger_id, None)
        self._order = None
        for members in (self._unreadable, self._losses, self._given_up):
            members.discard(ledger_id)
        self.revision += 1
        self._changes += 1

    def note_ledger(
        self,
        ledger_id: int,
        metadata: LedgerMetadata | MetadataCorruptError,
        layout: Layout | None,
        at: float,
    ) -> None:
        """Note a ledger's metadata as read now; with the layout, unless they do not parse."""
        if layout is None or isinstance(metadata, Exception):
            self.drop(ledger_id)
            self._unreadable.add(ledger_id)
            return
        if len(self._shared) > _LAYOUTS_SHARED:
            self._shared.clear()
        layout = self._shared.setdefault(layout, layout)
        self.revision += self._unread.drop(ledger_id)
        self._unreadable.discard(ledger_id)
        self.index.note(ledger_id, layout)
        self._states[ledger_id] = metadata.state
        for members, belongs in (
            (self._losses, bool(metadata.absent)),
            (self._given_up, metadata.given_up is not None),
        ):
            (members.add if belongs else members.discard)(ledger_id)
        row, before = LedgerRow.of(metadata, layout), self._rows.get(ledger_id)
        if row == before:
            return
        self._keep(row)
        self.revision += 1
        self._changes += 1
        if before is not None and self.is_complete:
            self._note_change(before, row, at)

    def _keep(self, row: LedgerRow) -> None:
        if row.ledger_id not in self._rows:
            self._order = None
            heapq.heappush(self._newest, row.ledger_id)
        self._rows[row.ledger_id] = row
        while len(self._rows) > LEDGERS_KEPT:
            self._rows.pop(heapq.heappop(self._newest), None)

    def _note_change(self, before: LedgerRow, after: LedgerRow, at: float) -> None:
        ledger_id = after.ledger_id
        if after.term > before.term:
            name = f"{{ledgers}} was taken over, term {after.term}"
            self.events.add(at, "taken over", str(ledger_id), name, ledger_id)
        elif (before.state, after.state) == ("OPEN", "IN_RECOVERY"):
            self.events.add(at, "taken over", "recovery", "{ledgers}: a recovery began", ledger_id)
        if (before.state, after.state) == ("IN_RECOVERY", "CLOSED"):
            self.events.add(at, "recovered", "recovery", "{ledgers}: recovered, and closed", ledger_id)
        if after.fragments > before.fragments and before.layout.growing:
            now = after.layout.growing or _newest_of(after.layout, before.layout)
            change = _exchanged(before.layout.growing, now)
            if change:
                text = f"{{ledgers}}: ensemble changed, {change}"
                self.events.add(at, "ensemble changed", change, text, ledger_id)
        elif after.fragments == before.fragments and after.layout != before.layout:
            named = {*before.layout.bookies}, {*after.layout.bookies}
            lost, gained = sorted(named[0] - named[1]), sorted(named[1] - named[0])
            if lost and gained:
                change = f"{', '.join(gained)} in place of {', '.join(lost)}"
                self.events.add(at, "repaired", change, f"{{ledgers}}: {change}", ledger_id)

    def note_pass(self, *, is_over: bool) -> None:
        """Note that reading what a listing found is over, or takes long. What is unread then is late."""
        before = self.is_complete, self._unread.is_late
        self.is_complete = self.is_complete or is_over
        self._unread.is_late = bool(self._unread)
        self.revision += before != (self.is_complete, self._unread.is_late)

    def note_logs(self, names: list[str]) -> None:
        """Note the names of all logs, sorted."""
        if names != self.logs:
            self.logs = names
            self.revision += 1

    def note_recovery(self, view: RecoveryView, *, now: float, at: float) -> list[int]:
        """Note who repairs and what. Returns the ledgers whose tasks are done: their metadata are news."""
        before, self.recovery = self.recovery, view
        self.revision += 1
        self._views += 1
        if self.is_complete and view.auditor != before.auditor:
            text = f"{view.auditor} is the auditor" if view.auditor else "no auditor is elected"
            self.events.add(at, "auto recovery", "auditor", text)
        if view.is_paused != before.is_paused:
            text = "auto recovery is paused" if view.is_paused else "auto recovery goes on"
            self.events.add(at, "auto recovery", "pause", text)
        for name in sorted({*view.record.lost} - {*before.record.lost}):
            if self.is_complete:
                text = f"bookie {name} counts as lost: its entries are copied to others"
                self.events.add(at, "bookie lost", name, text)
        done = sorted({ref.ledger_id for ref in before.refs} - {ref.ledger_id for ref in view.refs})
        for ledger_id in done:
            self.events.add(at, "repaired", "task", "{ledgers}: the repair task is done", ledger_id)
        self._note_pace(now, at)
        self._note_bytes(view.workers, now)
        return done

    def _note_pace(self, now: float, at: float) -> None:
        """Note how many ledgers are left to repair, once there is a task, or a bookie that counts as lost."""
        before, view = self._left, self.recovery
        self._left = left = sum(row.status != "open" for row in self.lacking())
        if self.pace is not None:
            self.pace.note(now, left)
            if not left:
                self.events.add(
                    at, "repair over", "", f"the repair of {ledgers_text(self.pace.done)} is over"
                )
                self.pace = None
        elif left and (view.refs or not self.down.isdisjoint(view.record.lost)):
            self.pace = Pace(now, left)
            self.events.add(at, "repair began", "", f"left to repair: {ledgers_text(left)}")
        elif before and not left and self.down:  # it was over before a task of it was seen
            self.events.add(at, "repair over", "", f"the repair of {ledgers_text(before)} is over")

    def _note_bytes(self, workers: Iterable[WorkerRecord], now: float) -> None:
        totals = {one.name: one.bytes_read for one in workers}
        before, self._worker_bytes = self._worker_bytes, (now, totals)
        if before is not None:
            grown = sum(max(total - before[1].get(name, total), 0) for name, total in totals.items())
            self.repair_bytes_per_s.add(grown / max(now - before[0], 1e-3))

    # --- what is shown ---------------------------------------------------------------------------

    @property
    def down(self) -> set[str]:
        """Return the bookies that are not registered."""
        return {name for name, one in self.bookies.items() if one.record is None}

    @property
    def problems(self) -> list[Problem]:
        """Return what is wrong, the worst first."""
        if self._problems is None or self._problems[0] != self.revision:
            self._problems = self.revision, self._judge()
        return self._problems[1]

    @property
    def condition(self) -> Condition:
        """Return the worst condition of all problems."""
        return max((problem.condition for problem in self.problems), default=Condition.HEALTHY)

    @property
    def is_known(self) -> bool:
        """Return whether enough is known to call the cluster healthy."""
        return self.is_complete and not self._unread.is_late and not self.metadata_error

    def _judge(self) -> list[Problem]:
        found: list[Problem] = []
        if self.metadata_error:
            found.append(Problem(Condition.DEGRADED, f"the metadata store: {self.metadata_error}"))
        elif not self.is_known:
            read = self.ledgers_listed - len(self._unread)
            text = f"the metadata of {read:,} of {self.ledgers_listed:,} ledgers have been read so far"
            found.append(Problem(Condition.HEALTHY, text))
        bookies, down = self.bookies.values(), self.down
        key = (self._changes, down)
        if self._copies is None or self._copies[0] != key:
            self._copies = key, Counter(one.copies for one in self.index.lacking(down)[0])
        found += judge(
            down={
                one.bookie_id: len(self.index.ledgers_of(one.bookie_id)) for one in bookies if not one.record
            },
            impaired=[
                one.bookie_id
                for one in bookies
                if one.state == "silent" or (one.state == "read-only" and one.order is None)
            ],
            ordered={one.bookie_id: one.order.mode for one in bookies if one.order is not None},
            damaged=[one.bookie_id for one in bookies if one.figures and one.figures.ledgers_damaged],
            lacking=self._copies[1],
            tasks=self.recovery.by_copies,
            growing_on_down=len(self.index.growing_on(down)),
            absent=len(self._losses),
            unreadable=len(self._unreadable),
            is_paused=self.recovery.is_paused,
            has_auditor=self.recovery.auditor is not None and bool(self.recovery.workers),
        )
        for one in bookies:
            if one.record is not None and one.is_tight:
                found.append(
                    Problem(Condition.DEGRADED, f"the disks of bookie {one.bookie_id} are nearly full")
                )
        return sorted(found, key=lambda problem: -problem.condition)

    @property
    def ledgers_by_state(self) -> dict[str, int]:
        """Return how many ledgers there are, by state."""
        counts = Counter(state.value for state in self._states.values())
        return {state.value: counts[state.value] for state in LedgerState if counts[state.value]}

    @property
    def rows_kept(self) -> int:
        """Return how many ledgers lists and searches know."""
        return len(self._rows)

    def row(self, ledger_id: int) -> LedgerRow | None:
        """Return a ledger's row; None where there is none, or it is not kept."""
        return self._rows.get(ledger_id)

    def knows(self, ledger_id: int) -> bool:
        """Return whether the ledger's metadata have been read."""
        return ledger_id in self._states or ledger_id in self._unreadable

    def newest_first(self) -> list[int]:
        """Return the ledgers that have rows, the newest first."""
        if self._order is None:
            self._order = sorted(self._rows, reverse=True)
        return self._order

    def select(self, query: LedgerQuery, rows_per_page: int) -> tuple[list[LedgerRow], int]:
        """Return one page of the ledgers that a query lets through, newest first, and the number of all."""
        found = list(self._matching(query))
        start = (max(query.page, 1) - 1) * rows_per_page
        return found[start : start + rows_per_page], len(found)

    def _matching(self, query: LedgerQuery) -> Iterator[LedgerRow]:
        ids: Iterable[int] = self.newest_first()
        text = query.text.strip()
        if text.isdecimal() and len(text) <= 19 and int(text) in self._rows:
            ids = [int(text)]
            text = ""
        elif query.lacking:
            ids = sorted((one.ledger_id for one in self.lacking()), reverse=True)
        elif query.bookie:
            ids = reversed(self.index.ledgers_of(query.bookie))
        text = text.casefold()
        for ledger_id in ids:
            row = self._rows.get(ledger_id)
            if row is None or (query.state and row.state != query.state):
                continue
            if text and text not in row.name.casefold() and text not in row.log.casefold():
                continue
            if query.bookie and query.bookie not in row.layout.bookies:
                continue
            yield row

    def lacking(self) -> list[LackingRow]:
        """Return the ledgers of which copies are lacking, those with the fewest good copies first."""
        view, down = self.recovery, self.down
        key = (self._changes, down, self._views)
        if self._lacking is not None and self._lacking[0] == key:
            return self._lacking[1]
        repairing = {one.ledger_id: one.name for one in view.workers if one.ledger_id is not None}
        refs = {ref.ledger_id: ref for ref in view.refs}
        found: list[LackingRow] = []
        seen = set()
        for one in self.index.lacking(down)[0]:
            seen.add(one.ledger_id)
            found.append(
                self._lacking_row(one.ledger_id, one.copies, one.bookies, refs.get(one.ledger_id), repairing)
            )
        for ref in view.refs:
            if ref.ledger_id not in seen:
                seen.add(ref.ledger_id)
                copies = None if ref.copies == COPIES_MAX else ref.copies
                found.append(self._lacking_row(ref.ledger_id, copies, (), ref, repairing))
        for ledger_id in self.index.growing_on(down):
            if ledger_id not in seen:
                row = self._rows.get(ledger_id)
                names = () if row is None else tuple(name for name in row.layout.growing if name in down)
                found.append(LackingRow(ledger_id, None, names, "open", None, None, ""))
        found.sort(key=lambda one: (COPIES_MAX if one.copies is None else one.copies, one.ledger_id))
        self._lacking = key, found
        return found

    def _lacking_row(
        self,
        ledger_id: int,
        copies: int | None,
        bookies: tuple[str, ...],
        ref: TaskRef | None,
        repairing: Mapping[int, str],
    ) -> LackingRow:
        task = self.recovery.tasks.get(ledger_id)
        if task is not None and copies is not None:
            copies = task.good_copies(copies)
        if ledger_id in repairing:
            status = "repairing"
        elif task is not None and task.attempts:
            status = "failed"
        else:
            status = "not due" if ref is None else "waiting"
        return LackingRow(ledger_id, copies, bookies, status, ref, task, repairing.get(ledger_id, ""))


def _as_people_sort(name: str) -> tuple[list[object], str]:
    """Return a key that sorts b2 before b10. Texts and numbers alternate, so keys can be compared."""
    return [int(part) if part.isdecimal() else part for part in _DIGITS.split(name)], name


def _newest_of(after: Layout, before: Layout) -> tuple[str, ...]:
    """Return the ensemble that a ledger has closed with, if only one is new; else nothing."""
    added = [one for one in after.complete if one not in before.complete and one != before.growing]
    return added[0] if len(added) == 1 else ()


def _exchanged(before: Sequence[str], after: Sequence[str]) -> str:
    """Return which bookies of an ensemble were exchanged, such as "b3 → b5"; "" for none."""
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if old != new]
    return ", ".join(f"{old} → {new}" for old, new in pairs)
