"""The files of segments and the reserve: creating, reusing, cutting, sealing and giving up.

Owns the order of writes and syncs in each of these steps. Does not own when they happen, nor the checkpoint.
The caller lists a segment there before its first group, and takes it off the list before its file is given
up.

A *spare* file was a segment, and is kept because its blocks have been written before. Writing into it again
changes none of the file system's own records. Such a change costs a good part of each fdatasync.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import replacement
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import IndexEncoder
from bookie_aio.storage.segment.segment import HAS_INDEX, Segment, SegmentRow
from metadata.errors import DiskFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.storage.disk.disk import Disk, File
    from bookie_aio.storage.disk.file_cache import FileCache
    from bookie_aio.wire.blocks import LacStatement

_PAGES_AT_ONCE = 16
_SLACK = 8
"""A sealed segment is cut where more than one part in this many of it was not written."""


async def create_segment(
    disk: Disk, directory: str, header: form.SegmentHeader, file_cache: FileCache
) -> Segment:
    """Create a preallocated segment; its header and its name are durable on return.

    Raises:
        DiskFullError: no space; nothing is left behind.
    """
    path = os.path.join(directory, form.segment_name(header.segment_id))
    file = await disk.create(path)
    try:
        await file.preallocate(header.capacity)
        await file.write([form.encode_segment_header(header)], 0)
        await file.sync()
        await disk.sync_directory(directory)
    except DiskFullError:
        file.close()
        await disk.unlink(path)
        raise
    return Segment(directory, header, file_cache, file)


async def reuse_file(
    disk: Disk, file: File, path: str, header: form.SegmentHeader, file_cache: FileCache
) -> Segment:
    """Turn an open spare file, or the reserve, into a segment; this takes no space.

    The header, with a new generation, is durable before the file gets its name. So nothing of the file's
    earlier life is ever taken for a group of the segment. The name is durable after `settle_name`.

    Raises:
        DiskFullError: no space to rewrite the header; the file is closed, and keeps its name.
    """
    directory = os.path.dirname(path)
    try:
        # Pages of its last life may be large ones in memory, and Linux counts a whole large page as written
        # when a part of it is.
        await file.will_not_need()
        await file.write([form.encode_segment_header(header)], 0)
        await file.sync()
        await disk.rename(path, os.path.join(directory, form.segment_name(header.segment_id)))
    except DiskFullError:  # for instance on a copy-on-write file system
        file.close()
        raise
    segment = Segment(directory, header, file_cache, file)
    segment.is_reused = True
    return segment


async def settle_name(disk: Disk, segment: Segment) -> Segment:
    """Make the name of a reused file durable, and return its segment.

    The file is removed where that fails. Under its old name it might be made another segment: a power cut
    could then leave it with this segment's name and the other one's header.

    Raises:
        DiskFullError: no space, or no file descriptor; nothing is left behind.
    """
    try:
        await disk.sync_directory(segment.directory)
    except DiskFullError:
        await segment.close()
        await disk.unlink(segment.path)
        raise
    return segment


async def create_reserve(disk: Disk, directory: str, size: int) -> None:
    """Create the preallocated file for fences and recovery adds on a full disk.

    Raises:
        DiskFullError: no space; nothing is left behind.
    """
    async with replacement(disk, directory, form.RESERVE) as file:
        await file.preallocate(size)
    await disk.sync_directory(directory)


async def give_up_segment(disk: Disk, segment: Segment, *, keep_as_spare: bool) -> str | None:
    """Remove a segment that no checkpoint lists, or keep its file as a spare one.

    Returns:
        The spare file's name, or None.
    """
    await segment.close()
    await disk.unlink(segment.index_path)
    spare = form.spare_name(segment.segment_id) if keep_as_spare else None
    if spare is None:
        await disk.unlink(segment.path)
    else:
        await disk.rename(segment.path, os.path.join(segment.directory, spare))
    await segment.close()  # A read under way may have opened the file again.
    try:
        await disk.sync_directory(segment.directory)
    except DiskFullError as error:
        # Without a file descriptor nothing was tried, and nobody waits for it: what a power cut brings back,
        # the next start removes.
        if error.is_of_space:
            raise
    return spare


async def settle_segment(segment: Segment) -> None:
    """Make a segment's bytes durable, and cut its file if much of it was not used. Raises DiskFullError."""
    assert segment.file is not None
    if segment.file.size() - segment.end > segment.header.capacity // _SLACK:
        segment.header = await cut_file(segment.file, segment.header, segment.end)
    await segment.file.sync()


async def cut_file(file: File, header: form.SegmentHeader, end: int) -> form.SegmentHeader:
    """Cut a segment's file, and return the segment's header from then on.

    The header with the new capacity is durable first: a file shorter than its header says has lost data.

    Raises:
        DiskFullError: no space to rewrite the header; the file is as long as it was.
    """
    header = header._replace(capacity=end)
    await file.write([form.encode_header_sector(header)], 0)
    await file.sync()
    await file.truncate(end)
    return header


async def write_index(
    disk: Disk, segment: Segment, checkpoint: int, statements: Callable[[int], LacStatement | None]
) -> SegmentRow:
    """Write a segment's index, durable on return; returns the segment's row for the checkpoint.

    From then on a start does not replay the segment, so its terms and marks must be in the checkpoint before.
    The segment's index in memory must not change meanwhile.

    Args:
        checkpoint: the number of the newest durable checkpoint.
        statements: returns the highest LAC statement of a ledger.

    Raises:
        DiskFullError: nothing is left behind, and the call may be repeated.
    """
    assert segment.index is not None
    header = segment.header
    encoder = IndexEncoder(header, segment.end, checkpoint, segment.index.ledgers, statements)
    name = form.index_name(segment.segment_id)
    async with replacement(disk, segment.directory, name) as file:
        offset, pages = encoder.pages_at, list[bytes]()
        for page in encoder.pages():
            pages.append(page)
            if len(pages) == _PAGES_AT_ONCE:
                await file.write(pages, offset)  # the journal writes in between
                offset, pages = offset + sum(map(len, pages)), []
        await file.write(pages, offset)
        await file.write([encoder.head()], 0)
    await disk.sync_directory(segment.directory)
    return SegmentRow(
        segment.segment_id,
        header.generation,
        segment.end,
        encoder.lowest_ledger,
        encoder.highest_ledger,
        HAS_INDEX,
    )
