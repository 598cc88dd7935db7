"""The witness: what was durable last, in a small file of its own in each data directory.

Two facts are in no other file that the next start could trust by itself:

- Where the durable groups of the newest segment end. Without it, a damaged tail looks torn (rule 5).
- Which checkpoint was the newest. Without it an older checkpoint, put back, is believed.

Owns the file `witness` of each directory: its bytes, and when it is written and synced. Does not own the
conclusions: `crash_recovery` compares the claims with the other files.

A claim is written after the fact is durable, so it never claims too much. It is written without a sync, so
that it costs a group nothing. After `kill -9` the page cache has it, and the claim is exact. After a power
cut it may be any older one, which claims less. It is synced at each checkpoint, behind the first group of a
segment, once when the bookie idles, at a clean stop, and at a start.

All directories have the same claims. So one that was set back contradicts the others.

The file is two pages of 4,096 bytes, which are overwritten in place. Page 0 has the claim about groups, and
only the journal writes it. Page 1 has the claim about checkpoints, and only the checkpointer writes
it. A claim is in one sector, which a power cut leaves old or new. So no power cut makes a claim unreadable,
and an unreadable claim is damage. Little-endian:

      0  4s   magic b"BKW1"
      4  u32  crc          CRC32C of bytes 8 … 55
      8  u32  version      1
     12  u32  page         0 or 1
     16  u64  owner        of which bookie the file is; see `data_directory.owner_of`
     24  u64  checkpoint   the number of a checkpoint that was durable
     32  u64  segment      page 0: the segment that was written to, 0: none
     40  u64  generation   page 0: of that segment
     48  u64  end          page 0: where its durable groups end
"""

from __future__ import annotations

import asyncio
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from bookie_aio.storage.disk.disk import write_file
from bookie_aio.storage.segment.format import WITNESS, UnknownVersionError
from metadata.errors import CorruptRecordError, DiskFailedError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.disk.disk import Disk, File
    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.wire.blocks import Buffer

VERSION = 1
WITNESS_MAGIC = b"BKW1"
PAGE_BYTES = 4096
GROUPS_PAGE = 0
CHECKPOINTS_PAGE = 1
IDLE_S = 1.0
"""Without a group for so long the bookie idles. A claim is synced once then."""

_CLAIM = struct.Struct("<4sIIIQQQQQ")
_COVERED_FROM = 8
_PADDING = bytes(PAGE_BYTES - _CLAIM.size)
assert _CLAIM.size == 56


class Claim(NamedTuple):
    """The claim of one page: all of it was durable when the page was written."""

    owner: int
    checkpoint: int
    segment_id: int = 0
    generation: int = 0
    end: int = 0


def encode_page(page: int, claim: Claim) -> bytes:
    """Return the bytes of a page."""
    covered = _CLAIM.pack(WITNESS_MAGIC, 0, VERSION, page, *claim)[_COVERED_FROM:]
    return b"".join((WITNESS_MAGIC, crc32c(covered).to_bytes(4, "little"), covered, _PADDING))


def parse_page(page: int, data: Buffer) -> Claim:
    """Parse and check a page.

    Raises:
        CorruptRecordError: the page does not parse.
        UnknownVersionError: it is of another version.
    """
    if len(data) < _CLAIM.size:
        raise CorruptRecordError(f"page {page} of the witness file is missing")
    magic, crc, version, own_page, *fields = _CLAIM.unpack_from(data)
    covered = memoryview(data)[_COVERED_FROM : _CLAIM.size]
    if magic != WITNESS_MAGIC or crc32c(covered) != crc or own_page != page:
        raise CorruptRecordError(f"page {page} of the witness file is damaged")
    if version != VERSION:
        raise UnknownVersionError(f"a witness file of format version {version}; this program knows {VERSION}")
    return Claim(*fields)


def encode_witness(owner: int, checkpoint: int = 0) -> list[bytes]:
    """Return the bytes of a file that claims nothing of groups."""
    claim = Claim(owner, checkpoint)
    return [encode_page(GROUPS_PAGE, claim), encode_page(CHECKPOINTS_PAGE, claim)]


