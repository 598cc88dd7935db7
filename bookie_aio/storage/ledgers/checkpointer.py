"""Writing checkpoints: the state that must outlive the segments it was journaled in.

Owns the checkpoint's file, the table of ledgers beside it, and the *list lock*. The lock is held while a
segment is sealed, a segment is given up, an index is rebuilt, or a checkpoint is written. So the changes of
the checkpoint's list of segments come one after another. Writing to the journal goes on meanwhile.

Three orders between checkpoints and other files, kept by the callers:

- A checkpoint lists a segment before the segment's first group is written.
- A checkpoint covers a segment's terms and marks before the segment's index is written: a segment with an
  index is not replayed.
- A checkpoint that does not list a segment is durable before the segment's file is given up.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import remove_files, write_file
from bookie_aio.storage.ledgers.checkpoint import encode_checkpoint, pack_state
from bookie_aio.storage.ledgers.ledger_table import PackedTable
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.segment import SegmentRow
from metadata.errors import DiskFullError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.segment.allocator import SegmentAllocator
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.storage.segment.witness import WitnessFiles
    from bookie_aio.wire.blocks import Buffer

_LEDGERS_AT_ONCE = 512
_PARTS_AT_ONCE = 32


class Checkpointer:
    """Writes the checkpoints of one engine."""

    def __init__(
        self,
        disk: Disk,
        home: str,
        segments: SegmentSet,
        ledgers: LedgerStates,
        allocator: SegmentAllocator,
        health: StorageHealth,
        *,
        live_ledgers_max: int,
        needed: Collection[SegmentRow],
        witness: WitnessFiles,
        number: int,
    ) -> None:
        """Share the engine's segments and ledgers.

        Args:
            home: the directory of the checkpoint and the table.
            live_ledgers_max: `StorageConfig.live_ledgers_max`.
            needed: segments to list although they are not among `segments`, until `release_needed`.
            witness: is told of each checkpoint that is durable.
            number: the number of the newest checkpoint that was ever durable.
        """
        self._disk = disk
        self._home = home
        self._segments = segments
        self._ledgers = ledgers
        self._allocator = allocator
        self._health = health
        self._live_ledgers_max = live_ledgers_max
        self._needed = needed
        self._witness = witness
        self.number = number  # of the newest checkpoint that is durable
        self.list_lock = asyncio.Lock()

    def release_needed(self) -> None:
        """List the segments no more that were needed until crash recovery was complete."""
        self._needed = ()

    async def write(self, *more: SegmentRow) -> None:
        """Write a checkpoint that lists these segments as well; it is durable on return.

        Raises:
            DiskFullError: no space; the checkpoint is what it was.
        """
        async with self.list_lock:
            await self.write_locked(more)

    async def write_locked(self, more: Collection[SegmentRow] = ()) -> None:
        """Write as `write` does, for a caller that holds `list_lock`."""
        states = self._ledgers.states
        table, packed = None, await self._pack_states()
        if states.is_table_due(self._live_ledgers_max):
            # Without space for a table the checkpoint goes on growing: only the checkpoint is needed for
            # what frees space.
            with suppress(DiskFullError):
                table = await self._write_table(packed)
                # The checkpoint that names the new table still holds all live states: newer, and as true.
                packed = await self._pack_states()
        rows = await _joined(packed)
        # The list of segments and the next id are taken together, in one step.
        also_listed = {row.segment_id: row for row in (*self._needed, *more)}
        if (ready := self._allocator.ready) is not None:
            also_listed[ready.segment_id] = SegmentRow(ready.segment_id, ready.header.generation)
        listed = self._segments.rows()
        listed += [row for one, row in also_listed.items() if one not in self._segments.by_id]
        number = self.number + 1
        encode = partial(
            encode_checkpoint, self._allocator.next_id, listed, self._ledgers.marks, rows,
            self._ledgers.deleted.packed(), number=number, owner=self._witness.owner,
        )  # fmt: skip
        if table is not None:
            try:
                await self._write_home(form.CHECKPOINT, encode(table=table.number))
            except DiskFullError:
                await remove_files(self._disk, [self._table_path(table.number)])  # its space may be missing
            else:
                await self._note(number)
                await self._switch_to(table)
                return
        await self._write_home(form.CHECKPOINT, encode(table=states.table_number))
        await self._note(number)

    async def _note(self, number: int) -> None:
        """Have the witness name a checkpoint that is durable, before anything is given up by it."""
        self.number = number
        await self._witness.note_checkpoint(number)

    async def _write_home(self, name: str, buffers: Sequence[Buffer]) -> None:
        write = partial(write_file, self._disk, self._home, name, buffers)
        await self._allocator.make_room(self._home, write)

    def _table_path(self, number: int) -> str:
        return os.path.join(self._home, form.table_name(number))

    async def _pack_states(self) -> dict[int, bytes]:
        """Pack the live states. A state that changes meanwhile is newer, and no less true."""
        live, packed = list(self._ledgers.states.live.items()), dict[int, bytes]()
        for at in range(0, len(live), _LEDGERS_AT_ONCE):
            packed.update((one, pack_state(one, state)) for one, state in live[at : at + _LEDGERS_AT_ONCE])
            await asyncio.sleep(0)
        return packed

    async def _write_table(self, packed: dict[int, bytes]) -> PackedTable:
        """Write a new table of ledgers, which counts once a checkpoint names it."""
        states = self._ledgers.states
        table = PackedTable(states.next_table_number, checkpoint=self.number)
        for number, part in enumerate(states.new_rows(packed), 1):
            table.extend(part)
            if number % _PARTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await write_file(
            self._disk, self._home, form.table_name(table.number), table.encode(self._witness.owner)
        )
        return table

    async def _switch_to(self, table: PackedTable) -> None:
        """Use a table that a durable checkpoint names, and evict the live states that it holds unchanged."""
        states = self._ledgers.states
        former = states.table_number
        states.use_table(table)
        live = list(states.live)
        for at in range(0, len(live), _LEDGERS_AT_ONCE):
            states.evict_unchanged(live[at : at + _LEDGERS_AT_ONCE], self._ledgers.awaits)
            await asyncio.sleep(0)
        if former:
            # The checkpoint is durable: a caller must not take this for a checkpoint that found no room.
            with suppress(DiskFullError):
                await remove_files(self._disk, [self._table_path(former)])


async def _joined(packed: dict[int, bytes]) -> list[bytes]:
    """Join rows to parts: a checksum over each row of thousands would hold up the event loop."""
    rows, joined = list(packed.values()), []
    for at in range(0, len(rows), _LEDGERS_AT_ONCE):
        joined.append(b"".join(rows[at : at + _LEDGERS_AT_ONCE]))
        await asyncio.sleep(0)
    return joined
