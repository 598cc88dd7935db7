"""A segment: its file, its index, and the lookup of runs in it.

Owns one segment's file and its index. The index is in memory while the segment is not sealed, and in a file
afterwards. Of that file only the head is kept in memory, in an LRU cache (`LruCache`). Does not own the set
of segments, nor the bytes that are written into a segment.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import (
    PAGE_BYTES,
    RUNS_PER_PAGE,
    RUNS_PER_STEP,
    IndexHead,
    LedgerRow,
    MemoryIndex,
    Run,
    find_ledger,
    find_runs,
    unpack_ledgers,
    unpack_runs,
    unpack_shares,
)
from metadata.errors import CorruptRecordError, DiskFailedError, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable

    from bookie_aio.storage.disk.disk import File
    from bookie_aio.storage.disk.file_cache import FileCache
    from bookie_aio.wire.blocks import Buffer


K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """An LRU cache: values by key, each with a cost. It evicts until the costs are `cost_max` at most.

    One value is kept even if it costs more.
    """

    def __init__(self, cost_max: int) -> None:
        self._cost_max = cost_max
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.cost = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: K) -> V | None:
        """Return a value, which becomes the one used last; None where there is none."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, cost: int) -> None:
        """Put a value, in the place of the key's former value, and evict the values not used for longest."""
        self.drop(key)
        self._held[key] = (value, cost)
        self.cost += cost
        while self.cost > self._cost_max and len(self._held) > 1:
            _, (_, evicted_cost) = self._held.popitem(last=False)
            self.cost -= evicted_cost

    def drop(self, key: K) -> None:
        """Evict a value, if it is there."""
        found = self._held.pop(key, None)
        if found is not None:
            self.cost -= found[1]

    def clear(self) -> None:
        """Evict everything."""
        self._held.clear()
        self.cost = 0


HAS_INDEX = 1


class SegmentRow(NamedTuple):
    """The checkpoint's row of a segment. One that is not sealed has no ledgers in it, and perhaps no end."""

    segment_id: int
    generation: int = 0
    end: int = 0
    lowest_ledger: int = 0
    highest_ledger: int = 0
    flags: int = 0

    @property
    def is_sealed(self) -> bool:
        """Return whether the segment has an index."""
        return bool(self.flags & HAS_INDEX)


class UnreadIndexError(CorruptRecordError):
    """The disk fails to read some of an index, which may be intact."""


class SealedIndex:
    """The index file of a sealed segment. Everything read from it is checked."""

    __slots__ = ("_file_cache", "_heads", "path", "row")

    def __init__(
        self, path: str, row: SegmentRow, file_cache: FileCache, heads: LruCache[int, IndexHead]
    ) -> None:
        """Take the checkpoint's row of the segment; nothing is read yet."""
        self.path = path
        self.row = row
        self._file_cache = file_cache
        self._heads = heads

    async def head(self) -> IndexHead:
        """Return the index's head.

        Raises:
            UnreadIndexError: the disk fails to read it.
            CorruptRecordError: it is damaged, missing, or of another segment or life.
        """
        head = self._heads.get(self.row.segment_id)
        if head is None:
            file = await self._borrow()
            try:
                head = await read_head(file, self.path)
            except DiskFailedError as error:
                raise UnreadIndexError(f"{self.path} cannot be read: {error}") from error
            finally:
                self._file_cache.give_back(self.path)
            if (head.segment_id, head.generation, head.end) != self.row[:3]:
                raise CorruptRecordError(f"{self.path} is of another segment, or of an earlier life of it")
            self._heads.put(self.row.segment_id, head, head.memory_bytes)
        return head

    async def _borrow(self) -> File:
        try:
            return await self._file_cache.borrow(self.path)
        except DiskFailedError as error:
            raise UnreadIndexError(f"{self.path} cannot be opened: {error}") from error
        except FileNotFoundError as error:
            raise CorruptRecordError(f"{self.path} cannot be opened: {error}") from error

    async def _page(self, head: IndexHead, page: int) -> memoryview:
        file = await self._borrow()
        try:
            data = await file.read(head.page_offset(page), PAGE_BYTES)
        except DiskFailedError as error:
            raise UnreadIndexError(f"{self.path} cannot be read: {error}") from error
        finally:
            self._file_cache.give_back(self.path)
        if not head.page_is_intact(page, data):
            raise CorruptRecordError(f"page {page} of {self.path} is damaged")
        return memoryview(data)

    async def ledgers(self) -> list[LedgerRow]:
        """Return the rows of all ledgers. Raises CorruptRecordError."""
        head = await self.head()
        rows: list[LedgerRow] = []
        for page in range(head.ledger_pages):
            rows += unpack_ledgers(await self._page(head, page), head.ledgers_on(page))
        return rows

    async def shares(self) -> AsyncIterator[list[tuple[int, int, int, int]]]:
        """Return ledger, lowest entry, highest entry and bytes of all ledgers, page by page.

        Raises CorruptRecordError.
        """
        head = await self.head()
        for page in range(head.ledger_pages):
            yield list(unpack_shares(await self._page(head, page), head.ledgers_on(page)))

    async def ledger(self, ledger_id: int) -> LedgerRow | None:
        """Return the row of one ledger; None where there is none. Raises CorruptRecordError."""
        if not self.row.lowest_ledger <= ledger_id <= self.row.highest_ledger:
            return None
        head = await self.head()
        page = head.page_of_ledger(ledger_id)
        if page < 0:
            return None
        return find_ledger(await self._page(head, page), head.ledgers_on(page), ledger_id)

    async def overlapping(
        self, run_start: int, run_count: int, widest: int, low: int, high: int, count_max: int
    ) -> list[Run]:
        """Return one ledger's runs as `Runs.overlapping` does. Raises CorruptRecordError."""
        head = await self.head()
        found: list[Run] = []
        above = looked_at = 0
        run_end = run_start + run_count
        from_first = max(0, low - widest)
        for page in head.pages_of_runs(run_start, run_count, from_first, high):
            data = await self._page(head, head.ledger_pages + page)
            base = page * RUNS_PER_PAGE
            start = max(run_start, base) - base
            stop = min(run_end, base + RUNS_PER_PAGE) - base
            start, stop = find_runs(data, start, stop, from_first, high)
            looked_at += stop - start
            if looked_at >= RUNS_PER_STEP:  # pages that are in memory are read without a wait
                looked_at = 0
                await asyncio.sleep(0)
            for run in unpack_runs(data, start, stop, low):
                above += run.first > low
                if above > count_max:
                    return found
                found.append(run)
        return found

    async def check(self) -> None:
        """Read and check the whole index, as the file has it. Raises CorruptRecordError."""
        self._heads.drop(self.row.segment_id)
        head = await self.head()
        for page in range(len(head.crcs)):
            await self._page(head, page)


