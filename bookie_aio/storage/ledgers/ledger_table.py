"""The states of all ledgers: those in use as objects, the rest packed and sorted. Pure.

A bookie may hold millions of ledgers, of which few are in use at a time. So there are two forms of state:

- The *table* has the packed rows of all ledgers as they were at one moment. Its file is never changed.
- *Live* states are objects, of the ledgers that were asked for since.

A checkpoint holds the live states and names the table. When the live states have become many, a new table is
made of both.

Invariants:

- A state that differs from its row in the table is live.
- Only a state that `make` returned may be changed, and not after an `await`: `evict_unchanged` may have
  evicted it by then. A state is never evicted while a record of its ledger is on its way to the disk.

The table's file, little-endian:

      0  4s   magic b"BKT1"
      4  u32  crc            CRC32C of byte 8 up to the end
      8  u32  version        2
     12  u32  reserved, 0
     16  u64  number         of the table, as in the file's name
     24  u64  ledgers
     32  u64  owner          of which bookie it is
     40  u64  checkpoint     the number of a checkpoint that was durable before
     48  ledgers × 160 bytes, ascending, as in the checkpoint
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from heapq import merge
from typing import TYPE_CHECKING

from crc32c import crc32c

from bookie_aio.storage.ledgers.checkpoint import LEDGER_BYTES, LedgerState, pack_state, unpack_state
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bookie_aio.storage.ledgers.checkpoint import IdRanges
    from bookie_aio.wire.blocks import Buffer

TABLE_MAGIC = b"BKT1"
VERSION = 2
_HEAD = struct.Struct("<4sIIIQQQQ")
_COVERED_FROM = 8
_FLAGS_AT = 24 // 4
_LIFTED_AT = 152 // 8
_ROWS_AT_ONCE = 512
assert _HEAD.size == 48


class PackedTable:
    """Packed rows, ascending by ledger."""

    __slots__ = ("checkpoint", "damaged", "ids", "lifted", "number", "rows")

    def __init__(self, number: int = 0, rows: Buffer = b"", checkpoint: int = 0) -> None:
        """Take the rows, and a checkpoint that was durable before; table 0 is the table without any rows."""
        self.number = number
        self.checkpoint = checkpoint
        self.rows: Buffer = rows or bytearray()
        self.ids = array("Q")
        self.damaged: set[int] = set()
        self.lifted: set[int] = set()
        self._index(rows)

    def extend(self, rows: Buffer) -> None:
        """Append rows to a table that is being made, in parts since the table may be large."""
        assert isinstance(self.rows, bytearray)
        self.rows += rows
        self._index(rows)

    def _index(self, rows: Buffer) -> None:
        if rows:
            ids = memoryview(rows).cast("Q")[:: LEDGER_BYTES // 8].tolist()
            flags = memoryview(rows).cast("I")[_FLAGS_AT :: LEDGER_BYTES // 4].tolist()
            self.ids.extend(ids)
            self.damaged.update(one for one, flag in zip(ids, flags, strict=True) if flag & 1)
            lifts = memoryview(rows).cast("Q")[_LIFTED_AT :: LEDGER_BYTES // 8].tolist()
            self.lifted.update(one for one, lift in zip(ids, lifts, strict=True) if lift)

    def row(self, ledger_id: int) -> memoryview | None:
        """Return a ledger's row."""
        at = bisect_left(self.ids, ledger_id)
        if at == len(self.ids) or self.ids[at] != ledger_id:
            return None
        return memoryview(self.rows)[at * LEDGER_BYTES : (at + 1) * LEDGER_BYTES]

    def encode(self, owner: int) -> list[Buffer]:
        """Return the file's bytes, in parts."""
        fields = (self.number, len(self.ids), owner, self.checkpoint)
        head = _HEAD.pack(TABLE_MAGIC, 0, VERSION, 0, *fields)[_COVERED_FROM:]
        crc = crc32c(self.rows, crc32c(head))
        return [TABLE_MAGIC + crc.to_bytes(4, "little"), head, self.rows]

    @classmethod
    def parse(cls, number: int, owner: int, data: Buffer) -> PackedTable:
        """Parse and check the file's bytes.

        Raises:
            CorruptRecordError: the bytes do not parse, or are of another version, table or bookie.
        """
        view = memoryview(data)
        if len(view) < _HEAD.size or view[:4] != TABLE_MAGIC:
            raise CorruptRecordError(f"ledger table {number} is damaged")
        _, crc, version, _, own_number, count, own_owner, checkpoint = _HEAD.unpack_from(view)
        rows = view[_HEAD.size :]
        is_whole = crc32c(view[_COVERED_FROM:]) == crc and len(rows) == count * LEDGER_BYTES
        if not is_whole or version != VERSION or own_number != number:
            raise CorruptRecordError(f"ledger table {number} is damaged, or of another version")
        if own_owner != owner:
            raise CorruptRecordError(f"ledger table {number} is of another bookie")
        return cls(number, rows, checkpoint)


