"""The journal: group commit.

Owns the queue of accepted records and the group in flight. Groups form by natural batching: a group is the
records that arrived while the fdatasync of the group before it ran. One group is in flight at a time. So a
group on disk proves that all groups before it are durable (rule 5). Does not own the index. Each durable
group is handed over in order; that call indexes it, and then calls the `Done`s of its records.

A small record that comes alone to an idle journal is written on the event loop's thread, while the disk is
quick (`SyncGuard`). That saves two changes of thread, which cost more than the record itself.

After the first failed write or sync nothing is written or acknowledged any more (rule 2).
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bookie_aio.storage.segment import format as form
from metadata.errors import DiskFailedError, DiskFullError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.storage.health import StorageHealth
    from bookie_aio.storage.segment.allocator import SegmentAllocator
    from bookie_aio.storage.segment.segment import Segment
    from bookie_aio.storage.segment.witness import WitnessFiles
    from bookie_aio.wire.blocks import Block, Buffer, LacStatement

AT_ONCE_BYTES_MAX = 16 * 1024
"""The event loop waits for groups up to this size, each of one record."""
SHORT_SYNCS = 8
"""After so many short syncs in a row the loop waits for the next one itself."""
SHORT_SYNCS_MAX = 4096
"""The number grows up to this one with each stall, and is forgotten after as many short syncs in a row."""
STALL_S = 0.02
"""A sync that the loop waited for, and that took longer, is a stall."""

Done = Callable[[StorageError | None], None]
"""Called on the loop's thread, exactly once, with None when the record is durable and indexed."""


def when_durable(accept: Callable[[Done], None]) -> asyncio.Future[None]:
    """Call `accept` now, with a `Done` that completes the future returned.

    A cancelled future withdraws nothing: the record is still written.
    """
    durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StorageError | None) -> None:
        if durable.done():  # cancelled, with the connection that waited for it
            return
        if error is None:
            durable.set_result(None)
        else:
            durable.set_exception(error)

    accept(done)
    return durable


class AddWatch(Protocol):
    """An observer of accepted blocks, while it is in an engine's `add_watches`."""

    def note(self, block: Block) -> None:
        """Take note of an accepted block, which is not durable yet."""

    def note_forget(self, ledger_id: int) -> None:
        """Take note that entries accepted before do not count, once this record is durable."""


class Change(NamedTuple):
    """The change of a record other than a block: `kind` of the row, and the value if it has one."""

    kind: int
    ledger_id: int
    term: int = 0
    statement: LacStatement | None = None
    is_for_all: bool = False
    lock: bytes = b""
    first: int = 0
    before: int = 0  # of KIND_TERM, KIND_LIFT: the term before it, to revert to if the record is dropped
    last: int = -1  # of KIND_TOMBSTONE for a range of ledgers: the last one
    number: int = 0  # of KIND_MARK, KIND_LIFT
    bound: int = -1  # of these for all ledgers: the highest ledger concerned, −1 where it is unknown
    is_of_listed: bool = False  # of KIND_MARK: it concerns listed entries only


class Record(NamedTuple):
    """One record on its way to the disk. A barrier has an empty row and no event.

    A list stands for the blocks of many ledgers, which become durable together. `row` has a row of each, and
    `body` their bytes, one after another. They are in one group, so a crash leaves all of them or none.
    """

    row: bytes
    body: Buffer | None
    event: Block | list[Block] | Change | None
    done: Done
    size: int

    @property
    def events(self) -> int:
        """Return for how many changes of a ledger the record stands."""
        if isinstance(self.event, list):
            return len(self.event)
        return 0 if self.event is None else 1


class Group:
    """A group in flight, or one that became durable: `bodies_at` is the offset of the first body.

    `queued_at`: when the first of its records was queued.
    """

    __slots__ = (
        "bodies_at", "durable_at", "offset", "queued_at", "records", "segment", "size", "started_at",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        records: list[Record],
        offset: int,
        bodies_at: int,
        size: int,
        queued_at: float,
        started_at: float,
    ) -> None:
        self.segment = segment
        self.records = records
        self.offset = offset
        self.bodies_at = bodies_at
        self.size = size
        self.queued_at = queued_at
        self.started_at = started_at
        self.durable_at = 0.0


