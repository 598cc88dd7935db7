"""Reads: from entries asked for to checked bytes of blocks.

Owns the choice among the copies of an entry (`newest_copies`), and the cutting of blocks to
a budget. Checks every byte read. Does not own the segments: the caller names the segments to look into. A
block that fails its check raises `DamagedBlockError`. What was read before it counts, as do the entries of
that block before the first one whose own checksum does not hold.

Invariant: among copies of an entry the copy with the highest content term counts. Among copies of equal
content term the newest counts: the copy in the latest segment, and there at the highest offset.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.storage.segment.index import RUNS_PER_STEP
from bookie_aio.storage.segment.segment_set import SegmentGoneError
from bookie_aio.wire.blocks import HEADER_BYTES, Block, Known, entry_checksums
from bookie_aio.wire.listing import index_from, mark, meeting, runs_of
from bookie_aio.wire.messages import Stop
from metadata.errors import CorruptRecordError, DiskFailedError, MalformedFrameError
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.segment.index import Run
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.segment_set import Source
    from bookie_aio.wire.blocks import Buffer


class StoredCopy(NamedTuple):
    """A run and its place. Of two runs that hold an entry, the greater holds the copy that counts."""

    content_term: int
    segment_id: int
    offset: int
    run: Run
    segment: Segment


def newest_copies(mine: StoredCopy, found: Sequence[StoredCopy], last: int) -> list[range]:
    """Return the entries of a run, up to `last`, whose copy in this run is the copy that counts.

    They are returned as ranges of the run's stride, ascending. All runs that hold copies have to be in
    `found`.
    """
    run = mine.run
    entry_ids = run.entry_ids
    if run.last > last:
        entry_ids = range(run.first, last + 1, run.stride)
    rivals = [
        one.run.entry_ids
        for one in found
        if one[:3] > mine[:3] and one.run.first <= run.last and one.run.last >= run.first
    ]
    if not rivals:
        return [entry_ids] if entry_ids else []
    # One step for each rival, not for each entry: the event loop is blocked meanwhile.
    lost = bytearray(len(entry_ids))
    for rival in rivals:
        mark(lost, meeting(entry_ids, rival))
    return runs_of(entry_ids, lost, 0)


RUNS_AT_ONCE = 256
_GAP_BYTES = 4096
_RANGE_BYTES_MAX = 256 * 1024
_AHEAD_BYTES = 1024 * 1024
_TAKES_PER_STEP = 64
_ROW_ENTRIES_MAX = 2**32 - 1  # of a row of LIST_ENTRIES
ListedRun = tuple[int, int, int, int]


class DamagedBlockError(CorruptRecordError):
    """A stored block fails its checksums, or is missing."""


class UnreadBlockError(CorruptRecordError):
    """The disk fails to read a stored block, which may be intact."""


class ReadResult(NamedTuple):
    """The result of a read: blocks one after another, and why and where it ends.

    `stop_entry` is the first entry asked for that is not in the buffers. With `Stop.END` it is the entry
    behind the last entry asked for.
    """

    buffers: list[Buffer]
    stop: Stop
    stop_entry: int


async def gather(
    sources: Sequence[Source], low: int, high: int, count_max: int
) -> tuple[list[StoredCopy], int]:
    """Return the runs that may hold entries from `low` up to a horizon, by first entry, and the horizon.

    Up to the horizon the runs are complete. It is `high`, or less, so that at most `count_max` of the runs
    start above `low`. It is never below `low`: all runs that start at `low` or before are returned.

    The sources come by their lowest entry, so that sources behind the horizon are not looked into.

    Raises:
        DamagedIndexError: rebuild the index and call again.
        SegmentGoneError: look up the sources and call again.
    """
    found: list[StoredCopy] = []
    horizon = high
    looked_at = 0
    for source in sources:
        if source.lowest > horizon:
            break
        # One run more than is kept: if a source returns only a part of its runs, the horizon sinks to before
        # the last run that it returned, or further.
        runs = await source.overlapping(low, horizon, count_max + 1)
        segment = source.segment
        segment_id = segment.segment_id
        found += [StoredCopy(run.content_term, segment_id, run.offset, run, segment) for run in runs]
        found.sort(key=_first)
        horizon = _cut(found, low, horizon, count_max)
        looked_at += len(runs)
        if looked_at >= RUNS_PER_STEP:
            looked_at = 0
            await asyncio.sleep(0)
    return found, horizon


def _first(found: StoredCopy) -> int:
    return found.run.first


def _cut(found: list[StoredCopy], low: int, horizon: int, count_max: int) -> int:
    """Drop the runs behind the first `count_max` that start above `low`, and return the new horizon.

    Of several runs that start at one entry, all are kept or none.
    """
    stop = bisect_right(found, low, key=_first) + count_max
    if stop >= len(found):
        return horizon
    horizon = found[stop].run.first - 1
    del found[bisect_right(found, horizon, key=_first) :]
    return horizon


class _Parted(NamedTuple):
    """A block that is read in parts; `place` is its segment and offset."""

    place: tuple[int, int]
    block: Block
    ends: list[int]
    """The payload bytes of its first 0, 1, …, all entries."""


class Reader:
    """One read: the blocks of one ledger, from a fixed set of segments."""

    def __init__(self, ledger_id: int, sources: Sequence[Source], content_term: int, bytes_max: int) -> None:
        self._ledger_id = ledger_id
        self._sources = sources
        self._content_term = content_term
        self._bytes_left = bytes_max
        self._buffers: list[Buffer] = []
        self._found: list[StoredCopy] = []
        self._from = 0  # runs of `_found` before this number end below the entry looked for
        self._horizon = -1
        self._entry_id = 0
        self._step = 1
        self._fetched: dict[tuple[int, int], memoryview] = {}  # whole blocks, by segment and offset
        self._parted: _Parted | None = None  # the block that entries were last taken out of
        self.is_cold = False  # something was not in memory

    def unknown(self) -> ReadResult:
        """Return what was read before a damaged block was met."""
        return ReadResult(self._buffers, Stop.UNKNOWN, self._entry_id)

    async def read(self, entry_ids: range) -> ReadResult:
        """Read the entries; whether one that nothing lists may be denied is the caller's to judge.

        Raises:
            DamagedBlockError: rule 4 applies.
            UnreadBlockError: the answer is unknown for now.
            DamagedIndexError: rebuild the index and read again.
            SegmentGoneError: look up the sources and read again.
        """
        if not entry_ids:
            return ReadResult([], Stop.END, min(max(0, entry_ids.start), ENTRY_ID_MAX))
        at, self._step = 0, entry_ids.step
        takes = 0
        while at < len(entry_ids):
            takes += 1
            if takes % _TAKES_PER_STEP == 0:
                await asyncio.sleep(0)  # reads from memory do not pause by themselves
            entry_id = self._entry_id = entry_ids[at]
            if entry_id > self._horizon:
                self._found, self._horizon = await gather(
                    self._sources, entry_id, entry_ids[-1], RUNS_AT_ONCE
                )
                self._from = 0
                await self._fetch(entry_ids[at:])
            best = self._best(entry_id)
            if best is None or best.content_term < self._content_term:
                return ReadResult(self._buffers, Stop.NO_SUCH_ENTRY, entry_id)
            if best.content_term > self._content_term:
                return ReadResult(self._buffers, Stop.STALE_METADATA, entry_id)
            wanted = self._extent(best, entry_ids[at:])
            taken = await self._take(best, entry_id, wanted)
            at += taken
            if taken < wanted:
                self._entry_id = entry_ids[at]
                return ReadResult(self._buffers, Stop.BUDGET, entry_ids[at])
        return ReadResult(self._buffers, Stop.END, min(entry_ids[-1] + entry_ids.step, ENTRY_ID_MAX))

    def _next_ranges(self, entry_ids: range) -> dict[Segment, list[tuple[int, int]]]:
        """Return the places of the next runs that are wanted whole, as many as the budget has room for."""
        left = self._bytes_left
        wanted: dict[Segment, list[tuple[int, int]]] = {}
        for number in range(self._from, len(self._found)):
            run = self._found[number].run
            if run.first > min(self._horizon, entry_ids[-1]):
                break
            size = run.head_bytes + run.payload_bytes
            if run.first >= entry_ids[0] and run.stride == entry_ids.step and size <= left:
                left -= size
                wanted.setdefault(self._found[number].segment, []).append((run.offset, size))
        return wanted

    async def _fetch(self, entry_ids: range) -> None:
        """Fetch the blocks that this read will want of the runs found, with few calls and waits.

        If the disk fails to read one, the segment's blocks are left out. `_bytes` then reads each by itself,
        and raises the error.
        """
        self._fetched.clear()
        for segment, blocks in self._next_ranges(entry_ids).items():
            if len(blocks) > 1:
                found, is_cold = await fetch(segment, blocks)
                self.is_cold |= is_cold
                for offset, view in found.items():
                    self._fetched[segment.segment_id, offset] = view

    def ahead(self) -> list[tuple[Segment, list[tuple[int, int]]]]:
        """Return the places of the blocks that a read which goes on where this read ended will want."""
        self._bytes_left = _AHEAD_BYTES
        following = range(self._entry_id, self._horizon + 1, self._step)
        if not following:
            return []
        return [(one, _joined(blocks)) for one, blocks in self._next_ranges(following).items()]

    async def _bytes(self, found: StoredCopy, at: int, size: int) -> Buffer:
        fetched = self._fetched.get((found.segment_id, found.run.offset))
        if fetched is not None and len(fetched) >= at + size:
            return fetched[at : at + size]
        return await _read(found, at, size)

    def _best(self, entry_id: int) -> StoredCopy | None:
        found, best = self._found, None
        while self._from < len(found) and found[self._from].run.last < entry_id:
            self._from += 1
        for number in range(self._from, len(found)):
            one = found[number]
            if one.run.first > entry_id:
                break
            if entry_id in one.run.entry_ids and (best is None or one[:3] > best[:3]):
                best = one
        return best

    def _extent(self, best: StoredCopy, entry_ids: range) -> int:
        """Return how many of the next entries are in the run `best`, with no copy in a greater run."""
        run = best.run
        left = (run.last - entry_ids[0]) // run.stride + 1
        extent = min(left, len(entry_ids)) if entry_ids.step == run.stride else 1
        if self._horizon < entry_ids[-1]:
            extent = min(extent, (self._horizon - entry_ids[0]) // entry_ids.step + 1)
        if extent == 1:
            return 1
        last = entry_ids[extent - 1]
        for number in range(self._from, len(self._found)):
            one = self._found[number]
            if one.run.first > last:
                break
            if one is best or one[:3] < best[:3] or one.run.last < entry_ids[0]:
                continue
            if one.run.stride == run.stride and (one.run.first - run.first) % run.stride:
                continue  # entries of another write set
            after = index_from(entry_ids, one.run.first)
            # The two meet within as many steps as the other run's stride, or never.
            steps = range(after, min(extent, after + one.run.stride))
            extent = next((n for n in steps if entry_ids[n] in one.run.entry_ids), extent)
        return extent

    async def _take(self, found: StoredCopy, entry_id: int, wanted: int) -> int:
        """Read up to `wanted` entries of a run; returns how many the budget allowed."""
        run = found.run
        start = (entry_id - run.first) // run.stride
        total = run.head_bytes + run.payload_bytes
        is_whole = start == 0 and wanted == run.entries
        if is_whole and (total <= self._bytes_left or (run.entries == 1 and not self._buffers)):
            try:
                data = await self._bytes(found, 0, total)
                block = _parse(found, self._ledger_id, data)
            except (DamagedBlockError, UnreadBlockError):
                return await self._take_part(found, 0, wanted)
            if not block.payload_is_intact():
                wrong = block.damaged_entries()
                if wrong:
                    self._take_beginning(block, 0, block.entry_ids.index(wrong[0]), block.payload)
                raise _damaged(found, "its payload")
            self._buffers.append(data)
            self._bytes_left -= total
            return wanted
        if is_whole and self._buffers:
            return 0  # the next read begins with this block, and returns it whole
        return await self._take_part(found, start, wanted)

    async def _take_part(self, found: StoredCopy, start: int, wanted: int) -> int:
        run = found.run
        place = found.segment_id, run.offset
        parted = self._parted
        if parted is None or parted.place != place:
            # Kept: a read of another stride than the block's takes each entry by itself.
            block = _parse_or_salvage(found, self._ledger_id, await self._bytes(found, 0, run.head_bytes))
            parted = self._parted = _Parted(place, block, list(accumulate(block.lengths, initial=0)))
        block, ends = parted.block, parted.ends
        begin = ends[start]
        # The lengths of a salvaged block may be wrong.
        wanted = min(wanted, bisect_right(ends, run.payload_bytes) - 1 - start)
        if wanted < 1:
            raise _damaged(found, "its lengths")
        fixed, each = HEADER_BYTES + block.mac_bytes, 16 + block.mac_bytes

        def size(entries: int) -> int:
            return fixed + each * entries + ends[start + entries] - begin

        fitting = bisect_right(range(wanted + 1), self._bytes_left, key=size) - 1
        if not self._buffers:
            fitting = max(1, fitting)
        if fitting < 1:
            return 0
        while True:
            stop = start + fitting
            try:
                payload = memoryview(await self._bytes(found, block.head_bytes + begin, ends[stop] - begin))
                break
            except (DamagedBlockError, UnreadBlockError):
                if fitting == 1:
                    raise
                fitting //= 2  # What cannot be read may be behind the entries of the first half.
        parts = [payload[low - begin : high - begin] for low, high in pairwise(ends[start : stop + 1])]
        ids = block.entry_ids[start:stop]
        sums = entry_checksums(block.lac_crc, ids, block.running[start:stop], parts)
        if sums != list(block.checksums[start:stop]):
            # Damage, unless the whole block is still as its writer sent it: then the writer's checksum of an
            # entry was wrong. Readers find that, and it is no reason to mark the ledger.
            try:
                payload = (await read_block(found, self._ledger_id)).payload[begin : ends[stop]]
            except (DamagedBlockError, UnreadBlockError):
                stated = block.checksums[start:stop]
                wrong_at = next(
                    n for n, (is_, ought) in enumerate(zip(sums, stated, strict=True)) if is_ != ought
                )
                self._take_beginning(block, start, wrong_at, payload)
                raise
        self._buffers += (block.cut_head(start, stop), payload)
        self._bytes_left -= size(fitting)
        return fitting

    def _take_beginning(self, block: Block, start: int, count: int, payload: memoryview) -> None:
        """Take the entries before the first damaged one: a damaged entry takes none of its block with it.

        Args:
            start: the index in the block of the first entry of `payload`.
            count: so many entries from there on are intact.
        """
        self._entry_id = block.entry_ids[start + count]
        if count:
            stop = start + count
            self._buffers += (block.cut_head(start, stop), payload[: sum(block.lengths[start:stop])])


def _joined(blocks: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges to read for some blocks: neighbours are read together, with the gap between them."""
    ranges: list[tuple[int, int]] = []
    for offset, size in sorted(blocks):
        if ranges:
            start, length = ranges[-1]
            joined = offset + size - start
            if offset - (start + length) <= _GAP_BYTES and joined <= _RANGE_BYTES_MAX:
                ranges[-1] = (start, max(length, joined))
                continue
        ranges.append((offset, size))
    return ranges


