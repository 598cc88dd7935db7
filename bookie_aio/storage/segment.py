"""A segment: its file, its index, and how runs are found in it.

Owns one segment's file and the lookup in its index, in memory while the segment is not sealed, and in the
index file afterwards. Does not own which segments there are, nor what is written into them.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from bookie_aio.storage import directory as layout
from bookie_aio.storage import format as form
from bookie_aio.storage.index import (
    PAGE_BYTES,
    RUNS_PER_PAGE,
    IndexHead,
    LedgerRow,
    MemoryIndex,
    Run,
    encode_index,
    find_ledger,
    find_runs,
    pack_ledgers,
    unpack_ledgers,
    unpack_runs,
)
from metadata.errors import CorruptRecordError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.storage.disk import Disk, File
    from bookie_aio.wire.blocks import LacStatement

_LEDGER_ROWS_KEPT = 1024
_LEDGERS_AT_ONCE = 256


class SealedIndex:
    """The index file of a sealed segment: its head in memory, its pages as they are needed."""

    def __init__(self, file: File, head: IndexHead) -> None:
        self.file = file
        self.head = head
        self._rows: dict[int, LedgerRow | None] = {}

    @classmethod
    async def open(cls, disk: Disk, path: str) -> SealedIndex:
        """Open an index file and check its head.

        Raises:
            FileNotFoundError: there is none.
            CorruptRecordError: it is damaged.
        """
        file = await disk.open(path)
        try:
            size = IndexHead.size(await file.read(0, PAGE_BYTES))
            if size > file.size():
                raise CorruptRecordError(f"{path} ends early")
            return cls(file, IndexHead(await file.read(0, size)))
        except BaseException:
            file.close()
            raise

    async def _page(self, page: int) -> memoryview:
        data = await self.file.read(self.head.page_offset(page), PAGE_BYTES)
        if not self.head.page_is_intact(page, data):
            raise CorruptRecordError(f"page {page} of the index of segment {self.head.segment_id} is damaged")
        return memoryview(data)

    async def ledgers(self) -> list[LedgerRow]:
        """Give what it says of every ledger. Raises CorruptRecordError."""
        rows: list[LedgerRow] = []
        for page in range(self.head.ledger_pages):
            rows += unpack_ledgers(await self._page(page), self.head.ledgers_on(page))
        return rows

    async def _ledger(self, ledger_id: int) -> LedgerRow | None:
        if ledger_id in self._rows:
            return self._rows[ledger_id]
        page = self.head.page_of_ledger(ledger_id)
        found = None
        if page >= 0:
            found = find_ledger(await self._page(page), self.head.ledgers_on(page), ledger_id)
        if len(self._rows) >= _LEDGER_ROWS_KEPT:
            self._rows.clear()
        self._rows[ledger_id] = found
        return found

    async def overlapping(self, ledger_id: int, low: int, high: int, count_max: int) -> list[Run]:
        """Give the ledger's runs as `Runs.overlapping` does. Raises CorruptRecordError."""
        row = await self._ledger(ledger_id)
        if row is None:
            return []
        found: list[Run] = []
        above = 0
        run_end = row.run_start + row.run_count
        from_first = max(0, low - row.widest)
        for page in self.head.pages_of_runs(row, from_first, high):
            data = await self._page(self.head.ledger_pages + page)
            base = page * RUNS_PER_PAGE
            start = max(row.run_start, base) - base
            stop = min(run_end, base + RUNS_PER_PAGE) - base
            start, stop = find_runs(data, start, stop, from_first, high)
            for run in unpack_runs(data, start, stop, low):
                above += run.first > low
                if above > count_max:
                    return found
                found.append(run)
        return found


