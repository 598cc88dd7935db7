"""Blocks: runs of entries, in one form on the wire, on disk and in a read's answer.

A block holds `count` entries of one ledger under one content term, with the ids `first_entry`, `first_entry +
stride`, …. The stride is 1 in a ledger whose ensemble equals its write quorum. Otherwise it is the ensemble
size, and the block holds entries of one write set. All entries of a block were sent with one LAC and LAFR.
All numbers are little-endian:

      0  4s   magic b"BKB1"
      4  u32  head_crc       CRC32C of the head from byte 8 on (this header and the arrays)
      8  u32  head_bytes     this header and the arrays
     12  u32  payload_bytes
     16  u32  count          1 … 65,536
     20  u32  stride         1 … 64
     24  u64  ledger_id
     32  u64  content_term
     40  u64  first_entry
     48  i64  lac            last add confirmed when the entries were sent, −1 for none
     56  i64  lafr           rule 11; −1 where it is not used
     64  u32  lac_crc        CRC32C of (ledger_id, content_term, lac, lafr), the *LAC statement*
     68  u32  payload_crc    CRC32C of the payload; 0 with flag PARTIAL
     72  u16  mac_bytes      0, or 32 in a ledger with authentication codes
     74  u16  flags          1 PARTIAL: cut out of a larger block, payload_crc is not set; no other is legal
     76  u32  reserved, 0
     80  u64[count]  running    payload bytes of the ledger up to and including this entry
      …  u32[count]  lengths    payload bytes of this entry
      …  u32[count]  checksums  CRC32C of (entry_id, running, payload), seeded with lac_crc
      …  mac_bytes              code of the LAC statement
      …  mac_bytes × count      code of each entry
      …  payload                the entries' bytes, one after another

An entry's checksum covers ledger, content term, LAC, LAFR, id, running length and payload. Any holder of the
bytes can check it. The codes can be made and checked only with the ledger's key (`client_aio.core.digest`).
Checksums, codes and the LAC statement stay valid in a block that is cut out of a larger block.

Invariant: `Block.parse` accepts only bytes in which all lengths agree and the head's checksum holds.
"""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

if sys.byteorder != "little":  # the arrays of a block are used in place
    raise ImportError("bookie-aio runs on little-endian machines only")

Buffer = bytes | bytearray | memoryview

MAGIC = b"BKB1"
ENTRIES_MAX = 65_536
STRIDE_MAX = 64
FLAG_PARTIAL = 1
MAC_BYTES = (0, 32)

_COVERED = "IIIIQQQqqIIHHI"
_START = struct.Struct("<4sI")
HEADER = struct.Struct(f"<4sI{_COVERED}")
HEADER_BYTES = HEADER.size
_STATEMENT = struct.Struct("<QQqq")
_ENTRY = struct.Struct("<QQ")
_HEAD_COVERED_FROM = 8
# From this average size on, one checksum call for each payload costs less than joining the payloads first,
# which takes page faults on fresh memory.
_LARGE_ENTRY_BYTES = 512
_CRC_FIELD = struct.Struct("<I")
assert HEADER_BYTES == 80


class LacStatement(NamedTuple):
    """The LAC of a ledger as an entry, or an idle writer, states it, with checksum and code (rule 12b)."""

    content_term: int
    lac: int
    lafr: int
    crc: int
    mac: bytes = b""


class Known(NamedTuple):
    """The fields of a block's head that an index knows, too."""

    ledger_id: int
    content_term: int
    first_entry: int
    entries: int
    stride: int
    head_bytes: int
    payload_bytes: int


def statement_crc(ledger_id: int, content_term: int, lac: int, lafr: int) -> int:
    """Return the CRC32C of a LAC statement, which seeds the checksums of its entries."""
    return crc32c(_STATEMENT.pack(ledger_id, content_term, lac, lafr))


def statement_is_intact(ledger_id: int, statement: LacStatement) -> bool:
    """Return whether the checksum of a LAC statement holds for that ledger."""
    return statement.crc == statement_crc(ledger_id, statement.content_term, statement.lac, statement.lafr)


def entry_checksums(
    lac_crc: int, entry_ids: Sequence[int], running: Sequence[int], payloads: Sequence[Buffer]
) -> list[int]:
    """Return the checksum of each entry. All loops run in C: this is the hottest code of the client."""
    seeds = map(crc32c, map(_ENTRY.pack, entry_ids, running), repeat(lac_crc))
    return list(map(crc32c, payloads, seeds))