class SyncGuard:
    """Decides whether the event loop may wait for the sync of a small group.

    The loop does nothing else meanwhile, so the disk must have been quick lately. A disk that then stalls
    stops the loop once. After each further stall the loop leaves more syncs to the thread.
    """

    def __init__(self, short_s: float) -> None:
        """A sync of up to `short_s` seconds is short. With 0 the loop never waits."""
        self._short_s = short_s
        self._pause = SHORT_SYNCS
        self._left = SHORT_SYNCS if short_s else sys.maxsize

    @property
    def may_wait(self) -> bool:
        """Return whether enough syncs in a row were short."""
        return self._left <= 0

    def note(self, seconds: float, *, has_waited: bool) -> None:
        """Note how long a sync took, and whether the loop waited for it."""
        if seconds <= self._short_s:
            self._left -= 1
            if self._left <= -SHORT_SYNCS_MAX:
                self._left, self._pause = 0, SHORT_SYNCS
        elif self._short_s:
            if has_waited and seconds > STALL_S:
                self._pause = min(8 * self._pause, SHORT_SYNCS_MAX)
            self._left = self._pause


class Journal:
    """Writes records in the order in which they were appended, group by group."""

    def __init__(
        self,
        segment: Segment,
        allocator: SegmentAllocator,
        *,
        group_bytes_max: int,
        short_sync_s: float,
        on_group: Callable[[Group], None],
        on_dropped: Callable[[Sequence[Record], StorageError], None],
        on_rolled: Callable[[Segment], None],
        witness: WitnessFiles,
        health: StorageHealth,
        clock: Callable[[], float],
    ) -> None:
        """Start with an empty segment.

        Args:
            short_sync_s: see `SyncGuard`.
            on_group: a group is durable. If it raises, it has called none of the group's `Done`s.
            on_dropped: these records will not be written: there was no space, or the disk failed.
            on_rolled: nothing more will be written to this segment.
            witness: claims each group once it is durable, before the group's records are acknowledged.
            health: is told of a failed write; its listener then calls `stop`.
            clock: the time in seconds, for the metrics.
        """
        self._loop = asyncio.get_running_loop()
        self._allocator = allocator
        self._group_bytes_max = group_bytes_max
        self._guard = SyncGuard(short_sync_s)
        self._on_group = on_group
        self._on_dropped = on_dropped
        self._on_rolled = on_rolled
        self._witness = witness
        self._health = health
        self._clock = clock
        self._queued_at = 0.0
        self._queue: deque[Record] = deque()
        self._barriers = 0  # in the queue
        self._in_flight: Group | None = None
        self._is_scheduled = False
        self._number = 0
        self._offset = form.DATA_OFFSET
        self.segment = segment
        self.queued_bytes = 0
        self._rolled: Segment | None = None  # the segment before, until this one has a durable group

    @property
    def durable(self) -> tuple[int, int, int]:
        """Return a segment, its generation and the end of its durable groups; zeros before any group."""
        segment = self.segment if self._number else self._rolled
        if segment is None:
            return 0, 0, 0
        return segment.segment_id, segment.header.generation, segment.end

    @property
    def is_idle(self) -> bool:
        """Return whether everything appended is durable and handed over."""
        return self._in_flight is None and not self._queue

    @property
    def bytes_pending(self) -> int:
        """Return the bytes queued and in flight."""
        return self.queued_bytes + (self._in_flight.size if self._in_flight is not None else 0)

    @property
    def records_queued(self) -> int:
        """Return the number of records that wait for the group in flight."""
        return len(self._queue)

    @property
    def room(self) -> int:
        """Return the bytes left in the current segment for the bodies and rows of one group."""
        return self.segment.header.capacity - self._offset - form.GROUP_HEADER_BYTES

    def append(self, record: Record) -> None:
        """Queue a record. A group begins at the end of this event-loop iteration unless one is in flight."""
        if self._health.error is not None:
            self._on_dropped([record], self._health.error)
            return
        if not self._queue:
            self._queued_at = self._clock()
        self._queue.append(record)
        self.queued_bytes += record.size
        if self._in_flight is None and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._launch_idle)

    def barrier(self, done: Done) -> None:
        """Call `done` when everything appended so far is durable.

        It is called within this call if everything is durable already, or if the journal failed. It is called
        with `DiskFullError` when a record before the barrier was dropped.
        """
        if self._health.error is not None or self.is_idle:
            done(self._health.error)
        elif self._queue:
            self._queue.append(Record(b"", None, None, done, 0))
            self._barriers += 1
        else:
            assert self._in_flight is not None
            self._in_flight.records.append(Record(b"", None, None, done, 0))

    def _launch_idle(self) -> None:
        """Write what has come to an idle journal."""
        self._is_scheduled = False
        self.launch(may_wait=self._guard.may_wait)

    def launch(self, *, may_wait: bool = False) -> None:
        """Write the next group, if there is one to write and room for it.

        Args:
            may_wait: the loop may wait for the sync of a single small record.
        """
        while self._queue and self._in_flight is None and self._health.error is None:
            count, size = self._measure(self._group_bytes_max)
            if size > self.room:
                segment = self._allocator.take()
                if segment is not None:
                    self._roll(segment)
                    continue
                if self._allocator.is_preparing:
                    return  # called again when the segment is ready, or when there will be none
                count, size = self._measure(self.room)
                if size > self.room:
                    if not self._allocator.begin_reserve():
                        self._drop_first()
                        continue
                    return
            self._write([self._queue.popleft() for _ in range(count)], size, may_wait=may_wait)
            if self._is_scheduled:
                return  # a `Done` has appended: later, so that the loop waits once an iteration at most

    def _measure(self, limit: int) -> tuple[int, int]:
        """Return how many of the queued records go into the next group, at least one, and their size."""
        if self.queued_bytes <= limit:
            return len(self._queue), self.queued_bytes
        size = self._queue[0].size
        count = 1
        for record in islice(self._queue, 1, None):
            if record.size and size + record.size > limit:
                break  # a barrier (size 0) goes with the records before it
            size += record.size
            count += 1
        return count, size

    def _roll(self, segment: Segment) -> None:
        rolled, self.segment = self.segment, segment
        if self._number:
            self._rolled = rolled
        segment.previous = (rolled.segment_id, rolled.end)
        self._offset, self._number = form.DATA_OFFSET, 0
        self._on_rolled(rolled)

    def _drop_first(self) -> None:
        dropped = [self._queue.popleft()]
        self.queued_bytes -= dropped[0].size
        if self._barriers:
            # Rule 3: a barrier behind the dropped record must not tell that all records are durable.
            dropped += [record for record in self._queue if not record.row]
            self._queue = deque(record for record in self._queue if record.row)
            self._barriers = 0
        self._on_dropped(dropped, DiskFullError("no space left, and the reserve is used up"))

    def _write(self, records: list[Record], size: int, *, may_wait: bool) -> None:
        segment, header = self.segment, self.segment.header
        rows = [record.row for record in records if record.row]
        self.queued_bytes -= size
        self._barriers -= len(records) - len(rows)
        if not rows:  # barriers whose records went with the group before
            for record in records:
                record.done(None)
            return
        rows_bytes = sum(map(len, rows))
        head_bytes = form.GROUP_HEADER_BYTES + rows_bytes
        total = form.GROUP_HEADER_BYTES + size
        offset = form.group_start(self._offset, total)
        if offset + total > header.capacity:
            offset = self._offset
        witness = self._witness
        group = form.GroupHeader(
            header.segment_id, header.generation, self._number, offset, *segment.previous, total,
            witness.checkpoint, rows_bytes // form.ROW_BYTES,
        )  # fmt: skip
        began = self._clock()
        self._in_flight = Group(segment, records, offset, offset + head_bytes, total, self._queued_at, began)
        self._queued_at = began  # of what is left in the queue, at the latest
        try:
            buffers: list[Buffer] = [form.encode_group_head(group, rows)]
            buffers += [record.body for record in records if record.body is not None]
            buffers.append(form.padding(offset + total, header.capacity))
            assert segment.file is not None
            assert offset + total <= header.capacity
            claim = witness.of_group(header.segment_id, header.generation, offset + total)
            at_once = may_wait and len(records) == 1 and not self._queue and total <= AT_ONCE_BYTES_MAX
            future = segment.file.write_and_sync(buffers, offset, claim, at_once=at_once)
        except Exception as error:  # no memory, or no thread
            self._health.fail(error, "writing a group")
            return
        if future.done():
            self._written(future, has_waited=True)
        else:
            future.add_done_callback(self._written)

    def _written(self, future: asyncio.Future[None], *, has_waited: bool = False) -> None:
        error = None if future.cancelled() else future.exception()
        group = self._in_flight
        if self._health.error is not None or group is None:
            return
        if future.cancelled() or error is not None:
            self._health.fail(error, "a write")
            return
        group.durable_at = self._clock()
        self._guard.note(group.durable_at - group.started_at, has_waited=has_waited)
        self._in_flight = None
        self._witness.group_claimed(is_first=self._number == 0)
        self._number += 1
        self._offset = group.offset + group.size
        group.segment.end = self._offset
        try:
            # The disk is busy again before this group is indexed and acknowledged.
            self.launch()
            self._on_group(group)
        except Exception as broken:
            # Rule 3: no group may be indexed behind a durable group that is not.
            error = DiskFailedError(f"a durable group could not be indexed: {broken!r}")
            self._health.fail(error, "indexing a group")
            self._on_dropped(group.records, error)  # `stop` knows nothing of them any more
            raise

    def stop(self) -> list[Record]:
        """Stop for good (rule 2); returns the records queued and in flight, which are never written."""
        records = [*(self._in_flight.records if self._in_flight is not None else ()), *self._queue]
        self._queue.clear()
        self._in_flight = None
        self.queued_bytes = 0
        return records

    def limit_groups(self, group_bytes_max: int) -> None:
        """Set the size of a group. Before that, a start writes the tail as one group, whatever its size."""
        self._group_bytes_max = group_bytes_max
