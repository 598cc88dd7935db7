"""The writer's handle of an open ledger.

Owns the futures of adds, back-pressure, the idle writer's LAC, ensemble changes through the metadata store
and the closing of the ledger. Who acknowledged what is `client_aio.core.window`'s; the sending
`client_aio.replication`'s.

Invariants: futures complete in entry order, each exactly once; after the first failure nothing is
acknowledged any more; while an ensemble change's outcome is not known nothing is acknowledged (rules 9, 10).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Self

from bookie_aio.wire.blocks import LacStatement, statement_crc
from bookie_aio.wire.messages import AddFlag, WriteLac
from client_aio.core.window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES, AddWindow, Turn
from client_aio.replication import Replicator
from metadata.errors import (
    BackpressureError,
    BookKeeperError,
    EntryTooLargeError,
    InvalidArgumentError,
    LedgerClosedError,
    LedgerFencedError,
    MetadataUnavailableError,
    NotEnoughBookiesError,
    VersionConflictError,
    WriterAbortedError,
)
from metadata.ids import NO_ENTRY, TERM_WRITER
from metadata.ledger import LedgerMetadata, LedgerState

if TYPE_CHECKING:
    from types import TracebackType

    from client_aio.context import ClientContext
    from client_aio.reading import EntryReader, EntryStream
    from metadata.store import Version

logger = logging.getLogger(__name__)

Token = asyncio.Future[int] | None
_HARD_LIMIT_FACTOR = 4
_BULK_TURN_BYTES = BATCH_BYTES_MAX
_METADATA_RETRY_S = 0.2


class LedgerWriter:
    """Adds entries to a ledger; made by `Client.create_ledger`.

    An async context manager: leaving it normally flushes and closes the ledger; leaving it by an exception
    or a cancellation aborts, and the ledger stays OPEN for recovery.
    """

    def __init__(self, context: ClientContext, metadata: LedgerMetadata, version: Version) -> None:
        self._context = context
        self._config = context.config
        self._metadata = metadata
        self._version = version
        self._loop = asyncio.get_running_loop()
        self._window: AddWindow[Token] = AddWindow(
            ledger_id=metadata.ledger_id,
            content_term=metadata.last_fragment.content_term,
            ensemble_size=metadata.ensemble_size,
            write_quorum=metadata.write_quorum,
            ack_quorum=metadata.ack_quorum,
        )
        self._replicator: Replicator[Token] = Replicator(
            self._window,
            term=TERM_WRITER,
            flags=AddFlag.NONE,
            config=self._config,
            on_turns=self._on_turns,
            on_seat_failed=self._on_seat_failed,
            on_fenced=self._fail,
        )
        self._failure: BookKeeperError | None = None
        self._is_closing = False
        self._is_direct = True  # not failed, not closing, no bulk under way
        self._entry_bytes_max = context.config.entry_bytes_max
        self._bytes_held_max = _HARD_LIMIT_FACTOR * context.config.max_in_flight_bytes
        self._create_future: Callable[[], asyncio.Future[int]] = self._loop.create_future
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._bulk_lock = asyncio.Lock()
        self._queued: list[tuple[bytes, asyncio.Future[int]]] = []  # added while add_entries runs
        self._queued_bytes = 0
        self._change: asyncio.Task[None] | None = None
        self._lac_stated = NO_ENTRY
        self._lac_timer: asyncio.TimerHandle | None = None
        self._reader: EntryReader = context.entry_reader(lambda: self._metadata)

    async def _start(self) -> None:
        bookies = self._metadata.last_fragment.bookies
        self._replicator.seat(bookies, await self._context.pool.get_all(bookies))

    # --- what is known ---

    @property
    def ledger_id(self) -> int:
        """Give the ledger's id."""
        return self._metadata.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Give the ledger's metadata as this writer last wrote it."""
        return self._metadata

    @property
    def last_add_confirmed(self) -> int:
        """Give the id of the last acknowledged entry, −1 for none."""
        return self._window.lac

    @property
    def last_add_pushed(self) -> int:
        """Give the id of the last entry that was taken, −1 for none."""
        return self._window.last_add_pushed

    @property
    def length(self) -> int:
        """Give the payload bytes of all acknowledged entries."""
        return self._window.length_confirmed

    @property
    def bytes_in_flight(self) -> int:
        """Give the bytes of the entries not acknowledged yet, with what each costs beside its payload."""
        return self._window.bytes_held + self._queued_bytes

    @property
    def is_closed(self) -> bool:
        """Tell whether the handle takes no more adds."""
        return self._is_closing or self._failure is not None

    @property
    def failed_bookies(self) -> list[str]:
        """Give the bookies of the ensemble that failed and have not been replaced."""
        return self._replicator.failed_bookies

    @property
    def max_in_flight_bytes(self) -> int:
        """Give the bytes in flight above which `drain` waits."""
        return self._config.max_in_flight_bytes

    # --- adding ---

    def add_entry(self, data: bytes | bytearray | memoryview) -> asyncio.Future[int]:
        """Add an entry; never blocks.

        Returns:
            A future of the entry's id, done when the entry is acknowledged (rule 1). Futures complete in
            entry order. Cancelling one leaves its add running and the order intact.

        Raises:
            InvalidArgumentError: not bytes. EntryTooLargeError: above the limit. Nothing was sent.
            BackpressureError: more than four times `max_in_flight_bytes` are in flight. Not done.
        """
        # Every add runs through these lines: what is rare is decided elsewhere.
        if type(data) is not bytes:
            data = self._copy(data)
        if len(data) > self._entry_bytes_max:
            self.check_size(data)
        future = self._create_future()
        window = self._window
        if self._is_direct and window.bytes_held <= self._bytes_held_max:
            window.add(data, future)
            if not self._replicator.flush_is_due:
                self._replicator.schedule_flush()
        else:
            self._add_otherwise(data, future)
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
            raise _same(
                error, f"{error}; acknowledged up to entry {self._window.lac}", self._window.lac
            ) from error
        return first, last

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        while self.bytes_in_flight > self._config.max_in_flight_bytes and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def flush(self) -> None:
        """Wait until everything added so far is acknowledged.

        Raises:
            BookKeeperError: the writer's first failure.
        """
        if self._bulk_lock.locked() and self._queued:
            async with self._bulk_lock:
                pass
        await self._wait_for(self._window.last_add_pushed)

    async def close(self) -> LedgerMetadata:
        """Flush, and close the ledger for ever behind its last entry. Calling it again does nothing.

        Cancellation leaves the ledger OPEN or CLOSED; recovery settles it.

        Raises:
            BookKeeperError: the first failure of an add; the ledger then stays OPEN for recovery.
            LedgerFencedError: another client took the ledger over.
        """
        if self._metadata.is_closed:
            return self._metadata
        if not self._is_closing:
            await self.flush()
            self._is_closing, self._is_direct = True, False
        if self._change is not None:
            await asyncio.wait([self._change])
        if self._failure is not None:
            raise self._failure
        try:
            await self._close_metadata()
        finally:
            self._release()
        return self._metadata

    async def abort(self) -> None:
        """Give up: outstanding futures fail as *unknown*, the ledger stays OPEN for recovery."""
        self._is_closing, self._is_direct = True, False
        self._fail(
            WriterAbortedError(f"the writer of ledger {self.ledger_id} was aborted", ledger_id=self.ledger_id)
        )
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)

    def read(self, first: int, last: int) -> EntryStream:
        """Read entries that this writer has had acknowledged; see `LedgerReader.read`."""
        return self._reader.stream(first, last, self._window.lac)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                await self.close()
            except BaseException:
                await self.abort()
                raise
        else:
            await self.abort()

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

    def _add_otherwise(self, data: bytes, future: asyncio.Future[int]) -> None:
        """Refuse an add, or put it behind the bulk that is under way."""
        if self._failure is not None or self._is_closing:
            self._refuse(future)
        elif self.bytes_in_flight > self._bytes_held_max:
            raise BackpressureError(
                f"{self.bytes_in_flight:,} bytes are in flight in ledger {self.ledger_id}, more than "
                f"{_HARD_LIMIT_FACTOR} × max_in_flight_bytes: await drain() between adds",
                ledger_id=self.ledger_id,
            )
        else:
            self._queued.append((data, future))
            self._queued_bytes += len(data) + ENTRY_OVERHEAD_BYTES

    def _refuse(self, future: asyncio.Future[int]) -> None:
        future.set_exception(
            self._failure or LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)
        )
        future.exception()  # looked at: one that nobody awaits does not fill the log

    async def _take_all(
        self, entries: Iterable[bytes | bytearray | memoryview] | AsyncIterable[bytes]
    ) -> tuple[int, int]:
        first = self._window.last_add_pushed + 1
        taken = 0
        if isinstance(entries, AsyncIterable):
            async for data in entries:
                taken = await self._take(data, taken)
        else:
            for item in entries:
                taken = await self._take(item, taken)
        if self._failure is not None:
            raise self._failure
        self._replicator.schedule_flush()
        return first, self._window.last_add_pushed

    async def _take(self, data: bytes | bytearray | memoryview, taken: int) -> int:
        """Take one entry of a bulk; returns the bytes taken since the loop last had its turn."""
        if type(data) is not bytes:
            data = self._copy(data)
        self.check_size(data)
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise LedgerClosedError(f"ledger {self.ledger_id} is closed", ledger_id=self.ledger_id)
        self._window.add(data, None)
        taken += len(data) + ENTRY_OVERHEAD_BYTES
        if taken < _BULK_TURN_BYTES:
            return taken
        self._replicator.flush()
        await self.drain()
        await asyncio.sleep(0)
        return 0

    def _take_queued(self) -> None:
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        for data, future in queued:
            if self._failure is not None:
                self._refuse(future)
            else:
                self._window.add(data, future)
        self._replicator.schedule_flush()

    # --- what comes of it ---

    def _on_turns(self, turns: list[Turn[Token]]) -> None:
        for turn in turns:
            entry_id = turn.first_entry
            for future in turn.tokens:
                if future is not None and not future.done():
                    future.set_result(entry_id)
                entry_id += 1
        lac = self._window.lac
        while self._waiters and self._waiters[0][0] <= lac:
            waiter = self._waiters.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)
        if self.bytes_in_flight <= self._config.max_in_flight_bytes:
            self._room.set()
        if self._lac_timer is None:
            self._lac_timer = self._loop.call_later(self._config.explicit_lac_delay_s, self._publish_lac, lac)

    async def _wait_for(self, entry_id: int) -> None:
        if self._failure is not None:
            raise self._failure
        if entry_id <= self._window.lac:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((entry_id, waiter))
        await waiter

    def _publish_lac(self, lac_seen: int) -> None:
        """Tell the bookies the LAC, once no entry has told it for a while (rule 13)."""
        self._lac_timer = None
        lac = self._window.lac
        if self._failure is not None or lac == self._lac_stated:
            return
        if lac != lac_seen or not self._window.is_idle:
            # Still writing: what follows states the LAC, and the last of it comes back here.
            self._lac_timer = self._loop.call_later(self._config.explicit_lac_delay_s, self._publish_lac, lac)
            return
        self._lac_stated = lac
        term = self._window.content_term
        statement = LacStatement(term, lac, NO_ENTRY, statement_crc(self.ledger_id, term, lac, NO_ENTRY))
        self._replicator.broadcast(WriteLac(self.ledger_id, TERM_WRITER, statement))

    def _fail(self, error: BookKeeperError) -> None:
        """Fail everything outstanding, in entry order; the first failure is the writer's."""
        if self._failure is not None:
            return
        self._failure, self._is_direct = error, False
        tokens = self._window.abort()
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        for future in [*tokens, *(future for _, future in queued)]:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # looked at: one that nobody awaits does not fill the log
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()
        self._waiters.clear()
        self._room.set()
        self._release()

    def _release(self) -> None:
        self._replicator.stop()
        if self._lac_timer is not None:
            self._lac_timer.cancel()
            self._lac_timer = None
        self._context.forget(self)

    # --- ensemble changes (rules 9 and 10) ---

    def _on_seat_failed(self, bookie_id: str, error: BookKeeperError) -> None:
        self._context.pool.directory.note_failure(bookie_id)
        if self._is_closing or self._failure is not None:
            return  # Everything is acknowledged by now, or never will be.
        if self._change is None or self._change.done():
            # Failures found until the task first runs, or while it waits, are handled together.
            self._change = self._loop.create_task(
                self._replace_failed(), name=f"ensemble change of ledger {self.ledger_id}"
            )

    async def _replace_failed(self) -> None:
        try:
            while self._window.failed and self._failure is None and not self._metadata.is_closed:
                failed = self._window.failed
                try:
                    bookies, connections = await self._context.finder.replace(
                        self._metadata, self._replicator.bookies, failed
                    )
                except NotEnoughBookiesError as error:
                    if not self._window.can_acknowledge:
                        self._fail(self._below_quorum(error))
                        return
                    logger.warning(
                        "ledger=%d writing goes on without %s: %s",
                        self.ledger_id, ", ".join(self._replicator.failed_bookies), error,
                    )  # fmt: skip
                    if self._is_closing:
                        return
                    await self._context.pool.directory.wait_for_change(self._config.replacement_retry_s)
                    continue
                await self._change_ensemble(bookies, failed)
                if self._failure is None:
                    self._replicator.reseat(bookies, failed, connections)
        except BookKeeperError as error:
            self._fail(error)

    def _below_quorum(self, error: NotEnoughBookiesError) -> NotEnoughBookiesError:
        return NotEnoughBookiesError(
            f"ledger {self.ledger_id} has lost {', '.join(self._replicator.failed_bookies)}: some write set "
            f"has fewer than {self._metadata.ack_quorum} bookies left, and {error}",
            ledger_id=self.ledger_id,
        )

    async def _change_ensemble(self, bookies: tuple[str, ...], replaced: int) -> None:
        """Write the new fragment; returns once that has definitely happened, else fails the writer.

        The LAC is frozen from here until `reseat`, or for good.
        """
        first_entry = self._window.begin_change()
        if bookies == self._replicator.bookies:
            return  # The same bookies came back: nothing changes but that they get what they owe.
        logger.info(
            "ledger=%d ensemble change at entry %d: %s → %s",
            self.ledger_id, first_entry, ",".join(self._replicator.bookies), ",".join(bookies),
        )  # fmt: skip
        expected = self._metadata.last_fragment

        def change(metadata: LedgerMetadata) -> LedgerMetadata | None:
            if metadata.state is not LedgerState.OPEN or metadata.last_fragment != expected:
                return None
            return metadata.change_ensemble(first_entry, bookies)

        if not await self._compare_and_set(change):
            self._fail(self._taken_over())

    async def _close_metadata(self) -> None:
        last, length = self._window.lac, self._window.length_confirmed

        def close(metadata: LedgerMetadata) -> LedgerMetadata | None:
            return metadata.close(last, length) if metadata.state is LedgerState.OPEN else None

        if await self._compare_and_set(close):
            return
        if self._metadata.is_closed and self._metadata.last_entry == last:
            return  # A recovery came to the same end (rule 10).
        error = self._taken_over()
        self._fail(error)
        raise error

    def _taken_over(self) -> LedgerFencedError:
        state = self._metadata.state.value
        end = f" at entry {self._metadata.last_entry}" if self._metadata.is_closed else ""
        return LedgerFencedError(
            f"ledger {self.ledger_id} has been taken over by another client: it is {state}{end}",
            ledger_id=self.ledger_id,
        )

    async def _compare_and_set(self, change: Callable[[LedgerMetadata], LedgerMetadata | None]) -> bool:
        """Apply a change to the metadata by compare-and-set, until its outcome is definite (rule 10).

        Returns:
            True when it has happened. False when `change` gave None for what others made of the metadata,
            which `self._metadata` then is.

        Raises:
            MetadataUnavailableError: no definite outcome within `ensemble_change_timeout_s`.
        """
        ledgers = self._context.ledgers
        give_up_at = self._loop.time() + self._config.ensemble_change_timeout_s
        token = self._context.draw_token()
        wanted: LedgerMetadata | None = None
        while True:
            try:
                if wanted is None:
                    wanted = change(self._metadata)
                    if wanted is None:
                        return False
                # One token for all attempts: the store knows one that took effect although it seemed lost.
                self._version = await ledgers.compare_and_set(wanted, self._version, token=token)
                self._metadata = wanted
                return True
            except VersionConflictError:
                self._metadata, self._version = await ledgers.read(self.ledger_id)
                wanted, token = None, self._context.draw_token()
            except MetadataUnavailableError as error:
                # Unknown: the request may still land. The same version is tried until that is settled.
                if self._loop.time() > give_up_at:
                    raise
                logger.warning("ledger=%d metadata not reachable, trying again: %s", self.ledger_id, error)
                await asyncio.sleep(_METADATA_RETRY_S)


def _same(error: BookKeeperError, message: str, entry_id: int) -> BookKeeperError:
    """Build an error of the same class with another message."""
    copy = type(error)(message, ledger_id=error.ledger_id, bookie_id=error.bookie_id)
    copy.entry_id = entry_id
    return copy
