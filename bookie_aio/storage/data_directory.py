"""A data directory: its files, its cookie, and the process that has it open.

    DIR/cookie.json              the bookie that owns it (rule 6): a `metadata.access.bookies.Cookie`
    DIR/age                      how old the directory is: `bookie_aio.core.identity.AgeFile`
    DIR/lock                     flocked by the process that has the directory open
    DIR/checkpoint               `bookie_aio.storage.ledgers.checkpoint`
    DIR/NUMBER.ledgers           the table that the checkpoint names (`ledgers.ledger_table`)
    DIR/witness                  what was durable last (`segment.witness`)
    DIR/reserve                  preallocated space for fences and recovery adds
    DIR/ID.segment, DIR/ID.index a segment (ID: 16 hexadecimal digits), and the index of a sealed one
    DIR/ID.spare                 a file that was segment ID, kept to be made a segment again

A bookie may have several directories. Each has a cookie and a lock. The checkpoint, the table of ledgers and
the reserve are in one of them, the *home*. An index is beside its segment.

Owns the cookie file and the formatting of a directory; the names are in `segment.names`. Does not decide
whether a cookie is the right one: the server does at its start, with the metadata store.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import TEMPORARY_SUFFIX, sync_path, write_file
from bookie_aio.storage.ledgers.checkpoint import empty_checkpoint
from bookie_aio.storage.segment.format import (
    AGE,
    CHECKPOINT,
    COOKIE,
    INDEX_SUFFIX,
    LOCK,
    RESERVE,
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
    TABLE_SUFFIX,
    WITNESS,
    id_of,
)
from bookie_aio.storage.segment.witness import encode_witness
from metadata.access.bookies import Cookie
from metadata.errors import (
    CookieMismatchError,
    CorruptRecordError,
    MetadataCorruptError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.disk.disk import Disk


_COOKIE_BYTES_MAX = 64 * 1024
_SUFFIXES = (SEGMENT_SUFFIX, INDEX_SUFFIX, SPARE_SUFFIX, TABLE_SUFFIX)


async def read_cookie_text(disk: Disk, directory: str) -> bytes | None:
    """Read the bytes of a directory's cookie; None where there is no directory, or no cookie in it."""
    try:
        file = await disk.open(os.path.join(directory, COOKIE))
    except FileNotFoundError:
        return None
    try:
        return bytes(await file.read(0, min(file.size(), _COOKIE_BYTES_MAX)))
    finally:
        file.close()


async def read_cookie(disk: Disk, directory: str) -> Cookie | None:
    """Read the cookie of a directory; None where there is no directory, or no cookie in it.

    Raises:
        CorruptRecordError: the cookie does not parse.
    """
    text = await read_cookie_text(disk, directory)
    return None if text is None else parse_cookie(text, directory)


def parse_cookie(text: bytes, directory: str) -> Cookie:
    """Parse the bytes of a directory's cookie.

    Raises:
        CorruptRecordError: the cookie does not parse.
    """
    try:
        return Cookie.from_json(text)
    except MetadataCorruptError as error:
        raise CorruptRecordError(
            f"the cookie in {directory} is damaged: {error}. Start the bookie with its --id, which mends one "
            "flipped bit. If it is still refused, repair its ledgers on other bookies"
        ) from error


async def write_cookie(disk: Disk, directory: str, cookie: Cookie) -> None:
    """Write or replace the directory's cookie; it is durable on return."""
    await write_file(disk, directory, COOKIE, [cookie.to_json()])


def owner_of(cookie: Cookie) -> int:
    """Return the number by which a bookie's files name it: 64 bits that are drawn at each formatting."""
    return int.from_bytes(blake2b(cookie.incarnation.encode(), digest_size=8).digest(), "little")


async def write_empty_storage(disk: Disk, directories: Sequence[str], cookie: Cookie) -> None:
    """Write the witness files and the checkpoint of a new bookie, durable on return.

    The first directory is the home. They come before the cookies: a start takes a directory that has a
    cookie and lacks them for damaged.
    """
    owner = owner_of(cookie)
    for path in directories[1:]:
        await disk.unlink(os.path.join(path, CHECKPOINT))
    for path in directories:
        await write_file(disk, path, WITNESS, encode_witness(owner))
    await write_file(disk, directories[0], CHECKPOINT, empty_checkpoint(owner))


async def is_empty(disk: Disk, directory: str) -> bool:
    """Return whether a directory is missing, or holds nothing but perhaps a lock."""
    try:
        return set(await disk.list_directory(directory)) <= {LOCK}
    except FileNotFoundError:
        return True


async def format_directory(disk: Disk, directory: str, cookie: Cookie, *, force: bool = False) -> None:
    """Create the directory where it is missing, and make it this bookie's.

    Args:
        force: remove the storage's files in the directory. All entries in them are lost.

    Raises:
        CookieMismatchError: the directory is not empty, and `force` is not given.
        DirectoryInUseError: a bookie is running on the directory.
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
        await write_empty_storage(disk, [directory], cookie)
        await write_cookie(disk, directory, cookie)
        await sync_path(disk, directory)
    finally:
        lock.release()


def _is_ours(name: str) -> bool:
    stem = name.removesuffix(TEMPORARY_SUFFIX)
    known = (COOKIE, AGE, CHECKPOINT, RESERVE, WITNESS)
    return stem in known or any(id_of(stem, suffix) is not None for suffix in _SUFFIXES)
