"""Logs that are truncated, replaced, deleted and remade: the record of each life, and the invariants.

`LogLives` takes the place of `tests.sim.checkers.log.Chains` in runs whose setup is `log_lives`. The
invariants of `Chains` keep their names. A *life* of a log is the time from its list's creation to its
deletion. Ids of rows are never given twice, so each position belongs to one life.
`tests.sim.checkers.log_reads` checks readers, one reading at a time. The further names:

- ListChangesAreLegal: a list changes in the ways of `metadata.model.log`. Rows are appended; dropped from the
  front, but not the last one; or all dropped, for others or for good. A dropped row is of a CLOSED ledger,
  unless all rows are dropped for good. It leaves the list when its ledger is gone. A log's beginning never
  goes back, nor behind its last ledger. No ledger is listed twice. A list is deleted only when it is empty
  and condemned.
- TransactionsOnce: the batches of a query are recorded in ascending order, together with their ledgers. A
  repeated batch is reported as repeated, and changes nothing.
- LivesAreApart: nobody reads a record in another life than that of the log it was appended to.
- AllAckedRecordsAreReadable, at every moment: a record that is acknowledged had not been truncated before it
  was appended.
- NothingLeftOver: also no ledger that was ever a log's, and no page.
- PasswordsAreAsked: nobody reads, truncates, replaces or deletes a log with another password than that of its
  ledgers.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from client_aio.core.log_chain import TAG
from metadata.access.logs import KEY_LOG_PAGES, KEY_LOGS
from metadata.errors import MetadataCorruptError
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogHead, LogRow, Position
from metadata.model.paged_list import rows_of_page
from tests.sim.checkers.log import Chains

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

    from metadata.model.paged_list import PageRef
    from metadata.store import Version
    from tests.sim.checkers.invariants import History
    from tests.sim.checkers.log_reads import Reading
    from tests.sim.simulation import Simulation

LOG = "log"
BEGINNING = Position(0, 0)


class Shape(NamedTuple):
    """What a list said from a moment on."""

    since: float
    rows: tuple[LogRow, ...]
    begins_at: Position


@dataclass
class Life:
    """One life of the log."""

    number: int
    began_at: float
    head: LogHead | None = None
    rows: tuple[LogRow, ...] = ()
    listed: dict[int, LogRow] = field(default_factory=dict)  # by id, all that ever were
    listed_at: dict[int, float] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    in_order: list[Position] = field(default_factory=list)  # acknowledged ones
    readings: list[Reading] = field(default_factory=list)
    condemned_at: float | None = None
    ended_at: float | None = None

    @property
    def begins_at(self) -> Position:
        """Return where the log begins."""
        return self.head.begins_at if self.head is not None else BEGINNING

    def began_where(self, at: float) -> Position:
        """Return where the log began at a time."""
        return max((shape.begins_at for shape in self.shapes if shape.since < at), default=BEGINNING)

    def is_there(self, since: float) -> bool:
        """Return whether the log could be read without a break from that time on."""
        return self.began_at <= since and self.condemned_at is None


class LogLives(Chains):
    """The log of one run, in all its lives."""

    def __init__(self, history: History, now: Callable[[], float], password: bytes = b"") -> None:
        super().__init__(history, now)
        self.password = password
        self.lives: list[Life] = []
        self.life_of: dict[int, Life] = {}  # by a row's id
        self.life_tried: dict[bytes, Life] = {}
        self.cancelled: set[bytes] = set()  # payloads whose futures were
        self._mine: dict[str, list[tuple[bytes, asyncio.Future[Position]]]] = {}  # of each writer's life
        self._settled: dict[str, tuple[int, Position]] = {}  # how many of those, and the highest position
        self._pages: dict[str, bytes] = {}
        self._pages_now: dict[str, float] = {}  # when each was made
        self._owned: dict[int, float] = {}  # ledgers made for the log, or ever listed

    @property
    def life(self) -> Life | None:
        """Return the log's present life, None where there is no log."""
        return self.lives[-1] if self.lives and self.lives[-1].ended_at is None else None

    # --- writers ---

    def opened(self, who: str, ledger_id: int) -> Life | None:
        """Note that a log has been opened with that ledger; gives the life that it is in."""
        life = self.life_of.get(ledger_id)
        if life is None:
            self._fail("AllNonEmptyLedgersInLedgerList", f"{who} opened the log with {ledger_id}: not listed")
        return life

    def issued(
        self, who: str, payload: bytes, future: asyncio.Future[Position], life: Life | None = None
    ) -> None:
        """Note an append, and watch its future."""
        self.tried[payload] = who
        self.issued_at[payload] = self._now()
        if life is not None:
            self.life_tried[payload] = life
        mine = self._mine.setdefault(who, [])
        mine.append((payload, future))
        number = len(mine) - 1
        future.add_done_callback(lambda done: self._done(who, payload, number, done))

    def _done(self, who: str, payload: bytes, number: int, future: asyncio.Future[Position]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        position, mine = future.result(), self._mine[who]
        # Callbacks may come in any order; the futures themselves complete in theirs.
        count, highest = self._settled.get(who, (0, Position(0, -1)))
        if position is None:
            return
        for before, earlier in mine[count : number + 1]:
            if before in self.cancelled or (_succeeded(earlier) and earlier.result() is None):
                continue
            if not earlier.done() or earlier.cancelled() or earlier.exception() is not None:
                self._fail("EntryOrderMaintained", f"{who}: {payload!r} is at {position}, before {before!r}")
            elif earlier.result() <= highest:
                text = f"{who}: {before!r} is at {earlier.result()}, behind {highest}"
                self._fail("EntryOrderMaintained", text)
            else:
                highest = earlier.result()
        self._settled[who] = (max(count, number + 1), highest)
        self.acked(who, payload, position)

    @property
    def _row_ids(self) -> Collection[int]:
        return self.life_of

    def cancel(self, payloads: Iterable[bytes], future: asyncio.Future[Any]) -> None:
        """Cancel the future of an append or a batch; what was appended may be in the log or not."""
        if future.cancel():
            self.cancelled.update(payloads)

    def acked(self, who: str, payload: bytes, position: Position) -> None:
        """Note that a record was acknowledged."""
        self._history.note(who, "acknowledged", str(position), payload.decode())
        self._has_value(who, position, payload)
        life = self.life_of.get(position.ledger_id)
        if life is None:
            self._fail("AllNonEmptyLedgersInLedgerList", f"{position} is acknowledged and not listed")
            return
        if position not in self.acknowledged:
            insort(life.in_order, position)
        self.acknowledged[position] = payload
        self._takes_adds(payload, position)
        issued_at = self.issued_at.get(payload, 0.0)
        if life.condemned_at is None and position < life.began_where(issued_at):
            text = f"{position} ({payload!r}) was appended at {issued_at:.4f} s, when the log began behind it"
            self._fail("AllAckedRecordsAreReadable", text)
        self._within_closed(life.listed[position.ledger_id].ledger_id, position)
        self._in_its_life(who, payload, position)
        for reading in life.readings:
            reading.look_back_at(position, issued_at)

    def _are_of_one_list(self, row: int, other: int) -> bool:
        return self.life_of.get(row) is self.life_of.get(other)

    def _in_its_life(self, who: str, payload: bytes, position: Position) -> None:
        tried, found = self.life_tried.get(payload), self.life_of.get(position.ledger_id)
        if tried is not None and found is not tried:
            text = f"{who}: {payload!r} of life {tried.number} is at {position}, in {found and found.number}"
            self._fail("LivesAreApart", text)

    # --- readers ---

    def seen(self, who: str, payload: bytes, position: Position) -> None:
        """Note what was read at a position, in whatever order."""
        self._has_value(who, position, payload)
        self._may_be_read(who, position)
        if payload not in self.tried:
            self._fail("NoLogDivergence", f"{who} read {payload!r} at {position}, which nobody wrote")
        self._in_its_life(who, payload, position)

    def in_closed_ledgers(self) -> list[Position]:
        """Return what is acknowledged and lies in ledgers that are CLOSED, as are all before them."""
        life, found = self.life, list[Position]()
        for row in life.rows if life is not None else ():
            if not self._ledgers[row.ledger_id].is_closed:
                break
            assert life is not None
            found += [each for each in life.in_order if each.ledger_id == row.id]
        return found

    def is_closed(self, ledger_id: int) -> bool:
        """Return whether a ledger is CLOSED, or was when it was deleted."""
        return ledger_id in self._ledgers and self._ledgers[ledger_id].is_closed

    def exists(self, ledger_id: int) -> bool:
        """Return whether there is such a ledger."""
        return ledger_id in self._ledgers and ledger_id not in self._deleted

    def end_of(self, before: Position) -> Position | None:
        """Return where a log begins for sure that is truncated before a position: behind what lies before it.

        None where a ledger up to there is not CLOSED, or nothing lies before.
        """
        end: Position | None = None
        for row in self.life.rows if self.life is not None else ():
            if row.id > before.ledger_id:
                break
            if not self.is_closed(row.ledger_id):
                return None
            last = self._ledgers[row.ledger_id].last_entry
            assert last is not None
            here = min(before, Position(row.id, last + 1))
            if here > Position(row.id, 0):
                end = here
        return end

    def fail(self, name: str, text: str) -> None:
        """Record that an invariant does not hold."""
        self._fail(name, text)

    # --- the metadata store ---

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Follow the ledgers made for the log, its list, and the list's pages."""
        if key == f"{KEY_LOGS}/{LOG}":
            self._head_changed(value)
        elif key.startswith(f"{KEY_LOG_PAGES}/{LOG}/"):
            name = key.rpartition("/")[2]
            if value is None:
                self._pages_now.pop(name, None)
            else:
                self._pages[name] = value
                self._pages_now[name] = self._now()
        elif not key.startswith(KEY_LOGS + "/"):
            super().metadata_changed(key, value, version)

    def _ledger_changed(self, ledger_id: int, value: bytes | None) -> None:
        if value is None:
            self._deleted.add(ledger_id)
            life = self.life
            if life is not None and any(row.ledger_id == ledger_id for row in life.rows):
                self._fail("ListedLedgersExist", f"ledger {ledger_id} is deleted, and listed")
            return
        metadata = self._ledgers[ledger_id] = LedgerMetadata.from_json(value)
        if TAG in metadata.custom or metadata.password is not None:
            self._history.ignore(ledger_id)  # its entries are checked here, by their positions
            if metadata.custom.get(TAG) == LOG.encode():
                self._owned.setdefault(ledger_id, self._now())
        if metadata.is_closed and self.life is not None:
            for row in self.life.rows:
                if row.ledger_id == ledger_id:
                    for position in [each for each in self.life.in_order if each.ledger_id == row.id]:
                        self._within_closed(ledger_id, position)

    def _head_changed(self, value: bytes | None) -> None:
        life = self.life
        if value is None:
            if life is None or life.head is None or not life.head.is_deleted or life.head.has_dropped:
                self._fail("ListChangesAreLegal", f"the list is deleted as it was {life and life.head}")
            if life is not None:
                life.ended_at = self._now()
            self._history.note("meta", "the log is gone")
            return
        try:
            head = LogHead.from_json(value)
            rows = tuple(LogRow(*row) for row in (*self._rows_of(head.rows.pages), *head.rows.rows))
        except (MetadataCorruptError, KeyError) as error:
            self._fail("TypeOK", f"{error!r} in {value!r}")
            return
        if life is None:
            life = Life(len(self.lives) + 1, self._now())
            self.lives.append(life)
        self._history.note(
            "meta", f"life {life.number}:", [row.id for row in rows], str(head.begins_at),
            "deleted" if head.is_deleted else "", [row[1] for row in self._dropped_rows(head)],
        )  # fmt: skip
        self._check_change(life, head, rows)
        for row in rows:
            if row.id not in life.listed:
                life.listed[row.id], life.listed_at[row.id] = row, self._now()
                self.life_of[row.id] = life
                self._ledger_of[row.id] = row.ledger_id
                self._owned.setdefault(row.ledger_id, self._now())
        self.listed.update(life.listed)
        life.head, life.rows = head, rows
        life.shapes.append(Shape(self._now(), rows, head.begins_at))
        if head.is_deleted and life.condemned_at is None:
            life.condemned_at = self._now()

    def _rows_of(self, pages: Iterable[PageRef]) -> list[tuple[int, int, int]]:
        return [row for ref in pages for row in rows_of_page(ref, self._pages[ref.name])]

    def _dropped_rows(self, head: LogHead) -> list[tuple[int, int, int]]:
        return [*self._rows_of(head.dropped.pages), *head.dropped.rows]

    def _check_change(self, life: Life, head: LogHead, rows: tuple[LogRow, ...]) -> None:
        before, legal = life.head, self._legal
        legal(len({row.ledger_id for row in rows}) == len(rows), "a ledger is listed twice", head)
        legal(all(row.ledger_id not in self._deleted for row in rows), "a listed ledger is deleted", head)
        if any(row.ledger_id not in self._ledgers for row in rows):
            self._fail("ListedLedgersExist", f"one of {rows} never did")
            return
        open_ones = [row.id for row in rows[:-2] if not self._ledgers[row.ledger_id].is_closed]
        if open_ones:
            self._fail("AtMostTwoNotClosed", f"{open_ones} of {[row.id for row in rows]}")
        if before is None:
            return
        legal(not before.is_deleted or head.is_deleted, "it lives again", head)
        kept = [row for row in life.rows if row in rows]
        gone, added = life.rows[: len(life.rows) - len(kept)], rows[len(kept) :]
        legal([*gone, *kept, *added] == [*life.rows, *added], "rows are dropped from the middle", head)
        legal([*kept, *added] == list(rows), "rows are put in the middle", head)
        legal(all(row.id not in life.listed for row in added), "a row is listed again", head)
        legal(head.begins_at >= before.begins_at, "it begins earlier", head)
        if kept:
            legal(not (gone and added), "rows are dropped and appended at once", head)
            legal(head.begins_at.ledger_id <= max(rows[-1].id, before.begins_at.ledger_id), "it is cut", head)
        if not head.is_deleted:
            legal(all(self._ledgers[row.ledger_id].is_closed for row in gone), "an OPEN row is dropped", head)
        was, now = self._dropped_rows(before), self._dropped_rows(head)
        legal({row.ledger_id for row in gone} <= {row[1] for row in now}, "it forgets at once", head)
        forgotten = {row[1] for row in was} - {row[1] for row in now}
        legal(forgotten <= self._deleted, f"it forgets {forgotten - self._deleted}, which exist", head)
        self._check_transactions(_batches_of(before), _batches_of(head))

    def _legal(self, condition: bool, what: str, head: LogHead) -> None:
        if not condition:
            self._fail("ListChangesAreLegal", f"{what}: from {self.life and self.life.head} to {head}")

    def _check_transactions(self, before: dict[str, int], after: dict[str, int]) -> None:
        for query, batch in after.items():
            if before.get(query, -1) > batch:
                self._fail("TransactionsOnce", f"{query} goes from {before[query]} to {batch}")

    # --- the end ---

    def left_over(self, head_rows: list[int], made_before: float) -> list[int]:
        """Return the ledgers made for the log or ever listed that exist and are not among these."""
        gone = self._deleted.union(head_rows)
        return [each for each, at in self._owned.items() if at < made_before and each not in gone]

    def pages_left_over(self, made_before: float) -> list[str]:
        """Return the pages made by then that exist and that no list refers to.

        A dead client's request may still make one later, as it may make a ledger.
        """
        head = self.life.head if self.life is not None else None
        in_use = head.pages_in_use() if head is not None else []
        return [each for each, at in self._pages_now.items() if at < made_before and each not in in_use]


def _succeeded(future: asyncio.Future[Position]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def lives_of(simulation: Simulation) -> LogLives:
    """Return the run's record."""
    found = Chains.of(simulation)
    assert isinstance(found, LogLives), "the plan's setup is log_lives"
    return found


def _batches_of(head: LogHead) -> dict[str, int]:
    return {each.query_id: each.batch_id for each in head.transactions}
