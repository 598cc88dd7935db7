"""Compaction: freeing the space of segments of which little or nothing counts any more.

`Compactor` owns the decision which segments are given up, and copies the entries that still count out of
mostly dead segments. `SegmentRemover` gives a segment up. Neither owns spare files (`allocator`).

A segment's *live* bytes are the bytes in its index of ledgers that are not deleted, not forgotten since, and
not below a trim. A segment without live bytes is given up. A segment with few is compacted: ledger by ledger,
the entries that count are appended to the journal like any add. When all of them are durable, the segment is
given up. So a crash at any point leaves at most further copies, of which one counts.

A block is copied only if its copy is the one that counts. And it is copied only if no add to its entries was
accepted since it was looked up. Otherwise an older copy would become the newest one. The same holds for the
ledger's being forgotten: a copy behind that record would count again.

The work is done in small steps: at most so many bytes a second, and at most a share of the event loop's time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from bookie_aio.storage.background_task import BackgroundTask
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.read.reader import (
    RUNS_AT_ONCE,
    DamagedBlockError,
    UnreadBlockError,
    fetch,
    gather,
    newest_copies,
    read_block,
    read_part,
)
from bookie_aio.storage.segment.files import give_up_segment
from bookie_aio.storage.segment.format import DATA_OFFSET
from bookie_aio.storage.segment.segment_set import DamagedIndexError, SegmentGoneError
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.listing import index_from
from metadata.errors import (
    CorruptRecordError,
    DiskFullError,
    EntryTooLargeError,
    NoSuchLedgerError,
    StorageError,
)
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.journal import AddWatch, Done
    from bookie_aio.storage.ledgers.checkpoint import LedgerState
    from bookie_aio.storage.ledgers.checkpointer import Checkpointer
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.read.lookup import Lookup
    from bookie_aio.storage.read.reader import StoredCopy
    from bookie_aio.storage.segment.allocator import SegmentAllocator
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.wire.blocks import Buffer

_FETCHED_BYTES = 512 * 1024
_PAGES_AT_ONCE = 16
_BYTES_PENDING_MAX = 256 * 1024
"""Bytes of copies on their way to the disk at a time: adds wait for the groups that copies are in."""
_STEP_S = 0.001


@dataclass(frozen=True, slots=True)
class CompactionConfig:
    """When segments are compacted, and how fast."""

    compact_below: float = 0.5
    """A segment is compacted when less than this part of it counts."""
    compact_below_when_low: float = 0.65
    """The same while space is low. Copies must fill more than this part of their new segment, even where each
    entry is alone in its group. Otherwise they would be copied again and again."""
    bytes_per_s: int = 32 * 1024 * 1024
    """How many bytes compaction copies in a second at most."""
    loop_share: float = 0.2
    """The part of the event loop's time that copying may take; the search for dead segments may take a
    quarter of that."""
    pause_s: float = 2.0
    """How long compaction waits after a deletion, for further deletions."""


def counting_bytes(state: LedgerState | None, segment_id: int, lowest: int, highest: int, size: int) -> int:
    """Return how many of a ledger's bytes in a segment count; of a ledger that was trimmed about so many.

    Args:
        state: of the ledger; None for one that was deleted.
        lowest: the lowest of its entries in the segment; `highest` is the highest one.
        size: the bytes of its records there.
    """
    if state is None or state.since > segment_id or highest < state.first:
        return 0
    if lowest < state.first:
        return size * (highest + 1 - state.first) // (highest + 1 - lowest) or 1
    return size


class CopySink(Protocol):
    """The engine, as compaction sees it."""

    add_watches: set[AddWatch]

    def append_copy(self, block: Block, done: Done) -> None:
        """Accept a copy of a stored block."""

    def barrier(self, done: Done) -> None:
        """Call `done` when everything accepted is durable."""


class _Watch:
    """Notices adds to a ledger, and that it is forgotten."""

    def __init__(self, ledger_id: int) -> None:
        self._ledger_id = ledger_id
        self._noted: list[tuple[int, int]] = []
        self.is_muted = False

    def note(self, block: Block) -> None:
        """Take note of an add."""
        if block.ledger_id == self._ledger_id and not self.is_muted:
            self._noted.append((block.first_entry, block.last_entry))

    def note_forget(self, ledger_id: int) -> None:
        """Take note that the ledger is forgotten: that concerns every entry."""
        if ledger_id == self._ledger_id:
            self._noted.append((0, ENTRY_ID_MAX))

    def clear(self) -> None:
        """Drop what was noted."""
        self._noted.clear()

    def touches(self, entry_ids: range) -> bool:
        """Return whether anything noted may concern one of these entries."""
        return any(first <= entry_ids[-1] and last >= entry_ids[0] for first, last in self._noted)


class SegmentRemover:
    """Gives up segments of which nothing counts any more."""

    def __init__(
        self, disk: Disk, segments: SegmentSet, allocator: SegmentAllocator, checkpointer: Checkpointer
    ) -> None:
        """Share the engine's parts."""
        self._disk = disk
        self._segments = segments
        self._allocator = allocator
        self._checkpointer = checkpointer

    async def give_up(self, segment: Segment, *, is_dead: bool) -> None:
        """Remove a sealed segment, or keep its file as a spare one.

        A crash at any point leaves a whole segment that the checkpoint lists, or files that it does not list.
        The next start removes such files.

        Args:
            is_dead: nothing in it counts, not even as one of several copies.

        Raises:
            DiskFullError: no space for the checkpoint; the segment stays what it was.
        """
        async with self._checkpointer.list_lock:
            if segment.sealed is None or segment.is_gone:
                return
            row = segment.sealed.row
            self._segments.remove(segment)
            try:
                try:
                    await self._checkpointer.write_locked()
                except DiskFullError:
                    if not is_dead:
                        raise
                    # Not even the checkpoint has room. Nobody reads a dead segment, so that it may be cut.
                    await self._empty(segment)
                    await self._checkpointer.write_locked()
            except DiskFullError:
                segment.is_gone = False
                self._segments.add_sealed(segment, row)
                raise
            keep = not segment.has_unread and self._allocator.wants_spare(await self._size_of(segment))
            name = await give_up_segment(self._disk, segment, keep_as_spare=keep)
            if name is not None:
                self._allocator.add_spare(segment.directory, name)

    async def _empty(self, segment: Segment) -> None:
        file = await self._segments.file_cache.borrow(segment.path)
        try:
            await file.truncate(DATA_OFFSET)
        finally:
            self._segments.file_cache.give_back(segment.path)

    async def _size_of(self, segment: Segment) -> int:
        try:
            file = await self._segments.file_cache.borrow(segment.path)
        except (FileNotFoundError, StorageError):
            return 0
        try:
            return file.size()
        finally:
            self._segments.file_cache.give_back(segment.path)


