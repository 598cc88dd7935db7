"""The checkpoint: the state that must outlive the segments it was journaled in, in one small file. Pure.

It holds the term, marks, lock, highest entry and highest LAC statement of ledgers, the marks of all ledgers,
the ids of deleted ledgers, and the list of segments. A ledger without a row here may have one in the table
that the checkpoint names (`ledger_table`). The checkpoint covers at least every sealed segment. State of
later segments in it is harmless, since all of this state only grows. It is replaced atomically:

- before the first group of a new segment;
- when a segment is sealed;
- before the file of a segment is given up.

Little-endian:

      0  4s   magic b"BKC1"
      4  u32  crc            CRC32C of byte 8 up to the end
      8  u32  version        6
     12  u32  reserved, 0
     16  u64  next_segment   the lowest segment id that was never used
     24  u64  segments
     32  u64  ledgers
     40  u64  ranges
     48  u64  table          the number of the table of ledgers, 0: there is none
     56  u64  number         of this checkpoint: each one has the next number
     64  u64  owner          of which bookie it is, 0: of none with a cookie
     72  48 bytes            the marks of all ledgers (`marks`)
    120  segments × 48 bytes: u64 id, u64 generation (0: not known), u64 where its groups end (0: it is
             written to, or nothing is known), u64 lowest, u64 highest ledger in its index, u64 flags (1: it
             is sealed; else both ledgers are 0)
      …  ranges × 16 bytes:  u64 first, u64 last id of deleted ledgers, ascending
      …  ledgers × 160 bytes: u64 ledger_id, u64 term, i64 highest entry, u32 flags (1: marked, 2: locked,
             4: evicted once, 8: the marks that count concern listed entries only, 16: so does the highest
             one, if it is found in a segment, too),
             u32 code's bytes (all ones: no statement), u64 content term, i64 LAC, i64 LAFR,
             u32 crc, u32 reserved, 32s code, 32s lock, u64 the segment from which on entries count,
             i64 the first entry that is kept, u64 the highest number of a mark of this ledger, u64 the
             highest number of a mark that was lifted

`IdRanges` is a set of ids as ranges, which is small where ids come in runs, as the ids of deleted ledgers do.
Invariant: its ranges ascend, and between two of them at least one id is missing.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from bookie_aio.storage.ledgers.marks import MARKS, Marks
from bookie_aio.storage.segment.format import UnknownVersionError
from bookie_aio.storage.segment.segment import SegmentRow
from bookie_aio.wire.blocks import LacStatement
from metadata.errors import CorruptRecordError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bookie_aio.wire.blocks import Buffer


class IdRanges:
    """A set of ids from 0 to 2^63 − 1 that only grows."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Take (first, last) of ascending ranges, as `ranges` returns them."""
        self._firsts, self._lasts = array("q"), array("q")
        for first, last in ranges:
            if first > last or (self._lasts and first <= self._lasts[-1] + 1):
                raise ValueError(f"{first} to {last} is no range, or not in order")
            self._firsts.append(first)
            self._lasts.append(last)

    def add(self, one: int) -> None:
        """Put an id into the set."""
        at = bisect_right(self._firsts, one)  # the first range that starts behind it
        if at and one <= self._lasts[at - 1]:
            return
        joins_before = at > 0 and self._lasts[at - 1] + 1 == one
        joins_after = at < len(self._firsts) and self._firsts[at] - 1 == one
        if joins_before and joins_after:
            self._lasts[at - 1] = self._lasts[at]
            del self._firsts[at], self._lasts[at]
        elif joins_before:
            self._lasts[at - 1] = one
        elif joins_after:
            self._firsts[at] = one
        else:
            self._firsts.insert(at, one)
            self._lasts.insert(at, one)

    def highest(self) -> int:
        """Return the highest id in the set; −1 for none."""
        return self._lasts[-1] if self._lasts else -1

    def add_range(self, first: int, last: int) -> None:
        """Put all ids from `first` to `last` into the set."""
        low = bisect_left(self._lasts, first - 1)  # the first range that touches or follows it
        high = bisect_right(self._firsts, last + 1)  # the first range behind that does not touch it
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = array("q", (first,))
        self._lasts[low:high] = array("q", (last,))

    def covers(self, first: int, last: int) -> bool:
        """Return whether all ids from `first` to `last` are in the set."""
        at = bisect_right(self._firsts, first)
        return at > 0 and last <= self._lasts[at - 1]

    def __contains__(self, one: int) -> bool:
        firsts = self._firsts
        if not firsts:
            return False
        at = bisect_right(firsts, one)
        return at > 0 and one <= self._lasts[at - 1]

    def __len__(self) -> int:
        """Return the number of ranges, not of ids."""
        return len(self._firsts)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Return first and last id of each range, ascending."""
        return zip(self._firsts, self._lasts, strict=True)

    def packed(self) -> bytes:
        """Return first and last id of each range, ascending: 8 bytes each, little-endian.

        Fast for millions of ranges.
        """
        both = array("q", bytes(16 * len(self._firsts)))
        both[0::2], both[1::2] = self._firsts, self._lasts
        return both.tobytes()

    def ranges_from(self, one: int) -> Iterator[tuple[int, int]]:
        """Return first and last id of each range that does not end before an id, ascending."""
        for at in range(bisect_left(self._lasts, one), len(self._firsts)):
            yield self._firsts[at], self._lasts[at]


VERSION = 6
CHECKPOINT_MAGIC = b"BKC1"
_HEAD = struct.Struct("<4sIIIQQQQQQQ")
_SEGMENT = struct.Struct("<QQQQQQ")
_RANGE = struct.Struct("<QQ")
_LEDGER = struct.Struct("<QQqIIQqqII32s32sQqQQ")
_COVERED_FROM = 8
_FLAG_DAMAGED = 1
_FLAG_LOCKED = 2
_FLAG_EVICTED = 4
_FLAG_OF_LISTED = 8
_FLAG_UNPROVEN = 16
_NO_STATEMENT = 0xFFFFFFFF
LEDGER_BYTES = _LEDGER.size
assert (_HEAD.size, _SEGMENT.size, LEDGER_BYTES) == (72, 48, 160)


class LedgerState:
    """The state of a ledger, beside the places of its entries."""

    __slots__ = (
        "accepted", "doubted", "first", "last_entry", "lifted", "listed", "lock", "marked", "since",
        "statement", "term", "unproven", "was_evicted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.term = 0  # highest accepted, perhaps not durable yet
        self.last_entry = -1
        self.statement: LacStatement | None = None
        self.marked = 0  # the highest number of a mark of this ledger, perhaps not durable yet
        self.doubted = 0  # the highest of one that does not concern listed entries only
        self.listed = 0  # the highest of one that does, and that a durable group holds
        self.unproven = 0  # one of listed entries in a checkpoint of before its group was durable
        self.lifted = 0  # the highest number of a mark that was lifted, and is durable
        self.lock = b""  # checked against a request's token, perhaps not durable yet; empty: none
        self.accepted = 0  # the number of the last record accepted for it
        self.since = 0  # the segment from which on its entries count; 0: from the first
        self.first = 0  # entries below are not kept
        self.was_evicted = False  # once; entries may have been added since

    @property
    def is_marked(self) -> bool:
        """Return whether a mark of this ledger counts; a mark of all ledgers may count beside it."""
        return self.marked > self.lifted

    @property
    def is_in_doubt(self) -> bool:
        """Return whether a mark counts by which entries may have been lost that nothing lists."""
        return max(self.doubted, self.unproven) > self.lifted

    def mark(self, number: int, *, is_of_listed: bool = False, is_proven: bool = True) -> None:
        """Take a mark of this ledger.

        Args:
            number: the mark's.
            is_of_listed: it concerns listed entries only.
            is_proven: a durable group stands behind those of the entries, such as the mark's own. A start
                drops a damaged group that nothing stands behind, and does not list its entries any more. So
                a mark that only a checkpoint has puts the ledger in doubt.
        """
        self.marked = max(self.marked, number)
        if not is_of_listed:
            self.doubted = max(self.doubted, number)
        elif is_proven:
            self.listed = max(self.listed, number)
            if number == self.unproven:
                self.unproven = 0  # a later mark proves nothing of this one

    def raise_to(self, other: LedgerState) -> None:
        """Take in another state of the same ledger, older or newer: each value only grows."""
        self.term = max(self.term, other.term)
        self.last_entry = max(self.last_entry, other.last_entry)
        self.marked, self.lifted = max(self.marked, other.marked), max(self.lifted, other.lifted)
        self.doubted, self.listed = max(self.doubted, other.doubted), max(self.listed, other.listed)
        self.unproven = max(self.unproven, other.unproven)
        self.lock = self.lock or other.lock
        self.since = max(self.since, other.since)
        self.first = max(self.first, other.first)
        self.was_evicted = self.was_evicted or other.was_evicted
        if other.statement is not None:
            self.learn_statement(other.statement)

    def learn_statement(self, statement: LacStatement) -> None:
        """Keep the statement with the higher LAC; of equal LACs the statement with the higher LAFR."""
        known = self.statement
        if known is None or (statement.lac, statement.lafr) > (known.lac, known.lafr):
            self.statement = statement


@dataclass
class Checkpoint:
    """The contents of a checkpoint; `table` is the number of the table of ledgers, 0 for none.

    `number` is its own, and `owner` the bookie's.
    """

    next_segment: int = 1
    segments: dict[int, SegmentRow] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    ledgers: dict[int, LedgerState] = field(default_factory=dict)
    deleted: IdRanges = field(default_factory=IdRanges)
    table: int = 0
    number: int = 0
    owner: int = 0


def pack_state(ledger_id: int, state: LedgerState) -> bytes:
    """Return a ledger's row."""
    statement = state.statement
    term, lac, lafr, crc, mac = statement or (0, 0, 0, 0, b"")
    flags = (
        _FLAG_DAMAGED * state.is_marked | _FLAG_LOCKED * bool(state.lock) | _FLAG_EVICTED * state.was_evicted
    )
    if not state.is_in_doubt:
        flags |= _FLAG_OF_LISTED if state.listed >= state.marked else _FLAG_UNPROVEN
    return _LEDGER.pack(
        ledger_id, state.term, state.last_entry, flags,
        _NO_STATEMENT if statement is None else len(mac), term, lac, lafr, crc, 0, mac, state.lock,
        state.since, state.first, state.marked, state.lifted,
    )  # fmt: skip


