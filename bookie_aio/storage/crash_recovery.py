"""Crash recovery: from the directories to the state that the engine starts with. Every start runs it.

Owns the order in which the directories are read, and the conclusions from files that are missing, damaged or
in contradiction. Reads the witness files, the checkpoint, the table of ledgers that it names, and the
segments that it does not list as sealed. Of sealed segments only the names are read.

Files *contradict* each other where one of them names something durable that is not there. All such cases are
one case: data was lost, and every ledger is marked. One line tells of it, and no file that may hold data is
removed. The cases are:

- A file names a newer checkpoint than the one there is, or no witness file is intact that could name one.
  Such a checkpoint is *doubtful*. States are learnt from table and indexes, as without a checkpoint. Its
  own contents are lower bounds. A file that it does not list may be a good one, and stays.
- A segment is shorter than its header says.
- A segment is of another bookie, or of another generation than the checkpoint, the witness or its index has.
- The witness names a segment that is missing, or a later end of its groups than a later file does.

Segments that were given up may still be there: their entries were copied before, and the checkpoint does not
list them. Where data was lost, they are taken over again. The files are then looked at twice.

Makes the names that it finds durable, and renames only files that it cannot use. Everything else is written
by the engine afterwards. First the tail and the marks go into a new segment, before the bookie serves. Then
the checkpoint is written, and only then are useless files removed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.storage.disk.disk import TEMPORARY_SUFFIX
from bookie_aio.storage.found_files import ForeignFileError, FoundFiles
from bookie_aio.storage.journal import Change, Record
from bookie_aio.storage.ledgers.checkpoint import Checkpoint, IdRanges, unpack_state
from bookie_aio.storage.ledgers.ledger_table import LedgerTable, PackedTable
from bookie_aio.storage.ledgers.marks import NO_LEDGER, Marks
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.replay import Damage, Group, Replayed, replay_segment
from bookie_aio.storage.segment.segment import HAS_INDEX, Segment, SegmentRow, UnreadIndexError
from bookie_aio.storage.segment.witness import Claim
from bookie_aio.wire.blocks import Block
from metadata.errors import CorruptRecordError, DiskFailedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from bookie_aio.storage.disk.disk import Disk, File
    from bookie_aio.storage.ledgers.checkpoint import LedgerState
    from bookie_aio.storage.segment.index import IndexHead, LedgerRow
    from bookie_aio.storage.segment.segment_set import SegmentSet
    from bookie_aio.storage.segment.witness import WitnessFiles
    from metadata.errors import StorageError

DAMAGED_SUFFIX = ".damaged"
_SCAN_BYTES = 1024 * 1024


Held = tuple[int, int, int, int]
"""What was durable: the number of a checkpoint, a segment, its generation, and where its groups ended."""


class EarlierRun(NamedTuple):
    """What files outside the storage say of the runs before."""

    lost_up_to: int | None = None
    """The highest ledger id that data was lost of; None for no loss."""
    held: tuple[Held, ...] = ()
    """What the storage held at least, as each of them says."""


@dataclass
class RecoveredState:
    """The state in the directories, before the tail is written again."""

    deleted: IdRanges = field(default_factory=IdRanges)
    ledgers: LedgerTable = field(init=False)
    home: str = ""  # the directory of the checkpoint and the reserve
    spares: list[tuple[str, str]] = field(default_factory=list)  # directory and name of spare files
    marks: Marks = field(default_factory=Marks)  # the marks of earlier starts
    lost_data_of_any_ledger: bool = False  # whether this start has to mark all ledgers
    damage: Damage = field(default_factory=Damage)  # of the ledgers that this start has to mark
    ends_unproven: bool = False  # as in `Replayed`
    tail: Group | None = None  # the last group, if nothing proves that it was durable
    previous: tuple[int, int] = (0, 0)  # the newest segment, and the end of its durable groups
    next_id: int = 1
    checkpoint_number: int = 0  # of the newest checkpoint that was ever durable, as far as is known
    used: list[tuple[str, int]] = field(default_factory=list)  # replayed files, and the end of what counts
    reserve_bytes: int = 0  # 0: there is no reserve
    needed: set[SegmentRow] = field(
        default_factory=set
    )  # useless segments, listed until the tail is rewritten
    useless: list[str] = field(default_factory=list)  # paths of files to remove after the start
    unlisted: list[str] = field(default_factory=list)  # likewise, of files that no start needs
    notes: list[str] = field(default_factory=list)  # for the log: the damage found

    def __post_init__(self) -> None:
        """Start with no ledgers."""
        self.ledgers = LedgerTable(self.deleted)

    def state(self, ledger_id: int) -> LedgerState:
        """Return a ledger's state, a new one where there is none."""
        return self.ledgers.make(ledger_id)

    def lose_all(self, why: str) -> None:
        """Conclude that data was lost that may concern any ledger (rule 4)."""
        self.lost_data_of_any_ledger = True
        self.notes.append(why)

    def add_losses(self, other: RecoveredState) -> None:
        """Add what was lost as another look at the same files has found, which may have renamed some."""
        self.lost_data_of_any_ledger |= other.lost_data_of_any_ledger
        self.ends_unproven |= other.ends_unproven
        for ledger_id in other.damage.ledgers:
            if ledger_id in self.deleted:
                continue
            if ledger_id in other.damage.lost or ledger_id not in self.damage.harmed:
                self.damage.lost.add(ledger_id)  # that look listed what this one does not find
            else:
                self.damage.harm(ledger_id, other.damage.harmed[ledger_id])
        self.next_id = max(self.next_id, other.next_id)
        self.notes[:0] = [note for note in other.notes if note not in self.notes]

    def drop_deleted(self) -> None:
        """Drop the states of deleted ledgers, which segments and indexes may still list (rule 15)."""
        for ledger_id in [one for one in self.ledgers.live if one in self.deleted]:
            self.ledgers.remove(ledger_id)
        self.ledgers.count()
        for ledger_id in [one for one in self.damage.ledgers if one in self.deleted]:
            self.damage.lost.discard(ledger_id)
            self.damage.harmed.pop(ledger_id, None)

    def first_records(self) -> list[Record]:
        """Return the records that the engine writes first: the tail's, and marks for the damage found.

        The marks count from this call on.
        """
        self.marks.begin(self.next_id)
        records: list[Record] = []
        if self.tail is not None:
            packed = self.tail.packed_rows
            for number, row in enumerate(self.tail.rows):
                if not row.is_of_all and self.deleted.covers(row.ledger_id, row.last_ledger):
                    continue  # the checkpoint had the tombstone before the tail was durable
                if row.kind == form.KIND_MARK and self._is_marked_anew(row):
                    continue  # or each start on a full disk would add a mark to the tail
                body = self.tail.bodies[number]
                at = number * form.ROW_BYTES
                size = form.ROW_BYTES + len(body)
                event = _event_of(row, body)
                records.append(Record(packed[at : at + form.ROW_BYTES], body or None, event, _ignore, size))
        if self.lost_data_of_any_ledger:
            number = self.marks.draw()
            self.marks.learn_mark(number, NO_LEDGER)
            change = Change(form.KIND_MARK, 0, is_for_all=True, number=number)
            row_of_all = form.mark_all_row(number, NO_LEDGER)
            records.append(Record(row_of_all, None, change, _ignore, form.ROW_BYTES))
        for ledger_id in self.damage.ledgers:
            number, is_of_listed = self.marks.draw(), not self._is_in_doubt(ledger_id)
            self.state(ledger_id).mark(number, is_of_listed=is_of_listed)
            change = Change(form.KIND_MARK, ledger_id, number=number, is_of_listed=is_of_listed)
            packed = form.mark_row(ledger_id, number, is_of_listed=is_of_listed)
            records.append(Record(packed, None, change, _ignore, form.ROW_BYTES))
        return records

    def _is_in_doubt(self, ledger_id: int) -> bool:
        """Return whether this start found more damage of a ledger than of what the next one lists, too."""
        return self.ends_unproven or self.damage.is_in_doubt(ledger_id, self.state(ledger_id).statement)

    def _is_marked_anew(self, row: form.Row) -> bool:
        """Return whether this start makes a mark that stands for an earlier one as well."""
        if row.is_of_all:
            return self.lost_data_of_any_ledger and row.lac == NO_LEDGER
        return row.ledger_id in self.damage  # The new one is of a doubt, as there is a tail.