def _damaged(
    found: StoredCopy, what: str, kind: type[CorruptRecordError] = DamagedBlockError
) -> CorruptRecordError:
    """Return the error for a block whose bytes fail.

    The file of a segment that was given up may be another segment's by now, so its bytes prove no damage.
    """
    if found.segment.is_gone:
        kind = SegmentGoneError
    return kind(f"block at {found.run.offset} of segment {found.segment_id}: {what}")


async def _read(found: StoredCopy, at: int, size: int) -> Buffer:
    try:
        data = await found.segment.read(found.run.offset + at, size)
    except DiskFailedError as error:
        raise _damaged(found, str(error), UnreadBlockError) from error
    except FileNotFoundError as error:
        raise _damaged(found, str(error)) from error
    if len(data) != size:
        raise _damaged(found, "the segment ends before")
    return data


def _parse(found: StoredCopy, ledger_id: int, data: Buffer) -> Block:
    """Parse a head, and check that it is the head of the block that the index lists."""
    run = found.run
    try:
        block = Block.parse_head(memoryview(data))
    except MalformedFrameError as error:
        raise _damaged(found, str(error)) from error
    is_ = (block.ledger_id, block.first_entry, block.content_term, block.count, block.stride)
    if is_ != (ledger_id, run.first, run.content_term, run.entries, run.stride):
        raise _damaged(found, "is another one")
    return block