def unpack_state(row: Buffer) -> LedgerState:
    """Return the state in a ledger's row."""
    return _state_of(_LEDGER.unpack(row))


def _state_of(fields: tuple[Any, ...]) -> LedgerState:
    (
        _, term, last_entry, flags, mac_bytes, content_term, lac, lafr, crc, _, mac, lock, since, first,
        marked, lifted,
    ) = fields  # fmt: skip
    state = LedgerState()
    state.term, state.last_entry, state.since, state.first = term, last_entry, since, first
    state.lifted = lifted
    # Marks of a doubt that were lifted count no more. So one number tells all.
    is_of_listed = bool(flags & (_FLAG_OF_LISTED | _FLAG_UNPROVEN))
    state.mark(marked, is_of_listed=is_of_listed, is_proven=not flags & _FLAG_UNPROVEN)
    state.unproven = marked if flags & _FLAG_UNPROVEN else 0
    state.lock = lock if flags & _FLAG_LOCKED else b""
    # Directories of before the flag have only the second form.
    state.was_evicted = bool(flags & _FLAG_EVICTED) or (since > 0 and last_entry < 0)
    if mac_bytes != _NO_STATEMENT:
        state.statement = LacStatement(content_term, lac, lafr, crc, mac[:mac_bytes])
    return state