async def read_head(file: File, path: str) -> IndexHead:
    """Read and check the head of an index. Raises CorruptRecordError."""
    size = IndexHead.size(await file.read(0, PAGE_BYTES))
    if size > file.size():
        raise CorruptRecordError(f"{path} ends early")
    return IndexHead(await file.read(0, size))


class Segment:
    """A segment: its file, and `index` while it is not sealed, `sealed` afterwards."""

    __slots__ = (
        "checkpoint_row",
        "directory",
        "end",
        "file",
        "file_cache",
        "has_unread",
        "header",
        "index",
        "is_gone",
        "is_reused",
        "path",
        "previous",
        "sealed",
    )  # fmt: skip

    def __init__(
        self, directory: str, header: form.SegmentHeader, file_cache: FileCache, file: File | None = None
    ) -> None:
        """Take a segment, and its file where that is open; it stays open until `release_file`."""
        self.directory = directory
        self.path = os.path.join(directory, form.segment_name(header.segment_id))
        self.header = header
        self.file_cache = file_cache
        self.file = file
        self.previous = (0, 0)  # the segment before this one, and the end of its durable groups
        self.end = form.DATA_OFFSET  # the end of this segment's durable groups
        self.index: MemoryIndex | None = MemoryIndex()
        self.sealed: SealedIndex | None = None
        self.checkpoint_row: SegmentRow | None = None
        """Its row in the checkpoint, from its last write on until it has an index (again)."""
        self.is_reused = False  # its file was a segment before, so that all of it has been written
        self.is_gone = False  # given up; reads that began before may go on
        self.has_unread = False  # the disk has failed to read some of it: the file is not used again
        if file is not None:
            file_cache.adopt(self.path, file)

    @property
    def segment_id(self) -> int:
        """Return its id."""
        return self.header.segment_id

    @property
    def index_path(self) -> str:
        """Return the path of its index, which need not exist."""
        return os.path.join(self.directory, form.index_name(self.segment_id))

    async def read(self, offset: int, size: int) -> Buffer:
        """Read some of its bytes; fewer where the file ends.

        Raises:
            FileNotFoundError: the segment has been given up meanwhile.
            DiskFailedError: the disk fails to read it.
        """
        file = await self.file_cache.borrow(self.path)
        try:
            return await file.read(offset, size)
        except DiskFailedError:
            self.has_unread = True
            raise
        finally:
            self.file_cache.give_back(self.path)

    async def read_many(self, ranges: list[tuple[int, int]]) -> tuple[list[Buffer], bool]:
        """Read several ranges (offset, size) as `read` does, with one wait for all that is not in memory.

        Returns:
            The bytes by range, and whether some were not in memory.

        Raises:
            FileNotFoundError: the segment has been given up meanwhile.
            DiskFailedError: the disk fails to read it.
        """
        file = await self.file_cache.borrow(self.path)
        try:
            found: list[Buffer] = []
            for offset, size in ranges:
                data = file.read_nowait(offset, size)
                if data is None:
                    return found + await file.read_many(ranges[len(found) :]), True
                found.append(data)
            return found, False
        except DiskFailedError:
            self.has_unread = True
            raise
        finally:
            self.file_cache.give_back(self.path)

    async def will_need(self, ranges: list[tuple[int, int]]) -> None:
        """Ask the system to bring ranges into memory. Errors are ignored: the read itself meets them."""
        try:
            file = await self.file_cache.borrow(self.path)
        except (FileNotFoundError, StorageError):
            return
        try:
            file.will_need(ranges)
        finally:
            self.file_cache.give_back(self.path)

    async def will_not_need(self) -> None:
        """Ask the system to drop the file's pages from memory. Errors are ignored: it is a hint."""
        try:
            file = await self.file_cache.borrow(self.path)
        except (FileNotFoundError, StorageError):
            return
        try:
            with suppress(StorageError):
                await file.will_not_need()
        finally:
            self.file_cache.give_back(self.path)

    def release_file(self) -> None:
        """Let the file cache close its file while nobody reads from it."""
        if self.file is not None:
            self.file = None
            self.file_cache.give_back(self.path)

    async def close(self) -> None:
        """Close its files once nobody reads from them any more."""
        self.release_file()
        await self.file_cache.drop(self.path)
        if self.sealed is not None:
            await self.file_cache.drop(self.sealed.path)