def _event_of(row: form.Row, body: memoryview) -> Block | Change:
    if row.kind == form.KIND_BLOCK:
        return Block(body)
    return Change(
        row.kind,
        row.ledger_id,
        row.term,
        row.statement(body) if row.kind == form.KIND_STATEMENT else None,
        lock=bytes(body) if row.kind == form.KIND_LOCK else b"",
        is_for_all=row.is_of_all,
        first=row.first if row.kind == form.KIND_TRIM else 0,
        last=row.last_ledger,
        number=row.first if row.kind in (form.KIND_MARK, form.KIND_LIFT) else 0,
        bound=row.lac if row.is_of_all else NO_LEDGER,
        is_of_listed=row.is_of_listed,
    )


def _ignore(error: StorageError | None) -> None:
    """Nobody waits for one of these records: the engine awaits a barrier behind them."""


class _NewerCheckpointError(Exception):
    """A group names a newer checkpoint than the one that was believed until then."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _GivenUpSegmentsError(Exception):
    """Data was lost, and segments are still there that were given up.

    Their entries were copied to other segments. The copies may be what was lost.
    """


class CrashRecovery:
    """Reads the directories of one bookie."""

    def __init__(
        self,
        disk: Disk,
        directories: Sequence[str],
        segments: SegmentSet,
        witness: WitnessFiles,
        *,
        earlier: Sequence[Held] = (),
        newest: int = 0,
        keeps_given_up: bool = False,
    ) -> None:
        """Take the directories, and the set that the segments found are added to.

        Args:
            witness: the claims of an earlier run, and the owner of all files.
            earlier: what files outside the storage say of an earlier run; may be older than the witness.
            newest: the number of a checkpoint that is known to have been durable.
            keeps_given_up: whether segments that were given up, and not removed yet, are taken over again.
        """
        self._disk = disk
        self._directories = directories
        self._segments = segments
        self._witness = witness
        self._earlier = earlier
        self._claims = [*witness.claims, *(Claim(witness.owner, *held) for held in earlier)]
        self._keeps_given_up = keeps_given_up
        self._given_up: list[str] = []  # segments that the newest checkpoint does not list any more
        self._newest = max([newest, *(claim.checkpoint for claim in self._claims)])
        self._is_doubtful = False  # the checkpoint may not be the newest one
        self._files = FoundFiles(disk, directories, witness.owner, self._claims)
        self._checkpoint: Checkpoint | None = None
        self._is_table_lost = False
        self._unread_indexes: dict[int, DiskFailedError] = {}
        self._learnt: set[int] = set()  # ledgers whose `since` is known from indexes only
        self._found = RecoveredState(home=directories[0])

    async def run(self, *, spare_bytes: int) -> RecoveredState:
        """Read the directories, and conclude what is lost.

        Args:
            spare_bytes: the size of files that can become segments again.

        Raises:
            UnknownVersionError: a file is of another format version.
            CorruptRecordError: the directories cannot be those of one bookie.
            DiskFailedError: the disk fails to read something. The data there is neither lost nor known, and
                nothing is concluded from it.
        """
        try:
            return await self._run(spare_bytes)
        except _NewerCheckpointError as error:
            return await self._run_again(spare_bytes, error.number, self._keeps_given_up)
        except _GivenUpSegmentsError:
            found = await self._run_again(spare_bytes, self._newest, keeps_given_up=True)
            found.add_losses(self._found)
            return found
        except DiskFailedError as error:
            raise DiskFailedError(
                f"{error}. Nothing is concluded from what cannot be read: start again, and replace this "
                "bookie if its disk never gives it"
            ) from error

    async def _run_again(self, spare_bytes: int, newest: int, keeps_given_up: bool) -> RecoveredState:
        self._segments.clear()
        parts = (self._disk, self._directories, self._segments, self._witness)
        again = CrashRecovery(*parts, earlier=self._earlier, newest=newest, keeps_given_up=keeps_given_up)
        return await again.run(spare_bytes=spare_bytes)

    async def _run(self, spare_bytes: int) -> RecoveredState:
        found, files = self._found, self._files
        async for directory, name in files.names():
            if name == form.RESERVE + TEMPORARY_SUFFIX:
                continue  # the next reserve replaces it, perhaps before the clean-up
            if name.endswith(TEMPORARY_SUFFIX):
                found.unlisted.append(os.path.join(directory, name))
            elif name.endswith(form.SPARE_SUFFIX):
                await self._take_spare(directory, name, spare_bytes)
        await self._read_checkpoint()
        if form.RESERVE in files and files.directory(form.RESERVE) == found.home:
            found.reserve_bytes = await files.size(form.RESERVE)
        on_disk = files.ids(form.SEGMENT_SUFFIX) | files.ids(form.INDEX_SUFFIX)
        # Without a checkpoint only names tell which ids were used, also the names of spare files. A new
        # segment with a spare file's id would be renamed over it when given up.
        used = on_disk | files.ids(form.SPARE_SUFFIX) | {claim.segment_id for claim in self._claims}
        found.next_id = max([found.next_id, *(one + 1 for one in used)])
        next_segment = self._checkpoint.next_segment if self._checkpoint and self._is_trusted else None
        for why in files.contradictions(next_segment):
            found.lose_all(why)
        await self._open(sorted(on_disk | set(files.rows)))
        if self._given_up and (found.lost_data_of_any_ledger or found.damage):
            raise _GivenUpSegmentsError
        found.unlisted += self._given_up
        found.drop_deleted()
        is_empty = not self._segments.by_id and found.tail is None
        if self._checkpoint is None and not (is_empty and self._is_new):
            found.lose_all("there is no good checkpoint")
        if found.marks.number and not found.lost_data_of_any_ledger:
            which = "any ledger" if found.marks.is_unbounded else f"any ledger up to {found.marks.bound}"
            found.notes.append(f"data was lost before this start, perhaps of {which}")
        found.checkpoint_number = self._witness.checkpoint = self._newest
        return found

    @property
    def _is_new(self) -> bool:
        """Return whether nothing tells that there ever was a checkpoint."""
        return self._newest == 0 and self._checkpoint is None and form.COOKIE not in self._files

    @property
    def _is_trusted(self) -> bool:
        """Return whether there is a checkpoint, and nothing tells that it is not the newest one."""
        return self._checkpoint is not None and not self._is_doubtful

    async def _take_spare(self, directory: str, name: str, spare_bytes: int) -> None:
        path = os.path.join(directory, name)
        file = await self._disk.open(path)
        is_of_use = file.size() == spare_bytes
        file.close()
        if is_of_use:
            self._found.spares.append((directory, name))
        else:
            self._found.useless.append(path)

    async def _read_checkpoint(self) -> None:
        found = self._found
        self._checkpoint = await self._load_checkpoint()
        checkpoint = self._checkpoint or Checkpoint()
        self._files.rows = checkpoint.segments
        await self._find_newest(checkpoint)
        if self._checkpoint is not None:
            self._judge(checkpoint)
        found.deleted = checkpoint.deleted
        found.ledgers = LedgerTable(found.deleted)
        table = await self._read_table(checkpoint.table)
        if table.number != checkpoint.table:  # the checkpoint is an older one, or there is none
            for ledger_id, state in checkpoint.ledgers.items():
                if (row := table.row(ledger_id)) is not None:
                    state.raise_to(unpack_state(row))
        found.ledgers.load(checkpoint.ledgers, table, max(self._files.ids(form.TABLE_SUFFIX), default=0))
        found.marks = checkpoint.marks
        found.next_id = checkpoint.next_segment

    async def _load_checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint; None where there is none that is intact and of this bookie."""
        if form.CHECKPOINT not in self._files:
            return None
        self._found.home = self._files.directory(form.CHECKPOINT)
        try:
            return await self._files.checkpoint()
        except form.UnknownVersionError:
            raise
        except CorruptRecordError as error:
            # Rule 4: the checkpoint may have held fences that are nowhere else.
            self._found.lose_all(str(error))
            return None

    async def _find_newest(self, checkpoint: Checkpoint) -> None:
        """Find the newest checkpoint that a file names which the checkpoint does not list as sealed."""
        files, named = self._files, [checkpoint.number]
        for segment_id in sorted(files.ids(form.SEGMENT_SUFFIX) | files.ids(form.INDEX_SUFFIX)):
            row = files.rows.get(segment_id)
            if row is None or not row.is_sealed or not files.has_both(segment_id):
                named += await files.named_checkpoints(segment_id)
        for number in files.ids(form.TABLE_SUFFIX):
            if number > checkpoint.table:
                with suppress(CorruptRecordError, DiskFailedError):
                    named.append((await files.table(number)).checkpoint)
        self._newest = max(self._newest, *named)

    def _judge(self, checkpoint: Checkpoint) -> None:
        """Decide whether the checkpoint is the newest one."""
        witness, found = self._witness, self._found
        damage = "; ".join(witness.damage.values())
        if checkpoint.number < self._newest:
            why = (
                f"the checkpoint is number {checkpoint.number}, and number {self._newest} was durable: a "
                "file or a directory was set back"
            )
        elif not witness.is_whole_somewhere:
            why = f"nothing tells which checkpoint and which groups were durable last: {damage}"
        else:
            # Each checkpoint is claimed before the next one is written. So a claim is one behind at most.
            claimed = max(claim.checkpoint for claim in witness.claims)
            if claimed + 1 < self._newest:
                found.lose_all(
                    f"the witness names checkpoint {claimed}, and number {self._newest} was durable: the "
                    "witness was set back, and nothing tells which groups were durable last"
                )
            elif damage:
                found.notes.append(f"{damage}. Another directory has the same claims, and nothing is lost")
            return
        self._is_doubtful = True
        found.lose_all(f"{why}. No segment, index or table is removed")

    async def _read_table(self, number: int) -> PackedTable:
        """Read the table of ledgers that the checkpoint names; all other tables are useless.

        Where the checkpoint is not known to be the newest one, read the newest table that is intact.
        """
        found, numbers = self._found, self._files.ids(form.TABLE_SUFFIX)
        if not self._is_trusted:
            return await self._newest_table(numbers)
        found.useless += map(self._files.path, map(form.table_name, sorted(numbers - {number})))
        if not number:
            return PackedTable()
        try:
            return await self._files.table(number)
        except CorruptRecordError as error:
            # Rule 4: the table may have held fences that are nowhere else.
            found.lose_all(str(error))
            self._is_table_lost = True
            return await self._newest_table(numbers - {number})

    async def _newest_table(self, numbers: set[int]) -> PackedTable:
        """Read the newest of these tables that is intact. Its states are lower bounds."""
        for one in sorted(numbers, reverse=True):
            try:
                return await self._files.table(one)
            except CorruptRecordError as error:
                self._found.notes.append(str(error))
        return PackedTable()

    async def _open(self, segment_ids: list[int]) -> None:
        """Take over the sealed segments, and replay all others, newest first."""
        opened: dict[int, Segment] = {}
        for segment_id in segment_ids:
            row, files = self._files.rows.get(segment_id), self._files
            is_sealed = row is not None and row.is_sealed and files.has_both(segment_id)
            if row is not None and is_sealed and await self._learn_from(row):
                directory = files.directory(form.segment_name(segment_id))
                header = form.SegmentHeader(segment_id, row.generation, row.end, self._witness.owner)
                self._segments.add_sealed(Segment(directory, header, self._segments.file_cache), row)
                continue
            segment = await self._open_unsealed(segment_id, is_listed=row is not None)
            if segment is not None:
                opened[segment_id] = segment
                if row is not None and row.end:  # not sealed yet, or its index is missing
                    segment.end, segment.checkpoint_row = row.end, row
        for segment in opened.values():
            await self._try_index(segment)
        unsealed = {one: segment for one, segment in opened.items() if segment.sealed is None}
        await self._replay(unsealed)

    async def _open_unsealed(self, segment_id: int, *, is_listed: bool) -> Segment | None:
        """Open a segment; None where it is useless or lost."""
        checkpoint, files = self._checkpoint, self._files
        name, index_name = form.segment_name(segment_id), form.index_name(segment_id)
        is_trusted = self._is_trusted
        is_given_up = not is_listed and is_trusted and checkpoint and segment_id < checkpoint.next_segment
        if is_given_up and not (self._keeps_given_up and name in files):
            # The crash came before its file was removed.
            paths = [files.path(one) for one in (name, index_name) if one in files]
            (self._given_up if name in files else self._found.unlisted).extend(paths)
            return None
        if name not in files:
            await self._lose(segment_id, f"segment {segment_id} is missing")
            return None
        path = files.path(name)
        file = await self._disk.open(path)
        try:
            header = form.parse_segment_header(await file.read(0, form.DATA_OFFSET))
            files.check(segment_id, header)
        except (form.UnknownVersionError, DiskFailedError):
            file.close()
            raise
        except CorruptRecordError as error:
            # An intact index has the generation as well, and every block has its own checksums.
            try:
                index = await self._index_head(segment_id)
            except DiskFailedError:
                file.close()
                raise
            if index is None:
                try:
                    is_used = files.claimed_end(segment_id) > 0 or await _holds_data(file)
                finally:
                    file.close()
                may_be_new = is_trusted or self._is_new
                is_foreign = isinstance(error, ForeignFileError)
                if is_listed or is_used or is_foreign or index_name in files or not may_be_new:
                    await self._disk.rename(path, path + DAMAGED_SUFFIX)
                    await self._lose(segment_id, f"segment {segment_id}: {error}")
                else:
                    self._found.useless.append(path)  # the crash came while it was created
                return None
            header = form.SegmentHeader(segment_id, index.generation, file.size(), self._witness.owner)
        return Segment(files.directory(name), header, self._segments.file_cache, file)

    async def _index_head(self, segment_id: int) -> IndexHead | None:
        name = form.index_name(segment_id)
        if name not in self._files:
            return None
        try:
            return await self._files.head(segment_id)
        except CorruptRecordError as error:
            self._found.notes.append(f"{name}: {error}")
            return None

    async def _lose(self, segment_id: int, why: str) -> None:
        """Conclude what is lost with a segment: the ledgers in its index, or without an index any ledger."""
        found = self._found
        found.next_id = max(found.next_id, segment_id + 1)
        head = await self._index_head(segment_id)
        if head is None:
            if not self._is_doubtful:  # an older checkpoint lists segments that were given up since
                found.lose_all(why)
            return
        path = self._files.path(form.index_name(segment_id))
        try:
            rows = await self._segments.read_index(path, _row_of(head)).ledgers()
        except UnreadIndexError as error:
            raise DiskFailedError(str(error)) from error
        except CorruptRecordError:
            found.lose_all(why)
        else:
            found.damage.lost.update(row.ledger_id for row in rows)
            found.notes.append(f"{why}; it held entries of {len(rows)} ledgers")
        found.useless.append(path)

    async def _try_index(self, segment: Segment) -> None:
        """Take a segment as sealed if it has an intact index that the checkpoint does not list yet."""
        try:
            head = await self._index_head(segment.segment_id)
        except DiskFailedError as error:
            self._unread_indexes[segment.segment_id] = error
            return
        if head is None or head.end < self._files.claimed_end(segment.segment_id):
            return
        if head.generation != segment.header.generation:
            if not self._files.generations(
                segment.segment_id
            ):  # else the segment is right, and the index is not
                self._found.lose_all(f"segment {segment.segment_id} and its index have two generations")
            return
        row = _row_of(head)
        if not await self._learn_from(row):
            segment.end, segment.checkpoint_row = head.end, row
            return
        segment.release_file()
        self._segments.add_sealed(segment, row)

    @property
    def _is_learning(self) -> bool:
        """Return whether the newest checkpoint or its table is lost, and with it states of ledgers."""
        return not self._is_trusted or self._is_table_lost

    async def _learn_from(self, row: SegmentRow) -> bool:
        """Learn states from an index, if the checkpoint or the table is lost; False where it cannot be read.

        The indexes hold a part of the lost states. Without a state a ledger's entries would not count, and
        the segment would be given up.
        """
        if not self._is_learning:
            return True
        index = self._segments.read_index(self._files.path(form.index_name(row.segment_id)), row)
        try:
            self._learn(row.segment_id, await index.ledgers())
        except CorruptRecordError as error:
            self._found.notes.append(str(error))
            return False
        return True

    def _learn(self, segment_id: int, rows: list[LedgerRow]) -> None:
        for row in rows:
            state = self._found.state(row.ledger_id)
            if not state.since:
                self._learnt.add(row.ledger_id)
            if row.ledger_id in self._learnt:
                # Indexes do not come in the order of their segments if one was rebuilt.
                state.since = min(state.since or segment_id, segment_id)
            if state.since <= segment_id:
                state.last_entry = max(state.last_entry, row.highest)
            if row.statement is not None:
                state.learn_statement(row.statement)

    async def _replay(self, unsealed: dict[int, Segment]) -> None:
        """Replay the unsealed segments, newest first: each names the end of the segment before it."""
        found = self._found
        ask: Callable[[], Awaitable[tuple[int, int] | None]] | None = None
        is_last = True
        is_lone = False  # the newest segment holds nothing but the tail
        replayed: list[tuple[Segment, Replayed]] = []
        for segment_id in sorted({*unsealed, *self._segments.by_id}, reverse=True):
            segment = unsealed.get(segment_id)
            if segment is None:
                sealed = self._segments.by_id[segment_id]
                if is_last:
                    found.previous = (segment_id, sealed.end)
                is_last = False
                ask = partial(self._named_by, sealed)
                continue
            # A lone tail may be in the page cache only: the process before may have failed to sync it, and a
            # further sync would report success (rule 2). If an earlier segment holds the tail as well, that
            # copy may be the acknowledged one: it is not cut.
            may_be_cut = not is_lone
            named = await ask() if ask is not None else None  # by the next newer segment
            known = None
            if named is not None and named[0] <= segment_id:
                known = named[1] if named[0] == segment_id else form.DATA_OFFSET  # skipped, never used
            is_over = segment.end > form.DATA_OFFSET
            if known is None and is_over:
                # From the checkpoint, or from an index whose head is intact and whose pages are not.
                known = segment.end
            # A tail behind a known end has been written elsewhere, and may be outdated.
            result = await self._replay_one(segment, known, is_last=is_last and not is_over)
            if result.previous is not None:
                ask = partial(_known_already, result.previous)
                # A torn first group names the end of the segment before, but may be that segment's tail on
                # its way here. The tail is then still there, and only there.
                if is_last and (result.groups or result.tail is not None):
                    self._take_tail(result.tail)
                    # A given-up segment may be removed before the segment in front of it is sealed. Then only
                    # the next segment written names that one's end.
                    is_given_up = not result.groups and not result.lost_data_of_any_ledger
                    is_lone = not result.groups
                    found.previous = result.previous if is_given_up else (segment_id, result.end)
                    is_last = False
            elif not result.lost_data_of_any_ledger:
                await segment.close()  # prepared and never used
                found.useless.append(segment.path)
                found.used.append((segment.path, form.DATA_OFFSET))
                continue
            replayed.append((segment, result))
            if may_be_cut and not result.has_damage:  # a damaged segment may be needed as proof
                found.used.append((segment.path, result.written))
        for segment, result in reversed(replayed):
            await self._apply(segment, result)

    async def _replay_one(self, segment: Segment, known: int | None, *, is_last: bool) -> Replayed:
        """Replay a segment whose groups end at `known`, and compare it with what is claimed of it."""
        segment_id, found = segment.segment_id, self._found
        claimed = self._files.claimed_end(segment_id)
        if known is not None and claimed > known:
            found.lose_all(f"segment {segment_id} ends at {known}, and had durable groups up to {claimed}")
        if claimed and (known is not None or is_last):
            known = max(known or 0, claimed)
        assert segment.file is not None
        result = await replay_segment(segment.file, segment.header, proven_end=known, is_last=is_last)
        if result.unread is not None:
            # It may hold acknowledged records, or not: neither lost nor torn may be concluded.
            raise result.unread
        size, capacity = segment.file.size(), segment.header.capacity
        if size < capacity and (segment_id in self._files.rows or result.previous is not None):
            found.lose_all(f"segment {segment_id} has {size} bytes, and its header says {capacity}")
            result.lost_data_of_any_ledger = True
        if segment_id in self._unread_indexes and result.has_damage:
            raise self._unread_indexes[segment_id]  # the index may list what was there
        if result.checkpoint > self._newest and self._is_trusted:
            raise _NewerCheckpointError(result.checkpoint)
        self._newest = max(self._newest, result.checkpoint)
        return result

    def _take_tail(self, tail: Group | None) -> None:
        found = self._found
        found.tail = tail
        # The tail proves that an earlier start has seen the damage, and replay skips the damage itself from
        # now on. So the mark in the tail counts, like the records of any other group.
        if tail is not None:
            found.marks.learn_rows(tail.rows)

    async def _named_by(self, segment: Segment) -> tuple[int, int] | None:
        """Return the segment before a sealed one, and its end; None where the first group is not intact."""
        start = await segment.read(form.DATA_OFFSET, form.GROUP_HEADER_BYTES)
        group = form.peek_group_header(start, segment.header, form.DATA_OFFSET, segment.end)
        if group is None:
            return None
        head = memoryview(await segment.read(form.DATA_OFFSET, group.head_bytes))
        if form.parse_group_rows(group, head) is None:
            return None
        return (group.previous_segment, group.previous_end)

    async def _apply(self, segment: Segment, result: Replayed) -> None:
        found = self._found
        if result.lost_data_of_any_ledger and not found.lost_data_of_any_ledger:
            found.lose_all(f"segment {segment.segment_id} has groups that cannot be read")
        found.marks.learn_from(result, found.state)
        for ledger_id in result.damage.ledgers:
            if not found.state(ledger_id).is_marked:
                found.notes.append(f"segment {segment.segment_id} has damaged data of ledger {ledger_id}")
        # Also where they are marked: a client may be about to have that mark lifted, and not this one.
        found.damage.add(result.damage)
        found.ends_unproven |= result.ends_unproven
        for ledger_id, term in result.terms.items():
            state = found.state(ledger_id)
            state.term = max(state.term, term)
        for ledger_id, lock in result.locks.items():
            found.state(ledger_id).lock = lock
        for first, last in result.deleted:
            found.deleted.add_range(first, last)
        for ledger_id, statement in result.statements.items():
            found.state(ledger_id).learn_statement(statement)
        for ledger_id, first in result.trims.items():
            state = found.state(ledger_id)
            state.first = max(state.first, first)
        for ledger_id in result.forgotten:
            state = found.state(ledger_id)
            state.was_evicted = True
            if ledger_id in self._learnt:
                state.since = segment.segment_id  # the state may be learnt from later segments
            elif state.since < segment.segment_id:  # else the checkpoint has this forget, or a later one
                state.since, state.last_entry = segment.segment_id, -1
        for ledger_id, runs in result.index.ledgers.items():
            state = found.state(ledger_id)
            if not state.since or ledger_id in self._learnt:
                # A state learnt from the indexes of later segments does not outdate this segment's entries.
                state.since = min(state.since or segment.segment_id, segment.segment_id)
            if state.since <= segment.segment_id:
                state.last_entry = max(state.last_entry, runs.highest)
        if not result.groups and not result.lost_data_of_any_ledger:
            await segment.close()  # only a torn group, or a tail, which is rewritten elsewhere
            found.useless.append(segment.path)
            found.needed.add(SegmentRow(segment.segment_id, segment.header.generation))
            return
        segment.index, segment.end = result.index, result.end
        self._segments.add(segment)


async def _holds_data(file: File) -> bool:
    """Return whether anything was ever written behind a segment's header.

    A segment is created with a durable header in front of zeros. Only then is it written to. Without this
    check a damaged header would make a used segment look like one whose creation a crash interrupted.
    """
    for start, end in await file.written():
        for at in range(max(start, form.DATA_OFFSET), end, _SCAN_BYTES):
            if bytes(await file.read(at, min(_SCAN_BYTES, end - at))).strip(b"\0"):
                return True
    return False


async def _known_already(previous: tuple[int, int]) -> tuple[int, int] | None:
    return previous


def _row_of(head: IndexHead) -> SegmentRow:
    return SegmentRow(
        head.segment_id, head.generation, head.end, head.lowest_ledger, head.highest_ledger, HAS_INDEX
    )
