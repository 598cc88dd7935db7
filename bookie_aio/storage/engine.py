"""The storage engine: a bookie's disk, as the server sees it.

Owns the order of records: they are written in the order in which they were accepted, in groups, each with one
fdatasync. A `Done` is called when its record is durable and indexed, and never before (rules 2 and 3). Owns
the states of ledgers and the set of segments, and makes the parts of the storage. The package's docstring
lists the parts.

All methods are called on the event loop's thread. Accepting never blocks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from bookie_aio.metrics import StorageMetrics
from bookie_aio.storage.crash_recovery import CrashRecovery, EarlierRun, Held, RecoveredState
from bookie_aio.storage.health import FailStopDisk, StorageHealth
from bookie_aio.storage.journal import AddWatch, Change, Done, Journal, Record
from bookie_aio.storage.ledgers.checkpoint import LedgerState
from bookie_aio.storage.ledgers.checkpointer import Checkpointer
from bookie_aio.storage.ledgers.ledger_states import LedgerStates
from bookie_aio.storage.maintenance.compactor import Compactor, SegmentRemover
from bookie_aio.storage.maintenance.scrubber import Scrubber
from bookie_aio.storage.maintenance.sealer import IndexRebuilder, SegmentSealer
from bookie_aio.storage.marking import Marking
from bookie_aio.storage.read.lookup import Lookup
from bookie_aio.storage.read.reader import ReadResult
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.allocator import SegmentAllocator
from bookie_aio.storage.segment.segment import SegmentRow
from bookie_aio.storage.segment.segment_set import SegmentSet
from bookie_aio.storage.segment.witness import WitnessFiles
from metadata.errors import (
    DiskFailedError,
    DiskFullError,
    EntryTooLargeError,
    StorageError,
)
from metadata.ids import ENTRY_ID_MAX, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from bookie_aio.storage.config import StorageConfig
    from bookie_aio.storage.disk.disk import DirectoryLock, Disk
    from bookie_aio.storage.journal import Group
    from bookie_aio.storage.read.reader import ListedRun
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.wire.blocks import Block, Buffer, LacStatement

__all__ = ["Done", "Engine", "ReadResult"]

_FENCE_SHARE = 8
"""One part in this many of the reserve is kept for fences; recovery adds may use all other parts."""
_RECORD_BYTES_MAX = 1024 * 1024
_RECORD_SHARE = 16
_ROOM_BYTES_MIN = 4096
"""Room for fences in the first segment on a full disk, behind the records that the last run left."""


class Engine:
    """A bookie's storage. Open it with `Engine.open`."""

    def __init__(
        self,
        disk: Disk,
        directories: Sequence[str],
        config: StorageConfig,
        on_indexed: Callable[[Collection[int]], None],
        on_failed: Callable[[StorageError], None],
        on_writable: Callable[[bool], None],
        clock: Callable[[], float],
    ) -> None:
        """Not for users: `open` is."""
        self._clock = clock
        self._directories = directories
        self._config = config
        self._on_indexed = on_indexed
        self._on_failed = on_failed
        self._on_writable = on_writable
        self.record_bytes_max = min(_RECORD_BYTES_MAX, config.segment_bytes // _RECORD_SHARE)
        """A record of many blocks takes no more from here on. One that is large may leave much of a segment
        unused, since it is never cut."""
        self.health = StorageHealth(self)  # for other files in the directories, too
        self._disk = FailStopDisk(disk, self.health)
        self.disk: Disk = self._disk  # for other files in the directories
        self._locks: list[DirectoryLock] = []
        self._segments = SegmentSet(
            self._disk,
            files_max=config.files_max,
            heads_bytes_max=config.heads_bytes_max,
            locations_bytes_max=config.locations_bytes_max,
        )
        self._metrics = StorageMetrics()
        self.counts = self._metrics
        self.known: LedgerStates
        self._is_closed = False
        self.add_watches: set[AddWatch] = set()
        self.notes: Sequence[str] = ()
        self.marking: Marking
        self.held: Callable[[], Held]  # returns what is durable by now
        self._witness: WitnessFiles | None = None
        self._ledgers: LedgerStates
        self._allocator: SegmentAllocator
        self._checkpointer: Checkpointer
        self._sealer: SegmentSealer
        self._index_rebuilder: IndexRebuilder
        self._remover: SegmentRemover
        self._journal: Journal
        self._lookup: Lookup
        self._compactor: Compactor
        self._scrubber: Scrubber

    @classmethod
    async def open(
        cls,
        disk: Disk,
        directories: Sequence[str],
        config: StorageConfig,
        *,
        draw_generation: Callable[[], int],
        on_indexed: Callable[[Collection[int]], None],
        on_failed: Callable[[StorageError], None],
        on_writable: Callable[[bool], None],
        on_warning: Callable[[str], None] = lambda text: None,
        begin: Callable[[], Awaitable[EarlierRun]] | None = None,
        owner: int = 0,
        clock: Callable[[], float] | None = None,
    ) -> Engine:
        """Lock the directories, replay what a crash left, and be ready to serve.

        Args:
            directories: all directories of the bookie; segments are spread over them.
            draw_generation: returns a random number of 64 bits.
            on_indexed: called after each group, before its `Done`s, with the ledgers that it touched.
            on_failed: called once, when a write or a sync failed: nothing is acknowledged any more.
            on_writable: called with False when space ran out or fences may be lost, with True when there is
                space again.
            on_warning: called with a sentence for the log, for an operator to act on.
            begin: awaited with the directories locked, before anything is read. Returns what the caller knows
                of the run before this one. Lost data becomes a mark in the first group.
            owner: of which bookie the files are (`data_directory.owner_of`); others do not count.
            clock: the time in seconds, for the metrics; None stands for the event loop's.

        Raises:
            DirectoryInUseError: another process has one of the directories open.
            CorruptRecordError: a file is not of this format version, or the directories are not those of one
                bookie.
            DiskFullError: no room for the first segment and the reserve.
            DiskFailedError: the disk fails.
        """
        clock = clock or asyncio.get_running_loop().time
        engine = cls(disk, directories, config, on_indexed, on_failed, on_writable, clock)
        try:
            await engine._start(draw_generation, on_warning, begin, owner)
        except BaseException as error:
            engine._segments.file_cache.close()
            if engine._witness is not None:
                await engine._witness.close()
            for lock in engine._locks:
                lock.release()
            raise error  # by name: see docs/WHEELS.md
        return engine

    async def _start(
        self,
        draw_generation: Callable[[], int],
        on_warning: Callable[[str], None],
        begin: Callable[[], Awaitable[EarlierRun]] | None,
        owner: int,
    ) -> None:
        config = self._config
        self._locks.extend(map(self._disk.lock_directory, self._directories))
        earlier = EarlierRun() if begin is None else await begin()
        witness = await WitnessFiles.open(self._disk, self._directories, owner, self.health)
        self._witness = witness
        recovery = CrashRecovery(self._disk, self._directories, self._segments, witness, earlier=earlier.held)
        recovered = await recovery.run(spare_bytes=config.segment_bytes)
        if (bound := earlier.lost_up_to) is not None:
            recovered.lose_all(f"the directory was set back: ledgers up to {bound} may have lost data")
        self.notes = recovered.notes
        self._ledgers = self.known = LedgerStates(recovered.ledgers, recovered.deleted, recovered.marks)
        tail = recovered.first_records()
        tail_bytes = sum(record.size for record in tail)
        capacity = max(config.segment_bytes, tail_bytes + form.DATA_OFFSET + form.GROUP_HEADER_BYTES)
        self._allocator = SegmentAllocator(
            self._disk,
            self._directories,
            recovered.home,
            segments=self._segments,
            segment_bytes=capacity,
            limits=config.space,
            next_id=recovered.next_id,
            reserve_bytes=recovered.reserve_bytes,
            spares=recovered.spares,
            spare_bytes=config.segment_bytes,
            draw_generation=draw_generation,
            list_segment=self._list_segment,
            on_ready=self._ready,
            on_warning=on_warning,
            witness=witness,
            health=self.health,
        )
        if witness.is_absent and not recovered.lost_data_of_any_ledger:
            # A new bookie. A checkpoint without a witness would look like a lost witness.
            await witness.make_missing()
        await witness.catch_up()
        self._make_background_parts(recovered, witness)
        try:
            await self._begin(recovered, tail, tail_bytes, witness)
        except BaseException as error:
            await self._allocator.close()
            raise error  # by name: see docs/WHEELS.md

    async def _begin(
        self, recovered: RecoveredState, tail: list[Record], tail_bytes: int, witness: WitnessFiles
    ) -> None:
        """Make the first segment, write the last run's tail into it, and start the background work."""
        config = self._config
        replayed = list(self._segments.in_memory.values())
        least = form.DATA_OFFSET + form.GROUP_HEADER_BYTES + tail_bytes + _ROOM_BYTES_MIN
        segment = await self._allocator.first_segment(least, recovered.used, recovered.unlisted)
        segment.previous = recovered.previous
        self._segments.add(segment)
        self._journal = Journal(
            segment,
            self._allocator,
            group_bytes_max=max(config.group_bytes_max, tail_bytes),
            short_sync_s=config.short_sync_s,
            on_group=self._index_group,
            on_dropped=self._drop,
            on_rolled=self._rolled,
            witness=witness,
            health=self.health,
            clock=self._clock,
        )
        journal = self._journal
        self.held = lambda: (witness.checkpoint, *journal.durable)
        if tail_bytes > self._journal.room:
            raise DiskFullError(f"no room for the {tail_bytes} bytes that the last run left to be rewritten")
        await self._rewrite(tail)
        with suppress(DiskFullError):  # the next start finds the loss again, and is marked already
            await witness.make_missing()
        self._allocator.segment_bytes = config.segment_bytes
        largest = config.segment_bytes - form.DATA_OFFSET - form.GROUP_HEADER_BYTES
        self._journal.limit_groups(min(config.group_bytes_max, largest))
        self._checkpointer.release_needed()
        self._sealer.clean_up(replayed, recovered.useless + recovered.unlisted)
        if not self._allocator.is_full:
            self._allocator.begin()
        self._scrubber.start()

    def _make_background_parts(self, recovered: RecoveredState, witness: WitnessFiles) -> None:
        """Make the parts that work in the background, each after the parts that it uses."""
        config, disk, health = self._config, self._disk, self.health
        segments, ledgers, allocator = self._segments, self._ledgers, self._allocator
        self._checkpointer = Checkpointer(
            disk,
            recovered.home,
            segments,
            ledgers,
            allocator,
            health,
            live_ledgers_max=config.live_ledgers_max,
            needed=recovered.needed,
            witness=witness,
            number=recovered.checkpoint_number,
        )
        self._sealer = SegmentSealer(
            disk,
            segments,
            ledgers,
            allocator,
            self._checkpointer,
            health,
            page_cache_bytes=config.page_cache_bytes,
            on_sealed=self._sealed,
        )
        self._index_rebuilder = IndexRebuilder(segments, ledgers, self._checkpointer, self._sealer, health)
        self._remover = SegmentRemover(disk, segments, allocator, self._checkpointer)
        rebuild_index = self._index_rebuilder.rebuild
        self.marking = Marking(ledgers, self._accept_change)
        self._lookup = Lookup(self, ledgers, segments, rebuild_index)
        self._compactor = Compactor(
            config.compaction,
            self,
            ledgers,
            segments,
            self._lookup,
            allocator,
            self._remover,
            rebuild_index,
            health,
        )
        self._scrubber = Scrubber(config.scrub, ledgers, segments, self._lookup, rebuild_index, health)

    async def _rewrite(self, tail: list[Record]) -> None:
        """Write the tail and new marks as the first group, durable before anything is served (rule 2)."""
        if not tail:
            return
        for record in tail:
            event = record.event
            assert event is not None
            assert not isinstance(event, list)
            if isinstance(event, Change) and event.is_for_all:
                self._ledgers.accept_for_all()
                self._journal.append(record)
            elif isinstance(event, Change) and event.last > event.ledger_id:
                self._ledgers.bury(event)
                self._journal.append(record)
            else:
                self._accept(event.ledger_id, record)
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        self._journal.barrier(durable.set_result)
        error = await durable
        if error is not None:
            raise error

    async def _list_segment(self, segment: Segment) -> None:
        await self._checkpointer.write(SegmentRow(segment.segment_id, segment.header.generation))

    def _ready(self) -> None:
        self._sealer.retry()
        self._compactor.go_on()
        # Also while closing: `close` waits for the compaction, which may have copies in the queue.
        self._journal.launch()

    def _rolled(self, segment: Segment) -> None:
        self._segments.add(self._journal.segment)
        self._sealer.seal(segment)

    def _sealed(self) -> None:
        self._compactor.notice()

    # --- health ---

    def storage_failed(self, error: StorageError) -> None:
        """Tell the server, and drop the accepted records (rule 2). See `HealthListener`."""
        records = self._journal.stop()
        self._on_failed(error)
        self._drop(records, error)

    def writable_changed(self, is_writable: bool) -> None:
        """Tell the server. See `HealthListener`."""
        self._on_writable(is_writable)

    # --- accepting ---

    def _accept(self, ledger_id: int, record: Record) -> LedgerState:
        state = self._ledgers.accept(ledger_id)
        self._journal.append(record)
        return state

    def _check_room(self, size: int, kept: int) -> None:
        if not self._allocator.is_full:
            return
        left = self._journal.room + self._allocator.reserved_bytes - self._journal.bytes_pending
        if size + kept > left:
            raise DiskFullError("no space left, and the reserve is used up")

    def _accept_change(self, row: bytes, change: Change, done: Done) -> LedgerState:
        """Accept a change that may take the last of the reserve."""
        size = form.ROW_BYTES + len(change.lock)
        self._check_room(size, 0)
        record = Record(row, change.lock or None, change, done, size)
        if not change.is_for_all:
            return self._accept(change.ledger_id, record)
        self._ledgers.accept_for_all()
        self._journal.append(record)
        return LedgerState()  # of no ledger

    # Each of these raises NoSuchLedgerError once a tombstone was accepted (rule 15).

    def append_block(
        self, block: Block, done: Done, *, from_reserve: bool = False, states_lac: bool = True
    ) -> None:
        """Accept a block; its view is kept until it is durable, and written without a copy.

        Args:
            block: a whole block.
            done: see `Done`.
            from_reserve: the block may be written into the reserve when there is no other space.
            states_lac: False if the bookie must not state the block's LAC, now or after a restart.

        Raises:
            DiskFullError: not accepted: no space (with `from_reserve`: the reserve is used up as well).
            EntryTooLargeError: the block does not fit into a segment.
        """
        size = self.size_of(block)
        if not self.health.has_room:
            if not from_reserve:
                raise DiskFullError("no space left for ordinary adds")
            self._check_room(size, self._config.space.reserve_bytes // _FENCE_SHARE)
        for watch in self.add_watches:
            watch.note(block)
        row = form.block_row(block, 0 if states_lac else form.STATES_NOTHING)
        self._accept(block.ledger_id, Record(row, block.view, block, done, size))

    def append_blocks(self, blocks: list[Block], body: Buffer, done: Done) -> None:
        """Accept ordinary blocks, of many ledgers perhaps, as one record; all or none of them are accepted.

        Args:
            blocks: whole blocks that `size_of` has passed, in their order. The list is kept.
            body: their bytes, one after another. Kept until they are durable, and written without a copy.
            done: called once, when all of them are durable and indexed, or none will be.

        Raises:
            DiskFullError: no space for ordinary adds.
        """
        if not self.health.has_room:
            raise DiskFullError("no space left for ordinary adds")
        self._ledgers.accept_blocks(blocks)
        for watch in self.add_watches:
            for block in blocks:
                watch.note(block)
        row = b"".join(map(form.block_row, blocks))
        self._journal.append(Record(row, body, blocks, done, len(row) + len(body)))

    def append_copy(self, block: Block, done: Done) -> None:
        """Accept a copy of a stored block whose segment is to be given up.

        Raises:
            DiskFullError: no space.
            EntryTooLargeError: segments have become smaller than the block.
        """
        size = self.size_of(block)
        if self._allocator.is_full:
            raise DiskFullError("no space left for copies")
        # The LAC that the block states was learnt when the block was stored, and is in the checkpoint.
        for watch in self.add_watches:
            watch.note(block)
        row = form.block_row(block, form.STATES_NOTHING)
        self._accept(block.ledger_id, Record(row, block.view, block, done, size))

    def size_of(self, block: Block) -> int:
        """Return the size of a block's record. Raises EntryTooLargeError if no segment has room for it."""
        size = block.total_bytes + form.ROW_BYTES
        if size > self._config.segment_bytes - form.DATA_OFFSET - form.GROUP_HEADER_BYTES:
            raise EntryTooLargeError(f"a block of {size} bytes does not fit into a segment")
        return size

    def append_term(self, ledger_id: int, term: int, done: Done) -> None:
        """Accept a fence: the ledger's term is at least `term` from this call on. Raises DiskFullError."""
        change = Change(form.KIND_TERM, ledger_id, term=term, before=self.term(ledger_id))
        state = self._accept_change(form.term_row(ledger_id, term), change, done)
        if self.health.error is None:
            state.term = max(state.term, term)

    def append_statement(self, ledger_id: int, statement: LacStatement, done: Done) -> None:
        """Accept an explicit LAC. Raises DiskFullError when there is no room for ordinary adds."""
        if not self.health.has_room:
            raise DiskFullError("no space left for ordinary adds")
        change = Change(form.KIND_STATEMENT, ledger_id, statement=statement)
        size = form.ROW_BYTES + len(statement.mac)
        row = form.statement_row(ledger_id, statement)
        self._accept(ledger_id, Record(row, statement.mac or None, change, done, size))

    def append_mark(self, ledger_id: int, done: Done, *, is_of_listed: bool = False) -> None:
        """Accept the mark that data of this ledger was lost (rule 4).

        Raises DiskFullError. The mark counts in memory then, and with the next checkpoint.

        Args:
            is_of_listed: all that was lost are entries that an index lists.
        """
        number = self._ledgers.marks.draw()
        change = Change(form.KIND_MARK, ledger_id, number=number, is_of_listed=is_of_listed)
        row = form.mark_row(ledger_id, number, is_of_listed=is_of_listed)
        try:
            state = self._accept_change(row, change, done)
        except DiskFullError:
            if not self.is_deleted(ledger_id):
                state = self._ledgers.state(ledger_id)
                state.mark(number, is_of_listed=is_of_listed, is_proven=False)
            raise
        state.mark(number, is_of_listed=is_of_listed, is_proven=False)  # from now on, durable or not

    def append_lock(self, ledger_id: int, lock: bytes, done: Done) -> None:
        """Accept a ledger's lock, which counts from this call on, durable or not. Raises DiskFullError."""
        change = Change(form.KIND_LOCK, ledger_id, lock=lock)
        state = self._accept_change(form.lock_row(ledger_id, lock), change, done)
        state.lock = lock

    def append_tombstone(self, ledger_id: int, done: Done, *, last: int = -1) -> None:
        """Accept that a ledger has been deleted: from this call on nothing is accepted for it (rule 15).

        The ledger's state is dropped once the tombstone is durable. With `last`, all ledgers up to that one
        are gone for good, and none of them has a state here. Raises DiskFullError.
        """
        if last > ledger_id:
            assert next(self._ledgers.states.ids_from(ledger_id), last + 1) > last
            self._check_room(form.ROW_BYTES, 0)
            gone = Change(form.KIND_TOMBSTONE, ledger_id, last=last)
            self._ledgers.bury(gone)
            self._journal.append(
                Record(form.tombstones_row(ledger_id, last), None, gone, done, form.ROW_BYTES)
            )
            return
        change = Change(form.KIND_TOMBSTONE, ledger_id)
        self._accept_change(form.tombstone_row(ledger_id), change, done)
        self._ledgers.tombstones_pending.add(ledger_id)

    def append_trim(self, ledger_id: int, first: int, done: Done) -> None:
        """Accept that the ledger's entries below `first` are not kept.

        Once the trim is durable, reads answer that those entries are not there, and compaction frees their
        space in time. A `first` that is not above an earlier one changes nothing. Raises DiskFullError.
        """
        change = Change(form.KIND_TRIM, ledger_id, first=first)
        self._accept_change(form.trim_row(ledger_id, first), change, done)

    def append_forget(self, ledger_id: int, done: Done) -> None:
        """Accept that the ledger's stored entries do not count any more; entries added later do.

        For a ledger that other bookies hold. Compaction frees the entries' space in time; the ledger's term
        and lock stay. Raises DiskFullError.
        """
        change = Change(form.KIND_FORGET, ledger_id)
        self._accept_change(form.forget_row(ledger_id), change, done)
        for watch in self.add_watches:
            watch.note_forget(ledger_id)

    def barrier(self, done: Done) -> None:
        """Call `done` once everything accepted so far is durable and indexed: within this call if it is."""
        self._journal.barrier(done)

    # --- outcomes ---

    def _index_group(self, group: Group) -> None:
        """Index a durable group, and call its `Done`s."""
        reductions, indexed = self._ledgers.reductions, self._ledgers.indexed
        touched = self._ledgers.index(group)
        if self._ledgers.reductions != reductions:
            self._compactor.notice()
        metrics = self._metrics
        metrics.count_group(
            self._ledgers.indexed - indexed,
            group.size,
            queued_s=group.started_at - group.queued_at,
            committed_s=group.durable_at - group.started_at,
            durable_at=group.durable_at,
        )
        self._on_indexed(touched)
        self._call_back(group.records, None)
        metrics.acknowledge.add(self._clock() - group.durable_at)

    def _call_back(self, records: Sequence[Record], error: StorageError | None) -> None:
        for record in records:
            try:
                record.done(error)
            except Exception as broken:
                # A fault of one caller must not keep the other callers' `Done`s from being called.
                context = {"message": "a storage callback failed", "exception": broken}
                asyncio.get_running_loop().call_exception_handler(context)

    def _drop(self, records: Sequence[Record], error: StorageError) -> None:
        self._ledgers.count_dropped(sum(record.events for record in records))
        if isinstance(error, DiskFullError):
            for record in records:
                if isinstance(record.event, Change):
                    self._ledgers.revert(record.event)
        self._call_back(records, error)

    # --- state ---

    def term(self, ledger_id: int) -> int:
        """Return the highest term accepted, perhaps not durable yet; 0 for a ledger never heard of."""
        state = self._ledgers.get(ledger_id)
        if self._ledgers.marks.is_fenced(ledger_id, state):
            return TERM_FINAL
        return state.term if state is not None else 0

    def lock(self, ledger_id: int) -> bytes:
        """Return the ledger's lock, perhaps not durable yet; empty where it has none."""
        state = self._ledgers.get(ledger_id)
        return state.lock if state is not None else b""

    def is_deleted(self, ledger_id: int, last: int = -1) -> bool:
        """Return whether a tombstone was accepted for the ledger, perhaps not durable yet.

        With `last`: whether all ledgers up to that one have tombstones.
        """
        if last > ledger_id:
            return self._ledgers.deleted.covers(ledger_id, last)
        return self._ledgers.is_deleted(ledger_id)

    @property
    def eviction_candidates(self) -> set[int]:
        """Return the ledgers that the caller put here, to evict those that are still in the set later.

        A ledger is taken out when a record is accepted for it, and when a repair of it begins. From then on
        the repair may conclude that the entries here stay here.
        """
        return self._ledgers.eviction_candidates

    def is_damaged(self, ledger_id: int) -> bool:
        """Return whether data of this ledger was lost, or may have been (rule 4)."""
        return self._ledgers.mark_of(ledger_id) > 0

    def is_in_doubt(self, ledger_id: int) -> bool:
        """Return whether this bookie may have had entries or fences of the ledger that it does not list.

        It denies no entry then, and takes no ordinary adds. Other damage is of entries that it lists.
        """
        state, marks = self._ledgers.get(ledger_id), self._ledgers.marks
        if not marks.number:
            return state is not None and state.is_in_doubt
        return marks.is_in_doubt(ledger_id, state)

    def last_entry(self, ledger_id: int) -> int:
        """Return the highest entry that is durable and indexed, or −1."""
        state = self._ledgers.get(ledger_id)
        return state.last_entry if state is not None else -1

    def statement(self, ledger_id: int) -> LacStatement | None:
        """Return the highest LAC statement that is durable and indexed."""
        state = self._ledgers.get(ledger_id)
        return state.statement if state is not None else None

    def first_entry(self, ledger_id: int) -> int:
        """Return the first entry that is kept, by the trims that are durable; 0 where there were none."""
        state = self._ledgers.get(ledger_id)
        return state.first if state is not None else 0

    def is_pending(self, ledger_id: int) -> bool:
        """Return whether a record accepted for the ledger is not yet durable and indexed."""
        return self._ledgers.is_pending(ledger_id)

    @property
    def is_closed(self) -> bool:
        """Return whether `close` has drained the journal: nothing more may be accepted."""
        return self._is_closed

    @property
    def bytes_pending(self) -> int:
        """Return the bytes of records that are accepted and not yet durable."""
        return self._journal.bytes_pending

    @property
    def has_room(self) -> bool:
        """Return whether entries can be stored."""
        return self.health.has_room and self.health.error is None and not self._is_closed

    @property
    def is_writable(self) -> bool:
        """Return whether ordinary adds are accepted: there is room, and not every fence may be lost.

        Ledgers above the bound of the mark of all ledgers take adds (rule 4).
        """
        return self.has_room and not self._ledgers.marks.is_unbounded

    # --- reads ---

    async def read(self, ledger_id: int, content_term: int, entry_ids: range, bytes_max: int) -> ReadResult:
        """Read durable and indexed entries, up to the first that is not there or the end of the budget.

        Whole blocks are returned verbatim, parts of a block as partial blocks of two buffers each. At least
        one entry is returned, even above the budget. Every byte is checked; a ledger whose bytes fail is
        marked damaged (rule 4).

        Raises:
            StorageError: the mark of a damaged ledger could not be made durable.
        """
        return await self._lookup.read(ledger_id, content_term, entry_ids, bytes_max)

    async def list_entries(
        self, ledger_id: int, from_entry: int, rows_max: int, *, to_entry: int = ENTRY_ID_MAX
    ) -> tuple[list[ListedRun], int]:
        """Return runs (first entry, content term, count, stride) by first entry, and where to go on or −1.

        Runs may overlap where entries were stored more than once. No run starts above `to_entry`.

        Raises:
            DiskFailedError: the disk fails to read an index and the segment that it could be rebuilt from.
        """
        return await self._lookup.list_entries(ledger_id, from_entry, to_entry, rows_max)

    def list_ledgers(self, from_ledger: int, count_max: int) -> tuple[list[int], int]:
        """Return the ids of up to `count_max` ledgers with a state, ascending, and where to go on or −1."""
        return self._ledgers.list(from_ledger, count_max)

    # --- metrics and the end ---

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "is_writable": self.is_writable,
            "queue": {"bytes": self.bytes_pending, "records": self._journal.records_queued},
            **self._metrics.as_dict(),
            "damaged_blocks": self._lookup.damaged_blocks,
            "unread_blocks": self._lookup.unread_blocks,
            "segments": {
                **self._segments.metrics(),
                "current": self._journal.segment.segment_id,
                "current_bytes": self._journal.segment.end,
            },
            "reclaimed": self._compactor.metrics(),
            "scrubbed": self._scrubber.metrics(),
            "ledgers": {
                "count": len(self._ledgers.states),
                "damaged": self._ledgers.states.damaged_count,
                "deleted_ranges": len(self._ledgers.deleted),
                "lifted": self._ledgers.states.lifted_count,
                **self._ledgers.marks.metrics(),
            },
            "disk": {
                "free_bytes": (space := min(map(self._disk.space, self._directories))).free,
                "total_bytes": space.total,
                **self._allocator.metrics(),
            },
        }

    async def _drained(self) -> StorageError | None:
        """Wait until no record is on its way to the disk; returns the error if one was dropped."""
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        self.barrier(durable.set_result)
        return await durable

    async def close(self) -> None:
        """Make accepted records durable, seal the current segment, and release the directories' locks."""
        if self._is_closed:
            return
        error = await self._drained()
        self._is_closed = True
        await self._scrubber.close()
        await self._compactor.close()
        # A compaction that stopped half way may have copies on their way into the segment to be sealed.
        error = await self._drained() or error
        await self._allocator.close()
        await self._sealer.close()
        if error is None and self.health.error is None:
            try:
                await self._sealer.finish(self._journal.segment)
                if self._witness is not None:
                    await self._witness.sync()
            except (DiskFailedError, DiskFullError) as failure:
                self._metrics.close_error = str(failure)  # the next start replays instead
        if self._witness is not None:
            await self._witness.close()
        await self._segments.close()
        for lock in self._locks:
            lock.release()
