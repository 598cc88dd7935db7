"""A data directory: what lies where in it, whose it is, and who has it open.

    DIR/cookie.json              whose it is (rule 6): a `metadata.bookies.Cookie`
    DIR/lock                     flocked by the process that has the directory open
    DIR/checkpoint               `bookie_aio.storage.checkpoint`
    DIR/NUMBER.ledgers           the table of ledgers that it names (`bookie_aio.storage.states`)
    DIR/reserve                  preallocated space for fences and recovery adds
    DIR/ID.segment, DIR/ID.index a segment (ID: 16 hexadecimal digits), and the index of a sealed one
    DIR/ID.spare                 a file that was segment ID, kept to be made a segment again

A bookie may have several. Each has a cookie and a lock; the checkpoint, the table of ledgers and the reserve
are in one of them, the *home*; an index is beside its segment.

Owns these names and the cookie file. Does not decide whether a cookie is the right one: that takes the
metadata store, and is the startup's.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bookie_aio.storage.checkpoint import empty_checkpoint
from metadata.bookies import Cookie
from metadata.errors import (
    CookieMismatchError,
    CorruptRecordError,
    DiskFailedError,
    DiskFullError,
    MetadataCorruptError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bookie_aio.storage.disk import Disk, File
    from bookie_aio.wire.blocks import Buffer

COOKIE = "cookie.json"
LOCK = "lock"
CHECKPOINT = "checkpoint"
RESERVE = "reserve"
SEGMENT_SUFFIX = ".segment"
INDEX_SUFFIX = ".index"
SPARE_SUFFIX = ".spare"
TABLE_SUFFIX = ".ledgers"
TEMPORARY_SUFFIX = ".new"

_COOKIE_BYTES_MAX = 64 * 1024
_SUFFIXES = (SEGMENT_SUFFIX, INDEX_SUFFIX, SPARE_SUFFIX, TABLE_SUFFIX)


def segment_name(segment_id: int) -> str:
    """Give the name of a segment's file."""
    return f"{segment_id:016x}{SEGMENT_SUFFIX}"


def index_name(segment_id: int) -> str:
    """Give the name of a sealed segment's index."""
    return f"{segment_id:016x}{INDEX_SUFFIX}"


def spare_name(segment_id: int) -> str:
    """Give the name of a file that was this segment, and is to be one again."""
    return f"{segment_id:016x}{SPARE_SUFFIX}"


def table_name(number: int) -> str:
    """Give the name of a table of ledgers."""
    return f"{number:016x}{TABLE_SUFFIX}"


def id_of(name: str, suffix: str) -> int | None:
    """Give the number in a file's name, or None if it is not a file of that kind."""
    stem = name.removesuffix(suffix)
    if stem == name or len(stem) != 16 or not set(stem) <= set("0123456789abcdef"):
        return None
    return int(stem, 16)


@asynccontextmanager
async def replacement(disk: Disk, directory: str, name: str) -> AsyncIterator[File]:
    """Give an empty file, which gets the name in the end: synced by then, in one step.

    The directory is yet to be synced. Where there is no room, nothing is left over that takes space.
    """
    temporary = os.path.join(directory, name + TEMPORARY_SUFFIX)
    file = await disk.create(temporary)
    try:
        yield file
        await file.sync()
    except DiskFullError:
        await disk.unlink(temporary)
        raise
    finally:
        file.close()
    await disk.rename(temporary, os.path.join(directory, name))


async def write_file(disk: Disk, directory: str, name: str, buffers: Sequence[Buffer]) -> None:
    """Replace a file atomically: after a crash it holds the old bytes or the new ones.

    Raises:
        DiskFullError: it holds the old ones, and nothing is left over that takes space.
    """
    async with replacement(disk, directory, name) as file:
        await file.write(buffers, 0)
    try:
        await disk.sync_directory(directory)
    except DiskFullError as error:
        # It holds the new bytes, and after a crash perhaps the old ones: nobody may go on from either.
        raise DiskFailedError(str(error)) from error


async def remove_files(disk: Disk, paths: Sequence[str]) -> None:
    """Remove files; durable on return."""
    for path in paths:
        await disk.unlink(path)
    for directory in sorted({os.path.dirname(path) for path in paths}):
        await disk.sync_directory(directory)


async def read_cookie(disk: Disk, directory: str) -> Cookie | None:
    """Read whose directory it is; None where there is no directory, or no cookie in it.

    Raises:
        CorruptRecordError: there is a cookie that does not parse.
    """
    try:
        file = await disk.open(os.path.join(directory, COOKIE))
    except FileNotFoundError:
        return None
    try:
        text = bytes(await file.read(0, min(file.size(), _COOKIE_BYTES_MAX)))
    finally:
        file.close()
    try:
        return Cookie.from_json(text)
    except MetadataCorruptError as error:
        raise CorruptRecordError(f"the cookie in {directory} is damaged: {error}") from error


async def write_cookie(disk: Disk, directory: str, cookie: Cookie) -> None:
    """Write, or replace, the directory's cookie. Durable on return."""
    await write_file(disk, directory, COOKIE, [cookie.to_json()])


async def is_empty(disk: Disk, directory: str) -> bool:
    """Tell whether a directory is missing or holds nothing (but perhaps a lock)."""
    try:
        return set(await disk.list_directory(directory)) <= {LOCK}
    except FileNotFoundError:
        return True


async def format_directory(disk: Disk, directory: str, cookie: Cookie, *, force: bool = False) -> None:
    """Create the directory where it is missing, and make it this bookie's.

    Args:
        force: throw away what is in it. All that it held is lost.

    Raises:
        CookieMismatchError: it is not empty, and `force` is not given.
        DirectoryInUseError: a bookie is running on it.
    """
    await disk.make_directory(directory)
    lock = disk.lock_directory(directory)
    try:
        if not await is_empty(disk, directory):
            if not force:
                raise CookieMismatchError(f"{directory} is not empty; formatting it would lose what it holds")
            for name in await disk.list_directory(directory):
                if name != LOCK and _is_ours(name):
                    await disk.unlink(os.path.join(directory, name))
        # The checkpoint first: a directory with a cookie and without a checkpoint has lost something.
        await write_file(disk, directory, CHECKPOINT, empty_checkpoint())
        await write_cookie(disk, directory, cookie)
        await disk.sync_directory(os.path.join(directory, os.pardir))
    finally:
        lock.release()


def _is_ours(name: str) -> bool:
    stem = name.removesuffix(TEMPORARY_SUFFIX)
    known = (COOKIE, CHECKPOINT, RESERVE)
    return stem in known or any(id_of(stem, suffix) is not None for suffix in _SUFFIXES)
