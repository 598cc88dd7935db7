"""ADDs whose header is packed or decoded once, and then only gets another request id.

A module of its own, since it is compiled (docs/WHEELS.md) and the messages, which are dataclasses, are not.
"""

from __future__ import annotations

import struct

import msgpack

from bookie_aio.wire.frames import decode_header
from bookie_aio.wire.messages import Add, Message, Op, decode_request, encode_request

# An array of six fields, the operation, and the marker of a u32, which is the request's id.
_ADD_HEAD = bytes((0x96, Op.ADD, 0xCE))
_ADDS_KNOWN_MAX = 16_384
_ADD_KNOWN_BYTES = 128
"""Room for an add's header with a token. No client of this project sends a larger one."""


class PreparedRequest:
    """An ADD that is sent many times. All but the size and the request id is packed once."""

    __slots__ = ("_after", "_before", "_header_bytes", "_pack", "auth", "request")

    def __init__(self, request: Add, auth: bytes | None = None) -> None:
        self.request = request
        self.auth = auth
        packed = msgpack.packb(encode_request(request, 0, auth))
        # The head of the array, the operation and the id 0 take a byte each. A real id takes five bytes.
        self._before, self._after = packed[:2] + b"\xce", packed[3:]
        self._header_bytes = len(packed) + 4
        self._pack = struct.Struct(f">II3sI{len(self._after)}s").pack

    def frame_head(self, request_id: int, body_bytes: int) -> bytes:
        """Return prefix and header of a frame whose body follows."""
        header_bytes = self._header_bytes
        return self._pack(4 + header_bytes + body_bytes, header_bytes, self._before, request_id, self._after)


class RequestDecoder:
    """Decodes requests. Caches adds, of which many have the same header except for the request id.

    All connections share one decoder, so that its memory does not grow with their number.
    """

    __slots__ = ("_adds",)

    def __init__(self) -> None:
        self._adds: dict[bytes, tuple[bytes | None, Message]] = {}

    def decode(self, packed: memoryview) -> tuple[int, bytes | None, Message]:
        """Return request id, authorisation and request of a packed header.

        Raises:
            MalformedFrameError: the header does not decode, or is not that of a request.
        """
        if packed[:3] != _ADD_HEAD:
            return decode_request(decode_header(packed))
        # The bytes behind the id determine authorisation and fields, so equal bytes give an equal request.
        rest = bytes(packed[7:])
        known = self._adds.get(rest)
        if known is None:
            request_id, auth, request = decode_request(decode_header(packed))
            if len(self._adds) >= _ADDS_KNOWN_MAX:
                self._adds.clear()
            if len(rest) <= _ADD_KNOWN_BYTES:
                self._adds[rest] = auth, request
            return request_id, auth, request
        return int.from_bytes(packed[3:7], "big"), *known
