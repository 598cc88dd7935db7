"""Files that are replaced as a whole: written beside the old one, synced, then renamed over it."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from metadata.errors import (
    DiskFailedError,
    DiskFullError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bookie_aio.storage.disk.disk import Disk, File
    from bookie_aio.wire.blocks import Buffer


TEMPORARY_SUFFIX = ".new"


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
