"""The index: where the runs of entries lie. Pure: bytes in, bytes out.

A *run* is a stored block. `Runs` holds one ledger's runs in one segment. `MemoryIndex` holds all runs of a
segment that is not sealed, sorted and packed at 48 bytes a run: nothing here is per entry.

The index of a sealed segment is a file. Its head is read when the index is opened, and checked by its own
checksum. Its pages are read as they are needed, and checked by checksums in the head. Little-endian:

      0  4s   magic b"BKI1"
      4  u32  crc           CRC32C of byte 8 up to the end of the head
      8  u32  version       3
     12  u32  reserved, 0
     16  u64  segment_id
     24  u64  generation    of the segment
     32  u64  end           where the segment's durable groups end
     40  u64  ledgers
     48  u64  runs
     56  u32  ledger_pages
     60  u32  run_pages
     64  u64  highest_ledger
     72  u64  owner         of which bookie the segment is
     80  u64  checkpoint    the number of a checkpoint that was durable before
     88  u32[pages]         CRC32C of each page
      …  u64[ledger_pages]  first ledger of each page of ledgers
      …  u64[run_pages]     first entry of each page of runs
      …  (zeros up to a multiple of 4,096)
      …  pages of ledgers: 4,096 bytes each, 34 ledgers of 120 bytes, ascending:
             u64 ledger_id, u64 first run's number, u64 runs, u64 lowest entry, u64 highest entry,
             u64 widest run (last − first), u64 bytes of its records, u64 statement's content term, i64 LAC,
             i64 LAFR, u32 crc, u32 code's bytes (all ones: no statement), 32s code (zeros behind it)
      …  pages of runs: 4,096 bytes each, 102 runs of 40 bytes, by ledger, first entry, offset:
             u64 first entry, u64 content term, u64 offset of the block, u32 count, u32 stride,
             u32 head bytes, u32 payload bytes
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from bookie_aio.wire.blocks import LacStatement
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bookie_aio.storage.segment.format import SegmentHeader
    from bookie_aio.wire.blocks import Buffer

VERSION = 3
INDEX_MAGIC = b"BKI1"
PAGE_BYTES = 4096
RUNS_PER_STEP = 2048
"""How many runs are looked at in one event-loop iteration."""

_RUN = struct.Struct("<QQQIIII")
_LEDGER = struct.Struct("<QQQQQQQQqqII32s")
_SHARE = struct.Struct("<Q16xQQ8xQ64x")  # of a ledger: id, lowest, highest, bytes
_HEAD = struct.Struct("<4sIIIQQQQQIIQQQ")
_U64 = struct.Struct("<Q")
_COVERED_FROM = 8
_NO_STATEMENT = 0xFFFFFFFF
RUN_BYTES = _RUN.size
LEDGER_BYTES = _LEDGER.size
RUNS_PER_PAGE = PAGE_BYTES // RUN_BYTES
LEDGERS_PER_PAGE = PAGE_BYTES // LEDGER_BYTES
assert (RUN_BYTES, LEDGER_BYTES, _SHARE.size, _HEAD.size) == (40, 120, 120, 88)

pack_run = _RUN.pack


class Run(NamedTuple):
    """A stored block: its entries, and its place in its segment."""

    first: int
    content_term: int
    offset: int
    entries: int
    stride: int
    head_bytes: int
    payload_bytes: int

    @property
    def last(self) -> int:
        """Return the last entry."""
        return self.first + (self.entries - 1) * self.stride

    @property
    def entry_ids(self) -> range:
        """Return the entries."""
        return range(self.first, self.last + 1, self.stride)


class Runs:
    """One ledger's runs in one segment, by first entry and then by offset."""

    __slots__ = ("firsts", "highest", "packed", "size", "widest")

    def __init__(self) -> None:
        self.firsts = array("Q")
        self.packed = bytearray()
        self.highest = -1
        self.widest = 0
        self.size = 0  # bytes of the blocks and their rows

    def add(self, first: int, last: int, size: int, packed: bytes) -> None:
        """Add a run; runs come in the order of their offsets, and mostly of their entries."""
        firsts = self.firsts
        self.size += size
        if not firsts or first >= firsts[-1]:
            firsts.append(first)
            self.packed += packed
        else:
            at = bisect_right(firsts, first)
            firsts.insert(at, first)
            self.packed[at * RUN_BYTES : at * RUN_BYTES] = packed
        if last > self.highest:
            self.highest = last
        if last - first > self.widest:
            self.widest = last - first

    def overlapping(self, low: int, high: int, count_max: int) -> list[Run]:
        """Return the runs that may hold entries from `low` to `high`, by first entry.

        Only the first `count_max` of the runs that start above `low` are returned.
        """
        return list(chain.from_iterable(self.parts(low, high, count_max)))

    def parts(self, low: int, high: int, count_max: int) -> Iterator[list[Run]]:
        """Return the runs of `overlapping` in parts of `RUNS_PER_STEP` (or all that share a first entry).

        Runs may be added between two parts, and may be missing in the result.
        """
        firsts = self.firsts
        from_first = max(0, low - self.widest)
        while True:
            start = bisect_left(firsts, from_first)
            above = bisect_right(firsts, low, start)
            end = min(bisect_right(firsts, high, start), above + count_max)
            stop = self._end_of_part(start, end)
            if stop < end:
                # By entry and not by number: a run added meanwhile changes the numbers.
                from_first = firsts[stop - 1] + 1
            count_max -= max(0, stop - max(start, above))
            yield unpack_runs(self.packed, start, stop, low)
            if stop == end:
                return

    def _end_of_part(self, start: int, end: int) -> int:
        """Return the end of the first part of runs number `start` to `end` − 1: between two first entries."""
        if end - start <= RUNS_PER_STEP:
            return end
        firsts = self.firsts
        stop = bisect_left(firsts, firsts[start + RUNS_PER_STEP], start)
        return stop if stop > start else min(bisect_right(firsts, firsts[start], start), end)


