"""The files of a bookie's directories, as a start finds them.

Owns the names of the files and the directory of each, and reading them. Owns the check that a
file is the one of its name. An intact file may be another one: of another bookie, of another segment, or
of another life of the same one. Owns no conclusion: `crash_recovery` draws them.

Two other files tell of a segment: its row in the checkpoint, and the claims of the witness. Both
have the generation, which is random and was durable before the segment was written to.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bookie_aio.storage.ledgers.checkpoint import Checkpoint, parse_checkpoint
from bookie_aio.storage.ledgers.ledger_table import PackedTable
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.segment import read_head
from metadata.errors import CorruptRecordError, DiskFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bookie_aio.storage.disk.disk import Disk
    from bookie_aio.storage.segment.index import IndexHead
    from bookie_aio.storage.segment.segment import SegmentRow
    from bookie_aio.storage.segment.witness import Claim
    from bookie_aio.wire.blocks import Buffer


class ForeignFileError(CorruptRecordError):
    """An intact file is in the place of another one."""


class FoundFiles:
    """The files of all directories of one bookie."""

    def __init__(self, disk: Disk, directories: Sequence[str], owner: int, claims: Sequence[Claim]) -> None:
        """Take the directories; `names` reads their names.

        Args:
            owner: of which bookie the files are to be.
            claims: what the witness files claim.
        """
        self._disk = disk
        self._directories = directories
        self._owner = owner
        self._claims = claims
        self._at: dict[str, str] = {}  # the directory of each file's name
        self._heads: dict[str, IndexHead] = {}
        self.rows: dict[int, SegmentRow] = {}  # of the checkpoint, once it was read

    async def names(self) -> AsyncIterator[tuple[str, str]]:
        """Read the names, after making them durable; returns the directory and the name of each file.

        Raises:
            CorruptRecordError: the directories cannot be those of one bookie.
        """
        for directory in self._directories:
            # The process before may have been killed between a change of a name and its sync. Conclusions
            # from names (free ids, files that no checkpoint lists) must still hold after a power cut.
            await self._disk.sync_directory(directory)
            for name in await self._disk.list_directory(directory):
                if name == form.CHECKPOINT and name in self._at:
                    raise CorruptRecordError(
                        f"{directory} and {self._at[name]} both hold a checkpoint, and a bookie has one: one "
                        "of them is a copy, or belongs to another bookie"
                    )
                if name in self._at and form.id_of(name, form.SEGMENT_SUFFIX) is not None:
                    raise CorruptRecordError(
                        f"{directory} and {self._at[name]} both hold {name}, and a segment is one file: keep "
                        "the one that the bookie wrote to, and move the other one away"
                    )
                self._at.setdefault(name, directory)
                yield directory, name

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def directory(self, name: str) -> str:
        """Return the directory of a file that there is."""
        return self._at[name]

    def path(self, name: str) -> str:
        """Return the path of a file that there is."""
        return os.path.join(self._at[name], name)

    def ids(self, suffix: str) -> set[int]:
        """Return the numbers of all files of a kind."""
        return {one for name in self._at if (one := form.id_of(name, suffix)) is not None}

    def has_both(self, segment_id: int) -> bool:
        """Return whether a segment and its index are there, by their names."""
        return form.segment_name(segment_id) in self._at and form.index_name(segment_id) in self._at

    async def size(self, name: str) -> int:
        """Return the size of a file."""
        file = await self._disk.open(self.path(name))
        try:
            return file.size()
        finally:
            file.close()

    async def read(self, name: str, size: int | None = None) -> Buffer:
        """Read a file, or its first bytes."""
        file = await self._disk.open(self.path(name))
        try:
            return await file.read(0, file.size() if size is None else size)
        finally:
            file.close()

    # Each of these raises CorruptRecordError, and ForeignFileError where the file is intact.

    async def checkpoint(self) -> Checkpoint:
        """Read the checkpoint. Raises UnknownVersionError, too."""
        checkpoint = parse_checkpoint(await self.read(form.CHECKPOINT))
        if checkpoint.owner != self._owner:
            raise ForeignFileError("the checkpoint is of another bookie")
        return checkpoint

    async def table(self, number: int) -> PackedTable:
        """Read a table of ledgers."""
        name = form.table_name(number)
        if name not in self._at:
            raise CorruptRecordError(f"ledger table {number} is missing")
        return PackedTable.parse(number, self._owner, await self.read(name))

    async def head(self, segment_id: int) -> IndexHead:
        """Read the head of a segment's index, once."""
        name = form.index_name(segment_id)
        if name not in self._heads:
            file = await self._disk.open(self.path(name))
            try:
                self._heads[name] = await read_head(file, name)
            finally:
                file.close()
        head = self._heads[name]
        self.check(segment_id, head)
        return head

    async def named_checkpoints(self, segment_id: int) -> list[int]:
        """Return the checkpoints that a segment's header and the head of its index name.

        A file that cannot be read, or is damaged, names none. It is judged where it is opened.
        """
        found = []
        name = form.segment_name(segment_id)
        try:
            if name in self._at:
                header = form.parse_segment_header(await self.read(name, form.SECTOR_BYTES))
                self.check(segment_id, header)
                found.append(header.checkpoint)
        except (CorruptRecordError, DiskFailedError):
            pass
        try:
            if form.index_name(segment_id) in self._at:
                found.append((await self.head(segment_id)).checkpoint)
        except (CorruptRecordError, DiskFailedError):
            pass
        return found

    # --- the right file ---

    def claimed_end(self, segment_id: int) -> int:
        """Return where the durable groups of a segment ended at least; 0: nothing is claimed."""
        return max((claim.end for claim in self._claims if claim.segment_id == segment_id), default=0)

    def generations(self, segment_id: int) -> set[int]:
        """Return the generations that checkpoint and witness have of a segment: one, or none."""
        row = self.rows.get(segment_id)
        known = {row.generation} if row is not None and row.generation else set()
        return known | {claim.generation for claim in self._claims if claim.segment_id == segment_id}

    def check(self, segment_id: int, found: form.SegmentHeader | IndexHead) -> None:
        """Check that a segment or an index is the one of that id. Raises ForeignFileError."""
        generations = self.generations(segment_id)
        if found.segment_id != segment_id:
            raise ForeignFileError(f"the file is of segment {found.segment_id}")
        if found.owner != self._owner:
            raise ForeignFileError("the file is of another bookie")
        if generations and found.generation not in generations:
            raise ForeignFileError("the file is of another generation than the checkpoint or the witness has")

    def contradictions(self, next_segment: int | None) -> list[str]:
        """Compare the claims of the witness with the list of segments; returns what contradicts them.

        Args:
            next_segment: the lowest id that was never used, by a checkpoint that is the newest one. A segment
                below it that is not listed was given up. None: there is no such checkpoint.
        """
        found = []
        known = self.ids(form.SEGMENT_SUFFIX) | self.ids(form.INDEX_SUFFIX) | set(self.rows)
        for claim in self._claims:
            row = self.rows.get(claim.segment_id)
            if claim.segment_id and claim.segment_id not in known:
                if next_segment is not None and claim.segment_id >= next_segment:
                    found.append(f"segment {claim.segment_id} is missing, and was written to")
            elif row is not None and row.generation not in (0, claim.generation):
                found.append(f"segment {row.segment_id} is another one in the checkpoint than in the witness")
            elif row is not None and row.end and row.end < claim.end:
                found.append(f"segment {row.segment_id} ends before {claim.end}, where durable groups ended")
        return sorted(set(found))
