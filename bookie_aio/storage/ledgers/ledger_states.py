"""What a bookie knows of its ledgers, in memory: terms, locks, marks, LACs, and what is deleted.

Owns the state of each ledger and the sweep that takes a durable group into it. Does not own the records on
their way to the disk, nor the segments; of these it only learns where a group lies.

Invariant: what a state says of terms, locks and marks counts from the moment it was accepted, and what it
says of entries and LACs from the moment they are durable and indexed (rule 3).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import Runs, pack_run
from bookie_aio.wire.blocks import Block
from metadata.errors import NoSuchLedgerError

if TYPE_CHECKING:
    from bookie_aio.storage.journal import Change, Group
    from bookie_aio.storage.ledgers.checkpoint import LedgerState
    from bookie_aio.storage.ledgers.id_ranges import IdRanges
    from bookie_aio.storage.ledgers.ledger_table import LedgerTable
    from bookie_aio.storage.segment.segment import Segment


class LedgerStates:
    """The ledgers of one engine."""

    def __init__(self, states: LedgerTable, deleted: IdRanges) -> None:
        """Take what a restart found."""
        self.states = states
        self.deleted = deleted  # by tombstones that are durable
        self.burying: set[int] = set()  # by those that were accepted and are not durable yet
        self._accepted = 0  # records accepted, and of those the ones durable and indexed
        self._indexed = 0
        self.eviction_candidates: set[int] = (
            set()
        )  # of those that somebody put here: nothing was accepted since
        self.reductions = 0  # tombstones, trims and forgets indexed: each lets something be given up

    def get(self, ledger_id: int) -> LedgerState | None:
        """Return a ledger's state; None for one never heard of, or deleted."""
        return self.states.get(ledger_id)

    def state(self, ledger_id: int) -> LedgerState:
        """Return a ledger's state, a new one where there is none."""
        return self.states.make(ledger_id)

    def is_deleted(self, ledger_id: int) -> bool:
        """Return whether a tombstone was accepted for the ledger, perhaps not durable yet."""
        return ledger_id in self.burying or ledger_id in self.deleted

    def accept(self, ledger_id: int) -> LedgerState:
        """Count a record that is accepted for a ledger, and give the ledger's state.

        Raises:
            NoSuchLedgerError: it has been deleted (rule 15). Nothing is counted.
        """
        if self.is_deleted(ledger_id):
            raise NoSuchLedgerError(f"ledger {ledger_id} has been deleted", ledger_id=ledger_id)
        state = self.state(ledger_id)
        self.eviction_candidates.discard(ledger_id)
        self._accepted += 1
        state.accepted = self._accepted
        return state

    def accept_for_all(self) -> None:
        """Count a record that concerns every ledger."""
        self._accepted += 1

    def settle(self, count: int) -> None:
        """Count records that will not be written any more."""
        self._indexed += count

    def take_back(self, change: Change) -> None:
        """Forget a fence, a lock or a tombstone that counted from its acceptance on, and will not be written.

        Or it would be found held, and promised, although it is nowhere (rule 3). Whoever was to be told of
        it waits behind it, and is told that it was dropped. No record is smaller than a fence, so that those
        which follow one are dropped with it.
        """
        state = self.states.live.get(change.ledger_id)  # as is all that was accepted and not written yet
        if state is None:
            return
        if change.kind == form.KIND_TERM:
            state.term = min(state.term, change.before)
        elif change.kind == form.KIND_LOCK and state.lock == change.lock:
            state.lock = b""
        elif change.kind == form.KIND_TOMBSTONE:
            self.burying.discard(change.ledger_id)

    def is_pending(self, ledger_id: int) -> bool:
        """Return whether something accepted for the ledger is not yet durable and indexed."""
        state = self.states.live.get(ledger_id)
        return state is not None and self.awaits(state)

    def awaits(self, state: LedgerState) -> bool:
        """Return whether something accepted for this state's ledger is not yet durable and indexed."""
        return state.accepted > self._indexed

    def index(self, group: Group) -> set[int]:
        """Take in a durable group: the sweep, once per group. Gives the ledgers that it touched."""
        index = group.segment.index
        assert index is not None
        ledgers = index.ledgers
        offset = group.bodies_at
        states = self.states.live  # what is on its way to the disk is among them
        touched: set[int] = set()
        for record in group.records:
            event = record.event
            if event is None:
                continue
            ledger_id = event.ledger_id
            touched.add(ledger_id)
            if isinstance(event, Block):
                head_bytes, payload_bytes = event.head_bytes, event.payload_bytes
                first, count, stride = event.first_entry, event.count, event.stride
                last = first + (count - 1) * stride
                state = states[ledger_id]
                runs = ledgers.get(ledger_id)
                if runs is None:
                    runs = ledgers[ledger_id] = Runs()
                    state.since = state.since or group.segment.segment_id
                packed = pack_run(first, event.content_term, offset, count, stride, head_bytes, payload_bytes)
                runs.add(first, last, record.size, packed)
                offset += head_bytes + payload_bytes
                if last > state.last_entry:
                    state.last_entry = last
                known = state.statement
                if (known is None or event.lac > known.lac) and not record.row[form.ROW_FLAGS_AT]:
                    state.statement = event.statement
            else:
                if record.body is not None:
                    offset += len(record.body)
                self._apply(event, group.segment)
            self._indexed += 1
        return touched

    def _apply(self, change: Change, segment: Segment) -> None:
        state = self.states.live.get(change.ledger_id)
        if change.is_for_all or state is None:  # None: a change that a restart found behind the tombstone
            return
        if change.kind == form.KIND_TOMBSTONE:
            self.burying.discard(change.ledger_id)
            self.deleted.add(change.ledger_id)
            self.states.remove(change.ledger_id)
            self.reductions += 1
        elif change.kind == form.KIND_FORGET:
            assert segment.index is not None
            segment.index.ledgers.pop(change.ledger_id, None)
            state.since, state.last_entry = segment.segment_id, -1
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
            state.is_damaged = True

    def list(self, from_ledger: int, count_max: int) -> tuple[list[int], int]:
        """Return ids, ascending, of ledgers of which anything is held, and where to go on or −1."""
        ids = list(islice(self.states.ids_from(from_ledger), count_max + 1))
        return ids[:count_max], ids[count_max] if len(ids) > count_max else -1