class Segment:
    """A segment's file; `index` while it is not sealed, `sealed` afterwards."""

    __slots__ = ("end", "file", "header", "index", "previous", "sealed")

    def __init__(self, file: File, header: form.SegmentHeader, previous: tuple[int, int] = (0, 0)) -> None:
        self.file = file
        self.header = header
        self.previous = previous  # the segment before it, and where that one's durable groups end
        self.end = form.DATA_OFFSET  # where its own durable groups end
        self.index: MemoryIndex | None = MemoryIndex()
        self.sealed: SealedIndex | None = None

    @property
    def segment_id(self) -> int:
        """Give its id."""
        return self.header.segment_id

    async def overlapping(self, ledger_id: int, low: int, high: int, count_max: int) -> list[Run]:
        """Give the ledger's runs, by first entry, that may hold entries from `low` to `high`.

        Of those that start above `low`, only the first `count_max`. Raises CorruptRecordError when
        a page of the sealed index is damaged.
        """
        if self.index is not None:
            runs = self.index.ledgers.get(ledger_id)
            return runs.overlapping(low, high, count_max) if runs is not None else []
        assert self.sealed is not None
        return await self.sealed.overlapping(ledger_id, low, high, count_max)

    def close(self) -> None:
        """Close its files."""
        self.file.close()
        if self.sealed is not None:
            self.sealed.file.close()


async def create_segment(disk: Disk, directory: str, header: form.SegmentHeader) -> Segment:
    """Create a preallocated segment; its header and its name are durable on return.

    Raises:
        DiskFullError: no space; nothing is left behind.
    """
    path = os.path.join(directory, layout.segment_name(header.segment_id))
    file = await disk.create(path)
    try:
        await file.preallocate(header.capacity)
        await file.write([form.encode_segment_header(header)], 0)
        await file.sync()
        await disk.sync_directory(directory)
    except DiskFullError:
        file.close()
        await disk.unlink(path)
        raise
    return Segment(file, header)


async def create_reserve(disk: Disk, directory: str, size: int) -> None:
    """Create the preallocated file that fences and recovery adds go to when all else is full.

    Raises:
        DiskFullError: no space; nothing is left behind.
    """
    path = os.path.join(directory, layout.RESERVE)
    temporary = path + layout.TEMPORARY_SUFFIX
    file = await disk.create(temporary)
    try:
        await file.preallocate(size)
        await file.sync()
    except DiskFullError:
        await disk.unlink(temporary)
        raise
    finally:
        file.close()
    await disk.rename(temporary, path)
    await disk.sync_directory(directory)


async def take_reserve(disk: Disk, directory: str, header: form.SegmentHeader) -> Segment:
    """Turn the reserve into a segment; this takes no space."""
    reserve = os.path.join(directory, layout.RESERVE)
    file = await disk.open(reserve)
    await file.write([form.encode_segment_header(header)], 0)
    await file.sync()
    await disk.rename(reserve, os.path.join(directory, layout.segment_name(header.segment_id)))
    await disk.sync_directory(directory)
    return Segment(file, header)


async def remove_segment(disk: Disk, directory: str, segment_id: int) -> None:
    """Remove a segment's file."""
    await disk.unlink(os.path.join(directory, layout.segment_name(segment_id)))
    await disk.sync_directory(directory)


async def trim_segment(segment: Segment) -> None:
    """Cut a segment behind its last group; durable on return, as is all that it holds."""
    if segment.file.size() > segment.end:
        await segment.file.truncate(segment.end)
    await segment.file.sync()


async def write_index(
    disk: Disk, directory: str, segment: Segment, statements: Callable[[int], LacStatement | None]
) -> SealedIndex:
    """Write a segment's index; it is durable on return.

    From then on a restart does not replay the segment: its terms and marks must be in the checkpoint. The
    segment's index in memory must not change meanwhile. Raises DiskFullError; it may be tried again.
    """
    assert segment.index is not None
    name = layout.index_name(segment.segment_id)
    header, ledgers = segment.header, segment.index.ledgers
    ordered, rows, run_start = sorted(ledgers), list[bytes](), 0
    for at in range(0, len(ordered), _LEDGERS_AT_ONCE):
        part, run_start = pack_ledgers(ledgers, ordered[at : at + _LEDGERS_AT_ONCE], run_start, statements)
        rows.append(part)
        await asyncio.sleep(0)  # writing goes on in between
    buffers = encode_index(header.segment_id, header.generation, segment.end, ledgers, rows)
    await layout.write_file(disk, directory, name, buffers)
    return await SealedIndex.open(disk, os.path.join(directory, name))
