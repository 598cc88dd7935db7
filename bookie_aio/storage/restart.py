"""Restart: from a directory to what the engine starts with.

Owns the order in which a directory is read, and what is concluded from what is missing there. Changes
nothing on the disk but the names of files that it cannot use; what has to be written follows in the engine,
before it serves: the tail and the marks into a new segment, then indexes, then the checkpoint, and only
then are useless files removed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bookie_aio.storage import directory as layout
from bookie_aio.storage import format as form
from bookie_aio.storage.checkpoint import Checkpoint, LedgerState, parse_checkpoint
from bookie_aio.storage.idranges import IdRanges
from bookie_aio.storage.journal import Change, Record
from bookie_aio.storage.replay import Group, Replayed, replay_segment
from bookie_aio.storage.segment import SealedIndex, Segment
from bookie_aio.wire.blocks import Block
from metadata.errors import CorruptRecordError, DiskFailedError

if TYPE_CHECKING:
    from bookie_aio.storage.disk import Disk, File
    from bookie_aio.storage.index import LedgerRow
    from metadata.errors import StorageError

DAMAGED_SUFFIX = ".damaged"


@dataclass
class Restarted:
    """What a directory holds."""

    ledgers: dict[int, LedgerState] = field(default_factory=dict)
    deleted: IdRanges = field(default_factory=IdRanges)
    segments: dict[int, Segment] = field(default_factory=dict)  # by id, ascending
    is_all_damaged: bool = False
    damaged: set[int] = field(default_factory=set)  # ledgers that are not marked yet
    tail: Group | None = None
    previous: tuple[int, int] = (0, 0)
    next_id: int = 1
    has_reserve: bool = False
    needed: set[int] = field(default_factory=set)  # useless segments whose tail is not rewritten yet
    useless: list[str] = field(default_factory=list)  # names of files to remove in the end
    notes: list[str] = field(default_factory=list)  # for the log: what was wrong

    def state(self, ledger_id: int) -> LedgerState:
        """Give a ledger's state, a new one where there is none."""
        state = self.ledgers.get(ledger_id)
        if state is None:
            state = self.ledgers[ledger_id] = LedgerState()
        return state

    def lose_all(self, why: str) -> None:
        """Conclude that data was lost that may concern any ledger."""
        self.is_all_damaged = True
        self.notes.append(why)

    def forget_deleted(self) -> None:
        """Leave out deleted ledgers, whatever segments and indexes still say of them (rule 15)."""
        for ledger_id in [one for one in self.ledgers if one in self.deleted]:
            del self.ledgers[ledger_id]
        self.damaged = {one for one in self.damaged if one not in self.deleted}

    def first_records(self) -> list[Record]:
        """Give the records that a restart writes first: the tail's, and marks for the damage it found."""
        records: list[Record] = []
        if self.tail is not None:
            packed = self.tail.packed_rows
            for number, row in enumerate(self.tail.rows):
                if row.ledger_id in self.deleted:
                    continue  # the checkpoint knew of the tombstone before the tail was durable
                body = self.tail.bodies[number]
                at = number * form.ROW_BYTES
                size = form.ROW_BYTES + len(body)
                event = _event_of(row, body)
                records.append(Record(packed[at : at + form.ROW_BYTES], body or None, event, _ignore, size))
        if self.is_all_damaged:
            change = Change(form.KIND_MARK, 0, is_for_all=True)
            row_of_all = form.mark_row(0, all_ledgers=True)
            records.append(Record(row_of_all, None, change, _ignore, form.ROW_BYTES))
        for ledger_id in sorted(self.damaged):
            change = Change(form.KIND_MARK, ledger_id)
            records.append(Record(form.mark_row(ledger_id), None, change, _ignore, form.ROW_BYTES))
        return records


def _event_of(row: form.Row, body: memoryview) -> Block | Change:
    if row.kind == form.KIND_BLOCK:
        return Block(body)
    return Change(
        row.kind,
        row.ledger_id,
        row.term,
        row.statement(body) if row.kind == form.KIND_STATEMENT else None,
        bool(row.kind == form.KIND_MARK and row.flags & form.MARK_ALL),
        bytes(body) if row.kind == form.KIND_LOCK else b"",
    )


def _ignore(error: StorageError | None) -> None:
    """Nobody waits: the restart awaits a barrier behind the record."""


