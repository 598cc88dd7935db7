"""The writer's handle of an open ledger.

Owns the futures of adds, back-pressure, the idle writer's LAC, and the closing of the ledger. Who
acknowledged what is `client_aio.core.add_window`'s; the sending `client_aio.ledger.replicator`'s; replacing
bookies `client_aio.ledger.ensemble_change`'s.

Invariants: futures complete in entry order, each exactly once; after the first failure nothing is
acknowledged any more; while an ensemble change's outcome is not known nothing is acknowledged (rules 9, 10).

Forces of a writer with deferred sync: making durable what the bookies have received.

Owns when a force is sent again: one is not always enough, since a bookie may fail on the way, and its
successor has to receive what it did. Does not own what a force makes durable, which the window decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from bookie_aio.wire.messages import AddFlag, WriteLac
from client_aio.core.add_window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES, AddGroup, AddWindow, EntryOrder
from client_aio.core.ensemble_change import Closing, EnsembleChange, EnsembleChangeMachine
from client_aio.handles import ClosesOnExit
from client_aio.lac_clock import LacPublisher
from client_aio.ledger.ensemble_change import EnsembleChangeTask
from client_aio.ledger.futures import EntryWaiters, as_unknown, fail_all, fenced_by_metadata, with_message
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.replicator import Replicator
from client_aio.ledger.stall_timeout import StallWatch
from metadata.errors import (
    BackpressureError,
    BookKeeperError,
    EntryTooLargeError,
    InvalidArgumentError,
    LedgerClosedError,
    WriterAbortedError,
)
from metadata.ids import NO_ENTRY, TERM_WRITER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio.config import WriteOptions
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.ledger.entry_reader import EntrySource, EntryStream
    from metadata.model.ledger import LedgerMetadata
    from metadata.store import Version


class DeferredSync:
    """Moves the LAC of one window by forces, one after another.

    Args:
        force: asks the bookies once, and returns when all that have not failed have answered.
        failure: gives what the writer has failed of; None while it has not.
    """

    def __init__(
        self,
        window: AddWindow[Any],
        force: Callable[[], Awaitable[None]],
        failure: Callable[[], BookKeeperError | None],
    ) -> None:
        self._window = window
        self._force = force
        self._failure = failure
        self._lock = asyncio.Lock()
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Note that the window has moved, or that the writer has failed."""
        self._moved.set()

    async def up_to(self, last: int) -> None:
        """Return when the LAC is at `last`, which has been received.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        async with self._lock:
            while self._window.lac < last:
                if (failure := self._failure()) is not None:
                    raise failure.with_traceback(None)
                self._moved.clear()
                await self._force()
                if self._window.lac >= last:
                    return
                if self._window.is_frozen or not self._window.can_acknowledge:
                    self._moved.clear()  # Nothing that came so far makes another force of use.
                if self._failure() is None:
                    await self._moved.wait()


logger = logging.getLogger(__name__)

Token = asyncio.Future[int] | None
_Given = tuple[bytes, asyncio.Future[int]]
_HARD_LIMIT_FACTOR = 4
_BULK_TURN_BYTES = BATCH_BYTES_MAX


class LedgerWriter(ClosesOnExit):
    """Adds entries to a ledger; made by `Client.create_ledger`.

    An async context manager: leaving it normally flushes and closes the ledger; leaving it by an exception
    or a cancellation aborts, and the ledger stays OPEN for recovery.
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
        self._held = self._hold(metadata, version)
        self._term = term
        self._digest = digest
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._window: AddWindow[Token] = AddWindow(
            ledger_id=metadata.ledger_id,
            content_term=metadata.last_fragment.content_term,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
            next_entry=last_entry + 1,
            length=length,
            guaranteed_write_quorum=metadata.guaranteed_write_quorum,
            deferred_sync=options.deferred_sync,
            codes=digest.codes(metadata.last_fragment.content_term),
        )
        self._replicator: Replicator[Token] = Replicator(
            self._window,
            term=term,
            flags=AddFlag.DEFERRED_SYNC if options.deferred_sync else AddFlag.NONE,
            digest=digest,
            config=self._config,
            on_turns=self._on_turns,
            on_seat_failed=self._on_seat_failed,
            on_fenced=self._fail,
            on_reseated=lambda: self._lac_publisher.again(),
        )
        self._changes: EnsembleChangeTask[Token] = EnsembleChangeTask(
            context,
            EnsembleChangeMachine.of(self._window, metadata, self._config.ensemble_changes_max),
            self._replicator,
            metadata=lambda: self._held.current,
            write=self._write_change,
            is_needed=lambda: self._failure is None and not self._is_closing,
            on_given_up=self._fail,
        )
        self._failure: BookKeeperError | None = None
        self._is_closing = False
        self._has_closed = False  # the ledger, rather than found it closed by others
        self._order: EntryOrder[_Given] | None = EntryOrder() if options.advanced else None
        self._is_direct = not options.advanced  # and not failed, not closing, no bulk under way
        self._entry_bytes_max = context.config.entry_bytes_max
        self._bytes_held_max = _HARD_LIMIT_FACTOR * context.config.max_in_flight_bytes
        self._create_future: Callable[[], asyncio.Future[int]] = self._loop.create_future
        self._waiters = EntryWaiters()
        self._room = asyncio.Event()
        self._room.set()
        self._bulk_lock, self._ending = asyncio.Lock(), asyncio.Lock()
        self._queued: list[_Given] = []  # added while add_entries runs
        self._queued_bytes = 0  # with what waits behind a gap
        self._forces = DeferredSync(self._window, self._replicator.force, lambda: self._failure)
        self._lac_publisher = LacPublisher(self._window, self._publish_lac, context.lac_clock)
        self._stall_watch = StallWatch(self._window, self._fail, self._config.add_quorum_timeout_s)
        self._reader = self._make_reader()

    def _hold(self, metadata: LedgerMetadata, version: Version) -> VersionedLedgerMetadata:
        return VersionedLedgerMetadata(self._context, metadata, version)

    def _make_reader(self) -> EntrySource:
        return self._context.writers_reader(self._held, self._digest)

    async def start(self) -> None:
        """Take the seats of the ensemble; called once, by who made this writer."""
        bookies = self._held.current.last_fragment.bookies
        self._replicator.seat(bookies, await self._context.pool.get_all(bookies))
        await self._replicator.lock()

    # --- what is known ---

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
        """Return the last entry that all of its write set have, and all before it; −1 for none.

        Known with guaranteed write quorum only (rule 11).
        """
        return self._window.lafr

    @property
    def last_add_pushed(self) -> int:
        """Return the id of the last entry that was taken, −1 for none."""
        return self._window.last_add_pushed

    @property
    def length(self) -> int:
        """Return the payload bytes of all acknowledged entries."""
        return self._window.length_confirmed

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of the entries not acknowledged yet, with what each costs beside its payload."""
        return self._window.bytes_held + self._queued_bytes

    @property
    def is_closed(self) -> bool:
        """Return whether the handle takes no more adds."""
        return self._is_closing or self._failure is not None

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
        """Return whether adds wait behind a gap in the ids, and for nothing else: the caller must close
        it."""
        window = self._window
        has_gap = self._order is not None and self._queued_bytes > 0
        return has_gap and window.last_add_pushed == window.last_entry_reported

    # --- adding ---

    def add_entry(
        self, data: bytes | bytearray | memoryview, entry_id: int | None = None
    ) -> asyncio.Future[int]:
        """Add an entry; never blocks.

        Args:
            entry_id: in a ledger opened with `advanced=True`, and only there, the id to add it under. Ids
                may come in any order; an entry is sent once all before it have come, until then it counts
                as in flight.

        Returns:
            A future of the entry's id, done when the entry is acknowledged (rule 1), with deferred sync when
            it is received by Qa bookies: durable after the next `force`. Futures complete in entry order.
            Cancelling one leaves its add running and the order intact.

        Raises:
            InvalidArgumentError: not bytes; an id where there must be none, none where there must be one,
                or one that was given before. EntryTooLargeError: above the limit. Nothing was sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Not done.
        """
        # Every add runs through these lines: what is rare is decided elsewhere.
        if type(data) is not bytes:
            data = self._copy(data)
        if len(data) > self._entry_bytes_max:
            self.check_size(data)
        future = self._create_future()
        window = self._window
        if self._is_direct and entry_id is None and window.bytes_held <= self._bytes_held_max:
            window.add(data, future)
            if not self._replicator.flush_is_due:
                self._replicator.schedule_flush()
        else:
            self._add_otherwise(data, future, entry_id)
        return future

    async def add_entries(
        self, entries: Iterable[bytes | bytearray | memoryview] | AsyncIterable[bytes]
    ) -> tuple[int, int]:
        """Add many entries under contiguous ids, and wait until all are acknowledged.

        Entries that others add meanwhile through this handle get ids behind these. Cancelling leaves what
        was taken so far running.

        Returns:
            The first and the last id; (n, n − 1) for no entries.

        Raises:
            BookKeeperError: the first failure; its `entry_id` is the last acknowledged entry. An exception
                of the iterable itself is passed on, what it gave before stays added.
        """
        if self._order is not None:
            raise InvalidArgumentError(
                f"ledger {self.ledger_id} takes ids from its writer: use add_entry(data, entry_id)",
                ledger_id=self.ledger_id,
            )
        try:
            async with self._bulk_lock:
                self._is_direct = False
                try:
                    first, last = await self._take_all(entries)
                finally:
                    self._take_queued()
                    self._is_direct = self._failure is None and not self._is_closing
            await self._wait_for(last)
        except BookKeeperError as error:
            if error is not self._failure:
                raise
            raise with_message(
                error, f"{error}; acknowledged up to entry {self._window.lac}", self._window.lac
            ) from error
        return first, last

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight, or only what waits behind a gap in the ids.

        With deferred sync that is what has not been forced, and this forces it.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        while self._failure is None and self.bytes_in_flight > self._config.max_in_flight_bytes:
            if not self._window.bytes_held and not self._queued:
                return  # All of it waits behind a gap, which only the caller can close.
            if self._options.deferred_sync:
                await self.force()
            else:
                self._room.clear()
                await self._room.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    async def flush(self) -> None:
        """Wait until everything added so far is acknowledged, with deferred sync until it is received.

        What waits behind a gap in the ids is not waited for.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        if self._bulk_lock.locked() and self._queued:
            async with self._bulk_lock:
                pass
        await self._wait_for(self._window.last_add_pushed)

    async def force(self) -> int:
        """Make durable, and acknowledge, everything added so far (deferred sync); returns the LAC.

        Every bookie of the ensemble that has not failed answers. Cancelling leaves what was sent running.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        await self.flush()
        await self._forces.up_to(self._window.last_add_pushed)
        return self._window.lac

    async def close(self) -> LedgerMetadata:
        """Flush, and close the ledger for ever behind its last entry. Calling it again does nothing.

        With deferred sync this forces; with guaranteed write quorum it waits until every entry has reached
        all of its write set. Adds that wait behind a gap in the ids fail. Cancellation leaves the ledger
        OPEN or CLOSED; recovery settles it.

        Raises:
            BookKeeperError: the first failure of an add; the ledger then stays OPEN for recovery.
            LedgerFencedError: another client took the ledger over.
        """
        return await self._close(self._close_metadata)

    async def _close(self, end: Callable[[], Awaitable[None]]) -> LedgerMetadata:
        """Flush, and end in the way that this call asks for: another one may ask for another."""
        if self._is_closed_here:
            return self._held.current
        if not self._is_closing:
            await self._settle()
            self._is_closing, self._is_direct = True, False
            self._refuse_behind_gap()
        await self._changes.finish()
        async with self._ending:  # Of two at once, the later one finds what the first has come to.
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            try:
                self._replicator.stop()  # Nobody waits for what is still to be answered.
                await end()
            finally:
                self._release()
        return self._held.current

    async def _settle(self) -> None:
        """Wait until nothing is under way: also what others add while this waits (rules 10 and 11).

        From the return to whatever the caller does next without awaiting, nothing is.
        """
        while True:
            await self.flush()
            if self._options.deferred_sync:
                await self.force()
            elif not self._window.is_idle:
                self._room.clear()
                await self._room.wait()
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._window.is_idle and not self._queued:
                return

    @property
    def _is_closed_here(self) -> bool:
        """Return whether this writer has closed the ledger, rather than found it closed by a recovery."""
        return self._failure is None and self._has_closed

    async def abort(self) -> None:
        """Give up: outstanding futures fail as *unknown*, the ledger stays OPEN for recovery.

        Does nothing to a ledger that this writer has closed.
        """
        if self._is_closed_here:
            return
        self._is_closing, self._is_direct = True, False
        self._fail(
            WriterAbortedError(f"the writer of ledger {self.ledger_id} was aborted", ledger_id=self.ledger_id)
        )
        await self._changes.cancel()

    def read(self, first: int, last: int) -> EntryStream:
        """Read entries that this writer has had acknowledged; see `LedgerReader.read`."""
        return self._reader.stream(first, last, self._window.lac)

    # --- taking ---

    def _copy(self, data: object) -> bytes:
        if isinstance(data, (bytes, bytearray, memoryview)):
            return bytes(data)
        raise InvalidArgumentError(f"an entry is bytes, not {type(data).__name__}", ledger_id=self.ledger_id)

    def check_size(self, data: bytes) -> None:
        """Raise EntryTooLargeError when the entry is above the limit."""
        if len(data) > self._config.entry_bytes_max:
            raise EntryTooLargeError(
                f"an entry of {len(data):,} bytes is above the limit of {self._config.entry_bytes_max:,}",
                ledger_id=self.ledger_id,
            )

    def _add_otherwise(self, data: bytes, future: asyncio.Future[int], entry_id: int | None) -> None:
        """Refuse an add, or put it behind the bulk that is under way, or in the order of the ids."""
        if (entry_id is None) != (self._order is None):
            raise InvalidArgumentError(
                f"ledger {self.ledger_id} takes ids from its writer: add_entry(data, entry_id)"
                if entry_id is None
                else f"entry id {entry_id}: ledger {self.ledger_id} was not created with advanced=True",
                ledger_id=self.ledger_id,
            )
        if self._failure is not None or self._is_closing:
            self._refuse(future)
        elif self.bytes_in_flight > self._bytes_held_max and not self._closes_gap(entry_id):
            raise BackpressureError(
                f"{self.bytes_in_flight:,} bytes are in flight in ledger {self.ledger_id}, more than "
                f"{_HARD_LIMIT_FACTOR} × max_in_flight_bytes: await drain() between adds",
                ledger_id=self.ledger_id,
            )
        elif self._order is not None and entry_id is not None:
            ready = self._order.take(entry_id, (data, future))
            self._queued_bytes += len(data) + ENTRY_OVERHEAD_BYTES
            for item, its_future in ready:
                self._queued_bytes -= len(item) + ENTRY_OVERHEAD_BYTES
                self._window.add(item, its_future)
            if ready:
                self._replicator.schedule_flush()
        else:
            self._queued.append((data, future))
            self._queued_bytes += len(data) + ENTRY_OVERHEAD_BYTES

    def _closes_gap(self, entry_id: int | None) -> bool:
        """Return whether this is the entry that those wait for which fill the memory: it alone frees any."""
        return (
            self._order is not None
            and entry_id == self._order.following
            and self._window.bytes_held <= self._bytes_held_max
        )

    def _refuse_behind_gap(self) -> None:
        if self._order is None or not self._order.waiting:
            return
        error = LedgerClosedError(
            f"ledger {self.ledger_id} was closed before entry {self._order.following} came; entries "
            f"{self._order.waiting[0]} to {self._order.waiting[-1]} waited for it",
            ledger_id=self.ledger_id,
        )
        fail_all([future for _, future in self._order.give_up()], error)
        self._queued_bytes = 0

    def _refuse(self, future: asyncio.Future[int]) -> None:
        closed = LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)
        fail_all([future], self._failure or closed)

    async def _take_all(
        self, entries: Iterable[bytes | bytearray | memoryview] | AsyncIterable[bytes]
    ) -> tuple[int, int]:
        first = self._window.last_add_pushed + 1
        taken = 0
        if isinstance(entries, AsyncIterable):
            async for data in entries:
                taken = await self._take(data, taken)
                self._replicator.schedule_flush()  # The next one may be long in coming.
        else:
            for item in entries:
                taken = await self._take(item, taken)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        self._replicator.schedule_flush()
        return first, self._window.last_add_pushed

    async def _take(self, data: bytes | bytearray | memoryview, taken: int) -> int:
        """Take one entry of a bulk; returns the bytes taken since the loop last had its turn."""
        if type(data) is not bytes:
            data = self._copy(data)
        self.check_size(data)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._is_closing:
            raise LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)
        self._window.add(data, None)
        taken += len(data) + ENTRY_OVERHEAD_BYTES
        if taken < _BULK_TURN_BYTES:
            return taken
        self._replicator.flush()
        await self._make_room()
        await asyncio.sleep(0)
        return 0

    async def _make_room(self) -> None:
        """Do as `drain` for a bulk: what waits for its end to be sent cannot be waited for."""
        while self._failure is None and self._window.bytes_held > self._config.max_in_flight_bytes:
            if self._options.deferred_sync:
                last = self._window.last_entry_sent
                await self._wait_for(last)
                await self._forces.up_to(last)
            else:
                self._room.clear()
                await self._room.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _take_queued(self) -> None:
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        for data, future in queued:
            if self.is_closed:
                self._refuse(future)
            else:
                self._window.add(data, future)
        self._replicator.schedule_flush()

    # --- what comes of it ---

    def _on_turns(self, turns: list[AddGroup[Token]]) -> None:
        for turn in turns:
            self._complete(turn)
        window = self._window
        self._forces.moved()
        self._waiters.reached(window.last_entry_reported)
        if not self._room.is_set() and window.bytes_held <= self._config.max_in_flight_bytes:
            self._room.set()  # Whoever waits looks whether it is room enough.
        if window.replacements or window.is_holding:
            self._changes.moved()
        self._lac_publisher.moved()

    def _complete(self, turn: AddGroup[Token]) -> None:
        entry_id = turn.first_entry
        for future in turn.tokens:
            if future is not None and not future.done():
                future.set_result(entry_id)
            entry_id += 1

    async def _wait_for(self, entry_id: int) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if entry_id > self._window.last_entry_reported:
            await self._waiters.wait_for(entry_id)

    def _publish_lac(self) -> None:
        window = self._window
        statement = self._digest.statement(window.content_term, window.lac, window.lafr_to_state)
        self._replicator.tell_lac(WriteLac(self.ledger_id, self._term, statement))

    def _fail(self, error: BookKeeperError) -> None:
        """Fail everything outstanding, in entry order; the first failure is the writer's."""
        if self._failure is not None:
            return
        self._failure, self._is_direct = as_unknown(error), False
        tokens = self._window.abort()
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        behind_gap = self._order.give_up() if self._order is not None else []
        fail_all([*tokens, *(future for _, future in [*queued, *behind_gap])], error)
        self._waiters.fail(error)
        self._room.set()
        self._forces.moved()
        self._release()

    def _release(self) -> None:
        self._replicator.stop()
        self._changes.stop()
        self._lac_publisher.stop()
        self._stall_watch.stop()
        self._context.forget(self)

    # --- ensemble changes (rules 9 and 10) ---

    def _on_seat_failed(self, bookie_id: str, error: BookKeeperError) -> None:
        self._context.pool.directory.note_refusal(bookie_id, error)
        if not self._is_closing and self._failure is None:
            self._changes.begin()  # else everything is acknowledged by now, or never will be

    async def _write_change(self, change: EnsembleChange) -> bool:
        logger.info(
            "ledger=%d ensemble change at entry %d: %s → %s",
            self.ledger_id, change.first_entry, ",".join(change.known.bookies), ",".join(change.bookies),
        )  # fmt: skip
        if await self._held.update(change.apply) or change.is_met_by(self._held.current):
            return True
        self._fail(fenced_by_metadata(self._held.current))
        return False

    async def _close_metadata(self) -> None:
        window = self._window
        # The fragment is this writer's own: what is held may have been read again since, from others.
        closing = Closing(window.lac, window.length_confirmed, self._changes.fragment)
        if await self._held.update(closing.apply) or closing.is_met_by(self._held.current):
            self._has_closed = True
            return
        error = fenced_by_metadata(self._held.current)
        self._fail(error)
        raise error
