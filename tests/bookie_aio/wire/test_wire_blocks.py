"""Blocks: round trips, cuts, and no flipped bit that goes unseen."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from dataclasses import dataclass
from itertools import accumulate

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from bookie_aio.wire.blocks import (
    ENTRIES_MAX,
    FLAG_PARTIAL,
    HEADER,
    STRIDE_MAX,
    Block,
    encode_block,
    parse_blocks,
    statement_is_intact,
)
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, TERM_FINAL

FIELDS = (
    "magic", "head_crc", "head_bytes", "payload_bytes", "count", "stride", "ledger_id", "content_term",
    "first_entry", "lac", "lafr", "lac_crc", "payload_crc", "mac_bytes", "flags", "reserved",
)  # fmt: skip


@dataclass
class Sample:
    """A block's contents, as the client that writes it has them."""

    ledger_id: int
    content_term: int
    first_entry: int
    stride: int
    lac: int
    lafr: int
    payloads: list[bytes]
    running: list[int]
    macs: list[bytes]

    def encode(self) -> bytes:
        return encode_block(**vars(self))

    def part(self, start: int, stop: int) -> Sample:
        macs = [self.macs[0], *self.macs[1 + start : 1 + stop]] if self.macs else []
        first = self.first_entry + start * self.stride
        changed = {
            "first_entry": first,
            "payloads": self.payloads[start:stop],
            "running": self.running[start:stop],
            "macs": macs,
        }
        return Sample(**{**vars(self), **changed})


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    payloads = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=12))
    stride = draw(st.integers(1, STRIDE_MAX))
    first = draw(st.integers(0, 100) | st.integers(0, ENTRY_ID_MAX - STRIDE_MAX * 12))
    before = draw(st.integers(0, 2**50))
    with_macs = draw(st.booleans())
    return Sample(
        ledger_id=draw(st.integers(0, LEDGER_ID_MAX)),
        content_term=draw(st.integers(0, TERM_FINAL)),
        first_entry=first,
        stride=stride,
        lac=draw(st.integers(-1, first - 1)),
        lafr=draw(st.integers(-1, ENTRY_ID_MAX)),
        payloads=payloads,
        running=list(accumulate(map(len, payloads), initial=before))[1:],
        macs=[hashlib.sha256(bytes([n])).digest() for n in range(len(payloads) + 1)] if with_macs else [],
    )


def check(block: Block, sample: Sample) -> None:
    count = len(sample.payloads)
    assert (block.ledger_id, block.content_term) == (sample.ledger_id, sample.content_term)
    assert (block.lac, block.lafr) == (sample.lac, sample.lafr)
    ids = [sample.first_entry + n * sample.stride for n in range(count)]
    assert (list(block.entry_ids), block.last_entry) == (ids, ids[-1])
    assert [bytes(payload) for payload in block.payloads()] == sample.payloads
    assert bytes(block.payload) == b"".join(sample.payloads)
    assert list(block.running) == sample.running
    assert list(block.lengths) == list(map(len, sample.payloads))
    assert block.macs == sample.macs[1:]
    statement = block.statement
    assert statement_is_intact(sample.ledger_id, statement)
    assert statement[:3] == (sample.content_term, sample.lac, sample.lafr)
    assert statement.mac == (sample.macs[0] if sample.macs else b"")
    assert block.payload_is_intact()
    assert block.damaged_entries() == []


@given(samples(), st.binary(max_size=20))
def test_a_block_round_trips_with_anything_behind_it(sample: Sample, behind: bytes) -> None:
    data = sample.encode()
    block = Block.parse(memoryview(data + behind))
    check(block, sample)
    assert bytes(block.view) == data
    assert not block.is_partial


@given(samples(), st.data())
def test_a_cut_of_a_cut_is_a_block_of_those_entries(sample: Sample, data: st.DataObject) -> None:
    block = Block.parse(memoryview(sample.encode()))
    for _ in range(2):
        start = data.draw(st.integers(0, block.count - 1))
        stop = data.draw(st.integers(start + 1, block.count))
        begin, end = block.payload_range(start, stop)
        cut = block.cut_head(start, stop) + bytes(block.view[begin:end])
        block, sample = Block.parse(memoryview(cut)), sample.part(start, stop)
        assert block.total_bytes == len(cut)
        assert block.is_partial
        check(block, sample)