class Restart:
    """The reading of one directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._names: set[str] = set()
        self._checkpoint: Checkpoint | None = None
        self._found = Restarted()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    async def run(self) -> Restarted:
        """Read everything.

        Raises:
            UnknownVersionError: something is of another format version.
        """
        found = self._found
        self._names = set(await self._disk.list_directory(self._directory))
        await self._read_checkpoint()
        found.useless += [name for name in self._names if name.endswith(layout.TEMPORARY_SUFFIX)]
        found.has_reserve = layout.RESERVE in self._names
        ids = [layout.id_of(name, layout.SEGMENT_SUFFIX) for name in self._names]
        ids += [layout.id_of(name, layout.INDEX_SUFFIX) for name in self._names]
        on_disk = {one for one in ids if one is not None}
        listed = set(self._checkpoint.segments) if self._checkpoint is not None else set()
        found.next_id = max([found.next_id, *(one + 1 for one in on_disk)])
        opened: dict[int, Segment] = {}
        for segment_id in sorted(on_disk | listed):
            segment = await self._open(segment_id, is_listed=segment_id in listed)
            if segment is not None:
                opened[segment_id] = segment
        await self._open_indexes(opened)
        await self._replay(opened)
        found.segments = dict(sorted(found.segments.items()))
        found.forget_deleted()
        if self._checkpoint is None and (found.segments or found.tail or layout.COOKIE in self._names):
            found.lose_all("there is no good checkpoint")
        return found

    async def _read_checkpoint(self) -> None:
        if layout.CHECKPOINT not in self._names:
            return
        file = await self._disk.open(self._path(layout.CHECKPOINT))
        try:
            self._checkpoint = parse_checkpoint(await file.read(0, file.size()))
        except form.UnknownVersionError:
            raise
        except (CorruptRecordError, DiskFailedError) as error:
            # It may have held fences that are nowhere else.
            self._found.lose_all(str(error))
            return
        finally:
            file.close()
        self._found.ledgers = self._checkpoint.ledgers
        self._found.deleted = self._checkpoint.deleted
        if self._checkpoint.is_all_damaged:
            self._found.lose_all("data was lost before this start, and nobody knows of which ledgers")
        self._found.next_id = self._checkpoint.next_segment

    async def _open(self, segment_id: int, *, is_listed: bool) -> Segment | None:
        """Open a segment; None where it is of no use or lost."""
        checkpoint = self._checkpoint
        if not is_listed and checkpoint is not None and segment_id < checkpoint.next_segment:
            # It was dropped on purpose, and the crash came before its file was gone.
            self._found.useless += [layout.segment_name(segment_id), layout.index_name(segment_id)]
            return None
        name = layout.segment_name(segment_id)
        if name not in self._names:
            await self._lose(segment_id, f"segment {segment_id} is missing")
            return None
        file = await self._disk.open(self._path(name))
        try:
            header = await self._header(file, segment_id)
        except CorruptRecordError as error:
            file.close()
            if isinstance(error, form.UnknownVersionError):
                raise
            if is_listed or layout.index_name(segment_id) in self._names:
                await self._disk.rename(self._path(name), self._path(name + DAMAGED_SUFFIX))
                await self._lose(segment_id, f"segment {segment_id}: {error}")
            else:
                self._found.useless.append(name)  # the crash came while it was created
            return None
        return Segment(file, header)

    async def _header(self, file: File, segment_id: int) -> form.SegmentHeader:
        try:
            header = form.parse_segment_header(await file.read(0, form.DATA_OFFSET))
            if header.segment_id != segment_id:
                raise CorruptRecordError(f"it is segment {header.segment_id}")
        except form.UnknownVersionError:
            raise
        except (CorruptRecordError, DiskFailedError):
            # A good index names the life of the file as well, and every block has its own checksums.
            index = await self._index(segment_id)
            if index is None:
                raise CorruptRecordError("its header is damaged, and there is no good index") from None
            index.file.close()
            return form.SegmentHeader(segment_id, index.head.generation, file.size())
        return header

    async def _index(self, segment_id: int) -> SealedIndex | None:
        name = layout.index_name(segment_id)
        if name not in self._names:
            return None
        try:
            index = await SealedIndex.open(self._disk, self._path(name))
        except (CorruptRecordError, DiskFailedError) as error:
            self._found.notes.append(f"{name}: {error}")
            return None
        if index.head.segment_id != segment_id:
            index.file.close()
            return None
        return index

    async def _lose(self, segment_id: int, why: str) -> None:
        """Conclude what is lost with a segment: what its index says, or anything."""
        found = self._found
        found.next_id = max(found.next_id, segment_id + 1)
        index = await self._index(segment_id)
        if index is None:
            found.lose_all(why)
            return
        try:
            rows = await index.ledgers()
        except (CorruptRecordError, DiskFailedError):
            found.lose_all(why)
        else:
            found.damaged.update(row.ledger_id for row in rows)
            found.notes.append(f"{why}; it held entries of {len(rows)} ledgers")
        finally:
            index.file.close()
        found.useless.append(layout.index_name(segment_id))

    async def _open_indexes(self, opened: dict[int, Segment]) -> None:
        for segment_id, segment in opened.items():
            index = await self._index(segment_id)
            if index is None:
                continue
            if index.head.generation != segment.header.generation:
                index.file.close()
                continue
            try:
                rows = await index.ledgers()
            except (CorruptRecordError, DiskFailedError) as error:
                self._found.notes.append(str(error))
                segment.end = index.head.end
                index.file.close()
                continue
            segment.index, segment.sealed, segment.end = None, index, index.head.end
            self._learn_places(segment_id, rows)

    def _learn_places(self, segment_id: int, rows: list[LedgerRow]) -> None:
        for row in rows:
            state = self._found.state(row.ledger_id)
            state.places.extend((segment_id, row.lowest, row.highest))
            state.last_entry = max(state.last_entry, row.highest)
            if row.statement is not None:
                state.learn_statement(row.statement)

    async def _replay(self, opened: dict[int, Segment]) -> None:
        """Replay what is not sealed, newest first: each says where the one before it ended."""
        found = self._found
        named: tuple[int, int] | None = None  # by the next newer one: which came before it, and its end
        is_last = True
        replayed: list[tuple[Segment, Replayed]] = []
        for segment_id in sorted(opened, reverse=True):
            segment = opened[segment_id]
            if segment.sealed is not None:
                if is_last:
                    found.previous = (segment_id, segment.end)
                is_last = False
                found.segments[segment_id] = segment
                named = await self._named_by(segment)
                continue
            known = None
            if named is not None and named[0] <= segment_id:
                known = named[1] if named[0] == segment_id else form.DATA_OFFSET  # passed over, never used
            if known is None and segment.end > form.DATA_OFFSET:
                known = segment.end  # an index whose head is good and whose pages are not
            result = await replay_segment(segment.file, segment.header, proven_end=known, is_last=is_last)
            if result.previous is not None:
                named = result.previous
                # A first group that is torn says where the segment before it ended, but it may have been
                # that one's tail on its way here: the tail is then still to be had there, and only there.
                if is_last and (result.groups or result.tail is not None):
                    found.tail = result.tail
                    found.previous = (segment_id, result.end)
                    is_last = False
            elif not result.is_all_damaged:
                segment.close()  # prepared and never used
                found.useless.append(layout.segment_name(segment_id))
                continue
            replayed.append((segment, result))
        for segment, result in reversed(replayed):
            self._apply(segment, result)

    async def _named_by(self, segment: Segment) -> tuple[int, int] | None:
        """Give which segment came before a sealed one, and that one's end; None where it cannot tell."""
        try:
            start = await segment.file.read(form.DATA_OFFSET, form.GROUP_HEADER_BYTES)
            group = form.peek_group_header(start, segment.header, form.DATA_OFFSET, segment.end)
            if group is None:
                return None
            head = memoryview(await segment.file.read(form.DATA_OFFSET, group.head_bytes))
        except DiskFailedError:
            return None
        if form.parse_group_rows(group, head) is None:
            return None
        return (group.previous_segment, group.previous_end)

    def _apply(self, segment: Segment, result: Replayed) -> None:
        found = self._found
        if result.is_all_damaged and not found.is_all_damaged:
            found.lose_all(f"segment {segment.segment_id} has groups that cannot be read")
        for ledger_id in result.damaged:
            if not found.state(ledger_id).is_damaged:
                found.damaged.add(ledger_id)
                found.notes.append(f"segment {segment.segment_id} has damaged data of ledger {ledger_id}")
        for ledger_id, term in result.terms.items():
            state = found.state(ledger_id)
            state.term = max(state.term, term)
        for ledger_id, lock in result.locks.items():
            found.state(ledger_id).lock = lock
        for ledger_id in result.deleted:
            found.deleted.add(ledger_id)
        for ledger_id, statement in result.statements.items():
            found.state(ledger_id).learn_statement(statement)
        for ledger_id, runs in result.index.ledgers.items():
            state = found.state(ledger_id)
            state.last_entry = max(state.last_entry, runs.highest)
        if not result.groups and not result.is_all_damaged:
            segment.close()  # nothing but a tail, which is written elsewhere, or a torn group
            found.useless.append(layout.segment_name(segment.segment_id))
            found.needed.add(segment.segment_id)
            return
        segment.index, segment.end = result.index, result.end
        found.segments[segment.segment_id] = segment
