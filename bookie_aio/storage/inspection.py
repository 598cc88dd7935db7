"""Looking at a bookie's directories while it does not run: segments, ledgers, and damage. Changes nothing.

The conclusions are those of a start (`crash_recovery`), on a disk that changes nothing. On top of that every
record of every segment is read and checked, as the scrubber does it. So all that a start or a pass of the
scrubber would find is found, before the bookie is started.

A segment's *live* bytes are those that the compactor would keep.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.crash_recovery import CrashRecovery
from bookie_aio.storage.data_directory import owner_of, read_cookie
from bookie_aio.storage.health import StorageHealth
from bookie_aio.storage.ledgers.checkpoint import IdRanges
from bookie_aio.storage.maintenance.compactor import counting_bytes
from bookie_aio.storage.maintenance.scrubber import RUNS_MAX, blocks_in_gaps
from bookie_aio.storage.read.reader import DamagedBlockError, StoredCopy, UnreadBlockError, read_block
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.replay import Gap, walk_groups
from bookie_aio.storage.segment.segment_set import SegmentSet
from bookie_aio.storage.segment.witness import WitnessFiles
from metadata.errors import (
    CookieMismatchError,
    CorruptRecordError,
    DiskFailedError,
    NoSuchKeyError,
    StorageError,
)
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie_aio.storage.crash_recovery import Held, RecoveredState
    from bookie_aio.storage.disk.disk import DirectoryLock, Disk
    from bookie_aio.storage.ledgers.checkpoint import LedgerState
    from bookie_aio.storage.segment.segment import Segment
    from metadata.access.bookies import Cookie

_CACHE_BYTES = 64 * 1024 * 1024
_FILES_MAX = 64
_KINDS = {
    form.KIND_BLOCK: "entries", form.KIND_TERM: "a fence", form.KIND_STATEMENT: "a LAC statement",
    form.KIND_MARK: "a mark", form.KIND_TOMBSTONE: "a tombstone", form.KIND_TRIM: "a trim",
    form.KIND_LOCK: "a lock", form.KIND_FORGET: "a forget", form.KIND_LIFT: "a lift",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is damaged, missing, or in contradiction."""

    text: str
    segment_id: int | None = None
    offset: int | None = None
    ledger_id: int | None = None
    first_entry: int | None = None
    last_entry: int | None = None
    counts: bool = True
    """Whether the bookie would need it: entries of deleted ledgers do not count."""


@dataclass(slots=True)
class InspectedSegment:
    """One segment."""

    segment_id: int
    path: str
    generation: int
    is_sealed: bool
    file_bytes: int
    """The length of its file, which is preallocated while it is written to."""
    used_bytes: int
    """Where its durable groups end."""
    live_bytes: int = 0
    dead_bytes: int = 0
    groups: int = 0
    ledgers: int = 0
    damaged_records: int = 0


@dataclass(slots=True)
class InspectedLedger:
    """One ledger."""

    ledger_id: int
    term: int
    """The term that it is fenced with; 0: it was never fenced."""
    entries: int = 0
    last_entry: int = -1
    lac: int | None = None
    """The highest LAC that was stated."""
    first_kept: int = 0
    """Entries below were trimmed."""
    is_marked: bool = False
    """Whether the bookie says that it lost data of it."""
    has_lock: bool = False
    """Whether requests need its password's token."""
    bytes: int = 0


@dataclass(slots=True)
class Inspection:
    """The contents of a bookie's directories."""

    cookie: Cookie
    directories: list[str]
    checkpoint: int = 0
    segments: list[InspectedSegment] = field(default_factory=list)
    spare_files: int = 0
    reserve_bytes: int = 0
    ledgers: list[InspectedLedger] = field(default_factory=list)
    deleted_ranges: list[tuple[int, int]] = field(default_factory=list)
    marks_of_all: dict[str, object] = field(default_factory=dict)
    tail_records: int = 0
    """Records of the last group, which a start writes again, since nothing proves that it was durable."""
    damage: list[Damage] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        """Return whether anything is damaged that counts, or the bookie has marks of lost data."""
        is_marked = any(one.is_marked for one in self.ledgers) or bool(self.marks_of_all.get("all_damaged"))
        return is_marked or any(one.counts for one in self.damage)