def encode_block(
    *,
    ledger_id: int,
    content_term: int,
    first_entry: int,
    stride: int,
    lac: int,
    lafr: int,
    payloads: Sequence[Buffer],
    running: Sequence[int],
    macs: Sequence[bytes] = (),
) -> bytes:
    """Build a whole block.

    Args:
        payloads: the entries' bytes, 1 to `ENTRIES_MAX` of them.
        running: for each entry, the ledger's payload bytes up to and including it.
        macs: empty, or the code of the LAC statement followed by the code of each entry.
    """
    count = len(payloads)
    assert 1 <= count <= ENTRIES_MAX
    assert len(running) == count
    assert len(macs) in (0, count + 1)
    lac_crc = statement_crc(ledger_id, content_term, lac, lafr)
    ids = range(first_entry, first_entry + stride * count, stride)
    lengths = list(map(len, payloads))
    payload_bytes = sum(lengths)
    if payload_bytes >= count * _LARGE_ENTRY_BYTES:
        parts, payload_crc = payloads, 0
        for part in parts:
            payload_crc = crc32c(part, payload_crc)
    else:
        payload = b"".join(payloads)
        parts, payload_crc = [payload], crc32c(payload)
    checksums = entry_checksums(lac_crc, ids, running, payloads)
    mac_bytes = len(macs[0]) if macs else 0
    head_bytes = HEADER_BYTES + 16 * count + mac_bytes * len(macs)
    head = _covered(count).pack(
        head_bytes, payload_bytes, count, stride, ledger_id, content_term, first_entry,
        lac, lafr, lac_crc, payload_crc, mac_bytes, 0, 0, *running, *lengths, *checksums,
    )  # fmt: skip
    if macs:
        head = b"".join((head, *macs))
    return b"".join((_START.pack(MAGIC, crc32c(head)), head, *parts))


@lru_cache(maxsize=256)
def _covered(count: int) -> struct.Struct:
    """Return the form of a head of `count` entries, from byte 8 to the codes."""
    return struct.Struct(f"<{_COVERED}{count}Q{count}I{count}I")