def _parse_or_salvage(found: StoredCopy, ledger_id: int, data: Buffer) -> Block:
    """Parse a head; where it is damaged, go by the index. Each entry then has to prove itself."""
    try:
        return _parse(found, ledger_id, data)
    except DamagedBlockError:
        run = found.run
        known = Known(
            ledger_id, run.content_term, run.first, run.entries, run.stride, run.head_bytes, run.payload_bytes
        )
        block = Block.salvage(memoryview(data), known)
        if block is None:
            raise
        return block


async def fetch(segment: Segment, blocks: list[tuple[int, int]]) -> tuple[dict[int, memoryview], bool]:
    """Read blocks (offset, size) of a segment together; returns them by offset, and whether any was cold.

    If the disk fails to read one of them, none is returned: the caller reads each by itself.
    """
    ranges = _joined(blocks)
    try:
        found, is_cold = await segment.read_many(ranges)
    except (DiskFailedError, FileNotFoundError):
        return {}, False
    starts = [offset for offset, _ in ranges]
    views = [memoryview(part) for part in found]
    fetched: dict[int, memoryview] = {}
    for offset, size in blocks:
        number = bisect_right(starts, offset) - 1
        at = offset - starts[number]
        fetched[offset] = views[number][at : at + size]
    return fetched, is_cold


