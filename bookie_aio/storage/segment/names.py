"""The names of the files in a data directory. Pure."""

from __future__ import annotations

COOKIE = "cookie.json"
LOCK = "lock"
CHECKPOINT = "checkpoint"
RESERVE = "reserve"
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
