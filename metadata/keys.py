"""The legal keys, values and writer tokens of a metadata store, of whatever kind.

Owns the checks that every store makes first, so that all stores refuse the same input with the same error.
Owns drawing writer tokens too. A token marks one write: a write whose answer was lost is recognised by it
(`metadata.write_outcome`). Does not own the layout of keys (`metadata.ids`).
"""

from __future__ import annotations

import json
import re
import secrets

from metadata.errors import InvalidArgumentError
from metadata.store import VALUE_BYTES_MAX

KEY_CHARACTERS_MAX = 1000
TOKEN = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")
ID_BLOCK_MAX = 1_000_000
TOP_RESERVED = (".store", "zookeeper")

_SEGMENT = re.compile(r"[^/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]+")


def check_key(key: str, *, root_allowed: bool = False) -> str:
    """Return the key, or raise InvalidArgumentError saying what is wrong with it."""
    if not isinstance(key, str):
        raise InvalidArgumentError(f"key {key!r} is not a string")
    if key == "" and root_allowed:
        return key
    if len(key) > KEY_CHARACTERS_MAX:
        raise InvalidArgumentError(f"key {key[:40]!r}… is longer than {KEY_CHARACTERS_MAX} characters")
    for segment in key.split("/"):
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise InvalidArgumentError(
                f"key {key!r} is not a relative path: its segment {segment!r} is empty, reserved, "
                "or holds a character that no store accepts"
            )
    if key.partition("/")[0] in TOP_RESERVED:
        raise InvalidArgumentError(f"key {key!r} lies where the stores keep what is their own")
    return key


def check_value(value: bytes) -> bytes:
    """Return the value as bytes, or raise InvalidArgumentError where it is too large or not UTF-8 JSON."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"a value is bytes, not {type(value).__name__}")
    value = bytes(value)
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgumentError(f"a value of {len(value)} bytes is above the limit of {VALUE_BYTES_MAX}")
    try:
        json.loads(value.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"a value is UTF-8 JSON, not {value[:80]!r}: {error}") from error
    return value


def check_token(token: str) -> str:
    """Return the writer token, or raise InvalidArgumentError."""
    if not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise InvalidArgumentError(
            f"writer token {token!r} is not legal: 1 to 64 letters, digits, '_', '.', ':' or '-'"
        )
    return token


def check_count(name: str, count: int) -> int:
    """Return the size of a block of ids, or raise InvalidArgumentError."""
    check_key(name)
    if "/" in name:
        raise InvalidArgumentError(f"the name of a sequence of ids is one segment, not {name!r}")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= ID_BLOCK_MAX:
        raise InvalidArgumentError(f"count {count!r} is not an integer from 1 to {ID_BLOCK_MAX}")
    return count


def check_sequence(name: str, least: int = 0) -> int:
    """Return the id that a sequence is to go on at, or raise InvalidArgumentError."""
    check_count(name, 1)
    if not isinstance(least, int) or isinstance(least, bool) or not 0 <= least < 2**63:
        raise InvalidArgumentError(f"least {least!r} is not an integer from 0 to 2**63 - 1")
    return least


def parent_of(key: str) -> str:
    """Return the parent's key; the root's key is the empty string."""
    return key.rpartition("/")[0]


def name_of(key: str) -> str:
    """Return the key's last segment."""
    return key.rpartition("/")[2]


def ancestors_of(key: str) -> list[str]:
    """List the keys above this one, topmost first, without the root."""
    segments = key.split("/")
    return ["/".join(segments[:end]) for end in range(1, len(segments))]


def token_of(token: str | None) -> str:
    """Return the given token, checked, or draw a new one."""
    return secrets.token_hex(8) if token is None else check_token(token)