async def read_block(found: StoredCopy, ledger_id: int, data: Buffer = b"") -> Block:
    """Read a whole stored block, and check it.

    Args:
        found: the block's run and place.
        ledger_id: the ledger that the index lists it under.
        data: the block's bytes, where they have been fetched.

    Raises:
        DamagedBlockError: rule 4 applies.
        UnreadBlockError: try again later.
        SegmentGoneError: look the entries up again.
    """
    size = found.run.head_bytes + found.run.payload_bytes
    if len(data) != size:
        data = await _read(found, 0, size)
    block = _parse(found, ledger_id, data)
    if not block.payload_is_intact():
        raise _damaged(found, "its payload")
    return block


async def read_part(found: StoredCopy, ledger_id: int, entry_ids: range) -> Block:
    """Read some entries of a stored block as a whole block, each checked by its own checksum.

    Raises: as `read_block`.
    """
    run = found.run
    start = run.entry_ids.index(entry_ids[0])
    stop = start + len(entry_ids)
    head = _parse_or_salvage(found, ledger_id, await _read(found, 0, run.head_bytes))
    begin, end = head.payload_range(start, stop)
    if end > run.head_bytes + run.payload_bytes:
        raise _damaged(found, "its lengths")
    payload = await _read(found, begin, end - begin)
    part = Block.parse(memoryview(b"".join((head.cut_head(start, stop), payload))))
    if part.damaged_entries():
        raise _damaged(found, "its entries")
    return Block.parse(part.whole(0, part.count))