def unpack_runs(packed: Buffer, start: int, stop: int, low: int) -> list[Run]:
    """Unpack the runs number `start` to `stop` − 1 that do not end below `low`."""
    if start >= stop:
        return []
    part = memoryview(packed)[start * RUN_BYTES : stop * RUN_BYTES]
    # One wide run makes all runs behind it candidates. No object is made of a run that ends below `low`.
    return [
        Run._make(fields)
        for fields in _RUN.iter_unpack(part)
        if fields[0] + (fields[3] - 1) * fields[4] >= low
    ]


class LedgerRow(NamedTuple):
    """One ledger's row in a sealed index."""

    ledger_id: int
    run_start: int
    run_count: int
    lowest: int
    highest: int
    widest: int
    size: int
    statement: LacStatement | None

    def pack(self) -> bytes:
        """Return the stored form."""
        term, lac, lafr, crc, mac = self.statement or (0, 0, 0, 0, b"")
        mac_bytes = _NO_STATEMENT if self.statement is None else len(mac)
        return _LEDGER.pack(*self[:7], term, lac, lafr, crc, mac_bytes, mac)


def find_ledger(page: Buffer, count: int, ledger_id: int) -> LedgerRow | None:
    """Return a ledger's row from a page of `count` rows, by binary search."""
    numbers = range(count)
    at = bisect_left(numbers, ledger_id, key=lambda number: _U64.unpack_from(page, number * LEDGER_BYTES)[0])
    view = memoryview(page)[at * LEDGER_BYTES : (at + 1) * LEDGER_BYTES]
    found = unpack_ledgers(view, 1) if at < count else []
    return found[0] if found and found[0].ledger_id == ledger_id else None


