"""The index: where the runs of entries lie. Pure: bytes in, bytes out.

A *run* is a stored block. `Runs` holds one ledger's runs in one segment, `MemoryIndex` all runs of a
segment that is not sealed, sorted and packed at 48 bytes a run: nothing here is per entry.

The index of a sealed segment is a file. Its head is read when it is opened, and checked by its own
checksum; its pages are read as they are needed, and checked by checksums in the head. Little-endian:

      0  4s   magic b"BKI1"
      4  u32  crc           CRC32C of byte 8 up to the end of the head
      8  u32  version       1
     12  u32  reserved, 0
     16  u64  segment_id
     24  u64  generation    of the segment
     32  u64  end           where the segment's durable groups end
     40  u64  ledgers
     48  u64  runs
     56  u32  ledger_pages
     60  u32  run_pages
     64  u32[pages]         CRC32C of each page
      …  u64[ledger_pages]  first ledger of each page of ledgers
      …  u64[run_pages]     first entry of each page of runs
      …  (zeros up to a multiple of 4,096)
      …  pages of ledgers: 4,096 bytes each, 36 ledgers of 112 bytes, ascending:
             u64 ledger_id, u64 first run's number, u64 runs, u64 lowest entry, u64 highest entry,
             u64 widest run (last − first), u64 statement's content term, i64 LAC, i64 LAFR, u32 crc,
             u32 code's bytes (all ones: no statement), 32s code (zeros behind it)
      …  pages of runs: 4,096 bytes each, 102 runs of 40 bytes, by ledger, first entry, offset:
             u64 first entry, u64 content term, u64 offset of the block, u32 count, u32 stride,
             u32 head bytes, u32 payload bytes

Invariant: among copies of an entry the one with the higher content term wins, and among those of equal
content term the newest, that is the one in the later segment, and there at the higher offset.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from bookie_aio.wire.blocks import LacStatement
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bookie_aio.wire.blocks import Buffer

VERSION = 1
INDEX_MAGIC = b"BKI1"
PAGE_BYTES = 4096

_RUN = struct.Struct("<QQQIIII")
_LEDGER = struct.Struct("<QQQQQQQqqII32s")
_HEAD = struct.Struct("<4sIIIQQQQQII")
_U64 = struct.Struct("<Q")
_COVERED_FROM = 8
_NO_STATEMENT = 0xFFFFFFFF
RUN_BYTES = _RUN.size
LEDGER_BYTES = _LEDGER.size
RUNS_PER_PAGE = PAGE_BYTES // RUN_BYTES
LEDGERS_PER_PAGE = PAGE_BYTES // LEDGER_BYTES
assert (RUN_BYTES, LEDGER_BYTES, _HEAD.size) == (40, 112, 64)

pack_run = _RUN.pack


class Run(NamedTuple):
    """Where a block lies in its segment."""

    first: int
    content_term: int
    offset: int
    entries: int
    stride: int
    head_bytes: int
    payload_bytes: int

    @property
    def last(self) -> int:
        """Give the last entry."""
        return self.first + (self.entries - 1) * self.stride

    @property
    def entry_ids(self) -> range:
        """Give the entries."""
        return range(self.first, self.last + 1, self.stride)


class Runs:
    """One ledger's runs in one segment, by first entry and then by offset."""

    __slots__ = ("firsts", "highest", "packed", "widest")

    def __init__(self) -> None:
        self.firsts = array("Q")
        self.packed = bytearray()
        self.highest = -1
        self.widest = 0

    def add(self, first: int, last: int, packed: bytes) -> None:
        """Add a run; runs come in the order of their offsets, and mostly in that of their entries."""
        firsts = self.firsts
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
        """Give the runs that may hold entries from `low` to `high`.

        Of those that start above `low`, only the first `count_max`.
        """
        start = bisect_left(self.firsts, low - self.widest) if low > self.widest else 0
        above = bisect_right(self.firsts, low, start)
        stop = min(bisect_right(self.firsts, high, start), above + count_max)
        return unpack_runs(self.packed, start, stop, low)


