"""Replay: walking the groups of a segment that has no intact index.

Owns the decision between torn and damaged (rule 5). The groups of a segment were made durable one after
another. So a proof that a later group was begun proves that all earlier groups were durable. There are four
such proofs:

- a later group of the segment;
- any group of a later segment, since each group names the end of the segment before its own;
- the head of the sealed index;
- the claim of a witness file, which was written behind the group's fdatasync.

Then:

- A body that fails its checksum in a proven group: the ledger is damaged. The row of a block still lists its
  entries. What may be forgotten is the LAC that the body stated, unless a later one is known.
- A group whose header or rows fail, below a proven end: nobody knows whose records they were, so every ledger
  is damaged. The walk goes on at the next bytes that are a group's head by magic, checksum, segment id,
  generation and own offset at once. The generation is random and never leaves the bookie, so that no payload
  can imitate a group's head.
- A last group without proof: if it is intact it is the *tail*. Its fdatasync may have failed or never run
  although the page cache looks good. So the tail is returned, to be written elsewhere (rule 2). If it is not
  intact it was never acknowledged, and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import MemoryIndex, Runs, pack_run
from metadata.errors import DiskFailedError
from metadata.ids import NO_ENTRY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bookie_aio.storage.disk.disk import File
    from bookie_aio.wire.blocks import LacStatement

_WINDOW_BYTES = 4 * 1024 * 1024


@dataclass
class Group:
    """A group as replay found it: `bodies` and `offsets` by row, `damaged` by number of the row."""

    header: form.GroupHeader
    rows: list[form.Row]
    packed_rows: bytes
    bodies: list[memoryview]
    offsets: list[int]
    damaged: set[int]


@dataclass
class Damage:
    """The ledgers of which data is damaged, and how."""

    lost: set[int] = field(default_factory=set)
    """Ledgers of which more was lost than `harmed` tells."""
    harmed: dict[int, int] = field(default_factory=dict)
    """Ledgers with damaged blocks, which are listed, or statements; the highest LAC in these, −1 for none."""

    def __bool__(self) -> bool:
        """Return whether any ledger has damage."""
        return bool(self.lost or self.harmed)

    def __contains__(self, ledger_id: int) -> bool:
        """Return whether a ledger has damage."""
        return ledger_id in self.lost or ledger_id in self.harmed

    @property
    def ledgers(self) -> list[int]:
        """Return the ledgers, ascending."""
        return sorted({*self.lost, *self.harmed})

    def harm(self, ledger_id: int, lac: int) -> None:
        """Add a damaged block or statement, and the LAC that it stated."""
        self.harmed[ledger_id] = max(lac, self.harmed.get(ledger_id, NO_ENTRY))

    def add(self, other: Damage) -> None:
        """Add the damage of another segment."""
        self.lost |= other.lost
        for ledger_id, lac in other.harmed.items():
            self.harm(ledger_id, lac)

    def is_in_doubt(self, ledger_id: int, known: LacStatement | None) -> bool:
        """Return whether more was lost of a ledger than listed entries.

        Args:
            known: the ledger's highest statement that was not lost.
        """
        lac = NO_ENTRY if known is None else known.lac
        return ledger_id in self.lost or self.harmed.get(ledger_id, NO_ENTRY) > lac


@dataclass
class Replayed:
    """The contents of a segment: the effects of its proven groups, and its tail."""

    index: MemoryIndex = field(default_factory=MemoryIndex)
    end: int = form.DATA_OFFSET  # of the proven groups
    groups: int = 0  # the number of proven groups
    written: int = form.DATA_OFFSET  # the end of the last group with an intact head, proven or not
    previous: tuple[int, int] | None = None  # as any group names it, proven or not
    checkpoint: int = 0  # the newest that a group names, proven or not: it was durable before
    ends_unproven: bool = False
    """Whether nothing proves the last group. It may be in the page cache only, and it may be all that proves
    the groups before. Behind a power cut a start drops a damaged one of these."""
    tail: Group | None = None
    terms: dict[int, int] = field(default_factory=dict)
    statements: dict[int, LacStatement] = field(default_factory=dict)
    locks: dict[int, bytes] = field(default_factory=dict)
    deleted: list[tuple[int, int]] = field(default_factory=list)  # first and last of each range
    trims: dict[int, int] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)
    damage: Damage = field(default_factory=Damage)
    """What is damaged here. Marks that stand in the segment are below."""
    lost_data_of_any_ledger: bool = False
    """Whether groups cannot be read, so that data of any ledger is damaged here."""
    marks: list[tuple[int, int, bool]] = field(default_factory=list)
    """Ledger and number of each mark of one ledger, and whether it concerns listed entries only."""
    lifts: dict[int, int] = field(default_factory=dict)
    marks_of_all: list[tuple[int, int]] = field(default_factory=list)  # number, bound
    ends_of_all: list[tuple[int, int]] = field(default_factory=list)  # number, the highest fenced id
    unread: DiskFailedError | None = None
    """How the disk failed to read some of the segment, which may be intact."""

    @property
    def has_damage(self) -> bool:
        """Return whether any data is damaged here."""
        return bool(self.damage) or self.lost_data_of_any_ledger

    def _harm(self, row: form.Row) -> None:
        """Note that the body of a block or a statement is damaged."""
        states_nothing = row.kind == form.KIND_BLOCK and row.flags & form.STATES_NOTHING
        self.damage.harm(row.ledger_id, NO_ENTRY if states_nothing else row.lac)

    def apply(self, group: Group) -> None:
        """Add the effects of a proven group."""
        self.groups += 1
        self.end = group.header.end
        for number, row in enumerate(group.rows):
            ledger_id = row.ledger_id
            if row.kind == form.KIND_BLOCK:
                is_damaged = number in group.damaged
                if is_damaged:
                    self._harm(row)
                # A damaged block stays listed: those of its entries that are intact may be the last copies.
                runs = self.index.ledgers.get(ledger_id)
                if runs is None:
                    runs = self.index.ledgers[ledger_id] = Runs()
                last = row.first + (row.entries - 1) * row.stride
                packed = pack_run(
                    row.first, row.term, group.offsets[number],
                    row.entries, row.stride, row.head_bytes, row.rest_bytes,
                )  # fmt: skip
                runs.add(row.first, last, form.ROW_BYTES + row.body_bytes, packed)
                if is_damaged or row.flags & form.STATES_NOTHING:
                    continue
                known = self.statements.get(ledger_id)
                if known is None or row.lac > known.lac:
                    self.statements[ledger_id] = row.statement(group.bodies[number])
            elif row.kind == form.KIND_TERM:
                self.terms[ledger_id] = max(row.term, self.terms.get(ledger_id, 0))
            elif row.kind == form.KIND_STATEMENT:
                if number in group.damaged:
                    self._harm(row)
                    continue
                known = self.statements.get(ledger_id)
                if known is None or (row.lac, row.first) > (known.lac, known.lafr):
                    self.statements[ledger_id] = row.statement(group.bodies[number])
            elif row.kind == form.KIND_TOMBSTONE:
                self.deleted.append((ledger_id, row.last_ledger))
            elif row.kind == form.KIND_TRIM:
                self.trims[ledger_id] = max(row.first, self.trims.get(ledger_id, 0))
            elif row.kind == form.KIND_FORGET:
                self.index.ledgers.pop(ledger_id, None)
                self.forgotten.add(ledger_id)
            elif row.kind == form.KIND_LOCK:
                if number in group.damaged:
                    # Rule 4: without the mark, the next client to come would lock the ledger.
                    self.damage.lost.add(ledger_id)
                else:
                    self.locks[ledger_id] = bytes(group.bodies[number])
            elif row.kind == form.KIND_MARK:
                if row.is_of_all:
                    self.marks_of_all.append((row.first, row.lac))
                else:
                    self.marks.append((ledger_id, row.first, row.is_of_listed))
            elif row.kind == form.KIND_LIFT:
                if row.is_of_all:
                    self.ends_of_all.append((row.first, row.lac))
                else:
                    self.lifts[ledger_id] = max(row.first, self.lifts.get(ledger_id, 0))
                    self.terms[ledger_id] = max(row.term, self.terms.get(ledger_id, 0))


class _Window:
    """Reads a file forward in large pieces. Bytes that the disk fails to read are missing, and no error."""

    def __init__(self, file: File, limit: int) -> None:
        self._file = file
        self._limit = limit
        self._start = 0
        self._data = memoryview(b"")
        self.failure: DiskFailedError | None = None

    async def view(self, offset: int, size: int) -> memoryview:
        """Return bytes; fewer than asked for at the limit or where the disk fails."""
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            wanted = min(max(size, _WINDOW_BYTES), max(0, self._limit - offset))
            self._data = memoryview(await self._read(offset, wanted))
            if len(self._data) < min(size, wanted):
                # Some of the window cannot be read, perhaps none of the bytes asked for.
                self._data = memoryview(await self._read(offset, min(size, wanted), is_needed=True))
            self._start, at = offset, 0
        return self._data[at : at + size]

    async def _read(
        self, offset: int, size: int, *, is_needed: bool = False
    ) -> bytes | bytearray | memoryview:
        try:
            return await self._file.read(offset, size) if size else b""
        except DiskFailedError as error:
            if is_needed:
                self.failure = error
            return b""


class _Walk:
    """The walk over one segment's groups. It searches for heads in the `written` ranges only."""

    def __init__(
        self, file: File, header: form.SegmentHeader, limit: int, written: list[tuple[int, int]]
    ) -> None:
        self._window = _Window(file, limit)
        self._segment = header
        self._limit = limit
        self._written = written

    @property
    def failure(self) -> DiskFailedError | None:
        """Return how the disk failed to read some bytes; None where it read all."""
        return self._window.failure

    async def group_at(self, offset: int) -> Group | None:
        """Return the group at an offset, its bodies checked; None where its header or rows fail."""
        start = await self._window.view(offset, form.GROUP_HEADER_BYTES)
        header = form.peek_group_header(start, self._segment, offset, self._limit)
        if header is None:
            return None
        head = await self._window.view(offset, header.head_bytes)
        rows = form.parse_group_rows(header, head)
        if rows is None:
            return None
        packed = bytes(head[form.GROUP_HEADER_BYTES :])
        group = Group(header, rows, packed, [], [], set())
        whole = await self._window.view(offset, header.total_bytes)
        can_read = len(whole) == header.total_bytes  # else each body by itself: some may be readable
        at = offset + header.head_bytes
        for number, row in enumerate(rows):
            size = row.head_bytes + row.rest_bytes
            if can_read:
                body = whole[at - offset : at - offset + size]
            else:
                body = await self._window.view(at, size)
            if not row.is_plausible() or not row.body_is_intact(body):
                group.damaged.add(number)
            group.bodies.append(body)
            group.offsets.append(at)
            at += size
        return group

    async def following(self, offset: int, number: int) -> Group | None:
        """Return the group of that number, if it begins at `offset` or at the next page."""
        group = await self.group_at(offset)
        on_page = form.next_page(offset)
        if group is None and on_page != offset and on_page < self._limit:
            group = await self.group_at(on_page)
        # Another number proves that a group between is missing.
        return group if group is not None and group.header.number == number else None

    async def next_group(self, offset: int) -> int | None:
        """Return the offset of the next group's head from `offset` on; None where there is none."""
        for start, end in self._written:
            found = await self._find_head(max(offset, start), min(end, self._limit))
            if found is not None:
                return found
        return None

    async def _find_head(self, offset: int, end: int) -> int | None:
        overlap = len(form.GROUP_MAGIC) - 1
        while offset < end:
            data = bytes(await self._window.view(offset, min(_WINDOW_BYTES, end - offset)))
            at = data.find(form.GROUP_MAGIC)
            while at >= 0:
                if await self._is_group(offset + at):
                    return offset + at
                at = data.find(form.GROUP_MAGIC, at + 1)
            offset += max(len(data) - overlap, 1) if len(data) > overlap else _WINDOW_BYTES
        return None

    async def _is_group(self, offset: int) -> bool:
        start = await self._window.view(offset, form.GROUP_HEADER_BYTES)
        header = form.peek_group_header(start, self._segment, offset, self._limit)
        if header is None:
            return False
        return form.parse_group_rows(header, await self._window.view(offset, header.head_bytes)) is not None