def encode_checkpoint(
    next_segment: int,
    segments: Iterable[SegmentRow],
    marks: Marks,
    rows: Sequence[bytes],
    deleted: bytes = b"",
    table: int = 0,
    number: int = 0,
    owner: int = 0,
) -> list[bytes]:
    """Return the file's bytes, in parts.

    Args:
        rows: rows of `pack_state`, single or joined: of every ledger whose state is not in the table, or
            differs from its row there.
        deleted: the deleted ledgers, as `IdRanges.packed` returns them.
        table: the number of the table.
        number: the number of this checkpoint.
        owner: of which bookie it is.
    """
    segment_rows = [_SEGMENT.pack(*row) for row in sorted(segments)]
    count = sum(map(len, rows)) // _LEDGER.size
    head = _HEAD.pack(
        CHECKPOINT_MAGIC,
        0,
        VERSION,
        0,
        next_segment,
        len(segment_rows),
        count,
        len(deleted) // _RANGE.size,
        table,
        number,
        owner,
    )
    covered = [b"".join((head[_COVERED_FROM:], marks.packed(), *segment_rows, deleted)), *rows]
    crc = 0
    for part in covered:
        crc = crc32c(part, crc)
    return [CHECKPOINT_MAGIC + crc.to_bytes(4, "little"), *covered]


def empty_checkpoint(owner: int) -> list[bytes]:
    """Return the checkpoint of a new bookie."""
    return encode_checkpoint(1, (), Marks(), (), owner=owner)


def parse_checkpoint(data: Buffer) -> Checkpoint:
    """Parse and check the file's bytes.

    Raises:
        CorruptRecordError: the bytes do not parse.
        UnknownVersionError: the checkpoint is of another version.
    """
    head = bytes(data[: _HEAD.size]).ljust(_HEAD.size, b"\0")
    _, crc, version, _, next_segment, segments, ledgers, ranges, table, number, owner = _HEAD.unpack(head)
    # The version comes before the length: the head of another version may be shorter.
    is_whole = head[:4] == CHECKPOINT_MAGIC and len(data) >= _COVERED_FROM + 4
    if not is_whole or crc32c(memoryview(data)[_COVERED_FROM:]) != crc:
        raise CorruptRecordError("the checkpoint is damaged")
    if version != VERSION:
        raise UnknownVersionError(
            f"a checkpoint of format version {version}; this program knows {VERSION}. It cannot be taken "
            "over: start a new bookie in an empty directory, and have the ledgers of the old one repaired"
        )
    segments_at = _HEAD.size + MARKS.size
    ranges_at = segments_at + _SEGMENT.size * segments
    ledgers_at = ranges_at + _RANGE.size * ranges
    view = memoryview(data)
    if len(data) != ledgers_at + LEDGER_BYTES * ledgers:
        raise CorruptRecordError("the checkpoint is damaged")
    marks = Marks.parse(view[_HEAD.size : segments_at])
    found = Checkpoint(next_segment, marks=marks, table=table, number=number, owner=owner)
    rows = map(SegmentRow._make, _SEGMENT.iter_unpack(view[segments_at:ranges_at]))
    found.segments = {row.segment_id: row for row in rows}
    found.deleted = IdRanges(_RANGE.iter_unpack(view[ranges_at:ledgers_at]))
    for fields in _LEDGER.iter_unpack(view[ledgers_at:]):
        found.ledgers[fields[0]] = _state_of(fields)
    return found
