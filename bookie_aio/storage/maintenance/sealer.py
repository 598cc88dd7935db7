"""Tending: sealing segments, writing checkpoints, rebuilding indexes, giving segments up, in the background.

Owns the segments that wait to be sealed, and the order of these writes: a checkpoint lists a segment before
its first group is written, covers a segment's terms and marks before its index is written (a segment with
an index is not replayed), and stops listing a segment before its file is given up. Writing goes on
meanwhile.

No space is no failure here: the index stays in memory, and sealing is tried again when there is space. One
directory that is full holds up no other: what is sealed, or given up, before an earlier segment is would else
be all that says where that one ended, so the checkpoint says it of each as soon as it is written to no more.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from bookie_aio.storage.background_task import fatal
from bookie_aio.storage.disk.disk import remove_files, write_file
from bookie_aio.storage.ledgers.checkpoint import encode_checkpoint, pack_state
from bookie_aio.storage.ledgers.ledger_table import PackedTable
from bookie_aio.storage.segment import names
from bookie_aio.storage.segment.files import give_up_segment, settle_segment, write_index
from bookie_aio.storage.segment.format import DATA_OFFSET
from bookie_aio.storage.segment.replay import Replayed, replay_segment
from bookie_aio.storage.segment.segment import SegmentRow, UnreadIndexError
from metadata.errors import CorruptRecordError, DiskFailedError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.ledgers.ledger_states import LedgerStates
    from bookie_aio.storage.segment.allocator import SegmentAllocator
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.wire.blocks import Buffer, LacStatement

_LEDGERS_AT_ONCE = 512
_PARTS_AT_ONCE = 32
_UNREAD_PAUSE_S = 5.0
"""Between two tries to rebuild an index from a segment that the disk fails to give."""


class Tender:
    """Looks after segments that are no longer written to."""

    def __init__(
        self,
        disk: Disk,
        home: str,
        segments: SegmentSet,
        ledgers: LedgerStates,
        allocator: SegmentAllocator,
        on_failed: Callable[[StorageError], None],
        on_lost_all: Callable[[], None],
        *,
        live_ledgers_max: int,
        page_cache_bytes: int,
    ) -> None:
        """Share the engine's segments and ledgers; `home` is the checkpoint's directory."""
        self._live_ledgers_max = live_ledgers_max
        self._page_cache_bytes = page_cache_bytes
        self._recent: deque[Segment] = deque()  # sealed last, and left in the page cache
        self._recent_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._unread_until: dict[int, float] = {}
        self._disk = disk
        self._home = home
        self._segments = segments
        self._ledgers = ledgers
        self._allocator = allocator
        self._on_failed = on_failed
        self._on_lost_all = on_lost_all
        self._one_at_a_time = asyncio.Lock()
        self._unsealed: list[Segment] = []
        self._useless: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self.lost_data_of_any_ledger = False
        self.also_listed: set[int] = set()
        """Segments that are of no use once the restart is complete, and needed until then."""
        self.on_sealed: Callable[[], None] = lambda: None

    def retry(self) -> None:
        """Try again what failed for want of space."""
        if (self._unsealed or self._useless) and not self._allocator.is_full and not self._tasks:
            self._spawn(self.seal_all())

    def seal(self, *segments: Segment) -> None:
        """Seal segments to which nothing more is written, in the background."""
        self._await_sealing(*segments)
        self._spawn(self.seal_all())

    def _await_sealing(self, *segments: Segment) -> None:
        for segment in segments:
            segment.checkpoint_row = segment.checkpoint_row or SegmentRow(segment.segment_id, end=segment.end)
        self._unsealed += segments

    def clean_up(self, segments: list[Segment], useless: list[str]) -> None:
        """Seal what a restart replayed, and remove the files that nothing needs any more."""
        self._useless = useless
        self.seal(*segments)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except DiskFullError:
            return
        except Exception as error:
            self._on_failed(fatal("sealing segments", error))

    async def seal_all(self) -> None:
        """Seal whatever waits for it, and write the checkpoint.

        Raises:
            DiskFullError: there was no space for the checkpoint, and nothing was done; or for some of the
                indexes, and all else was.
        """
        full: dict[str, DiskFullError] = {}
        async with self._one_at_a_time:
            if not self._unsealed:
                await self._write_checkpoint(set())
            while segment := next((one for one in self._unsealed if one.directory not in full), None):
                error = await self._seal(segment)
                if error is not None:
                    full[segment.directory] = error
                    continue
                self._unsealed.remove(segment)
                await self._let_go(segment)
            useless, self._useless = self._useless, []
            await self.remove(useless)
        self.on_sealed()
        if full:
            raise next(iter(full.values()))

    async def _seal(self, segment: Segment) -> DiskFullError | None:
        # Cut first, since that gives space back; then the checkpoint, since with an index the segment is not
        # replayed any more, and its fences must be elsewhere.
        error = await self._settle(segment)
        await self._write_checkpoint(set())
        if error is not None:
            return error
        assert segment.index is not None
        ledgers = segment.index.ledgers
        for ledger_id in [one for one in ledgers if not self._counts(one, segment.segment_id)]:
            del ledgers[ledger_id]
        write = partial(write_index, self._disk, segment, self._statement)
        try:
            row = await self._allocator.make_room(segment.directory, write)
        except DiskFullError as full:
            return full
        await self._segments.renew_index(segment)
        self._segments.seal(segment, row)
        return None

    async def _settle(self, segment: Segment) -> DiskFullError | None:
        if segment.file is not None:
            try:
                await settle_segment(segment)
            except DiskFullError as error:
                return error
        return None

    async def _let_go(self, latest: Segment) -> None:
        """Leave what was written last in the page cache, and have the system let go of what is before that.

        It would keep all of it while there is memory, and take another page for each one that is written:
        that of a page never used before costs more than the rest of the write, that of one just let go of
        little.
        """
        self._recent.append(latest)
        self._recent_bytes += latest.end
        while self._recent_bytes > self._page_cache_bytes:
            segment = self._recent.popleft()
            self._recent_bytes -= segment.end
            await segment.will_not_need()

    def _counts(self, ledger_id: int, segment_id: int) -> bool:
        state = self._ledgers.get(ledger_id)
        return state is not None and state.since <= segment_id

    def _statement(self, ledger_id: int) -> LacStatement | None:
        state = self._ledgers.get(ledger_id)
        return None if state is None else state.statement

    async def checkpoint(self, *segment_ids: int) -> None:
        """Write the checkpoint; it lists these segments as well. Raises DiskFullError."""
        async with self._one_at_a_time:
            await self._write_checkpoint(set(segment_ids))

    async def _write_checkpoint(self, more: set[int]) -> None:
        states = self._ledgers.states
        table, packed = None, await self._pack_states()
        if states.is_table_due(self._live_ledgers_max):
            # Without space for it the checkpoint goes on growing: what gives space back needs that one only.
            with suppress(DiskFullError):
                table = await self._write_table(packed)
                # The checkpoint that goes over to it still has all of this: newer, and no less true.
                packed = await self._pack_states()
        rows = await _joined(packed)
        # The list of segments and the next id are taken together, in one step.
        if self._allocator.ready is not None:
            more.add(self._allocator.ready.segment_id)
        listed = self._segments.rows()
        listed += [SegmentRow(one) for one in self.also_listed | more if one not in self._segments.by_id]
        encode = partial(
            encode_checkpoint, self._allocator.next_id, listed, self.lost_data_of_any_ledger, rows,
            self._ledgers.deleted.packed(),
        )  # fmt: skip
        if table is not None:
            try:
                await self._write_home(names.CHECKPOINT, encode(table.number))
            except DiskFullError:
                await self.remove([self._table_path(table.number)])  # its space may be what is missing
            else:
                await self._rest_on(table)
                return
        await self._write_home(names.CHECKPOINT, encode(states.table_number))

    async def _write_home(self, name: str, buffers: Sequence[Buffer]) -> None:
        write = partial(write_file, self._disk, self._home, name, buffers)
        await self._allocator.make_room(self._home, write)

    def _table_path(self, number: int) -> str:
        return os.path.join(self._home, names.table_name(number))

    async def _pack_states(self) -> dict[int, bytes]:
        """Pack the live states. What changes meanwhile is newer and no less true."""
        live, packed = list(self._ledgers.states.live.items()), dict[int, bytes]()
        for at in range(0, len(live), _LEDGERS_AT_ONCE):
            packed.update((one, pack_state(one, state)) for one, state in live[at : at + _LEDGERS_AT_ONCE])
            await asyncio.sleep(0)
        return packed

    async def _write_table(self, packed: dict[int, bytes]) -> PackedTable:
        """Write a new table of ledgers, which counts once a checkpoint names it."""
        states = self._ledgers.states
        table = PackedTable(states.next_table_number)
        for number, part in enumerate(states.new_rows(packed), 1):
            table.extend(part)
            if number % _PARTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        await write_file(self._disk, self._home, names.table_name(table.number), table.encode())
        return table

    async def _rest_on(self, table: PackedTable) -> None:
        """Go over to a table that the checkpoint names, and let states rest in it."""
        states = self._ledgers.states
        former = states.table_number
        states.rest_on(table)
        live = list(states.live)
        for at in range(0, len(live), _LEDGERS_AT_ONCE):
            states.rest(live[at : at + _LEDGERS_AT_ONCE], self._ledgers.awaits)
            await asyncio.sleep(0)
        if former:
            # The checkpoint is durable by now, and nobody may take it for one that found no room.
            with suppress(DiskFullError):
                await self.remove([self._table_path(former)])

    async def rebuild(self, segment: Segment) -> bool:
        """Rebuild a sealed index that fails its checksum, from the segment. What is lost is marked.

        False: the disk fails to give all of the segment, and nothing was changed. An index of what can be
        read now would hide the rest for good, and the segment would be given up with it.

        It goes on to its end where the caller, a reader perhaps whose connection is lost, is cancelled.
        """
        task = asyncio.get_running_loop().create_task(self._rebuild(segment))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self.retry())  # which waits for what is under way
        return await asyncio.shield(task)

    async def _rebuild(self, segment: Segment) -> bool:
        async with self._one_at_a_time:
            if segment.sealed is None or segment.is_gone:
                return True
            if self._unread_until.get(segment.segment_id, 0.0) > self._loop.time():
                return False
            found = await self._replay(segment)
            is_unread = found.unread is not None
            if found.damaged or found.lost_data_of_any_ledger:
                # Of groups whose heads are damaged the index tells what the segment does not. So it is not
                # given up, and nothing is marked, because the disk has failed to give it for a while.
                try:
                    await segment.sealed.check()
                except UnreadIndexError:
                    is_unread = True
                except CorruptRecordError:
                    pass
                else:
                    return True
            if is_unread:
                self._unread_until[segment.segment_id] = self._loop.time() + _UNREAD_PAUSE_S
                return False
            self._unread_until.pop(segment.segment_id, None)
            if found.lost_data_of_any_ledger and not self.lost_data_of_any_ledger:
                self.lost_data_of_any_ledger = True
                self._on_lost_all()
            for ledger_id in found.damaged:
                if self._ledgers.get(ledger_id) is not None:
                    self._ledgers.state(ledger_id).is_damaged = True
            await self._segments.unseal(segment, found.index)
            self._await_sealing(segment)
        await self._guard(self.seal_all())
        return True

    async def _replay(self, segment: Segment) -> Replayed:
        try:
            file = await self._segments.file_cache.borrow(segment.path)
        except FileNotFoundError:
            try:
                if segment.sealed is not None:
                    await segment.sealed.check()
            except UnreadIndexError as error:
                return Replayed(unread=DiskFailedError(str(error)))
            except CorruptRecordError:
                return Replayed(lost_data_of_any_ledger=True)  # and its index cannot tell what it held
            return Replayed(unread=DiskFailedError(f"{segment.path} is missing, and its index is whole"))
        except DiskFailedError as error:
            return Replayed(unread=error)
        try:
            return await replay_segment(file, segment.header, proven_end=segment.end, is_last=False)
        finally:
            self._segments.file_cache.give_back(segment.path)

    async def give_up(self, segment: Segment, *, is_dead: bool) -> None:
        """Give up a segment of which nothing counts any more.

        At each point of it a crash leaves a segment that the checkpoint lists, whole, or files that it does
        not list, which the next start removes. Raises DiskFullError, and the segment stays what it was.

        Args:
            is_dead: nothing in it counts, not even as one of several copies.
        """
        async with self._one_at_a_time:
            if segment.sealed is None or segment.is_gone:
                return
            row = segment.sealed.row
            self._segments.remove(segment)
            try:
                try:
                    await self._write_checkpoint(set())
                except DiskFullError:
                    if not is_dead:
                        raise
                    # Not even the checkpoint has room. Nobody reads this segment, so that it may be cut.
                    await self._empty(segment)
                    await self._write_checkpoint(set())
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

    async def remove(self, paths: list[str]) -> None:
        """Remove files that no checkpoint lists any more."""
        await remove_files(self._disk, paths)

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, current: Segment) -> None:
        """Leave everything sealed: there is nothing to replay at the next start."""
        unused: list[Segment] = []
        if current.index is not None and current.end > DATA_OFFSET:
            self._await_sealing(current)
        else:
            self._segments.remove(current)
            unused.append(current)
        if self._allocator.ready is not None:
            unused.append(self._allocator.ready)
            self._allocator.ready = None
        await self.seal_all()
        for segment in unused:
            keep = self._allocator.wants_spare(segment.file.size() if segment.file is not None else 0)
            await give_up_segment(self._disk, segment, keep_as_spare=keep and segment.is_reused)


async def _joined(packed: dict[int, bytes]) -> list[bytes]:
    """Join rows to parts: a checksum over each row of thousands would hold up the loop."""
    rows, joined = list(packed.values()), []
    for at in range(0, len(rows), _LEDGERS_AT_ONCE):
        joined.append(b"".join(rows[at : at + _LEDGERS_AT_ONCE]))
        await asyncio.sleep(0)
    return joined
