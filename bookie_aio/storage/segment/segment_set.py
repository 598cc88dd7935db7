"""The segments of an engine, and where in them the entries of a ledger lie.

Owns which segments there are, which of them have their index in memory, and the *ledger locations*: for a
ledger, what
the indexes of the sealed segments say of it. Places are looked up when a ledger is read for the first time
and kept while there is room, so that neither a start nor a ledger that nobody reads costs anything.

Invariant: `find` gives all segments that hold entries of the ledger, as of the moment when it returns.
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

_FIELDS = 6  # of a place: segment id, run start, run count, lowest entry, highest entry, widest run


class DamagedIndexError(CorruptRecordError):
    """Something of a sealed index fails its checksum; the index can be rebuilt from its segment."""

    def __init__(self, segment: Segment, cause: Exception) -> None:
        super().__init__(str(cause))
        self.segment = segment


class SegmentGoneError(CorruptRecordError):
    """The segment was given up while it was read, or its index rebuilt: look again."""


class Source(NamedTuple):
    """A segment that may hold entries of a ledger: its runs in memory, or where they are in the index."""

    lowest: int  # no run begins below
    segment: Segment
    runs: Runs | None
    sealed: SealedIndex | None = None
    run_start: int = 0
    run_count: int = 0
    widest: int = 0

    async def overlapping(self, low: int, high: int, count_max: int) -> list[Run]:
        """Return the runs, by first entry, that may hold entries from `low` to `high`.

        Of those that start above `low`, only the first `count_max`.

        Raises:
            DamagedIndexError: rebuild the index, and look again.
            SegmentGoneError: look again.
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
            # The index was rebuilt since, and what was read may be of the new one, where the runs of this
            # ledger have other numbers.
            raise SegmentGoneError(f"the index of segment {self.segment.segment_id} was rebuilt")
        return found


_lowest = attrgetter("lowest")


class _Known:
    """The locations of one ledger in the sealed segments up to one of them."""

    __slots__ = ("ledger_locations", "upto")

    def __init__(self) -> None:
        self.upto = 0
        self.ledger_locations = array("Q")


class SegmentSet:
    """All segments of an engine."""

    def __init__(self, disk: Disk, *, files_max: int, heads_bytes_max: int, places_bytes_max: int) -> None:
        self.file_cache = FileCache(disk, files_max)
        self.by_id: dict[int, Segment] = {}
        self.in_memory: dict[int, Segment] = {}  # those whose index is, ascending but for rebuilt ones
        self._sealed: list[int] = []
        self._highest = 0  # of all that were ever sealed
        self._heads: LruCache[int, IndexHead] = LruCache(heads_bytes_max)
        self._places: LruCache[int, _Known] = LruCache(places_bytes_max)
        self._epoch = 0  # counts how often all locations were forgotten

    def add(self, segment: Segment) -> None:
        """Add a segment whose index is in memory."""
        assert segment.index is not None
        self.by_id[segment.segment_id] = self.in_memory[segment.segment_id] = segment

    def add_sealed(self, segment: Segment, row: SegmentRow) -> None:
        """Add a segment whose index is on the disk, as the checkpoint or the index itself says."""
        self.by_id[segment.segment_id] = segment
        self._seal(segment, row)

    def seal(self, segment: Segment, row: SegmentRow) -> None:
        """Note that a segment's index is on the disk now."""
        del self.in_memory[segment.segment_id]
        segment.rest()
        self._seal(segment, row)

    def _seal(self, segment: Segment, row: SegmentRow) -> None:
        segment.index, segment.end = None, row.end
        segment.sealed = self.read_index(segment.index_path, row)
        if segment.segment_id <= self._highest:
            self._forget_places()  # what is known reaches beyond it already, or up to it
        self._highest = max(self._highest, segment.segment_id)
        insort(self._sealed, segment.segment_id)

    def read_index(self, path: str, row: SegmentRow) -> SealedIndex:
        """Return what reads an index."""
        return SealedIndex(path, row, self.file_cache, self._heads)

    async def unseal(self, segment: Segment, index: MemoryIndex) -> None:
        """Use an index that was rebuilt, until it is on the disk again."""
        assert segment.sealed is not None
        path = segment.sealed.path
        segment.checkpoint_row, segment.index, segment.sealed = segment.sealed.row, index, None
        self._sealed.remove(segment.segment_id)
        self.in_memory[segment.segment_id] = segment
        self._heads.drop(segment.segment_id)
        self._forget_places()
        await self.file_cache.drop(path)

    async def renew_index(self, segment: Segment) -> None:
        """Note that there is another file of the index's name: nothing is read from the former one any more.

        Who still read from that one when it was dropped may have opened it again.
        """
        await self.file_cache.drop(segment.index_path)
        self._heads.drop(segment.segment_id)

    def _forget_places(self) -> None:
        self._epoch += 1
        self._places.clear()

    def remove(self, segment: Segment) -> None:
        """Take a segment out: nothing is read from it any more, but what is under way."""
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
        """Return what the checkpoint is to say of all segments."""
        return [
            segment.sealed.row
            if segment.sealed is not None
            else segment.checkpoint_row or SegmentRow(segment.segment_id)
            for segment in self.by_id.values()
        ]

    def sealed_row(self, segment_id: int) -> SegmentRow | None:
        """Return what the checkpoint is to say of a sealed segment; None where it is not one."""
        segment = self.by_id.get(segment_id)
        return segment.sealed.row if segment is not None and segment.sealed is not None else None

    async def find(self, ledger_id: int, since: int, low: int, high: int) -> list[Source]:
        """Return where entries of the ledger from `low` to `high` may lie, in segments from `since` on.

        They come by their lowest entry, since a ledger that grew for long lies in many.

        Raises:
            DamagedIndexError: rebuild the index, and look again.
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
            self._places.drop(ledger_id)
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
            known = self._places.get(ledger_id) or _Known()
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
                self._places.put(ledger_id, fresh, 200 + 8 * len(fresh.ledger_locations))

    def metrics(self) -> dict[str, object]:
        """Return the figures that `bookie info` shows."""
        return {
            "count": len(self.by_id),
            "sealed": len(self._sealed),
            "bytes": sum(segment.end for segment in self.by_id.values()),
            "open_files": len(self.file_cache),
            "index_head_bytes": self._heads.cost,
            "places_bytes": self._places.cost,
        }

    async def close(self) -> None:
        """Close all files."""
        for segment in self.by_id.values():
            segment.rest()
        self.file_cache.close()