class Compactor:
    """Compacts the segments of one engine, in one task at a time."""

    def __init__(
        self,
        config: CompactionConfig,
        sink: CopySink,
        ledgers: LedgerStates,
        segments: SegmentSet,
        lookup: Lookup,
        allocator: SegmentAllocator,
        remover: SegmentRemover,
        rebuild_index: Callable[[Segment], Awaitable[bool]],
        health: StorageHealth,
    ) -> None:
        """Share the engine's parts. Nothing happens before `notice` is called."""
        self._config = config
        self._sink = sink
        self._ledgers = ledgers
        self._segments = segments
        self._lookup = lookup
        self._allocator = allocator
        self._remover = remover
        self._rebuild_index = rebuild_index
        self._background = BackgroundTask(self._work, health)
        self._loop = asyncio.get_running_loop()
        self.close = self._background.close
        self._noticed = 0
        self._looked_s = 0.0
        self._assessed: dict[int, tuple[int, int]] = {}  # live bytes, and `ledgers.reductions` then
        self._immovable: set[int] = set()  # segments with blocks that cannot be read
        self._bytes_pending = 0
        self._lost_copy: StorageError | None = None
        self._owed_s = 0.0
        self._is_stopped = False
        self.given_up = 0
        self.compacted = 0
        self.copied_bytes = 0

    def notice(self) -> None:
        """Look in a while at segments that were sealed, or of which less may count, since the last look."""
        self._noticed += 1
        self._background.start()

    def go_on(self) -> None:
        """Go on after a stop for lack of space."""
        if self._is_stopped:
            self._is_stopped = False
            self.notice()

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "live_bytes": sum(live for live, _ in self._assessed.values()),
            "given_up": self.given_up,
            "compacted": self.compacted,
            "copied_bytes": self.copied_bytes,
        }

    # --- finding segments ----------------------------------------------------------------------

    async def _work(self) -> None:
        config, seen = self._config, -1
        try:
            while seen != self._noticed:
                # Segments are looked at less often where there are many.
                rest_s = min(self._looked_s * 4 / config.loop_share, 10 * config.pause_s)
                await self._background.pause(max(config.pause_s, rest_s))
                seen, self._looked_s = self._noticed, 0.0
                await self._look()
                while (segment := self._worst()) is not None:
                    await self._compact(segment)
                    if seen != self._noticed:
                        break  # other segments may be dead by now, and giving them up needs no copying
        except DiskFullError:
            self._is_stopped = True

    async def _look(self) -> None:
        """Assess every sealed segment, and give up the dead ones."""
        for segment in self._segments.sealed():
            known = self._assessed.get(segment.segment_id)
            if segment.is_gone or (known is not None and known[1] == self._ledgers.reductions):
                continue
            reductions, started = self._ledgers.reductions, self._loop.time()
            try:
                live = await self._live_bytes(segment)
            except CorruptRecordError:
                if not segment.is_gone:
                    await self._rebuild_index(segment)
                continue
            finally:
                self._looked_s += self._loop.time() - started
            self._assessed[segment.segment_id] = (live, reductions)
            if not live:
                await self._give_up(segment, is_dead=True)
        for segment_id in [one for one in self._assessed if one not in self._segments.by_id]:
            del self._assessed[segment_id]

    async def _live_bytes(self, segment: Segment) -> int:
        live = pages = 0
        if segment.sealed is None:
            return segment.end
        async for page in segment.sealed.shares():
            for ledger_id, lowest, highest, size in page:
                state = self._ledgers.states.get(ledger_id)
                live += counting_bytes(state, segment.segment_id, lowest, highest, size)
            pages += 1
            if pages % _PAGES_AT_ONCE == 0:
                await self._background.pause(0)
        return live

    async def _give_up(self, segment: Segment, *, is_dead: bool = False) -> None:
        await self._remover.give_up(segment, is_dead=is_dead)
        self._assessed.pop(segment.segment_id, None)
        self.given_up += 1

    def _worst(self) -> Segment | None:
        """Return the segment to compact next: the one with the smallest live part below the limit."""
        config = self._config
        limit = config.compact_below_when_low if self._allocator.is_low else config.compact_below
        worst: tuple[float, Segment] | None = None
        for segment_id, (live, _) in self._assessed.items():
            segment = self._segments.by_id.get(segment_id)
            if segment is None or segment.sealed is None or segment_id in self._immovable:
                continue
            share = live / max(1, segment.end - DATA_OFFSET)
            if share < limit and (worst is None or share < worst[0]):
                worst = (share, segment)
        return worst[1] if worst is not None else None

    # --- compacting ----------------------------------------------------------------------------

    async def _compact(self, segment: Segment) -> None:
        """Copy the entries that count of a segment into the journal, and give the segment up."""
        self._lost_copy = None
        assert segment.sealed is not None
        try:
            async for page in segment.sealed.shares():
                for ledger_id, lowest, highest, _ in page:
                    await self._copy_ledger(segment, ledger_id, lowest, highest)
        except DamagedBlockError:
            self._immovable.add(segment.segment_id)  # its ledger is marked; intact blocks stay where they are
            return
        except EntryTooLargeError:
            self._immovable.add(segment.segment_id)  # segments have been made smaller since
            return
        except UnreadBlockError:
            self._assessed.pop(segment.segment_id, None)  # it is assessed again at the next look
            return
        except DamagedIndexError as error:
            await self._rebuild_index(error.segment)
            self._assessed.pop(segment.segment_id, None)
            return
        except CorruptRecordError:
            await self._rebuild_index(segment)
            self._assessed.pop(segment.segment_id, None)
            return
        await when_durable(self._sink.barrier)
        if self._lost_copy is not None:
            # Space ran out after copies were accepted: the entries that count are nowhere but in this
            # segment.
            raise self._lost_copy
        await self._give_up(segment)
        self.compacted += 1

    async def _copy_ledger(self, segment: Segment, ledger_id: int, lowest: int, highest: int) -> None:
        watch = _Watch(ledger_id)
        self._sink.add_watches.add(watch)
        try:
            if self._ledgers.is_pending(ledger_id):
                await when_durable(self._sink.barrier)  # adds accepted before the watch are found then
            while lowest <= highest:
                state = self._ledgers.get(ledger_id)
                if state is None or state.since > segment.segment_id or highest < state.first:
                    return
                lowest = max(lowest, state.first)
                sources = await self._lookup.sources(ledger_id, lowest, highest)
                found, horizon = await gather(sources, lowest, highest, RUNS_AT_ONCE)
                lowest, is_touched = await self._copy_runs(segment, ledger_id, found, lowest, horizon, watch)
                if is_touched:
                    watch.clear()
                    await when_durable(self._sink.barrier)
        except SegmentGoneError:
            await self._copy_ledger(segment, ledger_id, lowest, highest)
        except NoSuchLedgerError:
            # Deleted meanwhile. If there is no room for the tombstone, the barrier raises, and nothing is
            # given up.
            await when_durable(self._sink.barrier)
        finally:
            self._sink.add_watches.discard(watch)

    async def _copy_runs(
        self, segment: Segment, ledger_id: int, found: list[StoredCopy], low: int, horizon: int, watch: _Watch
    ) -> tuple[int, bool]:
        """Copy the entries that count of the segment's runs up to the horizon.

        Returns:
            The entry to go on at, and whether a newer add or a forget came, so that the runs have to be
            looked up again.
        """
        mine = [one for one in found if one.segment is segment and one.run.first <= horizon]
        is_plain = all(one.run.last < other.run.first for one, other in pairwise(found))
        fetched: dict[int, memoryview] = {}
        for number, one in enumerate(mine):
            run = one.run
            if run.last > horizon and run.first > low:
                return run.first, False  # copied as a whole in the next round
            whole = run.entry_ids
            for newest in [whole] if is_plain and run.last <= horizon else newest_copies(one, found, horizon):
                entry_ids = newest[index_from(newest, low) :]
                if not entry_ids:
                    continue
                if run.offset not in fetched:
                    fetched, _ = await fetch(segment, _batch(mine, number))
                started = self._loop.time()
                block = await self._read(one, ledger_id, entry_ids, fetched.get(run.offset, b""))
                if watch.touches(entry_ids):
                    return low, True  # not behind these: interleaved later runs may have entries below
                # No await from the look at the watch to the append.
                watch.is_muted = True  # the append below is compaction's own
                self._append(block)
                watch.is_muted = False
                await self._keep_pace(block.total_bytes, self._loop.time() - started)
        return horizon + 1, False

    async def _read(self, found: StoredCopy, ledger_id: int, entry_ids: range, data: Buffer) -> Block:
        """Read the entries of a run that count. Damage in others of its entries was repaired since."""
        try:
            block = await read_block(found, ledger_id, data)
        except DamagedBlockError:
            try:
                return await read_part(found, ledger_id, entry_ids)
            except DamagedBlockError as error:
                await self._lookup.mark(ledger_id, error)
                raise
        if len(entry_ids) == block.count:
            return block
        start = found.run.entry_ids.index(entry_ids[0])
        return Block.parse(block.whole(start, start + len(entry_ids)))

    def _append(self, block: Block) -> None:
        size = block.total_bytes

        def done(error: StorageError | None) -> None:
            self._bytes_pending -= size
            if error is not None:
                self._lost_copy = error

        self._sink.append_copy(block, done)
        self._bytes_pending += size
        self.copied_bytes += size

    async def _keep_pace(self, size: int, took_s: float) -> None:
        config = self._config
        self._owed_s += max(size / config.bytes_per_s, took_s / config.loop_share)
        if self._owed_s >= _STEP_S:
            owed_s, self._owed_s = self._owed_s, 0.0
            await self._background.pause(owed_s)
        if self._bytes_pending > _BYTES_PENDING_MAX:
            await when_durable(self._sink.barrier)


def _batch(mine: list[StoredCopy], start: int) -> list[tuple[int, int]]:
    """Return the places (offset, size) of the next runs, as many as are fetched together."""
    blocks: list[tuple[int, int]] = []
    size = 0
    for one in mine[start:]:
        run = one.run
        blocks.append((run.offset, run.head_bytes + run.payload_bytes))
        size += blocks[-1][1]
        if size >= _FETCHED_BYTES:
            break
    return blocks