def unpack_runs(packed: Buffer, start: int, stop: int, low: int) -> list[Run]:
    """Unpack the runs number `start` to `stop` − 1 that do not end below `low`."""
    if start >= stop:
        return []
    part = memoryview(packed)[start * RUN_BYTES : stop * RUN_BYTES]
    return [run for run in map(Run._make, _RUN.iter_unpack(part)) if run.last >= low]


class LedgerRow(NamedTuple):
    """What a sealed index says of one ledger."""

    ledger_id: int
    run_start: int
    run_count: int
    lowest: int
    highest: int
    widest: int
    statement: LacStatement | None

    def pack(self) -> bytes:
        """Give the stored form."""
        term, lac, lafr, crc, mac = self.statement or (0, 0, 0, 0, b"")
        mac_bytes = _NO_STATEMENT if self.statement is None else len(mac)
        return _LEDGER.pack(*self[:6], term, lac, lafr, crc, mac_bytes, mac)


def find_ledger(page: Buffer, count: int, ledger_id: int) -> LedgerRow | None:
    """Give a ledger's row from a page of `count` of them, by binary search."""
    numbers = range(count)
    at = bisect_left(numbers, ledger_id, key=lambda number: _U64.unpack_from(page, number * LEDGER_BYTES)[0])
    view = memoryview(page)[at * LEDGER_BYTES : (at + 1) * LEDGER_BYTES]
    found = unpack_ledgers(view, 1) if at < count else []
    return found[0] if found and found[0].ledger_id == ledger_id else None


def find_runs(page: Buffer, start: int, stop: int, low: int, high: int) -> tuple[int, int]:
    """Narrow runs number `start` to `stop` − 1 of a page to those that start from `low` to `high`."""

    def first(number: int) -> int:
        return int(_U64.unpack_from(page, number * RUN_BYTES)[0])

    numbers = range(start, stop)
    return start + bisect_left(numbers, low, key=first), start + bisect_right(numbers, high, key=first)


def unpack_ledgers(page: Buffer, count: int) -> list[LedgerRow]:
    """Unpack the first `count` ledgers of a page."""
    rows = []
    for fields in _LEDGER.iter_unpack(memoryview(page)[: count * LEDGER_BYTES]):
        ledger_id, start, runs, lowest, highest, widest, term, lac, lafr, crc, mac_bytes, mac = fields
        statement = (
            None if mac_bytes == _NO_STATEMENT else LacStatement(term, lac, lafr, crc, mac[:mac_bytes])
        )
        rows.append(LedgerRow(ledger_id, start, runs, lowest, highest, widest, statement))
    return rows


class MemoryIndex:
    """All runs of a segment that is not sealed."""

    __slots__ = ("ledgers",)

    def __init__(self) -> None:
        self.ledgers: dict[int, Runs] = {}

    def add(self, ledger_id: int, run: Run) -> None:
        """Add a run. (The journal's sweep does the same in its own loop, with bytes packed directly.)"""
        runs = self.ledgers.get(ledger_id)
        if runs is None:
            runs = self.ledgers[ledger_id] = Runs()
        runs.add(run.first, run.last, pack_run(*run))


def _paged(rows: Sequence[Buffer] | Iterable[Buffer], row_bytes: int) -> list[bytes]:
    """Cut rows into pages of whole rows."""
    packed = memoryview(b"".join(rows))
    step = PAGE_BYTES // row_bytes * row_bytes
    return [bytes(packed[at : at + step]).ljust(PAGE_BYTES, b"\0") for at in range(0, len(packed), step)]


def pack_ledgers(
    ledgers: dict[int, Runs],
    ledger_ids: Sequence[int],
    run_start: int,
    statements: Callable[[int], LacStatement | None],
) -> tuple[bytes, int]:
    """Give the rows of some ledgers, in that order, and the number of the run behind theirs."""
    rows: list[bytes] = []
    for ledger_id in ledger_ids:
        runs = ledgers[ledger_id]
        count = len(runs.firsts)
        statement = statements(ledger_id)
        row = LedgerRow(ledger_id, run_start, count, runs.firsts[0], runs.highest, runs.widest, statement)
        rows.append(row.pack())
        run_start += count
    return b"".join(rows), run_start


