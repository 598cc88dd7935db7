"""The states of a bookie's ledgers in memory: terms, locks, marks, LACs, and the deleted ids.

Owns the state of each ledger, and the sweep that indexes a durable group and updates the states from it. Does
not own the records on their way to the disk, nor the segments.

Invariant: a term, a lock or a mark counts from the moment it was accepted. An entry, a LAC or the lift of a
mark counts from the moment it is durable and indexed (rule 3).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from bookie_aio.storage.journal import Change
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import Runs, pack_run
from metadata.errors import NoSuchLedgerError

if TYPE_CHECKING:
    from bookie_aio.storage.journal import Group
    from bookie_aio.storage.ledgers.checkpoint import IdRanges, LedgerState
    from bookie_aio.storage.ledgers.ledger_table import LedgerTable
    from bookie_aio.storage.ledgers.marks import Marks
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.wire.blocks import Block


class LedgerStates:
    """The ledgers of one engine."""

    def __init__(self, states: LedgerTable, deleted: IdRanges, marks: Marks) -> None:
        """Take the states that crash recovery found."""
        self.marks = marks
        self.states = states
        self.deleted = deleted  # ledgers whose tombstones are durable
        self.tombstones_pending: set[int] = set()  # ledgers whose tombstones are accepted, not durable yet
        self._accepted = 0  # counts records, and each block of a record with several
        self.indexed = 0  # of those, the records that are durable and indexed, or dropped
        self.eviction_candidates: set[int] = set()
        """Ledgers that the server put here, and for which no record was accepted since."""
        self.reductions = 0  # tombstones, trims and forgets indexed: each lets something be given up

    def get(self, ledger_id: int) -> LedgerState | None:
        """Return a ledger's state; None for a ledger never heard of, or deleted."""
        return self.states.get(ledger_id)

    def state(self, ledger_id: int) -> LedgerState:
        """Return a ledger's state, a new one where there is none."""
        return self.states.make(ledger_id)

    def is_deleted(self, ledger_id: int) -> bool:
        """Return whether a tombstone was accepted for the ledger, perhaps not durable yet."""
        return ledger_id in self.tombstones_pending or ledger_id in self.deleted

    def accept(self, ledger_id: int) -> LedgerState:
        """Count a record that is accepted for a ledger, and return the ledger's state.

        Raises:
            NoSuchLedgerError: the ledger has been deleted (rule 15). Nothing is counted.
        """
        if self.is_deleted(ledger_id):
            raise NoSuchLedgerError(f"ledger {ledger_id} has been deleted", ledger_id=ledger_id)
        state = self.state(ledger_id)
        self.eviction_candidates.discard(ledger_id)
        self._accepted += 1
        state.accepted = self._accepted
        return state

    def accept_blocks(self, blocks: list[Block]) -> None:
        """Count one record with the blocks of many ledgers, in their order. Raises as `accept`."""
        for block in blocks:
            if self.is_deleted(block.ledger_id):
                raise NoSuchLedgerError(
                    f"ledger {block.ledger_id} has been deleted", ledger_id=block.ledger_id
                )
        candidates, make, accepted = self.eviction_candidates, self.states.make, self._accepted
        for block in blocks:
            ledger_id = block.ledger_id
            accepted += 1
            make(ledger_id).accepted = accepted
            if candidates:
                candidates.discard(ledger_id)
        self._accepted = accepted

    def bury(self, gone: Change) -> None:
        """Count a record of a range of ledgers that are gone for good. It counts at once: it stays true."""
        self.deleted.add_range(gone.ledger_id, gone.last)
        self._accepted += 1

    def accept_for_all(self) -> None:
        """Count a record that concerns every ledger."""
        self._accepted += 1

    def count_dropped(self, count: int) -> None:
        """Count accepted records that will never be written."""
        self.indexed += count

    def revert(self, change: Change) -> None:
        """Revert a fence, a lock or a tombstone that counted from its acceptance on, and was dropped.

        Rule 3: otherwise the bookie would promise a change that is nowhere on its disk. Nobody has relied on
        the change: callers wait for a record or a barrier behind it, and are told that it was dropped. No
        record is smaller than a fence, so the records behind a dropped fence are dropped with it.
        """
        state = self.states.live.get(change.ledger_id)  # live, as is every state with a record under way
        if state is None or change.is_for_all or change.last > change.ledger_id:
            return
        if change.kind in (form.KIND_TERM, form.KIND_LIFT):
            state.term = min(state.term, change.before)
        elif change.kind == form.KIND_LOCK and state.lock == change.lock:
            state.lock = b""
        elif change.kind == form.KIND_TOMBSTONE:
            self.tombstones_pending.discard(change.ledger_id)

    def is_pending(self, ledger_id: int) -> bool:
        """Return whether a record accepted for the ledger is not yet durable and indexed."""
        state = self.states.live.get(ledger_id)
        return state is not None and self.awaits(state)

    def awaits(self, state: LedgerState) -> bool:
        """Return whether a record accepted for this state's ledger is not yet durable and indexed."""
        return state.accepted > self.indexed

    def index(self, group: Group) -> set[int]:
        """Index a durable group; returns the ledgers that it touched. Called once per group: the hot path."""
        index = group.segment.index
        assert index is not None
        ledgers = index.ledgers
        offset = group.bodies_at
        states = self.states.live  # every state with a record under way is live
        touched: set[int] = set()
        for record in group.records:
            event = record.event
            if event is None:
                continue
            if isinstance(event, Change):
                touched.add(event.ledger_id)
                if record.body is not None:
                    offset += len(record.body)
                self._apply(event, group.segment)
                self.indexed += 1
                continue
            states_lac = not record.row[form.ROW_FLAGS_AT]
            for block in event if isinstance(event, list) else (event,):
                ledger_id = block.ledger_id
                touched.add(ledger_id)
                head_bytes, payload_bytes = block.head_bytes, block.payload_bytes
                first, count, stride = block.first_entry, block.count, block.stride
                last = first + (count - 1) * stride
                state = states[ledger_id]
                runs = ledgers.get(ledger_id)
                if runs is None:
                    runs = ledgers[ledger_id] = Runs()
                    state.since = state.since or group.segment.segment_id
                packed = pack_run(first, block.content_term, offset, count, stride, head_bytes, payload_bytes)
                size = head_bytes + payload_bytes
                runs.add(first, last, size + form.ROW_BYTES, packed)
                offset += size
                if last > state.last_entry:
                    state.last_entry = last
                known = state.statement
                if (known is None or block.lac > known.lac) and states_lac:
                    state.statement = block.statement
                self.indexed += 1
        return touched

    def _apply(self, change: Change, segment: Segment) -> None:
        state = self.states.live.get(change.ledger_id)
        if change.is_for_all:
            self._apply_to_all(change)
            return
        if change.last > change.ledger_id:
            self.deleted.add_range(change.ledger_id, change.last)  # again, where crash recovery found it
            return
        if state is None:  # found by crash recovery behind a tombstone
            return
        if change.kind == form.KIND_TOMBSTONE:
            self.tombstones_pending.discard(change.ledger_id)
            self.deleted.add(change.ledger_id)
            self.states.remove(change.ledger_id)
            self.reductions += 1
        elif change.kind == form.KIND_FORGET:
            assert segment.index is not None
            segment.index.ledgers.pop(change.ledger_id, None)
            state.since, state.last_entry = segment.segment_id, -1
            state.was_evicted = True
            self.reductions += 1
        elif change.kind == form.KIND_TRIM:
            state.first = max(state.first, change.first)
            self.reductions += 1
        elif change.kind == form.KIND_LOCK:
            state.lock = change.lock
        elif change.kind == form.KIND_TERM:
            state.term = max(state.term, change.term)
        elif change.kind == form.KIND_STATEMENT:
            assert change.statement is not None
            state.learn_statement(change.statement)
        elif change.kind == form.KIND_MARK:
            state.mark(change.number, is_of_listed=change.is_of_listed)
        elif change.kind == form.KIND_LIFT:
            state.term = max(state.term, change.term)
            state.lifted = max(state.lifted, change.number)

    def _apply_to_all(self, change: Change) -> None:
        if change.kind == form.KIND_MARK:
            self.marks.learn_mark(change.number, change.bound)
        else:
            self.marks.learn_end(change.number, change.bound)

    # --- marks ---------------------------------------------------------------------------------

    def mark_of(self, ledger_id: int) -> int:
        """Return the highest number of the ledger's marks that count, all ledgers' among them; 0: none."""
        return self.marks.of(ledger_id, self.get(ledger_id))

    def needs_mark(self, ledger_id: int) -> bool:
        """Return whether damage of the ledger found now needs a mark of its own.

        It does where the ledger has none, and where a client may be about to lift the one that it has.
        """
        number = self.mark_of(ledger_id)
        return not number or self.marks.is_told(number)

    def is_known(self, ledger_id: int) -> bool:
        """Return whether anything was ever accepted for the ledger, a tombstone included."""
        return self.states.get(ledger_id) is not None or self.is_deleted(ledger_id)

    def highest(self) -> int:
        """Return the highest id of a ledger with a state or a tombstone; −1 for none."""
        return max(self.states.highest(), self.deleted.highest(), *self.tombstones_pending, -1)

    def list(self, from_ledger: int, count_max: int) -> tuple[list[int], int]:
        """Return the ids of up to `count_max` ledgers, ascending, and where to go on or −1."""
        ids = list(islice(self.states.ids_from(from_ledger), count_max + 1))
        return ids[:count_max], ids[count_max] if len(ids) > count_max else -1
