"""The storage engine: what the server sees of a bookie's disk.

Owns the order of things: what is accepted is written in the order of the calls, in groups, each with one
fdatasync; a `Done` is called when its record is durable and indexed, and never before (rules 2 and 3).
Owns the state of ledgers and the set of segments. The parts: `journal` writes groups, `provision` sees to
space, `reader` reads, `restart` opens a directory, `tender` seals segments and writes checkpoints.

All methods are called on the loop's thread. Accepting never blocks.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.storage import format as form
from bookie_aio.storage.figures import Figures
from bookie_aio.storage.journal import AddWatch, Change, Done, Journal, Record
from bookie_aio.storage.ledgers import Ledgers
from bookie_aio.storage.lookup import Lookup
from bookie_aio.storage.provision import Provision
from bookie_aio.storage.reader import ReadResult
from bookie_aio.storage.restart import Restart, Restarted
from bookie_aio.storage.tender import Tender
from metadata.errors import (
    DiskFailedError,
    DiskFullError,
    EntryTooLargeError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from bookie_aio.storage.checkpoint import LedgerState
    from bookie_aio.storage.disk import DirectoryLock, Disk
    from bookie_aio.storage.journal import Group
    from bookie_aio.storage.reader import ListedRun
    from bookie_aio.storage.segment import Segment
    from bookie_aio.wire.blocks import Block, LacStatement

__all__ = ["Done", "Engine", "ReadResult", "StorageConfig"]

_FENCE_SHARE = 8
"""One part in this many of the reserve is kept for fences; recovery adds get the rest."""


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The engine's limits."""

    segment_bytes: int = 256 * 1024 * 1024
    group_bytes_max: int = 4 * 1024 * 1024
    reserve_bytes: int = 32 * 1024 * 1024
    space_retry_s: float = 5.0


