"""Cutting a byte stream into frames, whoever sent it and however it was split on the way."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import TYPE_CHECKING

import msgpack
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bookie_aio.wire.frames import (
    FRAME_BYTES_MAX,
    HANDSHAKE_FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    FrameParser,
    decode_header,
    encode_frame,
)
from metadata.errors import FrameTooLargeError, MalformedFrameError, ProtocolError

if TYPE_CHECKING:
    import random

    from bookie_aio.wire.frames import Header

Frames = list[tuple["Header", bytes]]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
headers = st.lists(scalars | st.lists(scalars, max_size=5), max_size=8)
frame_lists = st.lists(st.tuples(headers, st.binary(max_size=200)), min_size=1, max_size=6)


def encode(frames: Frames) -> bytes:
    return b"".join(encode_frame(header, len(body)) + body for header, body in frames)


def parse(data: bytes, pieces: list[int], frame_bytes_max: int = FRAME_BYTES_MAX) -> Frames:
    """Feed the stream in pieces of these sizes, over and over, and collect copies of the frames."""
    parser, found, at, turn = FrameParser(frame_bytes_max), [], 0, 0
    while at < len(data):
        size = pieces[turn % len(pieces)]
        parser.feed(data[at : at + size])
        found += [(header, bytes(body)) for header, body in parser.frames()]
        at, turn = at + size, turn + 1
    return found


@given(frame_lists, st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_any_splitting_of_a_stream_gives_the_same_frames(frames: Frames, pieces: list[int]) -> None:
    assert parse(encode(frames), pieces) == frames


@given(frame_lists, st.lists(st.integers(1, 5000), min_size=1, max_size=10), st.booleans(), st.booleans())
def test_reading_into_the_offered_buffer_gives_the_same_frames(
    frames: Frames, pieces: list[int], keeps_buffer: bool, has_large: bool
) -> None:
    frames = [*frames, *([([1], bytes(9_000))] if has_large else []), *frames] * 20  # crosses several buffers
    if keeps_buffer:  # each frame comes alone, so that the parser is idle in between
        pieces = [len(encode([frame])) for frame in frames]
    parser = FrameParser(FRAME_BYTES_MAX, keeps_buffer=keeps_buffer)
    data, found, at, turn = encode(frames), [], 0, 0
    while at < len(data):
        room = parser.get_buffer()
        assert len(room) > 0
        count = min(len(room), pieces[turn % len(pieces)], len(data) - at)
        room[:count] = data[at : at + count]
        parser.buffer_updated(count)
        found += list(parser.frames())
        at, turn = at + count, turn + 1
    # The bodies are compared only now: the buffers they lie in were kept, not overwritten.
    assert [(header, bytes(body)) for header, body in found] == frames
    assert not parser.is_mid_frame


def test_an_idle_connection_keeps_its_buffer_where_no_body_in_it_was_returned() -> None:
    for keeps_buffer in (False, True):
        parser = FrameParser(FRAME_BYTES_MAX, keeps_buffer=keeps_buffer)
        for body in (b"", b"copied", b""):
            parser.feed(encode([([1], body)]))
            assert [bytes(found) for _, found in parser.frames()] == [body]
            assert bool(parser.buffer_bytes) is keeps_buffer
        parser.feed(encode([([1], bytes(9_000))]))
        ((_, kept),) = parser.frames()
        assert not parser.buffer_bytes  # it is left to the view of the body
        parser.feed(encode([([1], b"\xff" * 9_000)]))
        assert bytes(kept) == bytes(9_000)


def test_a_consumer_that_stops_sees_each_frame_once() -> None:
    frames: Frames = [([number], b"body") for number in range(10)]
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(encode(frames))
    seen = []
    for header, _ in parser.frames():
        seen.append(header)
        if len(seen) == 4:
            break
    parser.feed(encode([([10], b"")]))
    seen += [header for header, _ in parser.frames()]
    assert seen == [[number] for number in range(11)]


def test_bytes_that_arrive_while_frames_are_iterated_are_parsed_in_order() -> None:
    parser, late, seen = FrameParser(FRAME_BYTES_MAX), encode([([2], bytes(50_000))]), []
    parser.feed(encode([([0], b""), ([1], b"")]))
    for header, body in parser.frames():
        seen.append((header, len(body)))
        if header == [0]:
            parser.feed(late)  # begins a new buffer under the iterator
    assert seen == [([0], 0), ([1], 0), ([2], 50_000)]


def test_a_limit_raised_between_two_frames_holds_for_the_second() -> None:
    parser, seen = FrameParser(HANDSHAKE_FRAME_BYTES_MAX), []
    parser.feed(encode([(["hello"], b""), (["add"], bytes(100_000))]))
    for header, _ in parser.frames():
        parser.frame_bytes_max = FRAME_BYTES_MAX
        seen.append(header)
    assert seen == [["hello"], ["add"]]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x00\x00\x00\x00", MalformedFrameError),
        (b"\x00\x00\x00\x04", MalformedFrameError),
        (b"\x00\x00\x00\x05\x00\x00\x00\x00\x90", MalformedFrameError),  # no header
        (b"\x00\x00\x00\x05\x00\x00\x00\x02", MalformedFrameError),  # a header longer than its frame
        (b"\x00\x01\x00\x00\x00\x00\x80\x00", MalformedFrameError),  # a header above the limit
        (b"\xff\xff\xff\xff", FrameTooLargeError),
        (b"GET / HTTP/1.1\r\n\r\n", FrameTooLargeError),
        (b"\x16\x03\x01\x02\x00\x01", FrameTooLargeError),  # TLS
        (b"\x00\x00\x00\x05\x00\x00\x00\x01\x80", MalformedFrameError),  # a map
        (b"\x00\x00\x00\x05\x00\x00\x00\x01\xc1", MalformedFrameError),
    ],
)
def test_wrong_prefixes_are_refused_as_soon_as_they_show(data: bytes, error: type[ProtocolError]) -> None:
    parser = FrameParser(FRAME_BYTES_MAX)
    parser.feed(data)
    with pytest.raises(error):
        list(parser.frames())


def test_a_frame_of_exactly_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    room = HANDSHAKE_FRAME_BYTES_MAX - (len(encode_frame([1])) - 4)
    assert parse(encode([([1], bytes(room))]), [999], HANDSHAKE_FRAME_BYTES_MAX) == [([1], bytes(room))]
    with pytest.raises(FrameTooLargeError):
        parse(encode([([1], bytes(room + 1))]), [999], HANDSHAKE_FRAME_BYTES_MAX)


@given(frame_lists, st.data())
def test_a_mutated_stream_parses_or_raises_a_typed_error(frames: Frames, data: st.DataObject) -> None:
    stream = bytearray(encode(frames))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(stream) - 1)))
        mutation = data.draw(st.sampled_from(["flip", "cut", "insert", "number"]))
        if mutation == "flip" and stream:
            stream[at] ^= 1 << data.draw(st.integers(0, 7))
        elif mutation == "cut":
            del stream[at : at + data.draw(st.integers(1, 8))]
        elif mutation == "insert":
            stream[at:at] = data.draw(st.binary(max_size=8))
        else:
            stream[at : at + 4] = data.draw(st.integers(0, 2**32 - 1)).to_bytes(4, "big")
    with contextlib.suppress(ProtocolError):
        parse(bytes(stream), [data.draw(st.integers(1, 300))], 4096)


@given(st.binary(max_size=300))
def test_any_bytes_for_a_header_decode_or_raise_a_typed_error(packed: bytes) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert isinstance(decode_header(memoryview(packed)), list)


@pytest.mark.parametrize(
    "packed",
    [
        b"\x91" * (HEADER_BYTES_MAX - 1) + b"\xc0",  # deeper than msgpack follows
        b"\xdc\xff\xff",  # a claim of 65,535 elements
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\x00\x41" + b"\xc0" * 65,  # one element above the limit
        b"\x91\xdb\xff\xff\xff\xff",  # a claim of 4 GiB of text
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\x81\x01\x01",  # a map with a key
        b"\x91\xd4\x01\x01",  # an extension
        b"\x91\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x91\xa2\xff\xfe",  # text that is not UTF-8
        b"\x91\x01\x01",  # something behind the array
        b"\x91\xc4\xff" + bytes(300),  # and much of it
        b"\x91" * 1000 + b"\xc0\x01",  # behind an array so deep that its `repr` recurses too far
        b"\x92\x01",  # too short
        b"\x05",
        b"",
    ],
)
def test_headers_outside_the_limits_are_refused_in_few_words(packed: bytes) -> None:
    with pytest.raises(MalformedFrameError, match=r"^.{1,300}$"):
        decode_header(memoryview(packed))


def peak_of_parsing(pieces: list[bytes], frame_bytes_max: int) -> int:
    parser = FrameParser(frame_bytes_max)
    tracemalloc.start()
    try:
        for piece in pieces:
            parser.feed(piece)
            for _ in parser.frames():
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_claim_alone_costs_no_memory() -> None:
    claim = FRAME_BYTES_MAX.to_bytes(4, "big") + b"\x00\x00\x00\x05"
    assert peak_of_parsing([claim, bytes(20_000)], FRAME_BYTES_MAX) < 150_000


def test_a_frame_of_the_limit_costs_at_most_the_buffer_before_it_and_its_own() -> None:
    frame = encode([([1], bytes(FRAME_BYTES_MAX - 6))])
    assert len(frame) == FRAME_BYTES_MAX + 4
    pieces = [frame[at : at + 65_536] for at in range(0, len(frame), 65_536)]
    # While the buffer is renewed, the old one with what has arrived and the new one exist side by side.
    assert peak_of_parsing(pieces, FRAME_BYTES_MAX) < 2 * FRAME_BYTES_MAX


def test_the_nastiest_header_stays_small_when_decoded() -> None:
    # Nested empty arrays are what takes most memory for a byte on the wire.
    inner = b"\xdc\x00\x40" + b"\x90" * 64
    packed = b"\xdc\x00\x03" + (b"\xdc\x00\x40" + inner * 64) * 3
    assert len(packed) < HEADER_BYTES_MAX
    frame = (4 + len(packed)).to_bytes(4, "big") + len(packed).to_bytes(4, "big") + packed
    assert peak_of_parsing([frame], FRAME_BYTES_MAX) < 2 * 1024 * 1024


@pytest.mark.pure
def test_copying_stays_linear_when_a_large_frame_arrives_in_small_pieces() -> None:
    class Counting(FrameParser):
        copied = 0

        def _renew(self) -> None:
            Counting.copied += self._filled - self._parsed
            super()._renew()

    frame, parser, found = encode([([1], bytes(4_000_000))]), Counting(FRAME_BYTES_MAX), 0
    for at in range(0, len(frame), 500):
        parser.feed(frame[at : at + 500])
        found += sum(1 for _ in parser.frames())
    assert found == 1
    assert Counting.copied < 2 * len(frame)


def test_the_buffer_grows_with_the_load_and_shrinks_when_it_is_over() -> None:
    def offered(parser: FrameParser, sent: bytes, read_bytes: int) -> int:
        largest = 0
        for at in range(0, len(sent), read_bytes):
            room = parser.get_buffer()
            largest = len(room)
            piece = sent[at : at + min(read_bytes, largest)]
            room[: len(piece)] = piece
            parser.buffer_updated(len(piece))
            list(parser.frames())
        return largest

    parser = FrameParser(FRAME_BYTES_MAX)
    bulk = b"".join([encode([([1], bytes(16_000))])] * 1000)
    at = 0
    while at < len(bulk):  # whatever is offered is filled: the peer is faster than we are
        room = parser.get_buffer()
        count = min(len(room), len(bulk) - at)
        room[:count] = bulk[at : at + count]
        parser.buffer_updated(count)
        list(parser.frames())
        at += count
    assert len(room) > 1_000_000
    offered(parser, encode([([1], bytes(100))]) * 200_000, 100)
    assert len(parser.get_buffer()) <= 16 * 1024


@pytest.mark.parametrize(
    "header", [["é" * 2000], [b"x" * 4096], [[1, 2], [b"", None]], [2**64 - 1, -(2**63)]]
)
def test_legal_headers_round_trip(header: Header) -> None:
    assert parse(encode([(header, b"")]), [7]) == [(header, b"")]


def test_packing_agrees_with_msgpack() -> None:
    frame = encode_frame([1, "a"], 3)
    assert frame[:4] == (4 + len(frame) - 8 + 3).to_bytes(4, "big")
    assert msgpack.unpackb(frame[8:]) == [1, "a"]


def test_a_small_body_keeps_no_large_buffer() -> None:
    parser = FrameParser(FRAME_BYTES_MAX)
    sizes = [200, 3_000_000, 100, 500_000]
    parser.feed(encode([([1], bytes(size)) for size in sizes]))
    bodies = [body for _, body in parser.frames()]
    assert [len(body) for body in bodies] == sizes
    kept = [len(memoryview(body.obj)) for body in bodies]
    assert all(buffer <= 32 * size for buffer, size in zip(kept, sizes, strict=True))
    assert kept[1] > sizes[1]  # a large one is no copy


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    st.lists(st.tuples(st.integers(400_000, 900_000), st.integers(0, 20)), min_size=10, max_size=30),
    st.randoms(use_true_random=False),
)
def test_a_buffer_is_used_again_only_when_nobody_looks_at_it(
    frames: list[tuple[int, int]], rng: random.Random
) -> None:
    """Each body is held while so many others arrive, as one that waits for the disk."""
    parser = FrameParser(FRAME_BYTES_MAX, reuses_buffer=True)
    held: list[tuple[int, memoryview, bytes]] = []
    arrived = 0
    for _ in range(20):  # until the buffers are large
        parser.feed(encode_frame([1], 500_000) + bytes(500_000))
        assert len(list(parser.frames())) == 1
    for size, holds in frames:
        body = rng.randbytes(16) * (size // 16 + 1)
        parser.feed(encode_frame([1, arrived], len(body)) + body)
        for _, view in parser.frames():
            arrived += 1
            held.append((arrived + holds, view, body))
        assert all(view == content for _, view, content in held)
        view = memoryview(b"")
        held = [one for one in held if one[0] > arrived]
    assert arrived == len(frames)


def test_a_large_buffer_is_used_again() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, reuses_buffer=True)
    frame = encode_frame([1], 500_000) + bytes(500_000)
    buffers: list[int] = []
    most = 0
    for _ in range(200):
        parser.feed(frame)
        assert len(list(parser.frames())) == 1
        buffers.append(id(parser._view.obj))
        most = max(most, parser.buffer_bytes)
    assert len(set(buffers[100:])) <= 2
    assert most <= 2 * 4 * 1024 * 1024
    parser.rest()
    assert parser.buffer_bytes == 0


def test_where_room_is_scarce_no_former_buffer_is_kept() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, reuses_buffer=True)
    frame = encode_frame([1], 500_000) + bytes(500_000)
    for _ in range(50):
        parser.feed(frame)
        assert len(list(parser.frames())) == 1
    parser.buffer_bytes_max = 64 * 1024
    for _ in range(10):
        parser.feed(frame)
        assert len(list(parser.frames())) == 1
    assert parser.buffer_bytes == len(parser._view)