class LedgerTable:
    """The states of one bookie's ledgers."""

    def __init__(self, deleted: IdRanges) -> None:
        """Start without states; `deleted` ledgers have none, even if the table still has a row of them."""
        self.live: dict[int, LedgerState] = {}
        self._table = PackedTable()
        self._deleted = deleted
        self._sorted: list[int] | None = None
        self._numbers_used = 0
        self._new = 0  # the number of ledgers minus the number of rows in the table
        self._stayed = 0  # the live states that the last eviction kept

    def load(self, live: dict[int, LedgerState], table: PackedTable, numbers_used: int) -> None:
        """Take the contents of a checkpoint and its table. The caller calls `count` afterwards.

        Args:
            live: the states in the checkpoint.
            table: the table that the checkpoint names.
            numbers_used: the highest number of any table file that was found. Files to be removed have such
                numbers, and no new table may get their names.
        """
        self.live = live
        self._numbers_used = numbers_used
        self._table = table

    def count(self) -> None:
        """Count the ledgers, after `load` or after deletions without a call of `remove`."""
        deleted, ids = self._deleted, self._table.ids
        if len(deleted) < len(ids) // 4:
            gone = sum(bisect_left(ids, last + 1) - bisect_left(ids, one) for one, last in deleted.ranges())
        else:
            gone = sum(one in deleted for one in ids)
        self._new = sum(one in deleted or self._table.row(one) is None for one in self.live) - gone

    def get(self, ledger_id: int) -> LedgerState | None:
        """Return a ledger's state, which the caller must not change; None where there is none."""
        state = self.live.get(ledger_id)
        if state is None and self._table.number:
            row = self._table.row(ledger_id)
            if row is not None and ledger_id not in self._deleted:
                state = unpack_state(row)
        return state

    def make(self, ledger_id: int) -> LedgerState:
        """Return a ledger's state, a new one where there is none. It may be changed before any `await`."""
        state = self.live.get(ledger_id)
        if state is None:
            state = self.get(ledger_id)
            if state is None:
                state = LedgerState()
                self._new += 1
            self.live[ledger_id] = state
            self._sorted = None
        return state

    def remove(self, ledger_id: int) -> None:
        """Drop the state of a ledger that is among the deleted ledgers."""
        assert ledger_id in self._deleted
        self._new -= 1
        if self.live.pop(ledger_id, None) is not None:
            self._sorted = None

    def __len__(self) -> int:
        return len(self._table.ids) + self._new

    @property
    def damaged_count(self) -> int:
        """Return the number of ledgers that have a mark of their own."""
        return len(self.damaged_ids())

    def damaged_ids(self) -> list[int]:
        """Return the ids of the ledgers that have a mark of their own, in no order."""
        live, deleted = self.live, self._deleted
        resting = [one for one in self._table.damaged if one not in live and one not in deleted]
        return resting + [one for one, state in live.items() if state.is_marked]

    @property
    def lifted_count(self) -> int:
        """Return the number of ledgers of which a mark was lifted, and that have no mark of their own."""
        live = sum(state.lifted > 0 and not state.is_marked for state in self.live.values())
        return self._resting(self._table.lifted - self._table.damaged) + live

    def _resting(self, ledger_ids: set[int]) -> int:
        return sum(one not in self.live and one not in self._deleted for one in ledger_ids)

    @property
    def highest_id(self) -> int:
        """Return the highest id of a ledger with a state, deleted or not; −1 where there is none."""
        resting = self._table.ids[-1] if self._table.ids else -1
        return max(resting, max(self.live, default=-1))

    @property
    def table_number(self) -> int:
        """Return the number of the table that a checkpoint must name; 0 for none."""
        return self._table.number

    @property
    def next_table_number(self) -> int:
        """Return the number of the next table."""
        return max(self._table.number, self._numbers_used) + 1

    def is_table_due(self, live_max: int) -> bool:
        """Return whether there are so many live states that a new table should be made.

        The states of ledgers in use stay live with any table, so their number alone is no reason for one.
        """
        return len(self.live) > max(live_max, len(self._table.ids) // 4, 2 * self._stayed)

    def ids_from(self, first: int) -> Iterator[int]:
        """Return the ledgers' ids from `first` on, ascending."""
        if self._sorted is None:
            self._sorted = sorted(self.live)
        ids, live = self._table.ids, self._sorted
        resting = (ids[at] for at in range(bisect_left(ids, first), len(ids)))
        rising = merge(resting, (live[at] for at in range(bisect_left(live, first), len(live))))
        last = -1
        for one in rising:
            if one != last and one not in self._deleted:
                yield one
            last = one

    def highest(self) -> int:
        """Return the highest id with a row or a live state, perhaps of a deleted ledger; −1 for none."""
        ids = self._table.ids
        return max(max(self.live, default=-1), ids[-1] if ids else -1)

    # --- making a new table ---

    def new_rows(self, packed: dict[int, bytes]) -> Iterator[Buffer]:
        """Return the rows of a new table, in parts.

        The rows in `packed` take the place of the present table's rows of the same ledgers.
        """
        ids = self._table.ids
        at = 0
        for ledger_id in sorted(packed):
            until = bisect_left(ids, ledger_id, at)
            yield from self._kept(at, until)
            yield packed[ledger_id]
            at = until + (until < len(ids) and ids[until] == ledger_id)
        yield from self._kept(at, len(ids))

    def _kept(self, start: int, stop: int) -> Iterator[Buffer]:
        """Return the rows number `start` to `stop` − 1 of the table, without the rows of deleted ledgers."""
        table, rows = self._table, memoryview(self._table.rows)
        while start < stop:
            end = stop
            for first, last in self._deleted.ranges_from(table.ids[start]):
                end = bisect_left(table.ids, first, start, stop)
                then = bisect_left(table.ids, last + 1, end, stop)
                break
            else:
                then = stop
            end = min(end, start + _ROWS_AT_ONCE)
            # Yielded even if empty, so that the caller can pause.
            yield rows[start * LEDGER_BYTES : end * LEDGER_BYTES]
            start = end if end - start == _ROWS_AT_ONCE else then

    def use_table(self, table: PackedTable) -> None:
        """Use a new table, which a durable checkpoint names. Live states stay live."""
        count = len(self)
        self._table = table
        self._new = count - len(table.ids)

    def evict_unchanged(self, ledger_ids: Iterable[int], is_pending: Callable[[LedgerState], bool]) -> None:
        """Evict those of these live states that equal their rows in the table, and are not pending."""
        for ledger_id in ledger_ids:
            state, row = self.live.get(ledger_id), self._table.row(ledger_id)
            if state is None or row is None or is_pending(state):
                continue
            if pack_state(ledger_id, state) == bytes(row):
                del self.live[ledger_id]
        self._sorted = None
        self._stayed = len(self.live)
