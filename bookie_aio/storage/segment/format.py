"""Every byte of a segment: layouts, and their encoding and parsing. Pure.

Everything is little-endian. A segment is a header page and then groups, in the order of their numbers. Each
group was written by one `pwritev`, and made durable by one fdatasync before the next group was written. A
group begins where the group before it ends, or at the next multiple of 4,096 (`group_start`). The bytes
between groups and behind the last group are zeros or, in a file that was a segment before, bytes of its
earlier life.

Segment header, in the first 4,096 bytes of the file, durable before the first group is written:

      0  4s   magic b"BKS1"
      4  u32  crc          CRC32C of bytes 8 … 55
      8  u32  version      4
     12  u32  reserved, 0
     16  u64  segment_id   1, 2, …: in the order of writing, never used twice
     24  u64  generation   random, drawn for this life of the file, never told to anybody
     32  u64  capacity     bytes of the file, this header included: the file is never shorter
     40  u64  owner        of which bookie the segment is, 0: of none with a cookie
     48  u64  checkpoint   the number of a checkpoint that was durable before

All fields lie in one sector. A segment that is cut gets its new capacity first, and a power cut leaves the
old header or the new one.

Group:

      0  4s   magic b"BKG1"
      4  u32  crc          CRC32C of byte 8 up to the end of the rows
      8  u64  segment_id
     16  u64  generation
     24  u64  number       0, 1, … in its segment
     32  u64  offset       its own, in the file: everything before it in this segment was durable
     40  u64  previous_segment  the segment written before this one, 0: none
     48  u64  previous_end      and where that one's durable groups end
     56  u64  total_bytes  of the whole group
     64  u64  checkpoint   the number of a checkpoint that was durable before
     72  u32  rows
     76  u32  reserved, 0
     80  rows × 64 bytes
      …  the bodies, in the order of the rows

Row:

      0  u16  kind         1 block, 2 term, 3 statement, 4 mark, 5 tombstone, 6 trim, 7 lock, 8 forget, 9 lift
      2  u16  flags        mark, lift: 1 of all ledgers; mark: 2 of listed entries only;
                           block: 1 it states no LAC; tombstone: 1 of a range of ledgers
      4  u32  head_bytes   block: its head; else 0
      8  u32  rest_bytes   block: its payload; statement: its code; lock: 32; else 0
     12  u32  entries      block
     16  u32  stride       block
     20  u32  head_crc     block: CRC32C of its head, as in its bytes 4 … 7
     24  u32  rest_crc     block: CRC32C of its payload; statement: of its code; lock: of itself
     28  u32  lac_crc      block, statement: CRC32C of the LAC statement
     32  u64  ledger_id
     40  u64  term         block, statement: content term; term: the term; lift of one ledger: the term that
                           it is held under from then on
     48  i64  first        block: first entry; statement: LAFR; trim: the first entry that is kept; mark: its
                           number; lift: the highest number that is lifted; tombstone of a range: the last
                           ledger, where ledger_id is the first one
     56  i64  lac          block, statement; mark of all ledgers: the highest ledger concerned, −1: unknown;
                           lift of all: the highest ledger that counts as fenced

The body of a block is the block as it came (`bookie_aio.wire.blocks`). The body of a statement is its code.
The body of a lock is the lock (`bookie_aio.core.authorisation`). Other rows have no body. So the group's
checksum covers its header and its rows, and through the checksums in the rows the bodies as well.

`segment_name` and its neighbours are the names of the files in a data directory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from bookie_aio.wire.blocks import HEADER_BYTES, LacStatement
from bookie_aio.wire.blocks import MAGIC as BLOCK_MAGIC
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.wire.blocks import Block, Buffer


VERSION = 4
SEGMENT_MAGIC = b"BKS1"
GROUP_MAGIC = b"BKG1"
DATA_OFFSET = 4096
"""The offset of a segment's first group."""

KIND_BLOCK = 1
KIND_TERM = 2
KIND_STATEMENT = 3
KIND_MARK = 4
KIND_TOMBSTONE = 5
KIND_TRIM = 6
KIND_LOCK = 7
KIND_FORGET = 8
KIND_LIFT = 9
KINDS = frozenset(range(KIND_BLOCK, KIND_LIFT + 1))
OF_ALL = 1
"""The flag of a mark or a lift of all ledgers, and of the tombstones of a range of ledgers."""
OF_LISTED = 2
"""The flag of a mark of one ledger: what is damaged is listed, so nothing else was forgotten."""
STATES_NOTHING = 1
"""A block's flag: the bookie must not state its LAC, which is not from the writer."""
ROW_FLAGS_AT = 2

