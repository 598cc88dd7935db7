"""Logs: the record of one run's logs, and the invariants of chains of ledgers.

Owns the record and the checks, as `tests.sim.checkers.invariants` does for single ledgers. The names:

- EntryOrderMaintained: positions of one writer's records increase. Readers return records in the order of
  positions and pass over none that is acknowledged. All of them read one value at each position.
- AllNonEmptyLedgersInLedgerList: a ledger whose record is acknowledged is listed, or has been.
- AtMostTwoNotClosed: all listed ledgers but the last two are CLOSED, whenever a list changes.
- ListedLedgersExist: no listed ledger is deleted.
- AllAckedRecordsAreReadable: after healing, every record that was acknowledged or read, and not truncated, is
  read.
- NoDirtyReads: a record that is read is one that its writer knows to be acknowledged, or lies in a CLOSED
  ledger.
- NoDivergenceBetweenClientAndMetaData: no acknowledged record lies behind the last entry of a CLOSED ledger.
- AppendsTakeEffectOnce: a record is at one position, and the records of one writer's life are read in the
  order of their appends.
- FencedWritersEnd: no writer has a record acknowledged behind a ledger of a writer that came after it.
- OneLedgerTakesAdds: a record that is appended after a later ledger had one acknowledged is not acknowledged
  in an earlier ledger.
- NotDoneIsNotThere: no record of a batch that failed as *not done* is read (`tests.sim.checkers.batches`).
- NothingLeftOver: after a sweep at the end, no ledger made for a log is in none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Any, cast

from client_aio.core.log_chain import TAG
from metadata.access.logs import KEY_LOGS
from metadata.errors import MetadataCorruptError, OperationTimeoutError
from metadata.ids import KEY_LEDGERS, ledger_id_of
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogHead, Position
from tests.sim.checkers.batches import NotDone, records_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterator

    from client_aio import LogRecord, LogWriter
    from metadata.store import Version
    from tests.sim.checkers.invariants import History
    from tests.sim.simulation import Simulation


class Chains:
    """The logs of one run: here, one log."""

    def __init__(self, history: History, now: Callable[[], float]) -> None:
        self._history = history
        self._now = now
        self.tried: dict[bytes, str] = {}  # payload → who
        self.acknowledged: dict[Position, bytes] = {}
        self._in_order: list[Position] = []  # those of `acknowledged`
        self.values: dict[Position, bytes] = {}  # as acknowledged or read
        self.passed: dict[str, Position] = {}  # reader → behind what it reads
        self._began: dict[str, Position] = {}  # reader → where it last began, since the log did
        self._futures: dict[str, list[asyncio.Future[Position]]] = {}  # of each writer's life, in their order
        self._highest: dict[str, list[Position]] = {}  # the highest position up to each of these
        self._values_read: dict[str, set[Position]] = {}
        self._ledgers: dict[int, LedgerMetadata] = {}
        self._deleted: set[int] = set()
        self._made: dict[int, float] = {}  # since when
        self._ledger_of: dict[int, int] = {}  # by a row's id
        self._writers: list[LogWriter] = []
        self._confirmed = Position(0, -1)  # the highest that any of them knows to be acknowledged
        self._first_acked: dict[int, float] = {}  # by a row's id: since when it has an acknowledged record
        self.issued_at: dict[bytes, float] = {}
        self._settled_at_issue: dict[bytes, int] = {}  # so many futures of the life were done then
        self._settled: dict[str, int] = {}
        self._ended_at: dict[str, int] = {}  # the first append of a life that failed for good
        self._number: dict[bytes, int] = {}  # of the append, in its writer's life
        self._position_of: dict[bytes, Position] = {}
        self._last_read: dict[tuple[str, str], int] = {}  # reader and writer → the number of the append
        self._ledgers_of: dict[str, set[int]] = {}  # by a writer's life: those with a record of it
        self.not_done = NotDone(history)
        self.owed: list[tuple[bytes, Position]] = []  # acknowledged somewhere behind that position
        self.listed: set[int] = set()
        self.begins_at = Position(0, 0)

    @classmethod
    def of(cls, simulation: Simulation) -> Chains:
        """Return the run's record."""
        if "chains" not in simulation.shared:
            chains = simulation.shared["chains"] = cls(simulation.history, lambda: simulation.loop.now)
            simulation.tree.watchers.append(chains.metadata_changed)
        found = simulation.shared["chains"]
        assert isinstance(found, cls)
        return found

    # --- writers ---

    def holds(self, log: LogWriter) -> None:
        """Note a writer's handle: it tells what is acknowledged before anybody has looked at a future."""
        self._writers.append(log)

    def issued(self, who: str, payload: bytes, future: asyncio.Future[Position]) -> None:
        """Note an append, and watch its future."""
        self.tried[payload] = who
        self.issued_at[payload] = self._now()
        futures = self._futures.setdefault(who, [])
        settled = self._settled.get(who, 0)
        while settled < len(futures) and futures[settled].done():
            settled += 1
        self._settled[who] = self._settled_at_issue[payload] = settled
        futures.append(future)
        number = self._number[payload] = len(futures) - 1
        future.add_done_callback(lambda done: self._completed(who, payload, number, done))

    def issued_batch(
        self, who: str, payloads: list[bytes], batch: asyncio.Future[tuple[Position, Position]], *more: Any
    ) -> None:
        """Note a batch, each record of it as an append."""
        self.not_done.watch(who, batch, payloads, self.values.values)
        for payload, each in zip(
            payloads, records_of(batch, len(payloads), lambda: self._row_ids), strict=True
        ):
            self.issued(who, payload, each, *more)

    @property
    def _row_ids(self) -> Collection[int]:
        """Return the ids of the rows that are or were listed."""
        return self._ledger_of

    def _completed(self, who: str, payload: bytes, number: int, future: asyncio.Future[Position]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            if not isinstance(error, OperationTimeoutError):
                self._ended_at.setdefault(who, number)
            return
        position = future.result()
        if position is None:
            self.owed.append((payload, cast("Any", future).first()))
            return
        # Callbacks may come in any order; the futures themselves complete in theirs.
        futures, highest = self._futures[who], self._highest.setdefault(who, [])
        while len(highest) < number:
            before = futures[len(highest)]
            if before.done() and not before.cancelled() and before.exception() is not None:
                highest.append(highest[-1] if highest else Position(0, -1))
                continue  # checked below, for each record behind it
            if not before.done() or before.cancelled():
                self._fail("EntryOrderMaintained", f"{who}: {payload!r} is at {position}, before {before}")
                break
            at = before.result() or Position(0, -1)  # None in the middle of a batch
            highest.append(max(highest[-1], at) if highest else at)
        self._check_failed_before(who, payload, futures[:number])
        if number and number <= len(highest) and highest[number - 1] >= position:
            text = f"{who}: {payload!r} is at {position}, behind one at {highest[number - 1]}"
            self._fail("EntryOrderMaintained", text)
        self.acked(who, payload, position)

    def _check_failed_before(self, who: str, payload: bytes, before: list[asyncio.Future[Position]]) -> None:
        """Check that a record overtook none that failed: those had failed as overdue before its append."""
        known = self._settled_at_issue[payload]
        for number, future in enumerate(before[known:], known):
            if future.done() and not future.cancelled() and (error := future.exception()) is not None:
                self._fail("EntryOrderMaintained", f"{who}: {payload!r} overtook append {number}: {error!r}")
        if self._ended_at.get(who, len(before)) < len(before):
            text = f"{who}: {payload!r} is behind append {self._ended_at[who]}, with which its writer ended"
            self._fail("EntryOrderMaintained", text)

    def _is_once(self, payload: bytes, position: Position) -> None:
        known = self._position_of.setdefault(payload, position)
        if known != position:
            self._fail("AppendsTakeEffectOnce", f"{payload!r} is at {known} and at {position}")

    def _is_not_fenced(self, who: str, position: Position) -> None:
        mine = self._ledgers_of.setdefault(who, set())
        if position.ledger_id in mine:
            return
        if mine:
            between = [
                (other, ledger)
                for other, theirs in self._ledgers_of.items()
                for ledger in theirs
                if other != who and min(mine) < ledger < position.ledger_id
            ]
            if between:
                self._fail("FencedWritersEnd", f"{who} has a record at {position}, behind {between}")
        mine.add(position.ledger_id)

    def acked(self, who: str, payload: bytes, position: Position) -> None:
        """Note that a record was acknowledged."""
        self._history.note(who, "acknowledged", str(position), payload.decode())
        self._is_once(payload, position)
        if payload in self._number:
            self._is_not_fenced(who, position)
        self._has_value(who, position, payload)
        if position not in self.acknowledged:
            insort(self._in_order, position)
        self.acknowledged[position] = payload
        if position.ledger_id not in self.listed:
            self._fail("AllNonEmptyLedgersInLedgerList", f"{position} is acknowledged and not listed")
        self._takes_adds(payload, position)
        self._within_closed(self._ledger_of.get(position.ledger_id, -1), position)
        for reader, behind in self.passed.items():
            # What was cut off before a reader came to it may be acknowledged later still.
            is_owed = self._began.get(reader, Position(0, 0)) <= position <= behind
            if is_owed and position not in self._values_read.get(reader, ()):
                self._fail(
                    "EntryOrderMaintained", f"{reader} is behind {behind}, and {position} was not read"
                )

    def _takes_adds(self, payload: bytes, position: Position) -> None:
        """Check that the ledger of a record was the last one that took any when the record was appended."""
        self._first_acked.setdefault(position.ledger_id, self._now())
        issued_at = self.issued_at.get(payload)
        if issued_at is None:
            return  # it came with a ledger that was added whole
        later = [
            row
            for row, at in self._first_acked.items()
            if row > position.ledger_id and at < issued_at and self._are_of_one_list(row, position.ledger_id)
        ]
        if later:
            text = (
                f"{payload!r}, appended at {issued_at:.4f} s, is at {position}; {later} had records by then"
            )
            self._fail("OneLedgerTakesAdds", text)

    def _are_of_one_list(self, row: int, other: int) -> bool:
        return True

    def _within_closed(self, ledger_id: int, position: Position) -> None:
        metadata = self._ledgers.get(ledger_id)
        last = metadata.last_entry if metadata is not None and metadata.is_closed else None
        if last is not None and position.entry_id > last:
            text = f"{position} is acknowledged, and ledger {ledger_id} is CLOSED at {last}"
            self._fail("NoDivergenceBetweenClientAndMetaData", text)

    # --- readers ---

    def _may_be_read(self, who: str, position: Position) -> None:
        """Check that what somebody reads is acknowledged, or was kept when its ledger was closed."""
        metadata = self._ledgers.get(self._ledger_of.get(position.ledger_id, -1))
        if metadata is not None and metadata.is_closed:
            is_kept = metadata.last_entry is not None and position.entry_id <= metadata.last_entry
        else:
            is_kept = False
        if is_kept or position <= self._confirmed:
            return
        lacs = [lac for each in self._writers if (lac := each.last_add_confirmed) is not None]
        self._confirmed = max([self._confirmed, *lacs])
        if position > self._confirmed:
            text = f"{who} read {position}, which no writer knows to be acknowledged, of {metadata}"
            self._fail("NoDirtyReads", text)

    def read(self, who: str, record: LogRecord) -> None:
        """Note a record read by one who reads in order and passes over nothing."""
        position, payload = record
        behind = self.passed.get(who, Position(0, -1))
        if position <= behind:
            self._fail("EntryOrderMaintained", f"{who} read {position} behind {behind}")
        order = self._in_order
        missed = order[bisect_right(order, max(behind, self.begins_at)) : bisect_left(order, position)]
        if missed:
            self._fail(
                "EntryOrderMaintained", f"{who} read {position} behind {behind} and passed over {missed}"
            )
        self._has_value(who, position, payload)
        self._may_be_read(who, position)
        if payload not in self.tried:
            self._fail("NoLogDivergence", f"{who} read {payload!r} at {position}, which nobody wrote")
        self._is_once(payload, position)
        if (number := self._number.get(payload)) is not None:
            reading = who, self.tried[payload]
            if self._last_read.get(reading, -1) >= number:
                self._fail("AppendsTakeEffectOnce", f"{who} read {payload!r} behind a later append")
            self._last_read[reading] = number
        if who not in self.passed:
            self._began.setdefault(who, self.begins_at)
        self.passed[who] = position
        self._values_read.setdefault(who, set()).add(position)

    def starts_at(self, who: str, position: Position) -> None:
        """Note that a reader goes on at a position: what was before it has been truncated."""
        self.passed[who] = Position(position.ledger_id, position.entry_id - 1)
        self._began[who] = position

    def _has_value(self, who: str, position: Position, payload: bytes) -> None:
        self.not_done.look(who, payload)
        known = self.values.setdefault(position, payload)
        if known != payload:
            self._fail("EntryOrderMaintained", f"{who}: {position} is {payload!r} and was {known!r}")

    # --- the metadata store ---

    def metadata_changed(self, key: str, value: bytes | None, version: Version | None) -> None:
        """Follow the ledgers made for logs, and the list."""
        if key.startswith(KEY_LEDGERS + "/") and key.count("/") == 5:
            self._ledger_changed(ledger_id_of(key), value)
        elif key.startswith(KEY_LOGS + "/") and value is not None:
            try:
                head = LogHead.from_json(value)
            except MetadataCorruptError as error:
                self._fail("TypeOK", str(error))
                return
            self._list_changed(head)

    def _ledger_changed(self, ledger_id: int, value: bytes | None) -> None:
        if value is None:
            if ledger_id in self._made:
                self._deleted.add(ledger_id)
            return
        self._ledgers[ledger_id] = LedgerMetadata.from_json(value)
        for position in self._acknowledged_in(ledger_id):
            self._within_closed(ledger_id, position)
        if TAG in self._ledgers[ledger_id].custom:
            self._made.setdefault(ledger_id, self._now())
            self._history.ignore(ledger_id)  # its entries are checked here, by their positions

    def _acknowledged_in(self, ledger_id: int) -> Iterator[Position]:
        for row, ledger in self._ledger_of.items():
            if ledger == ledger_id:
                order = self._in_order
                yield from order[
                    bisect_left(order, Position(row, 0)) : bisect_left(order, Position(row + 1, 0))
                ]

    def _list_changed(self, head: LogHead) -> None:
        self._history.note("meta", "log", [row.id for row in head.newest], str(head.begins_at))
        self.listed.update(row.id for row in head.newest)
        self._ledger_of.update((row.id, row.ledger_id) for row in head.newest)
        self.begins_at = max(self.begins_at, head.begins_at)
        for row in head.newest:
            if row.ledger_id in self._deleted:
                self._fail("ListedLedgersExist", f"ledger {row.ledger_id} is listed and deleted")
        for row in head.newest[:-2]:
            if not self._ledgers[row.ledger_id].is_closed:
                self._fail("AtMostTwoNotClosed", f"{row.ledger_id} of {[each.id for each in head.newest]}")

    def left_over(self, head_rows: list[int], made_before: float) -> list[int]:
        """Return the ledgers made for the log that exist and are not among these.

        A dead client's request may still make one later.
        """
        gone = self._deleted.union(head_rows)
        return [each for each, at in self._made.items() if at < made_before and each not in gone]

    def _fail(self, name: str, text: str) -> None:
        self._history.fail(name, text)