@given(st.lists(samples(), min_size=1, max_size=4))
def test_blocks_behind_one_another_are_found_again(several: list[Sample]) -> None:
    body = b"".join(sample.encode() for sample in several)
    blocks = list(parse_blocks(memoryview(body)))
    assert len(blocks) == len(several)
    for block, sample in zip(blocks, several, strict=True):
        check(block, sample)
    with pytest.raises(MalformedFrameError):
        list(parse_blocks(memoryview(body + b"\x00")))
    with pytest.raises(MalformedFrameError):
        list(parse_blocks(memoryview(body[:-1])))


FLIPPED = [
    Sample(7, 0, 3, 1, 2, -1, [b"one", b"", b"three"], [103, 103, 108], []),
    Sample(7, 5, 3, 4, -1, -1, [b"", b"12"], [0, 2], [bytes([n]) * 32 for n in range(3)]),
    Sample(0, TERM_FINAL, 0, 1, -1, -1, [b""], [0], []),
]


@pytest.mark.parametrize("sample", FLIPPED)
@pytest.mark.parametrize("is_cut", [False, True])
def test_every_flipped_bit_is_detected(sample: Sample, is_cut: bool) -> None:
    whole = Block.parse(memoryview(sample.encode()))
    data = bytes(whole.view)
    if is_cut:
        data = whole.cut_head(0, whole.count) + bytes(whole.payload)
    head_bytes = len(data) - whole.payload_bytes
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        if bit // 8 < head_bytes:
            with pytest.raises(MalformedFrameError):
                Block.parse(memoryview(damaged))
            continue
        block = Block.parse(memoryview(damaged))
        assert not block.payload_is_intact()
        at = bit // 8 - head_bytes
        ends = list(accumulate(block.lengths))
        victim = next(entry for entry, end in zip(block.entry_ids, ends, strict=True) if at < end)
        assert block.damaged_entries() == [victim]


def test_payloads_that_changed_places_are_detected_entry_by_entry() -> None:
    data = Sample(7, 0, 3, 1, 2, -1, [b"aaaa", b"bbbb", b"cccc"], [4, 8, 12], []).encode()
    swapped = data[:-12] + b"bbbbaaaacccc"
    assert Block.parse(memoryview(swapped)).damaged_entries() == [3, 4]


def forge(data: bytes, **changes: int) -> bytes:
    """Change header fields and make the checksum over the head right again, as a hostile peer would."""
    values = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True))
    values.update(changes)
    head = HEADER.pack(*values.values()) + data[HEADER.size :]
    covered = head[8 : max(80, min(values["head_bytes"], len(head)))]
    return head[:4] + struct.pack("<I", crc32c(covered)) + head[8:]


def restate(data: bytes, **changes: int) -> bytes:
    """Forge fields of the LAC statement, with its checksum made right too."""
    values = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True))
    values.update(changes)
    names = ("ledger_id", "content_term", "lac", "lafr")
    crc = crc32c(struct.pack("<QQqq", *(values[name] for name in names)))
    return forge(data, **{**changes, "lac_crc": crc})


PLAIN = Sample(7, 1, 3, 2, 2, -1, [b"one", b"", b"three"], [103, 103, 108], []).encode()