class WitnessFiles:
    """The witness files of one bookie's directories."""

    def __init__(self, disk: Disk, directories: Sequence[str], owner: int, health: StorageHealth) -> None:
        """Use `open`."""
        self._disk = disk
        self._directories = directories
        self._health = health
        self._files: dict[str, File] = {}
        self._newest = Claim(owner, 0)  # about groups
        self._groups = 0  # groups that were claimed
        self._synced_groups = 0
        self._timer: asyncio.TimerHandle | None = None
        self._groups_at_timer = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._oldest = 1 << 64  # of the claims about checkpoints, in files that are intact
        self.owner = owner
        self.checkpoint = 0  # the number of the newest durable checkpoint
        self.claims: list[Claim] = []  # of all pages that were intact when they were opened
        self.damage: dict[str, str] = {}  # by directory: how its file is damaged, or that it is missing
        self.is_absent = True  # no directory has a file

    @classmethod
    async def open(
        cls, disk: Disk, directories: Sequence[str], owner: int, health: StorageHealth
    ) -> WitnessFiles:
        """Read the files of all directories. Files that are damaged or missing are left as they are.

        Raises:
            UnknownVersionError: a file is of another version.
            DiskFailedError: the disk fails to read one.
        """
        found = cls(disk, directories, owner, health)
        try:
            for directory in directories:
                await found._open(directory)
        except BaseException:
            found._close_files()
            raise
        return found

    async def _open(self, directory: str) -> None:
        path = os.path.join(directory, WITNESS)
        try:
            file = await self._disk.open(path)
        except FileNotFoundError:
            self.damage[directory] = f"{path} is missing"
            return
        self.is_absent = False
        is_whole = False
        try:
            data = memoryview(await file.read(0, 2 * PAGE_BYTES))
            is_whole = len(data) == 2 * PAGE_BYTES
            if not is_whole:
                self.damage[directory] = f"{path} has {len(data)} bytes"
            for page in (GROUPS_PAGE, CHECKPOINTS_PAGE):
                try:
                    claim = parse_page(page, data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
                    if claim.owner != self.owner:
                        raise CorruptRecordError("it is of another bookie")
                except UnknownVersionError:
                    raise
                except CorruptRecordError as error:
                    is_whole = False
                    self.damage[directory] = f"{path}: {error}"
                else:
                    self.claims.append(claim)
        except BaseException:
            file.close()
            raise
        if is_whole:
            self._files[directory] = file
            self._oldest = min(self._oldest, self.claims[-1].checkpoint)
        else:
            file.close()

    @property
    def is_whole_somewhere(self) -> bool:
        """Return whether one directory's file is intact at least: all files have the same claims."""
        return bool(self._files)

    async def make_missing(self) -> None:
        """Write the files that are damaged or missing; they are durable on return.

        The conclusions from their damage must be durable before: it cannot be found again.

        Raises:
            DiskFullError: no space in any directory, and no file is intact. While there is an intact one, a
                directory without space is passed over.
        """
        full: DiskFullError | None = None
        for directory in list(self.damage):
            pages = [
                encode_page(GROUPS_PAGE, self._newest),
                encode_page(CHECKPOINTS_PAGE, Claim(self.owner, self.checkpoint)),
            ]
            try:
                await write_file(self._disk, directory, WITNESS, pages)
                self._files[directory] = await self._disk.open(os.path.join(directory, WITNESS))
            except DiskFullError as error:
                full = error
            else:
                del self.damage[directory]
        if full is not None and not self._files:
            raise full

    async def catch_up(self) -> None:
        """Make the claim of the newest checkpoint durable in all files, before another checkpoint is written.

        A crash may have come between the checkpoint and its claim, or between the claim and its sync: then
        it was read from the page cache only. So an intact witness is one checkpoint behind at most, and one
        that is further behind was set back.

        Raises:
            DiskFailedError: a write or a sync failed.
        """
        claimed = max((claim.checkpoint for claim in self.claims), default=0)
        if not self._files or claimed + 1 < self.checkpoint:
            return
        if self._oldest < self.checkpoint:
            await self.note_checkpoint(self.checkpoint)
        else:
            await self.sync()

    # --- claims ---

    def of_group(self, segment_id: int, generation: int, end: int) -> list[tuple[File, Buffer]]:
        """Return what to write, at the beginning of which files, once a group that ends there is durable."""
        self._newest = Claim(self.owner, self.checkpoint, segment_id, generation, end)
        page = encode_page(GROUPS_PAGE, self._newest)
        return [(file, page) for file in self._files.values()]

    def group_claimed(self, *, is_first: bool) -> None:
        """Note that the claim about a group was written. The claim is synced when no group follows soon.

        Args:
            is_first: it was the first group of its segment. Its claim is synced in any case.
        """
        self._groups += 1
        if is_first:
            self._sync_soon()
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        if self._is_closed:
            return
        self._groups_at_timer = self._groups
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._groups != self._groups_at_timer:
            self._arm()
        elif self._synced_groups != self._groups:
            self._sync_soon()

    def _sync_soon(self) -> None:
        if self._task is None and self._health.error is None and not self._is_closed:
            self._task = asyncio.get_running_loop().create_task(self._sync_guarded())
            self._health.watch(self._task, "a sync of the witness")

    async def _sync_guarded(self) -> None:
        try:
            await self.sync()
        except Exception as error:
            # Rule 2: after a failed sync nothing is known of what the file holds.
            self._health.fail(error, "syncing the witness")
        self._task = None
        if self._synced_groups != self._groups and self._timer is None and self._health.error is None:
            self._arm()

    async def note_checkpoint(self, number: int) -> None:
        """Claim a checkpoint that is durable; the claim is durable on return.

        Raises:
            DiskFailedError: a write or a sync failed.
        """
        self.checkpoint = number
        page = encode_page(CHECKPOINTS_PAGE, Claim(self.owner, number))
        try:
            for file in list(self._files.values()):
                await file.write([page], CHECKPOINTS_PAGE * PAGE_BYTES)
        except DiskFullError as error:
            # The file's blocks are there. And the checkpoint is durable: no caller may take it for one that
            # found no room.
            raise DiskFailedError(str(error)) from error
        await self.sync()

    async def sync(self) -> None:
        """Make the claims durable that are written by now.

        Raises:
            DiskFailedError: a sync failed.
        """
        groups = self._groups
        try:
            for file in list(self._files.values()):
                await file.sync()
        except DiskFullError as error:
            raise DiskFailedError(str(error)) from error
        self._synced_groups = max(self._synced_groups, groups)

    # --- the end ---

    async def close(self) -> None:
        """Stop the timer, wait for the sync under way, and close the files."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait([self._task])
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