def find_runs(page: Buffer, start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """Narrow runs number `start` to `stop` − 1 of a page to the runs that start from `low` to `high`."""

    def first(number: int) -> int:
        return int(_U64.unpack_from(page, number * RUN_BYTES)[0])

    numbers = range(start, stop)
    return start + bisect_left(numbers, low, key=first), start + bisect_right(numbers, high, key=first)


def unpack_ledgers(page: Buffer, count: int) -> list[LedgerRow]:
    """Unpack the first `count` ledgers of a page."""
    rows = []
    for fields in _LEDGER.iter_unpack(memoryview(page)[: count * LEDGER_BYTES]):
        term, lac, lafr, crc, mac_bytes, mac = fields[7:]
        statement = (
            None if mac_bytes == _NO_STATEMENT else LacStatement(term, lac, lafr, crc, mac[:mac_bytes])
        )
        rows.append(LedgerRow._make((*fields[:7], statement)))
    return rows


def unpack_shares(page: Buffer, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Return id, lowest entry, highest entry and bytes of the first `count` ledgers of a page."""
    return _SHARE.iter_unpack(memoryview(page)[: count * LEDGER_BYTES])


class MemoryIndex:
    """All runs of a segment that is not sealed."""

    __slots__ = ("ledgers",)

    def __init__(self) -> None:
        self.ledgers: dict[int, Runs] = {}

    def add(self, ledger_id: int, run: Run) -> None:
        """Add a run. (`LedgerStates.index` does the same in its own loop, with bytes packed directly.)"""
        runs = self.ledgers.get(ledger_id)
        if runs is None:
            runs = self.ledgers[ledger_id] = Runs()
        runs.add(run.first, run.last, run.head_bytes + run.payload_bytes, pack_run(*run))


def _paged(parts: Iterable[Buffer], row_bytes: int) -> Iterator[bytes]:
    """Cut rows into pages of whole rows."""
    step = PAGE_BYTES // row_bytes * row_bytes
    rest = b""
    for part in parts:
        view = memoryview(part)
        if rest:
            taken = step - len(rest)
            rest += bytes(view[:taken])
            view = view[taken:]
            if len(rest) < step:
                continue
            yield rest.ljust(PAGE_BYTES, b"\0")
        whole = len(view) // step * step
        for at in range(0, whole, step):
            yield bytes(view[at : at + step]).ljust(PAGE_BYTES, b"\0")
        rest = bytes(view[whole:])
    if rest:
        yield rest.ljust(PAGE_BYTES, b"\0")


class IndexEncoder:
    """Encodes a sealed segment's index page by page, so that the journal writes in between.

    The index in memory must not change meanwhile, except that ledgers may be removed from it.
    """

    def __init__(
        self,
        header: SegmentHeader,
        end: int,
        checkpoint: int,
        ledgers: dict[int, Runs],
        statements: Callable[[int], LacStatement | None],
    ) -> None:
        self._ledgers = sorted(ledgers.items())
        self._statements = statements
        run_count = sum(len(runs.firsts) for _, runs in self._ledgers)
        self._ledger_pages = -(-len(self._ledgers) // LEDGERS_PER_PAGE)
        self._page_count = self._ledger_pages + -(-run_count // RUNS_PER_PAGE)
        self._fixed = (
            INDEX_MAGIC, 0, VERSION, 0, header.segment_id, header.generation, end, len(self._ledgers),
            run_count, self._ledger_pages, self._page_count - self._ledger_pages, self.highest_ledger,
            header.owner, checkpoint,
        )  # fmt: skip
        self._crcs = array("I")
        self._fences: list[bytes] = []
        self.pages_at = _round_up(_HEAD.size + 12 * self._page_count)

    @property
    def lowest_ledger(self) -> int:
        """Return the lowest ledger; 0 where there is none."""
        return self._ledgers[0][0] if self._ledgers else 0

    @property
    def highest_ledger(self) -> int:
        """Return the highest ledger; 0 where there is none."""
        return self._ledgers[-1][0] if self._ledgers else 0

    def pages(self) -> Iterator[bytes]:
        """Return the pages, in their order in the file from `pages_at` on."""
        for page in _paged(self._ledger_rows(), LEDGER_BYTES):
            yield self._count(page)
        for page in _paged((runs.packed for _, runs in self._ledgers), RUN_BYTES):
            yield self._count(page)

    def _ledger_rows(self) -> Iterator[bytes]:
        start = 0
        for ledger_id, runs in self._ledgers:
            count = len(runs.firsts)
            yield LedgerRow(
                ledger_id, start, count, runs.firsts[0], runs.highest, runs.widest, runs.size,
                self._statements(ledger_id),
            ).pack()  # fmt: skip
            start += count

    def _count(self, page: bytes) -> bytes:
        self._crcs.append(crc32c(page))
        self._fences.append(page[:8])
        return page

    def head(self) -> bytes:
        """Return the head, which lies before the pages. Only after `pages` has returned all of them."""
        assert len(self._crcs) == self._page_count
        covered = b"".join((_HEAD.pack(*self._fixed)[_COVERED_FROM:], self._crcs.tobytes(), *self._fences))
        return (INDEX_MAGIC + crc32c(covered).to_bytes(4, "little") + covered).ljust(self.pages_at, b"\0")


def _round_up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class IndexHead:
    """The part of a sealed segment's index that stays in memory: 12 bytes for each 4,096 of the file."""

    __slots__ = (
        "checkpoint", "crcs", "end", "generation", "highest_ledger", "ledger_count", "ledger_fences",
        "ledger_pages", "owner", "pages_at", "run_count", "run_fences", "segment_id",
    )  # fmt: skip

    @staticmethod
    def size(data: Buffer) -> int:
        """Return the size of a head, from its first 88 bytes; raises CorruptRecordError."""
        if len(data) < _HEAD.size or bytes(data[:4]) != INDEX_MAGIC:
            raise CorruptRecordError("the index of a segment is damaged")
        *_, ledger_pages, run_pages, _, _, _ = _HEAD.unpack_from(data)
        return _HEAD.size + 12 * int(ledger_pages + run_pages)

    def __init__(self, data: Buffer) -> None:
        """Parse and check a head.

        Raises:
            CorruptRecordError: the head does not parse, or is of another version.
        """
        size = self.size(data)
        if len(data) < size:
            raise CorruptRecordError("the index of a segment ends early")
        (
            _, crc, version, _, self.segment_id, self.generation, self.end,
            self.ledger_count, self.run_count, self.ledger_pages, run_pages, self.highest_ledger,
            self.owner, self.checkpoint,
        ) = _HEAD.unpack_from(data)  # fmt: skip
        if crc32c(memoryview(data)[_COVERED_FROM:size]) != crc or version != VERSION:
            raise CorruptRecordError("the index of a segment is damaged, or of another version")
        pages = self.ledger_pages + run_pages
        at = _HEAD.size
        self.crcs = array("I", bytes(data[at : at + 4 * pages]))
        at += 4 * pages
        self.ledger_fences = array("Q", bytes(data[at : at + 8 * self.ledger_pages]))
        at += 8 * self.ledger_pages
        self.run_fences = array("Q", bytes(data[at : at + 8 * run_pages]))
        self.pages_at = _round_up(size)

    @property
    def lowest_ledger(self) -> int:
        """Return the lowest ledger; 0 where there is none."""
        return self.ledger_fences[0] if self.ledger_fences else 0

    @property
    def memory_bytes(self) -> int:
        """Return about how many bytes the head takes in memory."""
        return 600 + 12 * len(self.crcs)

    def page_offset(self, page: int) -> int:
        """Return a page's offset in the file; pages of runs are numbered behind pages of ledgers."""
        return self.pages_at + page * PAGE_BYTES

    def page_is_intact(self, page: int, data: Buffer) -> bool:
        """Check a page's checksum."""
        return len(data) == PAGE_BYTES and crc32c(data) == self.crcs[page]

    def page_of_ledger(self, ledger_id: int) -> int:
        """Return the only page that may hold the ledger; −1 where none can."""
        return bisect_right(self.ledger_fences, ledger_id) - 1

    def ledgers_on(self, page: int) -> int:
        """Return how many ledgers a page holds."""
        return min(LEDGERS_PER_PAGE, int(self.ledger_count) - page * LEDGERS_PER_PAGE)

    def pages_of_runs(self, run_start: int, run_count: int, low: int, high: int) -> range:
        """Return the pages that hold one ledger's runs with a first entry from `low` to `high`.

        They are numbered among the pages of runs. `run_start` and `run_count` are the ledger's runs. Only the
        fences of pages that begin within them are entries of this ledger.
        """
        begin = run_start // RUNS_PER_PAGE
        end = (run_start + run_count - 1) // RUNS_PER_PAGE + 1
        # The last page whose fence is below `low` may still end in runs from `low` on.
        start = max(begin, bisect_left(self.run_fences, low, begin + 1, end) - 1)
        stop = bisect_right(self.run_fences, high, begin + 1, end)
        return range(start, stop)
