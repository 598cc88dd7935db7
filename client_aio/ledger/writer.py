"""The writer's handle of an open ledger.

Owns the futures of adds, back-pressure, the idle writer's LAC, and the close of the ledger. Does not own
acknowledgements (`client_aio.core.add_window`), adds that wait (`client_aio.ledger.waiting_adds`), sending
(`client_aio.ledger.replication`), or the replacement of bookies (`client_aio.ledger.ensemble_change`).

With deferred sync, forces make durable the entries that the bookies have received. `DeferredSync` owns when a
force is sent again: a bookie may fail before it answers, and its replacement must receive the entries first.
The window decides which entries a force has made durable.

Invariants: futures complete in entry order, each exactly once. After the first failure nothing more is
acknowledged. While the outcome of an ensemble change is unknown nothing is acknowledged (rules 9, 10).
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import _get_running_loop
from collections.abc import AsyncIterable
from threading import get_ident
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from mypy_extensions import mypyc_attr

from bookie_aio.wire.messages import AddFlag, WriteLac
from client_aio.core.add_window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES, EntryOrder
from client_aio.core.ensemble_change import Closing
from client_aio.core.healing import Intake
from client_aio.handles import ClosesOnExit
from client_aio.lac_clock import LacPublisher
from client_aio.ledger.entry_reader import writers_reader
from client_aio.ledger.futures import (
    AnyAdd,
    BatchAdd,
    EntryWaiters,
    as_unknown,
    complete_runs,
    fail_all,
    fenced_by_metadata,
    note_sent,
    with_message,
)
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.replication import CopiesWatch, Replication, StallWatch
from client_aio.ledger.standing import Standing
from client_aio.ledger.waiting_adds import (
    HARD_LIMIT_FACTOR,
    WaitingAdds,
    as_batch,
    as_entry,
    check_entries,
    check_room,
)
from metadata.errors import (
    BookKeeperError,
    EntryTooLargeError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    WriterAbortedError,
)
from metadata.ids import NO_ENTRY, TERM_WRITER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from client_aio.bookies.connection import BookieConnection
    from client_aio.config import WriteOptions
    from client_aio.context import ClientContext
    from client_aio.core.add_window import AddGroup, AddWindow, Outstanding
    from client_aio.core.digest import Digest
    from client_aio.core.ensemble_change import EnsembleChange
    from client_aio.ledger.entry_reader import EntrySource, EntryStream
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version

logger = logging.getLogger(__name__)

Token = AnyAdd
_Given = tuple[bytes, asyncio.Future[int]]
_BULK_TURN_BYTES = BATCH_BYTES_MAX
"""How many bytes of a bulk are taken in one event-loop iteration."""


class DeferredSync:
    """Advances the LAC of one window by forces, one after another.

    Args:
        force: sends one force, and returns when the LAC is at an entry, or every bookie that has not failed
            has answered.
        failure: returns the writer's failure; None if it has not failed.
    """

    def __init__(
        self,
        window: AddWindow[Any],
        force: Callable[[int], Awaitable[None]],
        failure: Callable[[], BookKeeperError | None],
    ) -> None:
        self._window = window
        self._force = force
        self._failure = failure
        self._lock = asyncio.Lock()
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Note that the window has changed, or that the writer has failed."""
        self._moved.set()

    async def up_to(self, last: int) -> None:
        """Return when the LAC is at `last`, an entry that Qa bookies have received.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        async with self._lock:
            while self._window.lac < last:
                if (failure := self._failure()) is not None:
                    raise failure.with_traceback(None)
                self._moved.clear()
                await self._force(last)
                if self._window.lac >= last:
                    return
                if self._window.is_frozen or not self._window.can_acknowledge:
                    self._moved.clear()  # Only a later change of the window can make another force succeed.
                if self._failure() is None:
                    await self._moved.wait()


@mypyc_attr(allow_interpreted_subclasses=True)
class LedgerWriter(ClosesOnExit):
    """Adds entries to a ledger; made by `Client.create_ledger`.

    An async context manager: leaving it normally flushes and closes the ledger. Leaving it by an exception or
    a cancellation aborts the writer, and the ledger stays OPEN for recovery.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: LedgerMetadata,
        version: Version,
        digest: Digest,
        options: WriteOptions,
        *,
        term: int = TERM_WRITER,
        last_entry: int = NO_ENTRY,
        length: int = 0,
    ) -> None:
        self._context = context
        self._config = context.config
        self._digest = digest
        self._options = options
        self._loop = asyncio.get_running_loop()
        # Gets what is outstanding when the writer fails; without it the futures fail.
        self._on_dropped: Callable[[Outstanding[Token]], None] | None = None
        self._is_closing = False
        self._closes = 0  # calls that wait for the last adds
        self._has_closed = False  # this writer has closed the ledger, and not found it closed
        self._was_idle = False  # fenced by a bookie while every add had been acknowledged
        self._order: EntryOrder[_Given] | None = EntryOrder() if options.advanced else None
        self._is_direct = not options.advanced  # and not failed, not closing, and no adds wait
        self._entry_bytes_max = context.config.entry_bytes_max
        self._bytes_held_max = HARD_LIMIT_FACTOR * context.config.max_in_flight_bytes
        self._create_future: Callable[[], asyncio.Future[int]] = self._loop.create_future
        self._is_running = self._loop.is_running
        self._loop_thread = 0  # in which the loop was running when it was last checked
        self._waiters = EntryWaiters()
        self._room = asyncio.Event()
        self._room.set()
        self._ending = asyncio.Lock()
        self._behind_gap_bytes = 0  # of the entries behind a gap in the ids
        self._attach(metadata, version, term=term, last_entry=last_entry, length=length)
        self._intake = Intake(self._window)
        self._waiting = WaitingAdds(
            self._intake.put_run,
            lambda: self._replicator.flush(),
            self._make_room,
            self._all_taken,
            context.config.max_in_flight_bytes,
            f"adds that wait in ledger {metadata.ledger_id}",
        )
        self._reader = self._make_reader()

    def _attach(
        self, metadata: LedgerMetadata, version: Version, *, term: int, last_entry: int, length: int
    ) -> None:
        """Begin to add behind `last_entry`, under a term."""
        self._held = self._hold(metadata, version)
        self._term = term
        self._standing = Standing(self._context, self._digest, term)
        deferred_sync = self._options.deferred_sync
        replication: Replication[Token] = Replication(
            self._context,
            metadata,
            self._digest,
            self,
            term=term,
            flags=AddFlag.DEFERRED_SYNC if deferred_sync else AddFlag.NONE,
            ack_quorum=metadata.ack_quorum,
            next_entry=last_entry + 1,
            length=length,
            guaranteed_write_quorum=metadata.guaranteed_write_quorum,
            deferred_sync=deferred_sync,
        )
        # Attributes of the writer itself: every add uses the first two.
        self._window, self._replicator = replication.window, replication.replicator
        self._changes = replication.changes
        self._leave_ordered = replication.leave_ordered
        self._context.pool.directory.tell_of_orders(self, replication.leave_ordered)
        self._forces = DeferredSync(self._window, self._replicator.force, lambda: self._failure)
        self._lac_publisher = LacPublisher(self._window, self._publish_lac, self._context.lac_clock)
        timeout_s, clock = self._config.add_quorum_timeout_s, self._context.clock
        self._copies = CopiesWatch(self._replicator, timeout_s, clock)
        stall_watch = StallWatch(self._window, self._fail, timeout_s, clock)
        self._parts = (self._replicator, self._changes, self._lac_publisher, stall_watch)

    def _hold(self, metadata: LedgerMetadata, version: Version) -> VersionedLedgerMetadata:
        return VersionedLedgerMetadata(self._context, metadata, version)

    def _make_reader(self) -> EntrySource:
        return writers_reader(self._context, lambda: self._held.current, self._digest)

    async def start(self, connections: dict[str, BookieConnection | BookKeeperError]) -> None:
        """Seat the bookies of the ensemble; called once, before the first add.

        Args:
            connections: an error for a bookie that is down, which has failed from the start (rule 9).
        """
        self._replicator.seat(self._held.current.last_fragment.bookies, connections)
        self._leave_ordered()
        await self._replicator.lock(self._context)

    # --- state ---

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return (
            f"<{type(self).__name__} of ledger {self.ledger_id}: LAC {self.last_add_confirmed}, "
            f"{self.bytes_in_flight} bytes in flight{state}>"
        )

    @property
    def ledger_id(self) -> int:
        """Return the ledger's id."""
        return self._held.current.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the ledger's metadata as this writer last wrote it."""
        return self._held.current

    @property
    def last_add_confirmed(self) -> int:
        """Return the id of the last acknowledged entry, −1 for none."""
        return self._window.lac

    @property
    def last_add_fully_replicated(self) -> int:
        """Return the last entry that its whole write set has, like every entry before it; −1 for none.

        Known only with guaranteed write quorum (rule 11).
        """
        return self._window.lafr

    @property
    def last_add_pushed(self) -> int:
        """Return the id of the last entry that was taken, −1 for none."""
        return self._intake.last_taken - self._intake.shift

    @property
    def length(self) -> int:
        """Return the payload bytes of all acknowledged entries."""
        return self._window.length_confirmed

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of the unacknowledged entries, including the overhead of each entry."""
        return self._intake.bytes_held + self._waiting.bytes_held + self._behind_gap_bytes

    @property
    def is_closed(self) -> bool:
        """Return whether the handle takes no adds; a close under way may yet fail, and leave it open."""
        return self._is_closing or self._closes > 0 or self._failure is not None

    @property
    def failed_bookies(self) -> list[str]:
        """Return the bookies of the ensemble that failed and have not been replaced."""
        return self._replicator.failed_bookies

    @property
    def max_in_flight_bytes(self) -> int:
        """Return the bytes in flight above which `drain` waits."""
        return self._config.max_in_flight_bytes

    @property
    def is_held_up(self) -> bool:
        """Return whether adds wait only for a gap in the ids, which the caller must close."""
        window = self._window
        has_gap = self._order is not None and self._behind_gap_bytes > 0
        return has_gap and window.last_add_pushed == window.last_entry_reported

    # --- adding ---

    def add_entry(
        self, data: bytes | bytearray | memoryview, entry_id: SupportsIndex | None = None
    ) -> asyncio.Future[int]:
        """Add an entry; never blocks.

        Args:
            entry_id: the id of the entry; required with `advanced=True`, and allowed only there. Ids may come
                in any order. An entry is sent once all ids before it have come. Until then it counts as in
                flight.

        Returns:
            A future of the entry's id. It is done when the entry is acknowledged (rule 1). With deferred sync
            it is done when Qa bookies have received the entry, which is durable after the next `force`.
            Futures complete in entry order. Cancelling a future leaves its add running, and the order intact.

        Raises:
            InvalidArgumentError: the data are not bytes; an id is given without `advanced`, missing with it,
                or was used before. Nothing was sent.
            EntryTooLargeError: the entry is above the limit. Nothing was sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Not done.
        """
        # Hot path: every add runs through these lines. Rare cases are in `_add_otherwise`.
        # The full check of the loop calls the system for the process id, so a burst does without.
        replicator = self._replicator
        if not (replicator.flush_is_due and get_ident() == self._loop_thread and self._is_running()):
            if _get_running_loop() is not self._loop:
                self._context.check_loop()
            self._loop_thread = get_ident()
        if type(data) is not bytes:
            data = as_entry(data, self.ledger_id)
        if len(data) > self._entry_bytes_max:
            self.check_size(data)
        future = self._create_future()
        window = self._window
        if self._is_direct and entry_id is None and window.bytes_held <= self._bytes_held_max:
            window.add(data, future)
            if not replicator.flush_is_due:
                replicator.schedule_flush()
        else:
            self._add_otherwise(data, future, entry_id)
        return future

    def add_batch(self, entries: Sequence[bytes]) -> asyncio.Future[tuple[int, int]]:
        """Add many entries under contiguous ids, with one future for all of them; never blocks.

        The cheapest way to add small entries: nothing is done for each of them in Python. A batch that is
        larger than a frame or than the room in flight is sent piece by piece. Adds made meanwhile get ids
        behind it.

        Args:
            entries: a list, or another sequence, of at least one entry. It may be changed after the call.

        Returns:
            A future of the first and the last id. It is done when the last entry is acknowledged, and so are
            all before it (rule 1). With deferred sync it is done when Qa bookies have received all of them.
            Futures of batches and of single entries complete in entry order. Cancelling a future leaves the
            adds of its batch running, also of the entries that wait for room.

            When it fails, entries from the start of the batch may be in the ledger, without gaps: the error's
            `acknowledged` says how many are acknowledged. Its outcome is *not done* only where no entry of
            the batch was sent.

        Raises:
            InvalidArgumentError: not a sequence of bytes, or an empty one; or the ledger takes ids from its
                writer. Nothing was sent.
            EntryTooLargeError: an entry is above the limit. Nothing was sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Not done.
        """
        self._context.check_loop()
        if self._order is not None:
            raise InvalidArgumentError(
                f"ledger {self.ledger_id} takes ids from its writer: use add_entry(data, entry_id)",
                ledger_id=self.ledger_id,
            )
        payloads = as_batch(entries, self._entry_bytes_max, self.ledger_id)
        future: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._add_run(payloads, BatchAdd(future, len(payloads)))
        return future

    async def add_entries(
        self, entries: Iterable[bytes | bytearray | memoryview] | AsyncIterable[bytes]
    ) -> tuple[int, int]:
        """Add many entries under contiguous ids, and wait until all are acknowledged.

        Entries that other tasks add meanwhile through this handle get ids behind these. Cancelling leaves the
        entries taken so far running.

        Returns:
            The first and the last id; (n, n − 1) for no entries.

        Raises:
            BookKeeperError: the first failure; its `entry_id` is the last acknowledged entry. An exception of
                the iterable itself is passed on; the entries taken before it stay added.
        """
        self._context.check_loop()
        if self._order is not None:
            raise InvalidArgumentError(
                f"ledger {self.ledger_id} takes ids from its writer: use add_entry(data, entry_id)",
                ledger_id=self.ledger_id,
            )
        check_entries(entries)
        if self._closes:
            raise _closed(self.ledger_id)
        try:
            async with self._waiting.turn():
                self._is_direct, losses = False, self._intake.losses
                first, last = await self._take_all(entries, losses)
            await self._wait_for(last)
            self._intake.check(losses)
        except BookKeeperError as error:
            if error is not self._failure:
                raise
            self._was_idle = False
            raise with_message(
                error, f"{error}; acknowledged up to entry {self._window.lac}", self._window.lac
            ) from error
        shift = self._intake.shift
        return first - shift, last - shift

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight, or only entries behind a gap in the ids.

        With deferred sync, entries that have not been forced are in flight, and this forces them. With
        guaranteed write quorum, entries that have not reached their whole write set are in flight.

        Raises:
            BookKeeperError: the writer's first failure.
            NotEnoughBookiesError: with guaranteed write quorum, a bookie lacks acknowledged entries, and no
                copy has come for `add_quorum_timeout_s` of those added before. The message names it. The
                writer goes on.
        """
        while self._failure is None and self.bytes_in_flight > self._config.max_in_flight_bytes:
            self._context.check_loop()
            if not self._intake.bytes_held and not self._waiting:
                return  # All entries wait behind a gap, which only the caller can close.
            if self._options.deferred_sync:
                await self.force()
            else:
                await self._copies.wait(self._room)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    async def flush(self) -> None:
        """Wait until every entry added so far is acknowledged, with deferred sync until it is received.

        Entries behind a gap in the ids are not waited for.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        self._context.check_loop()
        await self._waiting.passed()
        await self._wait_for(self._intake.last_taken)

    async def force(self) -> int:
        """Make durable, and acknowledge, every entry added so far (deferred sync); returns the LAC.

        Qa bookies of each write set must answer. Cancelling leaves the requests running.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        self._context.check_loop()
        await self.flush()
        if self._options.deferred_sync:
            await self._forces.up_to(self._window.last_add_pushed)
        return self._window.lac

    async def close(self, *, at_ack_quorum: bool = False) -> LedgerMetadata:
        """Flush, and close the ledger for ever behind its last entry. Calling it again does nothing.

        Adds made while this waits are refused; an `add_entries` under way may go on. Adds behind a gap in the
        ids fail. With deferred sync this forces. With guaranteed write quorum it waits until every entry has
        reached its whole write set. Cancellation leaves the ledger OPEN or CLOSED; a recovery decides which.

        Args:
            at_ack_quorum: with guaranteed write quorum, do not wait for more than Qa copies of each entry.
                The metadata then record from which entry on there may be fewer than Qw, for a repair.

        Raises:
            BookKeeperError: the first failure of an add; the ledger then stays OPEN for recovery.
            LedgerFencedError: another client took the ledger over.
            NotEnoughBookiesError: with guaranteed write quorum, a bookie lacks acknowledged entries, and no
                copy has come for `add_quorum_timeout_s`. The message names it. The ledger is OPEN, takes
                adds, and may be closed again. Or as of `Standing`: it stays OPEN for recovery.
        """
        self._context.check_loop()
        return await self._close(self._close_metadata, at_ack_quorum=at_ack_quorum)

    async def _close(
        self, end: Callable[[], Awaitable[None]], *, at_ack_quorum: bool = False
    ) -> LedgerMetadata:
        """Flush, and end the writer with `end`. Concurrent calls may have different ends."""
        if self._is_closed_here:
            return self._held.current
        try:
            if not self._is_closing:
                self._closes, self._is_direct = self._closes + 1, False
                try:
                    await self._settle(at_ack_quorum)
                    self._is_closing = True
                    self._refuse_behind_gap()
                finally:
                    self._closes -= 1
                    self._all_taken()  # Where the close has failed, the writer goes on.
            await self._changes.finish()
        except LedgerFencedError:
            if not self._was_idle:
                raise
        async with self._ending:  # The later one of two concurrent calls sees the result of the first.
            if self._failure is None and self._has_closed:
                return self._held.current
            if self._failure is not None:
                if not self._was_idle:
                    raise self._failure.with_traceback(None)
                # Rule 10: no add is lost where the other client closed the ledger at the same end.
                self._is_closing = True
                await self._changes.cancel()
            try:
                self._replicator.stop()  # Nobody waits for the outstanding answers.
                await end()
            finally:
                self._release()
        return self._held.current

    async def _settle(self, at_ack_quorum: bool) -> None:
        """Wait until no add is in flight, including those of a bulk under way (rules 10 and 11).

        No add is in flight on return, until the caller awaits again. With `at_ack_quorum` acknowledged
        entries may wait for their last copies.
        """

        def is_settled() -> bool:
            window = self._window
            is_acknowledged = window.lac == window.last_add_pushed
            return window.is_idle or self._has_closed or (at_ack_quorum and is_acknowledged)

        while True:
            await self.flush()
            if self._options.deferred_sync:
                await self.force()
            elif not is_settled():
                await self._copies.wait(self._room)
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if is_settled() and not self._waiting:
                return

    @property
    def _is_closed_here(self) -> bool:
        """Return whether this writer has closed the ledger, and not found it closed by a recovery."""
        return self._failure is None and self._has_closed

    async def abort(self) -> None:
        """End at once: outstanding futures fail as *unknown*, and the ledger stays OPEN for recovery.

        Does nothing if this writer has closed the ledger.
        """
        self._context.check_loop()
        if self._is_closed_here:
            return
        self._is_closing, self._is_direct = True, False
        self._fail(
            WriterAbortedError(f"the writer of ledger {self.ledger_id} was aborted", ledger_id=self.ledger_id)
        )
        await self._changes.cancel()

    def read(self, first: int, last: int) -> EntryStream:
        """Read entries that this writer has had acknowledged; see `LedgerReader.read`."""
        self._context.check_running_loop()
        return self._reader.stream(first, last, self._window.lac)

    # --- taking ---

    def check_size(self, data: bytes) -> None:
        """Raise EntryTooLargeError when the entry is above the limit."""
        if len(data) > self._config.entry_bytes_max:
            raise EntryTooLargeError(
                f"an entry of {len(data):,} bytes is above the limit of {self._config.entry_bytes_max:,}",
                ledger_id=self.ledger_id,
            )

    def _add_otherwise(
        self, data: bytes, future: asyncio.Future[int], entry_id: SupportsIndex | None
    ) -> None:
        """Refuse an add, or queue it behind the bulk in progress, or put it into the order of the ids."""
        if (entry_id is None) != (self._order is None):
            raise InvalidArgumentError(
                f"ledger {self.ledger_id} takes ids from its writer: add_entry(data, entry_id)"
                if entry_id is None
                else f"entry id {entry_id}: ledger {self.ledger_id} was not created with advanced=True",
                ledger_id=self.ledger_id,
            )
        if self._order is None or entry_id is None or self.is_closed:
            self._add_run((data,), future)
            return
        closes_gap = entry_id == self._order.following and self._window.bytes_held <= self._bytes_held_max
        if not closes_gap:  # Only the entry at the gap lets the entries that fill the memory go on.
            check_room(self, f"ledger {self.ledger_id}", self.ledger_id)
        ready = self._order.take(entry_id, (data, future))
        self._behind_gap_bytes += len(data) + ENTRY_OVERHEAD_BYTES
        for item, its_future in ready:
            self._behind_gap_bytes -= len(item) + ENTRY_OVERHEAD_BYTES
            self._window.add(item, its_future)
        if ready:
            self._replicator.schedule_flush()

    def _add_run(self, payloads: Sequence[bytes], add: AnyAdd) -> None:
        """Refuse the entries of one add, take them, or have them wait behind others."""
        if self.is_closed:
            if self._failure is not None:
                self._was_told, self._was_idle = bool(self.told_failures), False
            self._of_batches = [*self._of_batches, *fail_all([add], self._failure or _closed(self.ledger_id))]
            return
        check_room(self, f"ledger {self.ledger_id}", self.ledger_id)
        if self._waiting.must_hold(payloads):
            self._is_direct = False
            self._waiting.put(payloads, add)
        else:
            self._intake.put_run(payloads, add)
            self._replicator.schedule_flush()

    def _refuse_behind_gap(self) -> None:
        if self._order is None or not self._order.waiting:
            return
        error = LedgerClosedError(
            f"ledger {self.ledger_id} was closed before entry {self._order.following} came; entries "
            f"{self._order.waiting[0]} to {self._order.waiting[-1]} waited for it",
            ledger_id=self.ledger_id,
        )
        fail_all([future for _, future in self._order.give_up()], error)
        self._behind_gap_bytes = 0

    async def _take_all(
        self, entries: Iterable[bytes | bytearray | memoryview] | AsyncIterable[bytes], losses: int
    ) -> tuple[int, int]:
        first = self._intake.last_taken + 1
        taken = 0
        try:
            if isinstance(entries, AsyncIterable):
                async for data in entries:
                    taken = await self._take(data, taken, losses)
                    self._replicator.schedule_flush()  # The next entry may come much later.
            else:
                for item in entries:
                    taken = await self._take(item, taken, losses)
        finally:
            self._replicator.schedule_flush()  # Also where the iterable raised: nothing may follow.
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        self._intake.check(losses)
        return first, self._intake.last_taken

    async def _take(self, data: bytes | bytearray | memoryview, taken: int, losses: int) -> int:
        """Take one entry of a bulk; returns the bytes taken since the last event-loop iteration."""
        if type(data) is not bytes:
            data = as_entry(data, self.ledger_id)
        self.check_size(data)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        self._intake.check(losses)
        if self._is_closing:
            raise _closed(self.ledger_id)
        self._intake.put(data, None)
        taken += len(data) + ENTRY_OVERHEAD_BYTES
        if taken < _BULK_TURN_BYTES:
            return taken
        self._replicator.flush()
        await self._make_room()
        await asyncio.sleep(0)
        return 0

    async def _make_room(self) -> None:
        """Do as `drain` for a bulk, without waiting for adds that are queued behind the bulk."""
        while self._failure is None and self._intake.bytes_held > self._config.max_in_flight_bytes:
            if self._options.deferred_sync:
                # Entries that are not sent yet count: a wait for the others may be over at once, for ever.
                last = self._window.last_add_pushed
                await self._wait_for(last)
                await self._forces.up_to(last)
            else:
                await self._copies.wait(self._room)
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _all_taken(self) -> None:
        """Note that no add waits: entries go to the window directly, where nothing else forbids it."""
        is_open = not self.is_closed and not self._intake.is_holding
        self._is_direct = is_open and self._order is None and not self._waiting.is_busy

    # --- acknowledgements and failures ---

    def _on_reported(self, groups: list[AddGroup[Token]]) -> None:
        for group in groups:
            self._complete(group)
        window = self._window
        if groups:
            self._replicator.times.reported(window.last_entry_reported)
        if self._options.deferred_sync:
            self._forces.moved()
        self._waiters.reached(self._intake.last_settled)
        if not self._room.is_set() and window.bytes_held <= self._config.max_in_flight_bytes:
            self._room.set()  # Each waiter checks for itself whether there is room enough.
        if window.replacements or window.is_holding:
            self._changes.moved()
        self._lac_publisher.moved()

    def _complete(self, group: AddGroup[Token]) -> None:
        entry_id = group.first_entry
        if group.has_runs:
            complete_runs(group.tokens, entry_id, int)
            return
        for future in cast("list[asyncio.Future[int] | None]", group.tokens):
            if future is not None and not future.done():
                future.set_result(entry_id)
            entry_id += 1

    async def _wait_for(self, entry_id: int) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if entry_id > self._intake.last_settled:
            await self._waiters.wait_for(entry_id)

    def _publish_lac(self) -> None:
        window = self._window
        statement = self._digest.statement(window.content_term, window.lac, window.lafr_to_state)
        self._replicator.tell_lac(WriteLac(self.ledger_id, self._term, statement))

    def _fail(self, error: BookKeeperError) -> None:
        """Fail everything outstanding, in entry order. The first failure is that of the writer."""
        if self._failure is not None:
            return
        self._failure, self._is_direct = as_unknown(error).with_traceback(None), False
        was_idle = self._window.is_idle
        dropped, held = self._window.abort(), self._intake.give_up()
        waiting = self._waiting.give_up()
        behind_gap = self._order.give_up() if self._order is not None else []
        self._behind_gap_bytes = 0
        outstanding = [*held, *waiting, *behind_gap]
        note_sent(dropped.groups)
        self._was_idle = was_idle and not outstanding and isinstance(error, LedgerFencedError)
        if self._on_dropped is not None:
            self._on_dropped(dropped)
        else:
            adds = [*dropped.tokens(), *held, *waiting, *(future for _, future in behind_gap)]
            self._of_batches = fail_all(adds, error)
        self._waiters.fail(error)
        self._room.set()
        self._forces.moved()
        self._release()

    def _release(self) -> None:
        for part in self._parts:
            part.stop()
        self._context.pool.directory.tell_no_more(self)
        self._context.forget(self)

    # --- ensemble changes (rules 9 and 10) ---

    def _needs_bookies(self) -> bool:
        # A writer that closes has everything acknowledged. After a failure nothing more is acknowledged.
        return self._failure is None and not self._is_closing

    def _on_reseated(self) -> None:
        self._lac_publisher.again()
        self._leave_ordered()

    async def _write_change(self, change: EnsembleChange) -> bool:
        logger.info(
            "ledger=%d ensemble change at entry %d: %s → %s",
            self.ledger_id, change.first_entry, ",".join(change.known.bookies), ",".join(change.bookies),
        )  # fmt: skip
        if await self._standing.make(change, self._held, heals=self._on_dropped is not None):
            return True
        self._fail(fenced_by_metadata(self._held.current))
        return False

    async def _close_metadata(self) -> None:
        window = self._window
        # This writer's own last fragment: the metadata may have been read again since others changed them.
        short_from = None if window.is_idle else window.lafr + 1  # rule 11: closed at the ack quorum
        closing = Closing(window.lac, window.length_confirmed, self._changes.fragment, short_from)
        if await self._standing.make(closing, self._held, heals=self._on_dropped is not None):
            self._has_closed, self._failure = True, None
            self._room.set()  # Another call may wait for copies.
            return
        error = fenced_by_metadata(self._held.current)
        self._fail(error)
        self._was_idle = False  # The metadata have decided: a further call fails too.
        raise error


def _closed(ledger_id: int) -> LedgerClosedError:
    return LedgerClosedError(f"ledger {ledger_id} is closed", ledger_id=ledger_id)