def encode_index(
    segment_id: int, generation: int, end: int, ledgers: dict[int, Runs], ledger_rows: Sequence[bytes]
) -> list[bytes]:
    """Give the buffers of a sealed segment's index file, one after another.

    Args:
        ledger_rows: what `pack_ledgers` made of all ledgers, ascending, in as many parts as you like.
    """
    ordered = sorted(ledgers)
    number = sum(len(runs.firsts) for runs in ledgers.values())
    ledger_pages = _paged(ledger_rows, LEDGER_BYTES)
    run_pages = _paged([ledgers[ledger_id].packed for ledger_id in ordered], RUN_BYTES)
    pages = ledger_pages + run_pages
    covered = b"".join(
        (
            _HEAD.pack(
                INDEX_MAGIC, 0, VERSION, 0, segment_id, generation, end,
                len(ordered), number, len(ledger_pages), len(run_pages),
            )[_COVERED_FROM:],
            array("I", map(crc32c, pages)).tobytes(),
            *(page[:8] for page in pages),
        )
    )  # fmt: skip
    head = INDEX_MAGIC + crc32c(covered).to_bytes(4, "little") + covered
    return [head.ljust(_round_up(len(head)), b"\0"), *pages]


def _round_up(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class IndexHead:
    """The part of a sealed segment's index that stays in memory: 12 bytes for each 4,096 of the file."""

    __slots__ = (
        "crcs", "end", "generation", "ledger_count", "ledger_fences", "ledger_pages", "pages_at",
        "run_count", "run_fences", "segment_id",
    )  # fmt: skip

    @staticmethod
    def size(data: Buffer) -> int:
        """Give how many bytes a head has, from its first 64; raises CorruptRecordError."""
        if len(data) < _HEAD.size or bytes(data[:4]) != INDEX_MAGIC:
            raise CorruptRecordError("the index of a segment is damaged")
        *_, ledger_pages, run_pages = _HEAD.unpack_from(data)
        return _HEAD.size + 12 * int(ledger_pages + run_pages)

    def __init__(self, data: Buffer) -> None:
        """Parse and check a head.

        Raises:
            CorruptRecordError: it does not parse, or is of another version.
        """
        size = self.size(data)
        if len(data) < size:
            raise CorruptRecordError("the index of a segment ends early")
        (
            _, crc, version, _, self.segment_id, self.generation, self.end,
            self.ledger_count, self.run_count, self.ledger_pages, run_pages,
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

    def page_offset(self, page: int) -> int:
        """Give where in the file a page lies; runs' pages are numbered on behind the ledgers'."""
        return self.pages_at + page * PAGE_BYTES

    def page_is_intact(self, page: int, data: Buffer) -> bool:
        """Check a page's checksum."""
        return len(data) == PAGE_BYTES and crc32c(data) == self.crcs[page]

    def page_of_ledger(self, ledger_id: int) -> int:
        """Give the page that holds the ledger, if any does; −1 where none can."""
        return bisect_right(self.ledger_fences, ledger_id) - 1

    def ledgers_on(self, page: int) -> int:
        """Give how many ledgers a page holds."""
        return min(LEDGERS_PER_PAGE, int(self.ledger_count) - page * LEDGERS_PER_PAGE)

    def pages_of_runs(self, row: LedgerRow, low: int, high: int) -> range:
        """Give the pages that hold the ledger's runs with a first entry from `low` to `high`.

        They are numbered among the runs' pages. Only pages that begin within the ledger's runs have a
        fence that says anything about it.
        """
        begin = row.run_start // RUNS_PER_PAGE
        end = (row.run_start + row.run_count - 1) // RUNS_PER_PAGE + 1
        # The last page whose fence is below `low` may still end in runs from `low` on.
        start = max(begin, bisect_left(self.run_fences, low, begin + 1, end) - 1)
        stop = bisect_right(self.run_fences, high, begin + 1, end)
        return range(start, stop)