async def list_runs(
    sources: Sequence[Source], from_entry: int, to_entry: int, rows_max: int
) -> tuple[list[ListedRun], int]:
    """Return runs of entries by first entry, neighbours joined, and where to go on (−1: there are no more).

    No run starts above `to_entry`; a run may end above it. At most `rows_max` runs are returned, or as many
    as start at one entry.

    Raises:
        DamagedIndexError: rebuild the index and list again.
        SegmentGoneError: list again.
    """
    listed: list[ListedRun] = []
    while not listed and 0 <= from_entry <= to_entry:
        listed, from_entry = await _list_page(sources, from_entry, to_entry, rows_max)
    return listed, from_entry if from_entry <= to_entry else -1


async def _list_page(
    sources: Sequence[Source], from_entry: int, to_entry: int, rows_max: int
) -> tuple[list[ListedRun], int]:
    found, horizon = await gather(sources, from_entry, to_entry, rows_max)
    runs: list[ListedRun] = []
    for one in found:
        run = one.run
        skipped = index_from(run.entry_ids, from_entry)
        if skipped < run.entries:
            first = run.first + skipped * run.stride
            runs.append((first, run.content_term, run.entries - skipped, run.stride))
    runs.sort(key=lambda row: (row[0], -row[1], -row[2]))
    listed: list[ListedRun] = []
    for number, row in enumerate(runs, 1):
        if number % RUNS_PER_STEP == 0:
            await asyncio.sleep(0)
        first = row[0]
        if first > horizon:
            break
        if len(listed) >= rows_max and first > listed[-1][0]:
            return listed, first
        _append_joined(listed, row)
    return listed, -1 if horizon >= to_entry else horizon + 1


def _append_joined(listed: list[ListedRun], row: ListedRun) -> None:
    """Add a run, joined to the last run if it continues or repeats that one and both fit into one row."""
    if listed:
        first, term, count, stride = listed[-1]
        offset, rest = divmod(row[0] - first, stride)
        if row[3] == stride and not rest and 0 <= offset <= count:
            joined = max(count, offset + row[2])
            if row[1] == term and joined <= _ROW_ENTRIES_MAX:
                listed[-1] = (first, term, joined, stride)
                return
            if row[1] < term and offset + row[2] <= count:
                return
    listed.append(row)