class Block:
    """A block's header, and views of its parts, over the bytes it was parsed from."""

    __slots__ = (
        "_reserved", "content_term", "count", "first_entry", "flags", "head_bytes", "head_crc", "lac",
        "lac_crc", "lafr", "ledger_id", "mac_bytes", "payload_bytes", "payload_crc", "stride", "view",
    )  # fmt: skip

    def __init__(self, view: memoryview) -> None:
        """Take a view of at least a head, unchecked. Use `parse` or `parse_head`, which check it."""
        self.view = view
        self.head_crc: int
        self._reserved: int
        self.head_bytes: int
        self.payload_bytes: int
        self.count: int
        self.stride: int
        self.ledger_id: int
        self.content_term: int
        self.first_entry: int
        self.lac: int
        self.lafr: int
        self.lac_crc: int
        self.payload_crc: int
        self.mac_bytes: int
        self.flags: int
        (
            _, self.head_crc, self.head_bytes, self.payload_bytes, self.count, self.stride, self.ledger_id,
            self.content_term, self.first_entry, self.lac, self.lafr, self.lac_crc, self.payload_crc,
            self.mac_bytes, self.flags, self._reserved,
        ) = HEADER.unpack_from(view)  # fmt: skip

    @classmethod
    def parse_head(cls, view: memoryview) -> Block:
        """Parse and check a head; the payload may be missing from the view.

        Raises:
            MalformedFrameError: too short, wrong magic, lengths that disagree, ids out of range, or a
                checksum over head or LAC statement that does not hold.
        """
        if len(view) < HEADER_BYTES or view[:4] != MAGIC:
            raise MalformedFrameError(f"no block starts with {bytes(view[:8])!r}")
        block = cls(view)
        block._check_head()
        return block

    @classmethod
    def parse(cls, view: memoryview) -> Block:
        """Parse and check the block at the start of the view, which holds the whole block.

        The checksum over the payload is left to `payload_is_intact`.

        Raises:
            MalformedFrameError: the block is cut short, or as for `parse_head`.
        """
        block = cls.parse_head(view)
        total_bytes = block.head_bytes + block.payload_bytes
        if len(view) != total_bytes:
            if len(view) < total_bytes:
                raise MalformedFrameError(f"a block of {total_bytes} bytes ends after {len(view)}")
            block.view = view[:total_bytes]
        return block

    @classmethod
    def salvage(cls, view: memoryview, known: Known) -> Block | None:
        """Return a block whose head is damaged, from its bytes and what is known of it otherwise.

        Its arrays may be wrong: each entry has to be checked by its own checksum, and the last bytes of the
        payload may be missing. It is good for `cut_head` of entries that were checked, and nothing else.

        Returns:
            None where the LAC statement is damaged: it seeds the checksum of each entry. None where the block
            has codes: the head's checksum alone tells that they are right.
        """
        if len(view) < known.head_bytes or known.head_bytes != HEADER_BYTES + 16 * known.entries:
            return None
        block = cls(view)
        block.ledger_id, block.content_term, block.first_entry = (
            known.ledger_id,
            known.content_term,
            known.first_entry,
        )
        block.count, block.stride, block.head_bytes = known.entries, known.stride, known.head_bytes
        block.payload_bytes, block.payload_crc, block.flags = known.payload_bytes, 0, FLAG_PARTIAL
        block.mac_bytes = 0
        if not NO_ENTRY <= block.lac < block.first_entry or not NO_ENTRY <= block.lafr <= ENTRY_ID_MAX:
            return None
        if block.lac_crc != statement_crc(block.ledger_id, block.content_term, block.lac, block.lafr):
            return None
        return block

    def _check_head(self) -> None:
        view, count, stride = self.view, self.count, self.stride
        if not 1 <= count <= ENTRIES_MAX or not 1 <= stride <= STRIDE_MAX:
            raise MalformedFrameError(f"a block of {count} entries with stride {stride}")
        if self.flags & ~FLAG_PARTIAL or self._reserved:
            raise MalformedFrameError(f"a block with flags {self.flags:#x} is of a later version")
        if self.mac_bytes not in MAC_BYTES:
            raise MalformedFrameError(f"a block with codes of {self.mac_bytes} bytes")
        arrays_end = HEADER_BYTES + 16 * count
        head_bytes = arrays_end + (self.mac_bytes * (count + 1) if self.mac_bytes else 0)
        if self.head_bytes != head_bytes or len(view) < head_bytes:
            raise MalformedFrameError(
                f"a block's head of {self.head_bytes} bytes does not fit its {count} entries"
            )
        if self.head_crc != crc32c(view[_HEAD_COVERED_FROM:head_bytes]):
            raise MalformedFrameError("the checksum over a block's head does not hold")
        if (
            self.ledger_id > LEDGER_ID_MAX
            or self.content_term > TERM_FINAL
            or self.first_entry + (count - 1) * stride > ENTRY_ID_MAX
            or not NO_ENTRY <= self.lac < self.first_entry
            or not NO_ENTRY <= self.lafr <= ENTRY_ID_MAX
        ):
            raise MalformedFrameError(
                f"a block of ledger {self.ledger_id}, term {self.content_term}, first entry "
                f"{self.first_entry}, LAC {self.lac}, LAFR {self.lafr} is out of range"
            )
        if self.lac_crc != statement_crc(self.ledger_id, self.content_term, self.lac, self.lafr):
            raise MalformedFrameError("the checksum over a block's LAC statement does not hold")
        lengths_at = HEADER_BYTES + 8 * count
        if sum(view[lengths_at : lengths_at + 4 * count].cast("I")) != self.payload_bytes:
            raise MalformedFrameError("the entries of a block do not fill its payload")

    @property
    def total_bytes(self) -> int:
        """Return the size of head and payload."""
        return self.head_bytes + self.payload_bytes

    @property
    def last_entry(self) -> int:
        """Return the id of the last entry."""
        return self.first_entry + (self.count - 1) * self.stride

    @property
    def entry_ids(self) -> range:
        """Return the ids of the entries."""
        return range(self.first_entry, self.last_entry + 1, self.stride)

    @property
    def is_partial(self) -> bool:
        """Return whether the block was cut out of a larger one."""
        return bool(self.flags & FLAG_PARTIAL)

    @property
    def running(self) -> memoryview:
        """Return the running lengths, u64."""
        return self.view[HEADER_BYTES : HEADER_BYTES + 8 * self.count].cast("Q")

    @property
    def lengths(self) -> memoryview:
        """Return the entries' lengths, u32."""
        start = HEADER_BYTES + 8 * self.count
        return self.view[start : start + 4 * self.count].cast("I")

    @property
    def checksums(self) -> memoryview:
        """Return the entries' checksums, u32."""
        start = HEADER_BYTES + 12 * self.count
        return self.view[start : start + 4 * self.count].cast("I")

    @property
    def statement(self) -> LacStatement:
        """Return the LAC statement of the block."""
        mac = bytes(self.view[HEADER_BYTES + 16 * self.count :][: self.mac_bytes]) if self.mac_bytes else b""
        return LacStatement(self.content_term, self.lac, self.lafr, self.lac_crc, mac)

    @property
    def macs(self) -> list[bytes]:
        """Return the entries' codes; empty without authentication codes."""
        if not self.mac_bytes:
            return []
        start, size = HEADER_BYTES + 16 * self.count + self.mac_bytes, self.mac_bytes
        return [bytes(self.view[at : at + size]) for at in range(start, self.head_bytes, size)]

    @property
    def payload(self) -> memoryview:
        """Return all entries' bytes, one after another."""
        return self.view[self.head_bytes : self.total_bytes]

    def payloads(self) -> list[memoryview]:
        """Return a view of each entry's bytes."""
        payload, lengths = self.payload, self.lengths
        return [payload[end - n : end] for end, n in zip(accumulate(lengths), lengths, strict=True)]

    def payload_is_intact(self) -> bool:
        """Return whether the checksum over the payload holds; each entry's own in a partial block."""
        if self.is_partial:
            return not self.damaged_entries()
        return crc32c(self.payload) == self.payload_crc

    def damaged_entries(self) -> list[int]:
        """Return the ids of the entries whose own checksum does not hold."""
        found = entry_checksums(self.lac_crc, self.entry_ids, self.running, self.payloads())
        if found == list(self.checksums):
            return []
        pairs = zip(self.entry_ids, found, self.checksums, strict=True)
        return [entry_id for entry_id, is_, ought in pairs if is_ != ought]

    def payload_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range, within the block, of the payloads at indexes start to stop − 1."""
        lengths = self.lengths
        begin = self.head_bytes + sum(lengths[:start])
        return begin, begin + sum(lengths[start:stop])

    def cut_head(self, start: int, stop: int) -> bytes:
        """Return the head of a PARTIAL block of the entries at indexes start to stop − 1."""
        return self._head_of(start, stop, self.flags | FLAG_PARTIAL, 0)

    def whole(self, start: int, stop: int) -> memoryview:
        """Return a whole block of the entries at indexes start to stop − 1, as an add carries it.

        The checksums and codes of the entries, and the LAC statement, stay as they are. The caller must know
        that the payload is intact, since the new block has a new checksum over the whole payload.
        """
        if (start, stop) == (0, self.count) and not self.is_partial:
            return self.view[: self.total_bytes]
        begin, end = self.payload_range(start, stop)
        payload = self.view[begin:end]
        head = self._head_of(start, stop, self.flags & ~FLAG_PARTIAL, crc32c(payload))
        return memoryview(b"".join((head, payload)))

    def _head_of(self, start: int, stop: int, flags: int, payload_crc: int) -> bytes:
        assert 0 <= start < stop <= self.count
        count, size = stop - start, self.mac_bytes
        lengths = self.lengths[start:stop]
        macs = HEADER_BYTES + 16 * self.count
        parts = [
            self.running[start:stop].tobytes(),
            lengths.tobytes(),
            self.checksums[start:stop].tobytes(),
            bytes(self.view[macs : macs + size]),
            bytes(self.view[macs + size * (1 + start) : macs + size * (1 + stop)]),
        ]
        head_bytes = HEADER_BYTES + sum(map(len, parts))
        fixed = HEADER.pack(
            MAGIC, 0, head_bytes, sum(lengths), count, self.stride, self.ledger_id, self.content_term,
            self.first_entry + start * self.stride, self.lac, self.lafr, self.lac_crc, payload_crc, size,
            flags, 0,
        )  # fmt: skip
        covered = b"".join((fixed[_HEAD_COVERED_FROM:], *parts))
        return b"".join((MAGIC, _CRC_FIELD.pack(crc32c(covered)), covered))


def parse_blocks(body: memoryview) -> Iterator[Block]:
    """Yield the blocks that follow one another in a body, to its end.

    Raises:
        MalformedFrameError: bytes left over, or a block that does not parse.
    """
    while body:
        block = Block.parse(body)
        yield block
        body = body[block.total_bytes :]
