"""The files of segments and the reserve: made, made again out of old ones, cut, sealed, given up.

Owns the order of writes and syncs in each of these. Does not own when they happen, nor the checkpoint:
whoever calls lists a segment there before its first group, and takes it off before its file is given up.

A *spare* file is one that was a segment, kept because its blocks have been written before: what is written
into it again needs no change of the file system's own records, which costs a good part of each fdatasync.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bookie_aio.storage.disk.disk import replacement
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment import names
from bookie_aio.storage.segment.index import IndexEncoder
from bookie_aio.storage.segment.segment import Segment, SegmentRow
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
    path = os.path.join(directory, names.segment_name(header.segment_id))
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
    """Turn a spare file, or the reserve, into a segment; this takes no space. It is open, and is closed then.

    Its header, with a generation of its own, is durable before it has its name, so that nothing of the
    file's earlier life is ever taken for a group of it.
    """
    directory = os.path.dirname(path)
    try:
        # Pages that its last life left in memory may be large ones, and Linux counts all of one as written
        # whenever a part of it is.
        await file.will_not_need()
        await file.write([form.encode_segment_header(header)], 0)
        await file.sync()
        await disk.rename(path, os.path.join(directory, names.segment_name(header.segment_id)))
        await disk.sync_directory(directory)
    except DiskFullError:  # where files are copied when they are written to, for instance
        file.close()
        raise
    segment = Segment(directory, header, file_cache, file)
    segment.is_reused = True
    return segment


async def create_reserve(disk: Disk, directory: str, size: int) -> None:
    """Create the preallocated file that fences and recovery adds go to when all else is full.

    Raises:
        DiskFullError: no space; nothing is left behind.
    """
    async with replacement(disk, directory, names.RESERVE) as file:
        await file.preallocate(size)
    await disk.sync_directory(directory)


async def give_up_segment(disk: Disk, segment: Segment, *, keep_as_spare: bool) -> str | None:
    """Remove a segment that no checkpoint lists; its file is kept as a spare one where that is wanted.

    Returns:
        The spare file's name, or None.
    """
    await segment.close()
    await disk.unlink(segment.index_path)
    spare = names.spare_name(segment.segment_id) if keep_as_spare else None
    if spare is None:
        await disk.unlink(segment.path)
    else:
        await disk.rename(segment.path, os.path.join(segment.directory, spare))
    await segment.close()  # Who still read from it may have opened it again.
    await disk.sync_directory(segment.directory)
    return spare


async def settle_segment(segment: Segment) -> None:
    """Make all that a segment holds durable, and cut it if much of it was not used."""
    assert segment.file is not None
    if segment.file.size() - segment.end > segment.header.capacity // _SLACK:
        await segment.file.truncate(segment.end)
    await segment.file.sync()


async def write_index(
    disk: Disk, segment: Segment, statements: Callable[[int], LacStatement | None]
) -> SegmentRow:
    """Write a segment's index; it is durable on return, and what the checkpoint says of it is given.

    From then on a restart does not replay the segment: its terms and marks must be in the checkpoint. The
    segment's index in memory must not change meanwhile.

    Raises:
        DiskFullError: nothing is left behind, and it may be tried again.
    """
    assert segment.index is not None
    header = segment.header
    encoder = IndexEncoder(
        segment.segment_id, header.generation, segment.end, segment.index.ledgers, statements
    )
    name = names.index_name(segment.segment_id)
    async with replacement(disk, segment.directory, name) as file:
        offset, pages = encoder.pages_at, list[bytes]()
        for page in encoder.pages():
            pages.append(page)
            if len(pages) == _PAGES_AT_ONCE:
                await file.write(pages, offset)  # writing to the journal goes on in between
                offset, pages = offset + sum(map(len, pages)), []
        await file.write(pages, offset)
        await file.write([encoder.head()], 0)
    await disk.sync_directory(segment.directory)
    return SegmentRow(
        segment.segment_id, header.generation, segment.end, encoder.lowest_ledger, encoder.highest_ledger
    )
