"""Frames: the unit of the byte stream between client and bookie.

    0  u32 big-endian   length of all that follows
    4  u32 big-endian   length of the header
    8  header           one msgpack array (`bookie_aio.wire.messages`)
    …  body             raw bytes: blocks of entries, or nothing

Owns the cutting of a stream into frames, and the receive buffer. A body is a view into that buffer, or a
copy where it is small. A view stays valid as long as it is held: a full buffer is left to its views, and the
parser begins a new buffer.

Invariants
- A length is checked against the limit before memory is allocated for it.
- The buffer grows only as bytes arrive, so a peer cannot take up memory by a length alone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgpack

from bookie_aio.wire.blocks import HEADER_BYTES as BLOCK_HEADER_BYTES
from metadata.errors import FrameTooLargeError, MalformedFrameError

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDSHAKE_FRAME_BYTES_MAX = 4 * 1024
FRAME_BYTES_MAX = 5 * 1024 * 1024
HEADER_BYTES_MAX = 16 * 1024
"""Well above the largest legal header. Small, since nested empty arrays decode to 60 times their size."""

_PREFIX = struct.Struct(">II")
_BUFFER_BYTES_MIN = 16 * 1024
_BUFFER_BYTES_MAX = 4 * 1024 * 1024
_SHRINK_BELOW = 8  # a buffer of which no read filled an eighth is followed by a buffer of half its size
_KEPT_TIMES_MAX = 8  # a body may keep alive a buffer of at most this many times its own size
_ROOM_MIN = 4 * 1024
_REUSED_BYTES_MIN = 256 * 1024  # smaller buffers are quickly made
_NO_FORMER = bytearray()
_NO_BUFFER = memoryview(bytearray(0))

Header = list[object]


def entry_room(frame_bytes_max: int) -> int:
    """Return the size of the largest entry that frames of this limit hold, beside its header and codes."""
    return frame_bytes_max - HEADER_BYTES_MAX - 2 * BLOCK_HEADER_BYTES  # a block of one: head, arrays, codes


def encode_frame(header: list[object], body_bytes: int = 0) -> bytes:
    """Return prefix and header of a frame whose body of `body_bytes` follows in separate buffers."""
    return frame_packed(msgpack.packb(header), body_bytes)


def frame_packed(packed: bytes, body_bytes: int = 0) -> bytes:
    """Return prefix and header of a frame whose header is packed already."""
    return _PREFIX.pack(4 + len(packed) + body_bytes, len(packed)) + packed


def decode_header(packed: memoryview) -> Header:
    """Decode a frame's header under tight limits.

    Raises:
        MalformedFrameError: not one msgpack array of plain values within the limits.
    """
    try:
        header = msgpack.unpackb(
            packed,
            max_array_len=64,
            max_map_len=0,
            max_str_len=4096,
            max_bin_len=4096,
            max_ext_len=0,
            strict_map_key=True,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # Not the `repr` of the error: it quotes the header, which may be long and deeply nested.
        reason = f"{type(error).__name__}: {error}"
        raise MalformedFrameError(f"the header is not msgpack within the limits: {reason:.200}") from error
    if not isinstance(header, list):
        raise MalformedFrameError(f"the header is a msgpack {type(header).__name__}, not an array")
    return header


class ShortForm:
    """A frame without a body, which is always the same except for the request id in its header, a u32."""

    __slots__ = ("_after", "_before", "_lengths", "_struct")

    def __init__(self, before: bytes, after: bytes) -> None:
        """Take the bytes of the packed header before and behind the four bytes of the id."""
        header_bytes = len(before) + 4 + len(after)
        self._before, self._after = before, after
        self._lengths = (4 + header_bytes) << 32 | header_bytes
        self._struct = struct.Struct(f">Q{len(before)}sI{len(after)}s")

    def pack(self, request_id: int) -> bytes:
        """Return the frame with this request id."""
        return self._struct.pack(self._lengths, self._before, request_id, self._after)

    def leading(self, view: memoryview) -> tuple[list[int], int]:
        """Return the ids of the frames of this form at the start of the view, and their size in bytes."""
        size, found = self._struct.size, []
        lengths_, before_, after_ = self._lengths, self._before, self._after
        whole = view[: len(view) // size * size]
        for lengths, before, request_id, after in self._struct.iter_unpack(whole):
            if lengths != lengths_ or before != before_ or after != after_:
                break
            found.append(request_id)
        return found, size * len(found)


class FrameParser:
    """Cuts a byte stream into frames. Only small bodies are copied.

    A view of a body keeps the whole buffer alive, while the limits count the body alone. A body that is a
    small part of its buffer is therefore copied. The memory that is kept stays within a fixed multiple
    (`_KEPT_TIMES_MAX`) of the bytes that are counted.

    Made for `asyncio.BufferedProtocol`: pass on `get_buffer` and `buffer_updated`, then iterate `frames`.
    """

    __slots__ = (
        "_filled", "_former", "_is_lent", "_largest_read", "_next_bytes", "_parsed", "_view",
        "buffer_bytes_max", "frame_bytes_max", "keeps_buffer", "reuses_buffer",
    )  # fmt: skip

    def __init__(
        self, frame_bytes_max: int, *, reuses_buffer: bool = False, keeps_buffer: bool = False
    ) -> None:
        """With `reuses_buffer` the buffer before the present one is used again when no view of it is left.

        Otherwise the system fills each page of each new buffer with zeros, which costs more than all that is
        done with a large frame. `buffer_bytes` counts both buffers.

        With `keeps_buffer` an idle connection keeps its buffer, where no body in it was returned: for one of
        few connections. A short answer then costs no new buffer.
        """
        self.frame_bytes_max = frame_bytes_max
        self.reuses_buffer = reuses_buffer
        self.keeps_buffer = keeps_buffer
        self._is_lent = False  # a view of a body in the present buffer was returned
        self.buffer_bytes_max = _BUFFER_BYTES_MAX
        """A new buffer is no larger, unless a frame that has begun needs it."""
        self._next_bytes = _BUFFER_BYTES_MIN
        self._parsed = self._filled = self._largest_read = 0
        self._view = _NO_BUFFER
        self._former = _NO_FORMER

    @property
    def buffer_bytes(self) -> int:
        """Return the size of the present receive buffer, and of a former one that is kept."""
        return len(self._view) + len(self._former)

    @property
    def is_mid_frame(self) -> bool:
        """Return whether a frame has arrived only in part."""
        return self._filled > self._parsed

    @property
    def claimed_bytes(self) -> int:
        """Return the buffer that the frame in part needs, where the present buffer is too small; else 0."""
        held = self._filled - self._parsed
        if held < 4:
            return 0
        length = int.from_bytes(self._view[self._parsed : self._parsed + 4], "big")
        claimed = 4 + min(length, self.frame_bytes_max)
        return claimed + 2 * _ROOM_MIN if self._parsed + claimed > len(self._view) else 0

    @property
    def next_op(self) -> int:
        """Return the operation of the next frame, or -1 where too little of the frame has arrived.

        A header is an array of less than 16 values, and begins with its operation (`messages`).
        """
        at = self._parsed + 9
        return self._view[at] if at < self._filled else -1

    def get_buffer(self) -> memoryview:
        """Return free space for the next bytes of the stream; never empty."""
        if len(self._view) - self._filled <= _ROOM_MIN:
            self._renew()
        return self._view[self._filled :]

    def buffer_updated(self, count: int) -> None:
        """Note that `count` bytes have been written to the buffer that `get_buffer` returned last."""
        self._filled += count
        assert self._filled <= len(self._view)
        if count > self._largest_read:
            self._largest_read = count
        if self._filled == len(self._view):
            self._next_bytes = min(2 * self._next_bytes, _BUFFER_BYTES_MAX)

    def rest(self) -> None:
        """Drop the buffer; the next bytes get a new, small one. Not to be called within a frame."""
        assert not self.is_mid_frame
        self._view = _NO_BUFFER
        self._former = _NO_FORMER
        self._next_bytes = _BUFFER_BYTES_MIN
        self._parsed = self._filled = self._largest_read = 0
        self._is_lent = False

    def shrink(self, size_min: int = _BUFFER_BYTES_MIN) -> None:
        """Let go of what the buffers have beyond the bytes not yet parsed, down to `size_min`.

        With 0 the connection must not be read soon: the next bytes need a new buffer.
        """
        if not self.is_mid_frame:
            if self.buffer_bytes > size_min:
                self.rest()
            return
        rest = self._view[self._parsed : self._filled]
        size = max(size_min, len(rest))
        self._former = _NO_FORMER
        self._next_bytes = _BUFFER_BYTES_MIN
        if size < len(self._view):
            self._begin(bytearray(size), rest)

    def feed(self, data: bytes) -> None:
        """Append bytes that were not read into the buffer of `get_buffer`."""
        view = memoryview(data)
        while view:
            room = self.get_buffer()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.buffer_updated(count)
            view = view[count:]

    def frames(self) -> Iterator[tuple[Header, memoryview]]:
        """Yield the complete frames: decoded header and body.

        Raises:
            FrameTooLargeError: a length above `frame_bytes_max`.
            MalformedFrameError: lengths that disagree, or a header that does not decode.
        """
        while (frame := self.next_packed()) is not None:
            yield decode_header(frame[0]), frame[1]

    def next_packed(self) -> tuple[memoryview, memoryview] | None:
        """Return the packed header and the body of the next complete frame; None where there is none.

        Raises:
            FrameTooLargeError: a length above `frame_bytes_max`.
            MalformedFrameError: lengths that disagree. The header is not decoded here.
        """
        at, view = self._parsed, self._view
        held = self._filled - at
        if held >= 8:
            length, header_bytes = _PREFIX.unpack_from(view, at)
            if not 4 < length <= self.frame_bytes_max:
                self._check_length(length)
            if not 0 < header_bytes <= length - 4 or header_bytes > HEADER_BYTES_MAX:
                raise MalformedFrameError(f"a header of {header_bytes} bytes in a frame of {length}")
            end = at + 4 + length
            if 4 + length > held:
                return None
            body_start = at + 8 + header_bytes
            # Advanced before the return: a caller that stops here must not get the frame twice.
            self._parsed = end
            body = view[body_start:end]
            if body:
                if len(body) * _KEPT_TIMES_MAX < len(view):
                    body = memoryview(bytes(body))
                else:
                    self._is_lent = True
            return view[at + 8 : body_start], body
        if held >= 4:
            # Checked after four bytes: a peer of another protocol may send no more before it gets an answer.
            self._check_length(int.from_bytes(view[at : at + 4], "big"))
        elif not held and self._next_bytes == _BUFFER_BYTES_MIN:
            if self.keeps_buffer and not self._is_lent:
                self._parsed = self._filled = 0
            else:
                # An idle connection keeps no buffer: ten thousand may be connected. A busy one has a larger.
                self.rest()
        return None

    def take_short(self, form: ShortForm) -> list[int]:
        """Take the next frames as long as they have this short form, and return their request ids."""
        found, size = form.leading(self._view[self._parsed : self._filled])
        self._parsed += size
        return found

    def _check_length(self, length: int) -> None:
        if length > self.frame_bytes_max:
            raise FrameTooLargeError(
                f"a frame of {length:,} bytes is above the limit of {self.frame_bytes_max:,}"
            )
        if length <= 4:
            raise MalformedFrameError(f"a frame of {length} bytes has no room for a header")

    def _renew(self) -> None:
        """Begin a new buffer with the bytes not yet parsed. The old buffer is left to its views."""
        if self._view and self._largest_read * _SHRINK_BELOW < len(self._view):
            self._next_bytes = max(self._next_bytes // 2, _BUFFER_BYTES_MIN)
        rest = self._view[self._parsed : self._filled]
        want = 2 * len(rest)
        if len(rest) >= 4:
            # Twice the arrived bytes, so that all copies together cost no more than one copy of the frame.
            # Bounded by the size of this frame, and by the limit on frames.
            claimed = 4 + min(int.from_bytes(rest[:4], "big"), self.frame_bytes_max)
            if claimed > len(rest):
                want = min(want, claimed)
        usual = min(self._next_bytes, self.buffer_bytes_max)
        self._begin(self._new_buffer(max(usual, want + 2 * _ROOM_MIN)), rest)

    def _begin(self, buffer: bytearray, rest: memoryview) -> None:
        self._view = memoryview(buffer)
        self._view[: len(rest)] = rest
        self._parsed, self._filled, self._largest_read = 0, len(rest), 0
        self._is_lent = False

    def _new_buffer(self, size: int) -> bytearray:
        """Return a buffer: the former one where nobody uses it. The present one is the next candidate."""
        former = self._former
        is_free = size <= len(former) <= 2 * size and _has_no_view(former)
        present = self._view.obj
        is_kept = self.reuses_buffer and _REUSED_BYTES_MIN <= len(self._view) <= self.buffer_bytes_max
        self._former = present if is_kept and isinstance(present, bytearray) else _NO_FORMER
        return former if is_free else bytearray(size)


def _has_no_view(buffer: bytearray) -> bool:
    """Return whether no view of the buffer is left, by what a change of its size says."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
