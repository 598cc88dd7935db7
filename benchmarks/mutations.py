"""Frames that no good client sends, drawn from a random source.

Owns the input of one connection of the fuzzer: a stream of bytes, and how many frames of each kind are in it.
The same source gives the same stream. Ledgers stay clear of `spared`, where a good client works. Its ledgers
have no password, so the bookie obeys a well-formed fence from anybody.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgpack
from crc32c import crc32c

from bookie_aio.wire import messages as wire
from bookie_aio.wire.blocks import HEADER_BYTES, Block, LacStatement, encode_block, statement_crc
from bookie_aio.wire.frames import FRAME_BYTES_MAX, decode_header, encode_frame
from bookie_aio.wire.many import encode_adds, encode_write_lacs
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, TERM_FINAL

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

LARGE_BYTES = 700_000
SOFT_FRAMES_MAX = 16
EDGES = (0, 1, 2, 63, 64, 65, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63)
BLOCK_FIELDS = (
    (8, 4), (12, 4), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8), (56, 8), (64, 4), (68, 4), (72, 2),
    (74, 2), (76, 4), (80, 8),
)  # fmt: skip
NO_BOOKIE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"SSH-2.0-OpenSSH_9.9\r\n",
    b"\x00\x00\x00\x2d\x00\x00\x00\x00" + bytes(37),  # a ZooKeeper client
    b"\n",
)


class Streams(NamedTuple):
    """The bytes of one connection: well-formed requests, and malformed frames after that many answers."""

    well_formed: bytes
    answers: int
    wrong: bytes


class Mutator:
    """Draws the frames of one connection."""

    def __init__(self, rng: random.Random, spared: frozenset[int]) -> None:
        self._rng, self._spared = rng, spared
        self._kinds: dict[str, Callable[[], bytes]] = {
            "bit flips": self._flipped,
            "truncated": self._truncated,
            "false length": self._false_length,
            "spliced": self._spliced,
            "random msgpack": self._random_header,
            "no bookie's": self._garbage,
            "false checksum": self._false_checksum,
            "forged block": self._forged_block,
            "wrong body": self._wrong_body,
            "wrong handshake": self._wrong_handshake,
            "contradictory": self._contradictory,
            "rows that lie": self._lying_rows,
        }
        self._is_patient = False
        self._more = 0  # requests beyond one in each well-formed frame
        self.counts: dict[str, int] = {}

    def draw(self) -> Streams:
        """Draw all that one connection sends."""
        rng, parts = self._rng, []
        self._more = 0
        self._is_patient = rng.random() < 0.5
        if rng.random() < 0.9:
            parts.append(self.hello())
            # Well-formed but extreme: the connection lives on, so several of them reach the bookie.
            count = rng.randrange(SOFT_FRAMES_MAX)
            parts += [self._counted("extreme values", self._valid) for _ in range(count)]
        answers = len(parts) + self._more if self._is_patient else 0
        kind = rng.choice(list(self._kinds))
        wrong = self._counted(kind, self._kinds[kind]) + self.frame(wire.Ping())
        return Streams(b"".join(parts), answers, wrong)

    def _counted(self, kind: str, draw: Callable[[], bytes]) -> bytes:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return draw()

    # --- well-formed frames --------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return a valid handshake."""
        request = wire.Hello(wire.VERSION_MIN, wire.VERSION_MAX, "fuzz", "", "")
        return encode_frame(wire.encode_request(request, 0))

    def frame(self, request: wire.Message, body: bytes = b"") -> bytes:
        """Return a request's frame."""
        auth = self._rng.choice((None, None, None, b"", b"token", bytes(4096)))
        header = wire.encode_request(request, self._rng.randrange(2**32), auth)
        return encode_frame(header, len(body)) + body

    def _ledger(self) -> int:
        while True:
            ledger_id = self._rng.choice(
                (self._edge(LEDGER_ID_MAX), 2**40 + self._rng.randrange(500) * 65_537)
            )
            if ledger_id not in self._spared:
                return ledger_id

    def _edge(self, top: int, low: int = 0) -> int:
        return max(low, min(top, self._rng.choice((low, *EDGES, top - 1, top, self._rng.getrandbits(63)))))

    def _term(self) -> int:
        return self._rng.choice((0, 0, 0, self._edge(TERM_FINAL)))

    def _block(self, ledger_id: int, content_term: int = 0) -> bytes:
        rng = self._rng
        count = rng.choice((1, 1, 2, 7, rng.randrange(1, 300)))
        stride = rng.choice((1, 1, 1, 3, 64))
        top = ENTRY_ID_MAX - stride * count
        first = rng.choice((0, rng.randrange(1000), self._edge(top)))
        payloads = [rng.randbytes(rng.choice((0, 1, 10, 100))) for _ in range(count)]
        if rng.random() < 0.005:
            payloads[0] = bytes(rng.randrange(LARGE_BYTES))
        return encode_block(
            ledger_id=ledger_id,
            content_term=content_term,
            first_entry=first,
            stride=stride,
            lac=rng.choice((-1, first - 1)),
            lafr=rng.choice((-1, self._edge(ENTRY_ID_MAX, -1))),
            payloads=payloads,
            running=list(accumulate(map(len, payloads))),
        )

    def _draw_add(self) -> tuple[wire.Add, bytes]:
        ledger_id, term = self._ledger(), self._term()
        content_term = self._rng.choice((0, 0, term, self._edge(term)))
        flags = self._rng.choice((0, 0, 0, 0, 0, 1, 2, 4, 7))
        return wire.Add(ledger_id, term, flags), self._block(ledger_id, content_term)

    def _add(self) -> bytes:
        return self.frame(*self._draw_add())

    def _many(self, size: int) -> int:
        """Return the first request id of a well-formed frame of so many requests."""
        self._more += size - 1
        return self._rng.randrange(2**32 - 1 - size)

    def _adds(self) -> bytes:
        rng = self._rng
        size = rng.choice((1, 2, 3, 8, rng.randrange(1, 60)))
        adds: list[tuple[wire.Add, bytes | None, bytes]] = []
        for _ in range(size):
            add, block = adds[-1][::2] if adds and rng.random() < 0.1 else self._draw_add()
            adds.append((add, rng.choice((None, None, None, b"token", bytes(32), bytes(60_000))), block))
        while sum(len(block) for _, _, block in adds) > FRAME_BYTES_MAX // 2:
            adds.pop()
        adds = [(add, auth if at < 8 else None, block) for at, (add, auth, block) in enumerate(adds)]
        return b"".join(encode_adds(self._many(len(adds)), adds))

    def _write_lacs(self) -> bytes:
        rng = self._rng
        size = rng.choice((1, 2, 8, wire.MANY_MAX))
        token = rng.choice((None, None, b"token", bytes(32)))
        lacs = [(self._draw_write_lac(is_intact=True), token) for _ in range(size)]
        return encode_write_lacs(self._many(size), lacs)

    def _read(self) -> bytes:
        edge = self._edge
        first, last = sorted((edge(ENTRY_ID_MAX), edge(ENTRY_ID_MAX)))
        if self._rng.random() < 0.3:
            first, last = 0, ENTRY_ID_MAX
        elif self._rng.random() < 0.1:
            first, last = last, first
        stride, bytes_max = max(1, edge(64)), edge(2**32 - 1)
        return self.frame(
            wire.Read(self._ledger(), self._maybe_term(), self._term(), first, last, stride, bytes_max)
        )

    def _maybe_term(self) -> int:
        return self._rng.choice((wire.NO_TERM, wire.NO_TERM, wire.NO_TERM, self._edge(TERM_FINAL, -1)))

    def _read_lac(self) -> bytes:
        known = self._edge(ENTRY_ID_MAX, -1)
        wait_ms = 0 if self._is_patient else self._edge(wire.WAIT_MS_MAX)
        return self.frame(wire.ReadLac(self._ledger(), self._maybe_term(), known, wait_ms))

    def _write_lac(self, *, is_intact: bool = True) -> bytes:
        return self.frame(self._draw_write_lac(is_intact=is_intact))

    def _draw_write_lac(self, *, is_intact: bool) -> wire.WriteLac:
        rng, ledger_id, term = self._rng, self._ledger(), self._term()
        lac, lafr = self._edge(ENTRY_ID_MAX, -1), self._edge(ENTRY_ID_MAX, -1)
        crc = statement_crc(ledger_id, term, lac, lafr) ^ (0 if is_intact else 1 << rng.randrange(32))
        statement = LacStatement(term, lac, lafr, crc, rng.choice((b"", b"", bytes(32), bytes(4096))))
        return wire.WriteLac(ledger_id, rng.choice((term, TERM_FINAL)), statement)

    def _valid(self) -> bytes:
        edge = self._edge
        choices: tuple[Callable[[], bytes], ...] = (
            self._add,
            self._adds,
            self._read,
            self._read,
            self._read_lac,
            self._write_lac,
            self._write_lacs,
            lambda: self.frame(wire.ListEntries(self._ledger(), edge(ENTRY_ID_MAX))),
            lambda: self.frame(wire.ListLedgers(edge(LEDGER_ID_MAX))),
            lambda: self.frame(self._rng.choice((wire.Info(), wire.Ping()))),
        )
        return self._rng.choice(choices)()

    # --- malformed frames ----------------------------------------------------------------------

    def _flipped(self) -> bytes:
        frame = bytearray(self._valid())
        # Half of the flips hit prefix and header, however long the body is.
        for _ in range(self._rng.choice((1, 1, 1, 2, 8))):
            top = min(len(frame), self._rng.choice((40, 140, len(frame))))
            frame[self._rng.randrange(top)] ^= 1 << self._rng.randrange(8)
        return bytes(frame)

    def _truncated(self) -> bytes:
        frame = self._valid()
        return frame[: self._rng.randrange(len(frame))]

    def _false_length(self) -> bytes:
        frame = self._valid()
        length, header_bytes = struct.unpack_from(">II", frame)
        wrong = (
            0,
            1,
            3,
            4,
            5,
            length - 1,
            length + 1,
            FRAME_BYTES_MAX,
            FRAME_BYTES_MAX + 1,
            2**31,
            2**32 - 1,
        )
        if self._rng.random() < 0.5:
            length = self._rng.choice(wrong)
        else:
            header_bytes = self._rng.choice((*wrong, header_bytes - 1, header_bytes + 1))
        return struct.pack(">II", length, header_bytes) + frame[8:]

    def _spliced(self) -> bytes:
        one, other = self._valid(), self._valid()
        return one[: self._rng.randrange(len(one))] + other[self._rng.randrange(len(other)) :]

    def _random_value(self, depth: int) -> object:
        rng = self._rng
        kind = rng.randrange(10 if depth else 7)
        if kind <= 1:
            return rng.choice((*EDGES, -1, -(2**63), 2**64 - 1))
        if kind == 2:
            return rng.choice((None, True, False, 0.0, float("inf"), float("nan")))
        if kind == 3:
            return rng.randbytes(rng.choice((0, 4, 32, 4096, 4097)))
        if kind == 4:
            return "é\0\n" * rng.choice((0, 1, 1000))
        if kind == 5:
            return {number: number for number in range(rng.randrange(3))}
        if kind == 6:
            return [0] * rng.choice((0, 3, 64, 65, 5000))
        return [self._random_value(depth - 1) for _ in range(rng.randrange(9))]

    def _random_header(self) -> bytes:
        rng = self._rng
        choice = rng.randrange(4)
        if choice == 0:
            packed = rng.randbytes(rng.randrange(1, 200))
        elif choice == 1:
            packed = b"\x91" * rng.choice((100, 500, 1000, 5000)) + b"\xc0"
        elif choice == 2:
            packed = msgpack.packb(self._random_value(4))
        else:
            start = [rng.choice([*wire.Op, 0, 0x82]), rng.getrandbits(32), None]
            packed = msgpack.packb([*start, *(self._random_value(2) for _ in range(rng.randrange(9)))])
        body = rng.randbytes(rng.choice((0, 0, 100)))
        return struct.pack(">II", 4 + len(packed) + len(body), len(packed)) + packed + body

    def _garbage(self) -> bytes:
        return self._rng.choice((*NO_BOOKIE, self._rng.randbytes(self._rng.randrange(1, 3000))))

    def _false_checksum(self) -> bytes:
        ledger_id = self._ledger()
        block = bytearray(self._block(ledger_id))
        block[self._rng.choice((self._rng.randrange(len(block)), len(block) - 1, 4, 64, 68))] ^= 0x10
        return self.frame(wire.Add(ledger_id, 0, 0), bytes(block))

    def _forged_block(self) -> bytes:
        ledger_id = self._ledger()
        block = bytearray(self._block(ledger_id))
        head_bytes = Block(memoryview(block)).head_bytes
        for _ in range(self._rng.randint(1, 3)):
            at, size = self._rng.choice(
                (*BLOCK_FIELDS, (head_bytes - 4, 4), (HEADER_BYTES + (head_bytes - HEADER_BYTES) // 2, 4))
            )
            value = self._rng.choice((*EDGES, 2**64 - 1, self._rng.getrandbits(64))) % (1 << 8 * size)
            if (at, size) == (24, 8) and value in self._spared:
                continue
            block[at : at + size] = value.to_bytes(size, "little")
        ledger_id, content_term, _, lac, lafr = struct.unpack_from("<QQQqq", block, 24)
        block[64:68] = statement_crc(ledger_id, content_term, lac, lafr).to_bytes(4, "little")
        covered_to = min(max(int.from_bytes(block[8:12], "little"), HEADER_BYTES), len(block))
        block[4:8] = crc32c(bytes(block[8:covered_to])).to_bytes(4, "little")
        return self.frame(wire.Add(min(ledger_id, LEDGER_ID_MAX), self._term(), 0), bytes(block))

    def _wrong_body(self) -> bytes:
        ledger_id = self._ledger()
        block = self._block(ledger_id)
        view = Block.parse(memoryview(block))
        start, stop = view.payload_range(0, 1)
        requests = (wire.Ping(), wire.Info(), wire.ListLedgers(0), wire.ReadLac(ledger_id, -1, -1, 0))
        choices = (
            (wire.Add(ledger_id, 0, 0), b""),
            (wire.Add(ledger_id, 0, 0), block + block),
            (wire.Add(ledger_id, 0, 0), block[:-1]),
            (wire.Add(ledger_id, 0, 0), view.cut_head(0, 1) + block[start:stop]),
            (wire.Add(ledger_id ^ 2**41, 0, 0), block),
            (self._rng.choice(requests), block),
            (wire.Ping(), bytes(self._rng.choice((1, 1000, LARGE_BYTES)))),
        )
        return self.frame(*self._rng.choice(choices))

    def _lying_rows(self) -> bytes:
        """Return a frame of many whose count, rows, tokens or blocks contradict one another."""
        rng = self._rng
        op, frame = rng.choice(((wire.Op.ADDS, self._adds()), (wire.Op.WRITE_LACS, self._write_lacs())))
        header_bytes = int.from_bytes(frame[4:8], "big")
        *_, count = decode_header(memoryview(frame)[8 : 8 + header_bytes])
        assert isinstance(count, int)
        body = bytearray(frame[8 + header_bytes :])
        row_bytes = 24 if op == wire.Op.ADDS else 48
        choice = rng.randrange(4)
        if choice == 0:
            count = rng.choice((0, 1, count - 1, count + 1, wire.MANY_MAX, wire.MANY_MAX + 1))
        elif choice == 1:
            del body[rng.randrange(len(body)) :]
        else:  # any field of any row; or two sizes, so that a block reaches into its neighbour
            for _ in range(choice - 1):
                size = rng.choice((1, 2, 4, 8))
                at = rng.randrange(row_bytes * count - size + 1)
                value = rng.choice((*EDGES, rng.getrandbits(64))) % (1 << 8 * size)
                if size < 8 or value not in self._spared:
                    body[at : at + size] = value.to_bytes(size, "little")
        header = [int(op), rng.choice((1, 2**32 - 2, 2**32 - 1)), None, count]
        return encode_frame(header, len(body)) + bytes(body)

    def _contradictory(self) -> bytes:
        ledger_id = self._ledger()
        choices: tuple[Callable[[], bytes], ...] = (
            lambda: self._write_lac(is_intact=False),
            lambda: self.frame(wire.WriteLac(ledger_id, 0, None)),
            lambda: self.frame(wire.Add(ledger_id, 0, 0), self._block(ledger_id, self._edge(TERM_FINAL))),
            lambda: self.frame(wire.Add(self._edge(2**63, LEDGER_ID_MAX), 2**63, 2**15)),
            lambda: self.frame(wire.Read(ledger_id, -2, -1, -1, 2**63, 0, 2**63)),
            lambda: self.frame(wire.ReadLac(ledger_id, -1, -2, 2**31)),
        )
        return self._rng.choice(choices)()

    def _wrong_handshake(self) -> bytes:
        rng = self._rng
        choices = (
            wire.Hello(2, 9, "fuzz", "", ""),
            wire.Hello(0, 0, "fuzz", "", ""),
            wire.Hello(9, 1, "fuzz", "", ""),
            wire.Hello(1, 1, "fuzz", "another cluster", ""),
            wire.Hello(1, 1, "fuzz", "", "another bookie"),
            wire.Hello(1, 1, "\n" * 1000, "\x1b[31m", "é" * 900),
        )
        return self.frame(rng.choice(choices))
