"""The segments of an engine, and the places of a ledger's entries in them.

Owns the set of segments, the set of those whose index is in memory, and the *ledger locations*. These are one
ledger's rows in the indexes of the sealed segments. Locations are looked up when a ledger is read for the
first time, and kept in an LRU cache. So a start costs nothing by ledger, and neither does a ledger that
nobody reads.

Invariant: `find` returns all segments that hold entries of the ledger, as of the moment when it returns.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right, insort
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.storage.disk.file_cache import FileCache
from bookie_aio.storage.segment.segment import LruCache, SealedIndex, SegmentRow
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.segment.index import IndexHead, MemoryIndex, Run, Runs
    from bookie_aio.storage.segment.segment import Segment

_FIELDS = 6  # of a location: segment id, run start, run count, lowest entry, highest entry, widest run


class DamagedIndexError(CorruptRecordError):
    """A sealed index fails a checksum; it can be rebuilt from its segment."""

    def __init__(self, segment: Segment, cause: Exception) -> None:
        super().__init__(str(cause))
        self.segment = segment


class SegmentGoneError(CorruptRecordError):
    """The segment was given up while it was read, or its index rebuilt: look the sources up again."""


class Source(NamedTuple):
    """A segment that may hold entries of a ledger: its runs in memory, or their place in its index."""

    lowest: int  # no run begins below
    segment: Segment
    runs: Runs | None
    sealed: SealedIndex | None = None
    run_start: int = 0
    run_count: int = 0
    widest: int = 0

    async def overlapping(self, low: int, high: int, count_max: int) -> list[Run]:
        """Return the runs, by first entry, that may hold entries from `low` to `high`.

        Only the first `count_max` of the runs that start above `low` are returned.

        Raises:
            DamagedIndexError: rebuild the index, and look the sources up again.
            SegmentGoneError: look the sources up again.
        """
        if self.runs is not None:
            parts = self.runs.parts(low, high, count_max)
            given = next(parts)
            for part in parts:
                given += part
                await asyncio.sleep(0)
            return given
        assert self.sealed is not None
        try:
            found = await self.sealed.overlapping(
                self.run_start, self.run_count, self.widest, low, high, count_max
            )
        except CorruptRecordError as error:
            if self.segment.is_gone:
                raise SegmentGoneError(str(error)) from error
            raise DamagedIndexError(self.segment, error) from error
        if self.segment.sealed is not self.sealed:
            # The index was rebuilt meanwhile. The pages read may be of the new index, where the runs of this
            # ledger have other numbers.
            raise SegmentGoneError(f"the index of segment {self.segment.segment_id} was rebuilt")
        return found


_lowest = attrgetter("lowest")


class _Known:
    """The locations of one ledger in the sealed segments up to segment `upto`."""

    __slots__ = ("ledger_locations", "upto")

    def __init__(self) -> None:
        self.upto = 0
        self.ledger_locations = array("Q")


class SegmentSet:
    """All segments of an engine."""

    def __init__(self, disk: Disk, *, files_max: int, heads_bytes_max: int, locations_bytes_max: int) -> None:
        self.file_cache = FileCache(disk, files_max)
        self.by_id: dict[int, Segment] = {}
        self.in_memory: dict[int, Segment] = {}  # index in memory; ascending, except where one was rebuilt
        self._sealed: list[int] = []
        self._highest = 0  # id that was ever sealed
        self._heads: LruCache[int, IndexHead] = LruCache(heads_bytes_max)
        self._locations: LruCache[int, _Known] = LruCache(locations_bytes_max)
        self._epoch = 0  # counts how often all locations were evicted

    def add(self, segment: Segment) -> None:
        """Add a segment whose index is in memory."""
        assert segment.index is not None
        self.by_id[segment.segment_id] = self.in_memory[segment.segment_id] = segment

    def add_sealed(self, segment: Segment, row: SegmentRow) -> None:
        """Add a sealed segment, by its row in the checkpoint or by its index's head."""
        self.by_id[segment.segment_id] = segment
        self._seal(segment, row)

    def seal(self, segment: Segment, row: SegmentRow) -> None:
        """Note that a segment's index is durable: from now on it is read from its file."""
        del self.in_memory[segment.segment_id]
        segment.release_file()
        self._seal(segment, row)

    def _seal(self, segment: Segment, row: SegmentRow) -> None:
        segment.index, segment.end = None, row.end
        segment.sealed = self.read_index(segment.index_path, row)
        if segment.segment_id <= self._highest:
            self._evict_locations()  # known locations reach up to this segment, or beyond it
        self._highest = max(self._highest, segment.segment_id)
        insort(self._sealed, segment.segment_id)

    def read_index(self, path: str, row: SegmentRow) -> SealedIndex:
        """Return a reader of the index of a path, which shares this set's caches."""
        return SealedIndex(path, row, self.file_cache, self._heads)

    async def unseal(self, segment: Segment, index: MemoryIndex) -> None:
        """Use a rebuilt index in memory, until the segment is sealed again."""
        assert segment.sealed is not None
        path = segment.sealed.path
        segment.checkpoint_row, segment.index, segment.sealed = segment.sealed.row, index, None
        self._sealed.remove(segment.segment_id)
        self.in_memory[segment.segment_id] = segment
        self._heads.drop(segment.segment_id)
        self._evict_locations()
        await self.file_cache.drop(path)

    async def renew_index(self, segment: Segment) -> None:
        """Note that the index's file was replaced: the former file is not read any more.

        A read under way when the former file was dropped may have opened it again.
        """
        await self.file_cache.drop(segment.index_path)
        self._heads.drop(segment.segment_id)

    def _evict_locations(self) -> None:
        self._epoch += 1
        self._locations.clear()

    def remove(self, segment: Segment) -> None:
        """Take a segment out: no read of it begins any more. Reads under way go on."""
        segment.is_gone = True
        del self.by_id[segment.segment_id]
        self.in_memory.pop(segment.segment_id, None)
        self._heads.drop(segment.segment_id)
        if segment.sealed is not None:
            self._sealed.remove(segment.segment_id)

    def sealed(self) -> list[Segment]:
        """Return the sealed segments, oldest first."""
        return [self.by_id[segment_id] for segment_id in self._sealed]

    def rows(self) -> list[SegmentRow]:
        """Return the checkpoint's rows of all segments."""
        return [
            segment.sealed.row
            if segment.sealed is not None
            else segment.checkpoint_row or SegmentRow(segment.segment_id, segment.header.generation)
            for segment in self.by_id.values()
        ]

    def sealed_row(self, segment_id: int) -> SegmentRow | None:
        """Return the checkpoint's row of a sealed segment; None where the segment is not sealed."""
        segment = self.by_id.get(segment_id)
        return segment.sealed.row if segment is not None and segment.sealed is not None else None

    async def find(self, ledger_id: int, since: int, low: int, high: int) -> list[Source]:
        """Return the segments, from `since` on, that may hold entries of the ledger from `low` to `high`.

        They come by their lowest entry, so that a reader can stop early: an old ledger lies in many segments.

        Raises:
            DamagedIndexError: rebuild the index, and call again.
        """
        ledger_locations = (await self._known(ledger_id, since)).ledger_locations
        # No await from here on: see the invariant.
        found, gone = [], 0
        for at in range(0, len(ledger_locations), _FIELDS):
            if ledger_locations[at + 3] > high or ledger_locations[at + 4] < low:
                continue
            segment = self.by_id.get(ledger_locations[at])
            if segment is None or segment.sealed is None:
                gone += 1
            elif ledger_locations[at] >= since:
                sealed = segment.sealed
                found.append(
                    Source(
                        ledger_locations[at + 3],
                        segment,
                        None,
                        sealed,
                        ledger_locations[at + 1],
                        ledger_locations[at + 2],
                        ledger_locations[at + 5],
                    )
                )
        if gone * _FIELDS * 2 > len(ledger_locations):
            self._locations.drop(ledger_id)
        for segment in self.in_memory.values():
            assert segment.index is not None
            runs = segment.index.ledgers.get(ledger_id)
            if runs is not None and segment.segment_id >= since:
                found.append(Source(runs.firsts[0], segment, runs))
        found.sort(key=_lowest)
        return found

    async def _known(self, ledger_id: int, since: int) -> _Known:
        while True:
            epoch = self._epoch
            known = self._locations.get(ledger_id) or _Known()
            start = bisect_right(self._sealed, max(known.upto, since - 1))
            unknown = self._sealed[start:]
            if not unknown:
                return known
            fresh = _Known()
            fresh.upto, fresh.ledger_locations = unknown[-1], known.ledger_locations[:]
            for segment_id in unknown:
                segment = self.by_id.get(segment_id)
                if segment is None or segment.sealed is None:
                    continue
                try:
                    row = await segment.sealed.ledger(ledger_id)
                except CorruptRecordError as error:
                    if segment.is_gone:
                        continue
                    raise DamagedIndexError(segment, error) from error
                if row is not None:
                    fresh.ledger_locations.extend((segment_id, *row[1:6]))
            if epoch == self._epoch:
                self._locations.put(ledger_id, fresh, 200 + 8 * len(fresh.ledger_locations))

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "count": len(self.by_id),
            "sealed": len(self._sealed),
            "bytes": sum(segment.end for segment in self.by_id.values()),
            "open_files": len(self.file_cache),
            "index_head_bytes": self._heads.cost,
            "places_bytes": self._locations.cost,
        }

    def clear(self) -> None:
        """Take out all segments, before any is used: crash recovery starts over."""
        self.file_cache.close()
        self.by_id.clear()
        self.in_memory.clear()
        self._sealed.clear()
        self._heads.clear()
        self._evict_locations()
        self._highest = 0

    async def close(self) -> None:
        """Close all files."""
        for segment in self.by_id.values():
            segment.release_file()
        self.file_cache.close()