class Gap(NamedTuple):
    """A range in which no group could be read."""

    start: int
    end: int


async def walk_groups(file: File, header: form.SegmentHeader, end: int) -> AsyncIterator[Group | Gap]:
    """Return the groups of a sealed segment, which ends at `end`, and the gaps between them."""
    walk = _Walk(file, header, end, [(form.DATA_OFFSET, end)])
    offset, number = form.DATA_OFFSET, 0
    while offset < end:
        group = await walk.following(offset, number)
        if group is None:
            at = await walk.next_group(offset)
            group = await walk.group_at(at) if at is not None else None
            if at is None or group is None:  # none, or the disk has failed since
                yield Gap(offset, end)
                return
            yield Gap(offset, at)
        yield group
        offset, number = group.header.end, group.header.number + 1


async def replay_segment(
    file: File, header: form.SegmentHeader, *, proven_end: int | None, is_last: bool
) -> Replayed:
    """Walk a segment's groups.

    Args:
        file: the segment's file.
        header: the segment's header.
        proven_end: the end of its durable groups, where a tail may begin, if it is known from elsewhere.
        is_last: no later segment holds an intact group, so that this segment may have a tail.

    Returns:
        The contents. They are incomplete and must not be used where `unread` is set: the walk ends there.
    """
    size = file.size()
    limit = size if is_last or proven_end is None else proven_end
    # Most of a segment may be reserved and never written. `written` is called before the first read, since
    # the system counts pages that were read ahead as written. The magic has no zeros, so that no group's
    # magic straddles the end of a range.
    try:
        written = await file.written()
    except DiskFailedError:
        written = [(0, size)]
    walk = _Walk(file, header, limit, written)
    found = Replayed()
    beginning = _Walk(file, header, size, written)
    first = await beginning.group_at(form.DATA_OFFSET)
    if first is not None:  # even if it was rewritten elsewhere, and nothing here counts any more
        found.previous = (first.header.previous_segment, first.header.previous_end)
        found.checkpoint = first.header.checkpoint
    unproven: Group | None = None
    offset, number = form.DATA_OFFSET, 0
    while offset < limit and walk.failure is None:
        group = await walk.following(offset, number)
        if group is None:
            following = await walk.next_group(offset)
            is_proven = not is_last if proven_end is None else offset < proven_end
            if following is not None or is_proven:
                found.lost_data_of_any_ledger = True
            if following is None:
                break
            group = await walk.group_at(following)
            if group is None:  # the disk has failed since
                break
        if unproven is not None:
            found.apply(unproven)
        unproven = group
        found.previous = (group.header.previous_segment, group.header.previous_end)
        found.checkpoint = max(found.checkpoint, group.header.checkpoint)
        found.written = group.header.end
        offset, number = group.header.end, group.header.number + 1
    if unproven is not None:
        if not is_last or (proven_end is not None and unproven.header.end <= proven_end):
            found.apply(unproven)
        else:
            found.ends_unproven = True
            found.tail = None if unproven.damaged else unproven
    if proven_end is not None:
        found.end = max(found.end, proven_end)
    found.written = max(found.written, found.end)
    found.unread = beginning.failure or walk.failure
    return found