class Engine:
    """A bookie's storage. Open it with `Engine.open`."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        config: StorageConfig,
        lock: DirectoryLock,
        restarted: Restarted,
        on_indexed: Callable[[Collection[int]], None],
        on_failed: Callable[[StorageError], None],
    ) -> None:
        """Not for users: `open` is."""
        self._disk = disk
        self._directory = directory
        self._config = config
        self._lock = lock
        self._on_indexed = on_indexed
        self._on_failed = on_failed
        self._ledgers = Ledgers(restarted.ledgers, restarted.deleted)
        self._segments = restarted.segments
        self._figures = Figures()
        self._is_closed = False
        self.add_watches: set[AddWatch] = set()
        self.notes: Sequence[str] = restarted.notes
        self._tender: Tender
        self._provision: Provision
        self._journal: Journal
        self._lookup: Lookup

    @classmethod
    async def open(
        cls,
        disk: Disk,
        directory: str,
        config: StorageConfig,
        *,
        draw_generation: Callable[[], int],
        on_indexed: Callable[[Collection[int]], None],
        on_failed: Callable[[StorageError], None],
        on_writable: Callable[[bool], None],
    ) -> Engine:
        """Lock the directory, replay what a crash left, and be ready to serve.

        Args:
            draw_generation: gives a random number of 64 bits.
            on_indexed: called after each group, before its `Done`s, with the ledgers that it touched.
            on_failed: called once, when a write or a sync failed: nothing is acknowledged any more.
            on_writable: called with False when space ran out or fences may be lost, with True when there is
                space again.

        Raises:
            DirectoryInUseError: another process has it open.
            CorruptRecordError: something there is not of this format version.
            DiskFullError: there is not even room for the first segment and the reserve.
            DiskFailedError: the disk fails.
        """
        lock = disk.lock_directory(directory)
        restarted: Restarted | None = None
        try:
            restarted = await Restart(disk, directory).run()
            engine = cls(disk, directory, config, lock, restarted, on_indexed, on_failed)
            await engine._start(restarted, draw_generation, on_writable)
        except BaseException:
            for segment in restarted.segments.values() if restarted is not None else ():
                segment.close()
            lock.release()
            raise
        return engine

    async def _start(
        self,
        restarted: Restarted,
        draw_generation: Callable[[], int],
        on_writable: Callable[[bool], None],
    ) -> None:
        config = self._config
        tail = restarted.first_records()
        tail_bytes = sum(record.size for record in tail)
        capacity = max(config.segment_bytes, tail_bytes + form.DATA_OFFSET + form.GROUP_HEADER_BYTES)
        self._provision = Provision(
            self._disk,
            self._directory,
            segment_bytes=capacity,
            reserve_bytes=config.reserve_bytes,
            retry_s=config.space_retry_s,
            next_id=restarted.next_id,
            has_reserve=restarted.has_reserve,
            draw_generation=draw_generation,
            list_segment=self._list_segment,
            on_ready=self._ready,
            on_writable=on_writable,
            on_failed=self._fail,
        )
        self._tender = Tender(
            self._disk,
            self._directory,
            self._segments,
            self._ledgers,
            self._provision,
            self._fail,
            lambda: on_writable(False),
        )
        self._tender.is_all_damaged = restarted.is_all_damaged
        self._tender.also_listed = restarted.needed
        for ledger_id in restarted.damaged:
            self._ledgers.state(ledger_id).is_damaged = True
        self._lookup = Lookup(self, self._ledgers, self._segments, self._tender)
        segment = await self._provision.first_segment()
        segment.previous = restarted.previous
        self._segments[segment.segment_id] = segment
        self._journal = Journal(
            segment,
            self._provision,
            group_bytes_max=max(config.group_bytes_max, tail_bytes),
            on_group=self._index_group,
            on_dropped=self._drop,
            on_rolled=self._rolled,
            on_failed=self._on_failed,
        )
        if tail_bytes > self._journal.room:
            raise DiskFullError(f"no room for the {tail_bytes} bytes that the last run left to be rewritten")
        await self._rewrite(tail)
        self._provision.segment_bytes = config.segment_bytes
        largest = config.segment_bytes - form.DATA_OFFSET - form.GROUP_HEADER_BYTES
        self._journal.limit_groups(min(config.group_bytes_max, largest))
        await self._clean_up(segment, restarted)
        if not self._provision.is_full:
            self._provision.begin()

    async def _clean_up(self, current: Segment, restarted: Restarted) -> None:
        """Seal what the restart replayed, and remove what nothing needs any more."""
        for old in self._segments.values():
            if old is not current and old.index is not None:
                self._tender.add_unsealed(old)
        self._tender.also_listed = set()
        try:
            await self._tender.seal_all()
        except DiskFullError:
            return  # sealed later, removed at the next start
        await self._tender.remove(restarted.useless)

    async def _rewrite(self, tail: list[Record]) -> None:
        """Write the tail and new marks as the first group: durable here before anything is served."""
        if not tail:
            return
        for record in tail:
            event = record.event
            assert event is not None
            if isinstance(event, Change) and event.is_for_all:
                self._ledgers.accept_for_all()
                self._journal.append(record)
            else:
                self._accept(event.ledger_id, record)
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        self._journal.barrier(durable.set_result)
        error = await durable
        if error is not None:
            raise error

    async def _list_segment(self, segment: Segment) -> None:
        await self._tender.checkpoint(segment.segment_id)

    def _ready(self) -> None:
        self._tender.retry()
        if not self._is_closed:
            self._journal.launch()

    def _rolled(self, segment: Segment) -> None:
        current = self._journal.segment
        self._segments[current.segment_id] = current
        self._tender.seal(segment)

    def _fail(self, error: StorageError) -> None:
        self._journal.fail(error)

    # --- accepting ---

    def _accept(self, ledger_id: int, record: Record) -> LedgerState:
        state = self._ledgers.accept(ledger_id)
        self._journal.append(record)
        return state

    def _check_room(self, size: int, kept: int) -> None:
        if not self._provision.is_full:
            return
        left = self._journal.room + self._provision.spare_bytes - self._journal.bytes_pending
        if size + kept > left:
            raise DiskFullError("no space left, and the reserve is used up")

    def _accept_change(self, row: bytes, change: Change, done: Done) -> LedgerState:
        """Accept what may take the last of the reserve."""
        size = form.ROW_BYTES + len(change.lock)
        self._check_room(size, 0)
        return self._accept(change.ledger_id, Record(row, change.lock or None, change, done, size))

    # Each of these raises NoSuchLedgerError once a tombstone was accepted (rule 15).

    def append_block(self, block: Block, done: Done, *, from_reserve: bool = False) -> None:
        """Accept a block; its view is kept until it is durable, and written as it is.

        Raises:
            DiskFullError: not accepted: no space (with `from_reserve`: the reserve is used up as well).
            EntryTooLargeError: it does not fit into a segment.
        """
        size = block.total_bytes + form.ROW_BYTES
        if size > self._config.segment_bytes - form.DATA_OFFSET - form.GROUP_HEADER_BYTES:
            raise EntryTooLargeError(f"a block of {size} bytes does not fit into a segment")
        for watch in self.add_watches:
            watch.note(block)
        if self._provision.is_full:
            if not from_reserve:
                raise DiskFullError("no space left for new segments")
            self._check_room(size, self._config.reserve_bytes // _FENCE_SHARE)
        self._accept(block.ledger_id, Record(form.block_row(block), block.view, block, done, size))

    def append_term(self, ledger_id: int, term: int, done: Done) -> None:
        """Accept a fence: the ledger's term is at least `term` from now on. Raises DiskFullError."""
        change = Change(form.KIND_TERM, ledger_id, term=term)
        state = self._accept_change(form.term_row(ledger_id, term), change, done)
        if self._journal.error is None:
            state.term = max(state.term, term)

    def append_statement(self, ledger_id: int, statement: LacStatement, done: Done) -> None:
        """Accept an explicit LAC. Raises DiskFullError when the engine is not writable."""
        if self._provision.is_full:
            raise DiskFullError("no space left for new segments")
        change = Change(form.KIND_STATEMENT, ledger_id, statement=statement)
        size = form.ROW_BYTES + len(statement.mac)
        row = form.statement_row(ledger_id, statement)
        self._accept(ledger_id, Record(row, statement.mac or None, change, done, size))

    def append_mark(self, ledger_id: int, done: Done) -> None:
        """Accept the mark that data of this ledger was lost (rule 4). Raises DiskFullError."""
        change = Change(form.KIND_MARK, ledger_id)
        state = self._accept_change(form.mark_row(ledger_id), change, done)
        state.is_damaged = True  # from now on, durable or not

    def append_lock(self, ledger_id: int, lock: bytes, done: Done) -> None:
        """Accept the lock of a ledger, which counts from now on, durable or not. Raises DiskFullError."""
        change = Change(form.KIND_LOCK, ledger_id, lock=lock)
        state = self._accept_change(form.lock_row(ledger_id, lock), change, done)
        state.lock = lock

    def append_tombstone(self, ledger_id: int, done: Done) -> None:
        """Accept that a ledger has been deleted: nothing more is accepted for it, from now on and for ever.

        What is held of it is forgotten once the tombstone is durable. Raises DiskFullError.
        """
        change = Change(form.KIND_TOMBSTONE, ledger_id)
        self._accept_change(form.tombstone_row(ledger_id), change, done)
        self._ledgers.deleted.add(ledger_id)

    def barrier(self, done: Done) -> None:
        """Call back once everything accepted so far is durable and indexed: in this call if it is now."""
        self._journal.barrier(done)

    # --- what became of it ---

    def _index_group(self, group: Group) -> None:
        """Index a durable group, and tell those who wait."""
        touched = self._ledgers.index(group)
        self._figures.count_group(len(group.records), group.size, group.synced_s)
        self._on_indexed(touched)
        self._tell(group.records, None)

    def _tell(self, records: Sequence[Record], error: StorageError | None) -> None:
        for record in records:
            try:
                record.done(error)
            except Exception as broken:
                # One caller's fault must not keep the others from hearing.
                context = {"message": "a storage callback failed", "exception": broken}
                asyncio.get_running_loop().call_exception_handler(context)

    def _drop(self, records: Sequence[Record], error: StorageError) -> None:
        self._ledgers.settle(sum(record.event is not None for record in records))
        self._tell(records, error)

    # --- state ---

    def term(self, ledger_id: int) -> int:
        """Give the highest term accepted, perhaps not durable yet; 0 for a ledger never heard of."""
        state = self._ledgers.get(ledger_id)
        return state.term if state is not None else 0

    def lock(self, ledger_id: int) -> bytes:
        """Give the ledger's lock, perhaps not durable yet; empty where it has none."""
        state = self._ledgers.get(ledger_id)
        return state.lock if state is not None else b""

    def is_deleted(self, ledger_id: int) -> bool:
        """Tell whether a tombstone was accepted for the ledger, perhaps not durable yet."""
        return self._ledgers.is_deleted(ledger_id)

    @property
    def is_all_damaged(self) -> bool:
        """Tell whether data was lost that may concern any ledger."""
        return self._tender.is_all_damaged

    def is_damaged(self, ledger_id: int) -> bool:
        """Tell whether data of this ledger was lost, or may have been (rule 4)."""
        state = self._ledgers.get(ledger_id)
        return self._tender.is_all_damaged or (state is not None and state.is_damaged)

    def last_entry(self, ledger_id: int) -> int:
        """Give the highest entry that is durable and indexed, or −1."""
        state = self._ledgers.get(ledger_id)
        return state.last_entry if state is not None else -1

    def statement(self, ledger_id: int) -> LacStatement | None:
        """Give the highest LAC stated by anything that is durable and indexed."""
        state = self._ledgers.get(ledger_id)
        return state.statement if state is not None else None

    def is_pending(self, ledger_id: int) -> bool:
        """Tell whether something accepted for the ledger is not yet durable and indexed."""
        return self._ledgers.is_pending(ledger_id)

    def unsealed(self) -> Sequence[Segment]:
        """Give the segments whose entries are found through the index in memory only."""
        return self._tender.unsealed(self._journal.segment)

    @property
    def is_closed(self) -> bool:
        """Tell whether it was closed."""
        return self._is_closed

    @property
    def bytes_pending(self) -> int:
        """Give the bytes accepted that are not durable and indexed yet."""
        return self._journal.bytes_pending

    @property
    def has_room(self) -> bool:
        """Tell whether entries can be stored."""
        return not self._provision.is_full and self._journal.error is None and not self._is_closed

    @property
    def is_writable(self) -> bool:
        """Tell whether ordinary adds are accepted: there is room, and no fence was forgotten (rule 4)."""
        return self.has_room and not self.is_all_damaged

    # --- reads ---

    async def read(self, ledger_id: int, content_term: int, entry_ids: range, bytes_max: int) -> ReadResult:
        """Read durable and indexed entries, up to the first that is not there or the end of the budget.

        Whole blocks come verbatim, parts of one as partial blocks, each part as two buffers. One entry
        comes in any case. All that is read is checked; bytes that fail are marked lost (rule 4).
        """
        return await self._lookup.read(ledger_id, content_term, entry_ids, bytes_max)

    async def list_entries(
        self, ledger_id: int, from_entry: int, rows_max: int
    ) -> tuple[list[ListedRun], int]:
        """Give runs (first entry, content term, count, stride) by first entry, and where to go on or −1.

        Runs may overlap where entries were stored more than once.
        """
        return await self._lookup.list_entries(ledger_id, from_entry, rows_max)

    def list_ledgers(self, from_ledger: int, count_max: int) -> tuple[list[int], int]:
        """Give ids, ascending, of ledgers of which anything is held, and where to go on or −1."""
        return self._ledgers.list(from_ledger, count_max)

    # --- the rest ---

    def figures(self) -> dict[str, object]:
        """Give the figures that `bookie info` shows."""
        return {
            "is_writable": self.is_writable,
            "queue": {"bytes": self.bytes_pending, "records": self._journal.records_queued},
            **self._figures.as_dict(),
            "damaged_blocks": self._lookup.damaged_blocks,
            "segments": {
                "count": len(self._segments),
                "sealed": sum(segment.sealed is not None for segment in self._segments.values()),
                "bytes": sum(segment.end for segment in self._segments.values()),
                "current": self._journal.segment.segment_id,
                "current_bytes": self._journal.segment.end,
            },
            "ledgers": {
                "count": len(self._ledgers.states),
                "damaged": sum(state.is_damaged for state in self._ledgers.states.values()),
                "deleted_ranges": len(self._ledgers.deleted),
                "all_damaged": self._tender.is_all_damaged,
            },
            "disk": {
                "free_bytes": self._disk.free_bytes(self._directory),
                "has_reserve": self._provision.has_reserve,
            },
        }

    async def close(self) -> None:
        """Finish what is accepted, seal the segment for a quick start, and let go of the directory."""
        if self._is_closed:
            return
        durable: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        self.barrier(durable.set_result)
        error = await durable
        self._is_closed = True
        await self._provision.close()
        await self._tender.close()
        if error is None and self._journal.error is None:
            try:
                await self._tender.finish(self._journal.segment)
            except (DiskFailedError, DiskFullError) as failure:
                self._figures.close_error = str(failure)  # the next start replays instead
        for segment in self._segments.values():
            segment.close()
        self._lock.release()
