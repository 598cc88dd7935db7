"""Tending: sealing segments, writing checkpoints, rebuilding indexes, all in the background.

Owns the segments that wait to be sealed, and the order of these writes: a checkpoint lists a segment before
its first group is written, covers a segment's terms and marks before its index is written (a segment with
an index is not replayed), and stops listing a segment before its file is removed. Writing goes on
meanwhile.

No space is no failure here: the index stays in memory, and sealing is tried again when there is space.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from bookie_aio.storage import directory as layout
from bookie_aio.storage.checkpoint import encode_checkpoint, pack_states
from bookie_aio.storage.format import DATA_OFFSET
from bookie_aio.storage.replay import replay_segment
from bookie_aio.storage.segment import Segment, trim_segment, write_index
from metadata.errors import DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bookie_aio.storage.disk import Disk
    from bookie_aio.storage.ledgers import Ledgers
    from bookie_aio.storage.provision import Provision
    from bookie_aio.wire.blocks import LacStatement

_LEDGERS_AT_ONCE = 512


class Tender:
    """Looks after segments that are no longer written to."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        segments: dict[int, Segment],
        ledgers: Ledgers,
        provision: Provision,
        on_failed: Callable[[StorageError], None],
        on_lost_all: Callable[[], None],
    ) -> None:
        """Share the engine's segments and ledgers."""
        self._disk = disk
        self._directory = directory
        self._segments = segments
        self._ledgers = ledgers
        self._provision = provision
        self._on_failed = on_failed
        self._on_lost_all = on_lost_all
        self._one_at_a_time = asyncio.Lock()
        self._unsealed: list[Segment] = []
        self._rebuilt: list[Segment] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_all_damaged = False
        self.also_listed: set[int] = set()
        """Segments that are of no use once the restart is complete, and needed until then."""

    def unsealed(self, current: Segment) -> list[Segment]:
        """Give the segments whose entries are found through the index in memory only."""
        return [*self._unsealed, current]

    def add_unsealed(self, segment: Segment) -> None:
        """Take a segment to which nothing more is written; `seal_all` seals it."""
        self._unsealed.append(segment)

    def retry(self) -> None:
        """Try again what failed for want of space."""
        if (self._unsealed or self._rebuilt) and not self._provision.is_full and not self._tasks:
            self._spawn(self.seal_all())

    def seal(self, segment: Segment) -> None:
        """Seal a segment in the background."""
        self._unsealed.append(segment)
        self._spawn(self.seal_all())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except DiskFullError:
            return
        except StorageError as error:
            self._on_failed(error)

    async def seal_all(self) -> None:
        """Seal whatever waits for it, and write the checkpoint. Raises DiskFullError."""
        async with self._one_at_a_time:
            if not self._unsealed and not self._rebuilt:
                await self._write_checkpoint(set())
            while self._unsealed:
                segment = self._unsealed[0]
                await self._seal(segment)
                assert segment.index is not None
                for ledger_id, runs in segment.index.ledgers.items():
                    state = self._ledgers.get(ledger_id)
                    if state is not None:  # not deleted since
                        state.places.extend((segment.segment_id, runs.firsts[0], runs.highest))
                segment.index = None
                self._unsealed.remove(segment)
            while self._rebuilt:
                segment = self._rebuilt[0]
                await self._seal(segment)
                segment.index = None
                self._rebuilt.remove(segment)

    async def _seal(self, segment: Segment) -> None:
        # Trimmed first, since that gives space back; then the checkpoint, since with an index the segment
        # is not replayed any more, and its fences must be elsewhere.
        await trim_segment(segment)
        await self._write_checkpoint(set())
        assert segment.index is not None
        segment.sealed = await write_index(self._disk, self._directory, segment, self._statement)

    def _statement(self, ledger_id: int) -> LacStatement | None:
        state = self._ledgers.get(ledger_id)
        return None if state is None else state.statement

    async def checkpoint(self, *segment_ids: int) -> None:
        """Write the checkpoint; it lists these segments as well. Raises DiskFullError."""
        async with self._one_at_a_time:
            await self._write_checkpoint(set(segment_ids))

    async def _write_checkpoint(self, more: set[int]) -> None:
        # What changes between the parts is newer and no less true.
        states, rows = list(self._ledgers.states.items()), list[bytes]()
        for at in range(0, len(states), _LEDGERS_AT_ONCE):
            rows.append(pack_states(states[at : at + _LEDGERS_AT_ONCE]))
            await asyncio.sleep(0)
        # The list of segments and the next id are taken together, in one step.
        listed = {*self._segments, *self.also_listed, *more}
        if self._provision.ready is not None:
            listed.add(self._provision.ready.segment_id)
        data = encode_checkpoint(
            self._provision.next_id, listed, self.is_all_damaged, rows, self._ledgers.deleted.ranges()
        )
        await layout.write_file(self._disk, self._directory, layout.CHECKPOINT, [data])

    async def rebuild(self, segment: Segment) -> None:
        """Rebuild a sealed index that fails its checksum, from the segment. What is lost is marked."""
        async with self._one_at_a_time:
            damaged = segment.sealed
            if damaged is None or segment.index is not None:
                return
            found = await replay_segment(segment.file, segment.header, proven_end=segment.end, is_last=False)
            if found.is_all_damaged and not self.is_all_damaged:
                self.is_all_damaged = True
                self._on_lost_all()
            for ledger_id in found.damaged:
                state = self._ledgers.get(ledger_id)
                if state is not None:
                    state.is_damaged = True
            segment.index, segment.sealed = found.index, None
            damaged.file.close()
            self._rebuilt.append(segment)
        await self._guard(self.seal_all())

    async def remove(self, names: list[str]) -> None:
        """Remove files that no checkpoint lists any more."""
        for name in names:
            await self._disk.unlink(os.path.join(self._directory, name))
        if names:
            await self._disk.sync_directory(self._directory)

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, current: Segment) -> None:
        """Leave everything sealed: there is nothing to replay at the next start."""
        names: list[str] = []
        if current.index is not None and current.end > DATA_OFFSET:
            self._unsealed.append(current)
        else:
            del self._segments[current.segment_id]
            current.close()
            names.append(layout.segment_name(current.segment_id))
        if self._provision.ready is not None:
            spare, self._provision.ready = self._provision.ready, None
            spare.close()
            names.append(layout.segment_name(spare.segment_id))
        await self.seal_all()
        await self.remove(names)