def test_a_forged_block_without_changes_parses() -> None:
    assert restate(PLAIN) == forge(PLAIN) == PLAIN


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0},
        {"count": 2},
        {"count": 4},
        {"count": ENTRIES_MAX + 1},
        {"count": 2**32 - 1},
        {"stride": 0},
        {"stride": STRIDE_MAX + 1},
        {"head_bytes": 0},
        {"head_bytes": 79},
        {"head_bytes": 2**32 - 1},
        {"payload_bytes": 0},
        {"payload_bytes": 7},
        {"payload_bytes": 9},
        {"payload_bytes": 2**32 - 1},
        {"mac_bytes": 16},
        {"mac_bytes": 32},
        {"mac_bytes": 2**16 - 1},
        {"flags": 2},
        {"flags": 2**16 - 1},
        {"reserved": 1},
        {"lac_crc": 0},
        {"count": ENTRIES_MAX, "head_bytes": 80 + 16 * ENTRIES_MAX},
    ],
)
def test_fields_that_disagree_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(MalformedFrameError):
        Block.parse(memoryview(forge(PLAIN, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ledger_id": LEDGER_ID_MAX + 1},
        {"ledger_id": 2**64 - 1},
        {"content_term": TERM_FINAL + 1},
        {"first_entry": ENTRY_ID_MAX - 3, "lac": 0},
        {"first_entry": 2**64 - 1, "lac": 0},
        {"first_entry": 2, "lac": 2},
        {"lac": 3},
        {"lac": -2},
        {"lac": 2**63 - 1},
        {"lafr": -2},
        {"lafr": ENTRY_ID_MAX + 1},
    ],
)
def test_ids_out_of_range_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(MalformedFrameError):
        Block.parse(memoryview(restate(PLAIN, **changes)))


def test_an_entrys_length_above_the_payload_is_refused() -> None:
    lengths_at = 80 + 8 * 3
    for lengths in ((8, 0, 1), (2**32 - 1, 0, 0), (2**32 - 1, 2**32 - 1, 2**32 - 1), (3, 0, 4)):
        data = PLAIN[:lengths_at] + struct.pack("<3I", *lengths) + PLAIN[lengths_at + 12 :]
        with pytest.raises(MalformedFrameError):
            Block.parse(memoryview(forge(data)))


@given(samples(), st.data())
def test_forged_fields_parse_to_a_sound_block_or_raise_a_typed_error(
    sample: Sample, data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(FIELDS[2:]), min_size=1, max_size=3, unique=True))
    tops = {"mac_bytes": 2**16 - 1, "flags": 2**16 - 1}
    wide = ("ledger_id", "content_term", "first_entry")
    changes = {}
    for name in names:
        if name in ("lac", "lafr"):
            changes[name] = data.draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9))
        else:
            top = 2**64 - 1 if name in wide else tops.get(name, 2**32 - 1)
            changes[name] = data.draw(st.integers(0, top) | st.integers(0, min(top, 300)))
    with contextlib.suppress(MalformedFrameError):
        block = Block.parse(memoryview(restate(sample.encode(), **changes)))
        assert block.total_bytes == len(block.view)
        assert len(block.payloads()) == len(list(block.entry_ids)) == block.count
        assert block.last_entry <= ENTRY_ID_MAX
        block.damaged_entries()
        block.payload_is_intact()


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_parse_or_raise_a_typed_error(data: bytes, has_magic: bool) -> None:
    with contextlib.suppress(MalformedFrameError):
        Block.parse(memoryview(b"BKB1" + data if has_magic else data))


def test_a_block_cut_short_anywhere_is_refused() -> None:
    for size in range(len(PLAIN)):
        with pytest.raises(MalformedFrameError):
            Block.parse(memoryview(PLAIN[:size]))


def test_a_head_alone_is_parsed_without_its_payload() -> None:
    head = Block.parse_head(memoryview(PLAIN[: len(PLAIN) - 8]))
    assert (head.count, head.payload_bytes, list(head.lengths)) == (3, 8, [3, 0, 5])


def test_the_largest_number_of_entries_round_trips() -> None:
    count = ENTRIES_MAX
    data = Sample(1, 0, 0, 1, -1, -1, [b"x"] * count, list(range(1, count + 1)), []).encode()
    block = Block.parse(memoryview(data))
    assert (block.count, block.last_entry) == (count, count - 1)
    assert block.damaged_entries() == []


@pytest.mark.parametrize("size", [10, 511, 512, 3000])
def test_payloads_of_any_size_and_kind_of_buffer_get_the_same_bytes(size: int) -> None:
    payloads = [bytes([n]) * size for n in range(4)]
    running = [size * (n + 1) for n in range(4)]
    whole = Sample(1, 0, 0, 1, -1, -1, payloads, running, []).encode()
    kinds = [payloads[0], bytearray(payloads[1]), memoryview(payloads[2]), memoryview(bytearray(payloads[3]))]
    assert Sample(1, 0, 0, 1, -1, -1, kinds, running, []).encode() == whole
    assert Block.parse(memoryview(whole)).payload_crc == crc32c(b"".join(payloads))


def test_partial_is_the_only_flag() -> None:
    data = forge(PLAIN, flags=FLAG_PARTIAL, payload_crc=0)
    assert Block.parse(memoryview(data)).payload_is_intact()