class Inspector:
    """Looks at the directories of one bookie."""

    def __init__(
        self,
        disk: Disk,
        directories: Sequence[str],
        on_progress: Callable[[int, int], None],
        *,
        earlier: Sequence[Held] = (),
    ) -> None:
        """Prepare.

        Args:
            directories: all directories of the bookie.
            on_progress: called with the bytes of segments that were checked, and with all of them.
            earlier: what the storage held at least, as the age files say.
        """
        self._disk = disk
        self._directories = directories
        self._on_progress = on_progress
        self._earlier = earlier
        self._segments = SegmentSet(
            disk, files_max=_FILES_MAX, heads_bytes_max=_CACHE_BYTES, locations_bytes_max=_CACHE_BYTES
        )
        self._covered: dict[int, dict[tuple[int, int], IdRanges]] = {}
        self._bytes_of: dict[int, int] = {}

    async def run(self) -> Inspection:
        """Inspect the directories.

        Raises:
            DirectoryInUseError: a bookie runs on one of them.
            NoSuchKeyError: a directory has no cookie.
            CookieMismatchError: the directories are not all those of one bookie.
            CorruptRecordError: a cookie is damaged, or a file is of another format version.
        """
        locks: list[DirectoryLock] = []
        try:
            locks.extend(map(self._disk.lock_directory, self._directories))
            found = Inspection(await self._cookie(), list(self._directories))
            try:
                await self._read(found)
            except (DiskFailedError, FileNotFoundError) as error:
                # No file disappears meanwhile: one that is not found is a link to a file that is not there.
                found.damage.append(Damage(f"the disk fails: {error}"))
            return found
        finally:
            self._segments.file_cache.close()
            for lock in locks:
                lock.release()

    async def _cookie(self) -> Cookie:
        cookies = []
        for path in self._directories:
            cookie = await read_cookie(self._disk, path)
            if cookie is None:
                raise NoSuchKeyError(f"{path} is no bookie's directory: it has no cookie")
            cookies.append(cookie)
        first = cookies[0]
        if any(one != first for one in cookies):
            raise CookieMismatchError(f"{', '.join(self._directories)} are not directories of one bookie")
        if first.directories != len(cookies):
            raise CookieMismatchError(
                f"bookie {first.bookie_id} has {first.directories} directories: name all of them, not "
                f"{len(cookies)}"
            )
        return first

    async def _read(self, found: Inspection) -> None:
        owner = owner_of(found.cookie)
        witness = await WitnessFiles.open(self._disk, self._directories, owner, StorageHealth(_Nobody()))
        try:
            await self._inspect(found, witness)
        finally:
            await witness.close()

    async def _inspect(self, found: Inspection, witness: WitnessFiles) -> None:
        recovery = CrashRecovery(
            self._disk, self._directories, self._segments, witness, earlier=self._earlier
        )
        state = await recovery.run(spare_bytes=StorageConfig().segment_bytes)
        found.checkpoint = state.checkpoint_number
        found.spare_files = len(state.spares)
        found.reserve_bytes = state.reserve_bytes
        found.deleted_ranges = list(state.deleted.ranges())
        found.marks_of_all = state.marks.metrics()
        found.tail_records = len(state.tail.rows) if state.tail is not None else 0
        found.damage += [Damage(note) for note in state.notes]
        segments = [self._segments.by_id[one] for one in sorted(self._segments.by_id)]
        total, done = sum(one.end for one in segments), 0
        for segment in segments:
            found.segments.append(await self._segment(segment, state, found))
            done += segment.end
            self._on_progress(done, total)
        found.ledgers += [self._ledger(one, state) for one in state.ledgers.ids_from(0)]

    def _ledger(self, ledger_id: int, state: RecoveredState) -> InspectedLedger:
        one = state.ledgers.get(ledger_id)
        assert one is not None
        covered = self._covered.get(ledger_id, {})
        return InspectedLedger(
            ledger_id,
            one.term,
            sum(last + 1 - first for ids in covered.values() for first, last in ids.ranges()),
            one.last_entry,
            None if one.statement is None else one.statement.lac,
            one.first,
            one.is_marked or ledger_id in state.damage,
            bool(one.lock),
            self._bytes_of.get(ledger_id, 0),
        )

    async def _segment(self, segment: Segment, state: RecoveredState, found: Inspection) -> InspectedSegment:
        size: int | None = None
        try:
            size = await self._size(segment.path)
        except (FileNotFoundError, DiskFailedError) as error:
            found.damage.append(Damage(f"{segment.path} cannot be opened: {error}", segment.segment_id))
        report = InspectedSegment(
            segment.segment_id, segment.path, segment.header.generation, segment.sealed is not None,
            size or 0, segment.end,
        )  # fmt: skip
        is_index_intact = await self._index(segment, state, report, found)
        damage: list[Damage] = []
        if size is not None:
            damage = await self._records(segment, state, report, check_gaps=is_index_intact)
        report.damaged_records = len(damage)
        found.damage += damage
        report.dead_bytes = max(0, segment.end - form.DATA_OFFSET - report.live_bytes)
        return report

    async def _size(self, path: str) -> int:
        file = await self._segments.file_cache.borrow(path)
        try:
            return file.size()
        finally:
            self._segments.file_cache.give_back(path)

    async def _index(
        self, segment: Segment, state: RecoveredState, report: InspectedSegment, found: Inspection
    ) -> bool:
        """Count what the index lists; return False where the index is damaged: it can be rebuilt."""
        if segment.sealed is None:
            assert segment.index is not None
            for ledger_id, runs in segment.index.ledgers.items():
                one = state.ledgers.get(ledger_id)
                extents = [
                    (run.first, run.last, run.stride) for run in runs.overlapping(0, ENTRY_ID_MAX, RUNS_MAX)
                ]
                self._count(report, ledger_id, one, extents, runs.size)
            return True
        try:
            await segment.sealed.check()
            for row in await segment.sealed.ledgers():
                one = state.ledgers.get(row.ledger_id)
                where = (row.run_start, row.run_count, row.widest)
                listed = await segment.sealed.overlapping(*where, 0, ENTRY_ID_MAX, RUNS_MAX)
                extents = [(run.first, run.last, run.stride) for run in listed]
                self._count(report, row.ledger_id, one, extents, row.size)
        except CorruptRecordError as error:
            text = f"{error}; it is rebuilt from its segment"
            found.damage.append(Damage(text, segment.segment_id))
            return False
        return True

    def _count(
        self,
        report: InspectedSegment,
        ledger_id: int,
        state: LedgerState | None,
        extents: list[tuple[int, int, int]],
        size: int,
    ) -> None:
        """Count a ledger's runs in a segment: first entry, last entry and stride of each."""
        report.ledgers += 1
        lowest, highest = min(one[0] for one in extents), max(one[1] for one in extents)
        live = counting_bytes(state, report.segment_id, lowest, highest, size)
        report.live_bytes += live
        if not live or state is None:
            return
        self._bytes_of[ledger_id] = self._bytes_of.get(ledger_id, 0) + live
        covered = self._covered.setdefault(ledger_id, {})
        for first, last, stride in extents:
            if last >= state.first:
                first += -(-max(0, state.first - first) // stride) * stride
                ids = covered.setdefault((stride, first % stride), IdRanges())
                ids.add_range(first // stride, last // stride)

    async def _records(
        self, segment: Segment, state: RecoveredState, report: InspectedSegment, *, check_gaps: bool
    ) -> list[Damage]:
        """Read and check every record of a segment."""
        damage: list[Damage] = []
        gaps: list[Gap] = []
        file = await self._segments.file_cache.borrow(segment.path)
        try:
            async for group in walk_groups(file, segment.header, segment.end):
                if isinstance(group, Gap):
                    gaps.append(group)
                    continue
                report.groups += 1
                damage += [
                    _damaged_row(segment.segment_id, group.offsets[number], group.rows[number], state)
                    for number in sorted(group.damaged)
                ]
        finally:
            self._segments.file_cache.give_back(segment.path)
        sealed = segment.sealed
        for gap in gaps:
            text = f"no group can be read from byte {gap.start} to {gap.end}"
            # The index has the blocks of a sealed segment, and each block has its own checksums.
            is_known = sealed is not None and check_gaps
            damage.append(Damage(text, segment.segment_id, gap.start, counts=not is_known))
        if sealed is None or not check_gaps or not gaps:
            return damage
        async with aclosing(blocks_in_gaps(segment, sealed, gaps)) as blocks:
            async for ledger_id, run in blocks:
                copy = StoredCopy(run.content_term, segment.segment_id, run.offset, run, segment)
                try:
                    await read_block(copy, ledger_id)
                except (DamagedBlockError, UnreadBlockError, StorageError) as error:
                    counts = _counts(state, segment.segment_id, ledger_id, run.last)
                    damage.append(
                        Damage(
                            f"entries are damaged: {error}", segment.segment_id, run.offset, ledger_id,
                            run.first, run.last, counts,
                        )
                    )  # fmt: skip
        return damage


def _damaged_row(segment_id: int, offset: int, row: form.Row, state: RecoveredState) -> Damage:
    what = _KINDS.get(row.kind, f"a record of the unknown kind {row.kind}")
    is_block = row.kind == form.KIND_BLOCK
    last = row.first + (row.entries - 1) * row.stride if is_block else None
    counts = _counts(state, segment_id, row.ledger_id, last)
    return Damage(
        f"{what} fail{'' if is_block else 's'} the checksum", segment_id, offset, row.ledger_id,
        row.first if is_block else None, last, counts,
    )  # fmt: skip


def _counts(state: RecoveredState, segment_id: int, ledger_id: int, last: int | None) -> bool:
    """Return whether a record of a ledger in a segment still counts: not deleted, forgotten or trimmed."""
    one = state.ledgers.get(ledger_id)
    return one is not None and one.since <= segment_id and (last is None or last >= one.first)


class _Nobody:
    """Hears of the health of a storage that does not run."""

    def storage_failed(self, error: StorageError) -> None:
        """Do nothing: the error is raised as well."""

    def writable_changed(self, is_writable: bool) -> None:
        """Do nothing."""