_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)
_ALIGNED_BYTES_MAX = 64 * 1024
_SEGMENT = struct.Struct("<4sIIIQQQQQ")
SECTOR_BYTES = 512
_GROUP_COVERED = struct.Struct("<QQQQQQQQII")
_GROUP_START = struct.Struct("<4sI")
_ROW = struct.Struct("<HHIIIIIIIQQqq")
_BLOCK_HEAD_COVERED_FROM = 8
_BLOCK_LAFR = struct.Struct("<q")
_BLOCK_LAFR_AT = 56
GROUP_HEADER_BYTES = _GROUP_START.size + _GROUP_COVERED.size
ROW_BYTES = _ROW.size
assert (_SEGMENT.size, GROUP_HEADER_BYTES, ROW_BYTES) == (56, 80, 64)


class UnknownVersionError(CorruptRecordError):
    """Intact data of a format version that this program does not know; it is not changed."""


class SegmentHeader(NamedTuple):
    """The identity of one life of a segment's file."""

    segment_id: int
    generation: int
    capacity: int
    owner: int = 0
    checkpoint: int = 0


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Return the first 4,096 bytes of a segment."""
    return encode_header_sector(header).ljust(DATA_OFFSET, b"\0")


def encode_header_sector(header: SegmentHeader) -> bytes:
    """Return the first sector of a segment, for a header that is replaced in place."""
    fixed = _SEGMENT.pack(SEGMENT_MAGIC, 0, VERSION, 0, *header)
    return (SEGMENT_MAGIC + crc32c(fixed[8:]).to_bytes(4, "little") + fixed[8:]).ljust(SECTOR_BYTES, b"\0")


def parse_segment_header(data: Buffer) -> SegmentHeader:
    """Parse and check a segment's header.

    Raises:
        CorruptRecordError: the header does not parse.
        UnknownVersionError: the segment is of another version.
    """
    if len(data) < _SEGMENT.size:
        raise CorruptRecordError(f"a segment ends after {len(data)} bytes")
    magic, crc, version, _, *fields = _SEGMENT.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc32c(memoryview(data)[8 : _SEGMENT.size]) != crc:
        raise CorruptRecordError("a segment's header is damaged")
    if version != VERSION:
        raise UnknownVersionError(f"a segment of format version {version}; this program knows {VERSION}")
    return SegmentHeader(*fields)


class Row(NamedTuple):
    """One record of a group."""

    kind: int
    flags: int
    head_bytes: int
    rest_bytes: int
    entries: int
    stride: int
    head_crc: int
    rest_crc: int
    lac_crc: int
    ledger_id: int
    term: int
    first: int
    lac: int

    @property
    def body_bytes(self) -> int:
        """Return the size of the row's body."""
        return self.head_bytes + self.rest_bytes

    @property
    def is_of_all(self) -> bool:
        """Return whether the row is a mark or a lift of all ledgers."""
        return self.kind in (KIND_MARK, KIND_LIFT) and bool(self.flags & OF_ALL)

    @property
    def is_of_listed(self) -> bool:
        """Return whether the row is a mark that concerns listed entries only."""
        return self.kind == KIND_MARK and bool(self.flags & OF_LISTED)

    @property
    def last_ledger(self) -> int:
        """Return the last ledger that the row concerns: of a tombstone perhaps above the first."""
        return self.first if self.kind == KIND_TOMBSTONE and self.flags & OF_ALL else self.ledger_id

    def is_plausible(self) -> bool:
        """Return whether the row is of a kind that this version knows."""
        return self.kind in KINDS

    def statement(self, body: memoryview) -> LacStatement:
        """Return the LAC statement in a block, or an explicit one, from the row and its body."""
        if self.kind == KIND_STATEMENT:
            return LacStatement(self.term, self.lac, self.first, self.lac_crc, bytes(body))
        (lafr,) = _BLOCK_LAFR.unpack_from(body, _BLOCK_LAFR_AT)
        fixed = HEADER_BYTES + 16 * self.entries
        mac = body[fixed : fixed + (self.head_bytes - fixed) // (self.entries + 1)]
        return LacStatement(self.term, self.lac, lafr, self.lac_crc, bytes(mac))

    def body_is_intact(self, body: memoryview) -> bool:
        """Check the body against the checksums in the row."""
        if len(body) != self.body_bytes:
            return False
        if self.kind == KIND_BLOCK and (
            body[:8] != BLOCK_MAGIC + self.head_crc.to_bytes(4, "little")
            or crc32c(body[_BLOCK_HEAD_COVERED_FROM : self.head_bytes]) != self.head_crc
        ):
            return False
        return not self.rest_bytes or crc32c(body[self.head_bytes :]) == self.rest_crc


def block_row(block: Block, flags: int = 0) -> bytes:
    """Return the row of a whole block. Called for each block that is stored: the hot path."""
    # A partial block (rule 14 stores copies as they are) has no checksum over its payload.
    payload_crc = block.payload_crc if not block.flags else crc32c(block.payload)
    return _ROW.pack(
        KIND_BLOCK, flags, block.head_bytes, block.payload_bytes, block.count, block.stride,
        block.head_crc, payload_crc, block.lac_crc,
        block.ledger_id, block.content_term, block.first_entry, block.lac,
    )  # fmt: skip


def term_row(ledger_id: int, term: int) -> bytes:
    """Return the row of a fence."""
    return _ROW.pack(KIND_TERM, 0, 0, 0, 0, 0, 0, 0, 0, ledger_id, term, 0, 0)


def statement_row(ledger_id: int, statement: LacStatement) -> bytes:
    """Return the row of an explicit LAC; its code is the body."""
    mac = statement.mac
    return _ROW.pack(
        KIND_STATEMENT, 0, 0, len(mac), 0, 0, 0, crc32c(mac), statement.crc,
        ledger_id, statement.content_term, statement.lafr, statement.lac,
    )  # fmt: skip


def mark_row(ledger_id: int, number: int, *, is_of_listed: bool = False) -> bytes:
    """Return the row of the mark that data of this ledger was lost; `is_of_listed`: of listed entries."""
    flags = OF_LISTED if is_of_listed else 0
    return _ROW.pack(KIND_MARK, flags, 0, 0, 0, 0, 0, 0, 0, ledger_id, 0, number, 0)


def mark_all_row(number: int, bound: int) -> bytes:
    """Return the row of the mark that data of ledgers up to `bound` (−1: of any ledger) was lost."""
    return _ROW.pack(KIND_MARK, OF_ALL, 0, 0, 0, 0, 0, 0, 0, 0, 0, number, bound)


def lift_row(ledger_id: int, number: int, term: int) -> bytes:
    """Return the row that lifts a ledger's marks up to a number, and holds the ledger under a term."""
    return _ROW.pack(KIND_LIFT, 0, 0, 0, 0, 0, 0, 0, 0, ledger_id, term, number, 0)


def lift_all_row(number: int, fenced: int) -> bytes:
    """Return the row that ends the marks of all ledgers up to a number. Ids up to `fenced` are fenced."""
    return _ROW.pack(KIND_LIFT, OF_ALL, 0, 0, 0, 0, 0, 0, 0, 0, 0, number, fenced)


def tombstone_row(ledger_id: int) -> bytes:
    """Return the row of the tombstone of a ledger."""
    return _ROW.pack(KIND_TOMBSTONE, 0, 0, 0, 0, 0, 0, 0, 0, ledger_id, 0, 0, 0)


def tombstones_row(first: int, last: int) -> bytes:
    """Return the row of the tombstones of a range of ledgers."""
    return _ROW.pack(KIND_TOMBSTONE, OF_ALL, 0, 0, 0, 0, 0, 0, 0, first, 0, last, 0)


def lock_row(ledger_id: int, lock: bytes) -> bytes:
    """Return the row of a ledger's lock; the lock is the body."""
    return _ROW.pack(KIND_LOCK, 0, 0, len(lock), 0, 0, 0, crc32c(lock), 0, ledger_id, 0, 0, 0)


def trim_row(ledger_id: int, first: int) -> bytes:
    """Return the row of a trim: the ledger's entries below `first` are not kept."""
    return _ROW.pack(KIND_TRIM, 0, 0, 0, 0, 0, 0, 0, 0, ledger_id, 0, first, 0)


def forget_row(ledger_id: int) -> bytes:
    """Return the row of a forget: entries of the ledger stored before it do not count any more."""
    return _ROW.pack(KIND_FORGET, 0, 0, 0, 0, 0, 0, 0, 0, ledger_id, 0, 0, 0)


def group_start(end: int, size: int) -> int:
    """Return where a group of that size begins, behind groups that end at `end`.

    The system writes whole pages. So a small group begins on a new page where it then touches fewer pages.
    Entries of 1 KiB written one at a time cost one page each instead of 1.3. And no sector of an older group
    is rewritten.
    """
    rest = -end % _PAGE_BYTES
    if rest and size <= _ALIGNED_BYTES_MAX and -(-(size - rest) // _PAGE_BYTES) + 1 > -(-size // _PAGE_BYTES):
        return end + rest
    return end


def padding(end: int, capacity: int) -> bytes:
    """Return the zeros that fill the page in which a group ends, up to the segment's capacity.

    The system needs the other bytes of a page that is written in part. In a file that was a segment before it
    reads them from the disk first, and the group waits for that read. The next group may begin in the zeros.
    """
    return _ZEROS[: min(next_page(end), capacity) - end]


def next_page(offset: int) -> int:
    """Return the first multiple of the page size from `offset` on."""
    return offset + -offset % _PAGE_BYTES


class GroupHeader(NamedTuple):
    """A group's header, without magic and checksum."""

    segment_id: int
    generation: int
    number: int
    offset: int
    previous_segment: int
    previous_end: int
    total_bytes: int
    checkpoint: int
    row_count: int

    @property
    def head_bytes(self) -> int:
        """Return the size of header and rows."""
        return GROUP_HEADER_BYTES + self.row_count * ROW_BYTES

    @property
    def end(self) -> int:
        """Return the offset behind the group."""
        return self.offset + self.total_bytes


def encode_group_head(header: GroupHeader, rows: Sequence[bytes]) -> bytes:
    """Return header and rows; the bodies follow in their own buffers. A buffer may have several rows."""
    covered = b"".join((_GROUP_COVERED.pack(*header, 0), *rows))
    return b"".join((_GROUP_START.pack(GROUP_MAGIC, crc32c(covered)), covered))


def peek_group_header(data: Buffer, segment: SegmentHeader, offset: int, end: int) -> GroupHeader | None:
    """Return the header of a group at `offset`, with no look at its checksum (see `parse_group_rows`).

    None where the bytes are no header of a group of this life of the segment, at that offset, that ends at or
    before `end`.
    """
    if len(data) < GROUP_HEADER_BYTES or bytes(data[:4]) != GROUP_MAGIC:
        return None
    *fields, reserved = _GROUP_COVERED.unpack_from(data, _GROUP_START.size)
    header = GroupHeader(*fields)
    if (
        header.segment_id != segment.segment_id
        or header.generation != segment.generation
        or header.offset != offset
        or reserved
        or header.head_bytes > header.total_bytes
        or header.end > end
    ):
        return None
    return header


def parse_group_rows(header: GroupHeader, data: memoryview) -> list[Row] | None:
    """Return the rows of a group from its head's bytes; None where the checksum or a size is wrong."""
    if len(data) < header.head_bytes:
        return None
    (crc,) = struct.unpack_from("<I", data, 4)
    if crc32c(data[_GROUP_START.size : header.head_bytes]) != crc:
        return None
    rows = list(map(Row._make, _ROW.iter_unpack(data[GROUP_HEADER_BYTES : header.head_bytes])))
    if header.head_bytes + sum(row.body_bytes for row in rows) != header.total_bytes:
        return None
    return rows


COOKIE = "cookie.json"
AGE = "age"
LOCK = "lock"
CHECKPOINT = "checkpoint"
RESERVE = "reserve"
WITNESS = "witness"
SEGMENT_SUFFIX = ".segment"
INDEX_SUFFIX = ".index"
SPARE_SUFFIX = ".spare"
TABLE_SUFFIX = ".ledgers"


def segment_name(segment_id: int) -> str:
    """Return the name of a segment's file."""
    return f"{segment_id:016x}{SEGMENT_SUFFIX}"


def index_name(segment_id: int) -> str:
    """Return the name of a sealed segment's index."""
    return f"{segment_id:016x}{INDEX_SUFFIX}"


def spare_name(segment_id: int) -> str:
    """Return the name of a file that was this segment, and is kept to become another one."""
    return f"{segment_id:016x}{SPARE_SUFFIX}"


def table_name(number: int) -> str:
    """Return the name of a table of ledgers."""
    return f"{number:016x}{TABLE_SUFFIX}"


def id_of(name: str, suffix: str) -> int | None:
    """Return the number in a file's name, or None if it is not a file of that kind."""
    stem = name.removesuffix(suffix)
    if stem == name or len(stem) != 16 or not set(stem) <= set("0123456789abcdef"):
        return None
    return int(stem, 16)
