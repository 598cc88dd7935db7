"""The blocking writers of ledgers, unbounded ledgers and logs, and the client's methods that open them.

A `SubmitQueue` stands before each writer on the loop. `WriterHandle` is what all blocking writers share.
Arguments, results and errors are those of the method of the same name in `client_aio`, and are described
there: here stands only what differs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar, overload

from client_aio.core.add_window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES
from client_aio.ledger.waiting_adds import as_batch, check_entries
from client_aio.log.gaps import LogGap
from client_aio.sync.add_future import AddFuture, result_of
from client_aio.sync.loop_thread import ClientHandle, Handle, LoopThread, Room
from client_aio.sync.submit_queue import SubmitQueue, Writer, as_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
    from types import TracebackType

    import client_aio
    from client_aio.ledger.entry_reader import Entry
    from client_aio.log.add_ledgers import AddedToLog
    from client_aio.log.gaps import OnGap
    from client_aio.log.reader import LogBatch, LogRecord, Start
    from client_aio.log.takeover import LogMetadata
    from client_aio.log.truncation import SweepReport
    from metadata.model.ledger import LedgerMetadata
    from metadata.model.log import LogRow, Position


R = TypeVar("R")
T = TypeVar("T")


class AnyWriter(Writer, Protocol):
    """The writer behind a handle, as the handle uses it on the loop."""

    async def flush(self) -> None:
        """Wait until all adds are acknowledged."""

    async def close(self) -> object:
        """Flush, and close."""

    async def abort(self) -> None:
        """End at once; outstanding adds fail as *unknown*."""


class WriterHandle(Handle, Generic[R]):
    """A blocking writer. A context manager: a normal exit closes it, an exception aborts it.

    Args:
        add, add_batch: as of `SubmitQueue`.
    """

    def __init__(
        self,
        background: LoopThread,
        writer: AnyWriter,
        add: Callable[[bytes, int | None], asyncio.Future[R]],
        add_batch: Callable[[list[bytes]], asyncio.Future[tuple[R, R]]],
    ) -> None:
        super().__init__(background, writer)
        self._any_writer = writer
        self._inbox: SubmitQueue[R] = SubmitQueue(background, writer, add, add_batch)

    def _behind_inbox(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call on the loop, behind all payloads queued before."""

        async def run() -> T:
            await self._inbox.emptied()
            return await call()

        return self._run(run())

    def flush(self) -> None:
        """Wait until all adds so far are acknowledged; raise the writer's first failure."""
        self._behind_inbox(self._any_writer.flush)

    def close(self) -> object:
        """Flush, and close."""
        return self._behind_inbox(self._any_writer.close)

    def abort(self) -> None:
        """End at once; the ledger is left to recovery, or to the next takeover."""
        self._run(self._any_writer.abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if not self._is_left_in_fork(kind):
                self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise


_CHUNKS_AHEAD = 4


class LedgerWriter(WriterHandle[int]):
    """Adds entries to a ledger; see `client_aio.LedgerWriter`."""

    def __init__(self, background: LoopThread, writer: client_aio.LedgerWriter) -> None:
        super().__init__(background, writer, writer.add_entry, writer.add_batch)
        self._writer = writer
        self._entry_bytes_max = writer._context.config.entry_bytes_max

    @property
    def ledger_id(self) -> int:
        """As `client_aio.LedgerWriter.ledger_id`."""
        return self._writer.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """As `client_aio.LedgerWriter.metadata`."""
        return self._writer.metadata

    @property
    def last_add_confirmed(self) -> int:
        """As `client_aio.LedgerWriter.last_add_confirmed`."""
        return self._writer.last_add_confirmed

    @property
    def length(self) -> int:
        """As `client_aio.LedgerWriter.length`."""
        return self._writer.length

    def add_entry(self, data: bytes | bytearray | memoryview, entry_id: int | None = None) -> int:
        """Add an entry, wait until it is acknowledged, and return its id."""
        self._background.check_thread()
        return result_of(self.add_entry_nowait(data, entry_id))

    def add_entry_nowait(
        self, data: bytes | bytearray | memoryview, entry_id: int | None = None
    ) -> AddFuture[int]:
        """Add an entry; blocks only while more than `max_in_flight_bytes` are in flight.

        Args:
            entry_id: as for `client_aio.LedgerWriter.add_entry`. A refused id fails the future.

        Returns:
            A `concurrent.futures.Future` of the entry's id. Cancelling it leaves the add running. Its
            callbacks run on the background thread and must not block.

        Raises:
            BackpressureError: called in such a callback, and more than `max_in_flight_bytes` are in flight.
        """
        self._check_process()
        payload = as_bytes(data, "an entry")
        self._writer.check_size(payload)
        return self._inbox.put(payload, entry_id)

    def add_batch(self, entries: Sequence[bytes]) -> tuple[int, int]:
        """Add many entries, wait until all are acknowledged, and return the first and the last id."""
        self._background.check_thread()
        return result_of(self.add_batch_nowait(entries))

    def add_batch_nowait(self, entries: Sequence[bytes]) -> AddFuture[tuple[int, int]]:
        """Add many entries with one future; blocks only while more than `max_in_flight_bytes` are in flight.

        Returns:
            A `concurrent.futures.Future` of the first and the last id, as of
            `client_aio.LedgerWriter.add_batch`. A ledger that takes ids from its writer fails the future.
            Otherwise as that of `add_entry_nowait`.

        Raises:
            BackpressureError: as for `add_entry_nowait`.
        """
        self._check_process()
        return self._inbox.put_batch(as_batch(entries, self._entry_bytes_max, self.ledger_id))

    def add_entries(self, entries: Iterable[bytes | bytearray | memoryview]) -> tuple[int, int]:
        """Add many entries under contiguous ids, wait until all are acknowledged; return first and last id.

        The iterable runs on the calling thread, a few MiB ahead of the entries sent.
        """
        check_entries(entries)
        self._check_process()
        bulk = _Bulk(self._background, self._writer)
        try:
            bulk.start(self._inbox.emptied)
            for chunk in _chunks(entries):
                bulk.put(chunk)
            return bulk.finish()
        except BaseException:
            bulk.cancel()
            raise

    def force(self) -> int:
        """As `client_aio.LedgerWriter.force`."""
        return self._behind_inbox(self._writer.force)

    def close(self, *, at_ack_quorum: bool = False) -> LedgerMetadata:
        """As `client_aio.LedgerWriter.close`."""
        return self._behind_inbox(lambda: self._writer.close(at_ack_quorum=at_ack_quorum))


def _chunks(entries: Iterable[bytes | bytearray | memoryview]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for data in entries:
        chunk.append(as_bytes(data, "an entry"))
        size += len(chunk[-1]) + ENTRY_OVERHEAD_BYTES
        if size >= BATCH_BYTES_MAX:
            yield chunk
            chunk, size = [], 0
    yield chunk


class _Bulk:
    """One `add_entries` that is fed from another thread, a bounded number of chunks ahead."""

    def __init__(self, background: LoopThread, writer: client_aio.LedgerWriter) -> None:
        self._background = background
        self._writer = writer
        self._room = Room()
        self._chunks: deque[list[bytes]] = deque()
        self._is_fed = False
        self._has_ended = False
        self._wake: asyncio.Event
        self._adding: asyncio.Task[tuple[int, int]] | None = None

    def start(self, emptied: Callable[[], Awaitable[None]]) -> None:
        """Start adding, behind the payloads queued before. `cancel` ends it, even after an interrupt here."""

        async def start() -> None:
            await emptied()
            self._wake = asyncio.Event()
            self._adding = asyncio.create_task(self._writer.add_entries(self._entries()))
            self._adding.add_done_callback(self._ended)

        self._background.run(start())

    def put(self, chunk: list[bytes]) -> None:
        """Hand over a chunk, waiting for room; raise the error that ended the adding."""
        self._room.wait_for(lambda: len(self._chunks) < _CHUNKS_AHEAD or self._has_ended)
        self._chunks.append(chunk)
        if self._has_ended:
            self.finish()
        self._background.loop.call_soon_threadsafe(self._wake.set)

    def finish(self) -> tuple[int, int]:
        """Wait until all entries are acknowledged; return the first and the last id."""

        async def finish() -> tuple[int, int]:
            assert self._adding is not None
            self._is_fed = True
            self._wake.set()
            try:
                return await asyncio.shield(self._adding)
            finally:
                if self._adding.done():
                    self._adding = None

        return self._background.run(finish())

    def cancel(self) -> None:
        """Stop adding; entries that the writer has taken stay added."""

        async def cancel() -> None:
            if self._adding is not None:
                self._adding.cancel()
                await asyncio.wait([self._adding])
                self._adding = None

        self._background.run(cancel())

    def _ended(self, adding: asyncio.Task[tuple[int, int]]) -> None:
        if not adding.cancelled():
            adding.exception()  # Marks it as retrieved: `finish` raises it, unless `cancel` came first.
        self._has_ended = True
        self._room.notify()

    async def _entries(self) -> AsyncGenerator[bytes, None]:
        while True:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._room.notify()
                for data in chunk:
                    yield data
            elif self._is_fed:
                return
            else:
                self._wake.clear()
                if not self._chunks:  # The feeding thread appends before it sets the event.
                    await self._wake.wait()


class UnboundedLedgerWriter(LedgerWriter):
    """Adds entries to an unbounded ledger; see `client_aio.UnboundedLedgerWriter`."""

    def __init__(self, background: LoopThread, writer: client_aio.UnboundedLedgerWriter) -> None:
        super().__init__(background, writer)
        self._unbounded = writer

    @property
    def term(self) -> int:
        """As `client_aio.UnboundedLedgerWriter.term`."""
        return self._unbounded.term

    @property
    def first_entry(self) -> int:
        """As `client_aio.UnboundedLedgerWriter.first_entry`."""
        return self._unbounded.first_entry

    def roll(self) -> int:
        """As `client_aio.UnboundedLedgerWriter.roll`."""
        return self._behind_inbox(self._unbounded.roll)

    def trim(self, before_entry: int) -> int:
        """As `client_aio.UnboundedLedgerWriter.trim`."""
        return self._run(self._unbounded.trim(before_entry))

    def close(self, *, at_ack_quorum: bool = False, seal: bool = False) -> LedgerMetadata:
        """As `client_aio.UnboundedLedgerWriter.close`."""
        return self._behind_inbox(lambda: self._unbounded.close(seal=seal))


class UnboundedClient(ClientHandle):
    """The unbounded-ledger operations of a client; a part of `Client`."""

    def open_unbounded_ledger(self, name_or_id: str | int, **options: Any) -> UnboundedLedgerWriter:
        """As `client_aio.Client.open_unbounded_ledger`; blocks until the ledger is open."""

        async def open_() -> client_aio.UnboundedLedgerWriter:
            return await self._client.open_unbounded_ledger(name_or_id, **options)

        return UnboundedLedgerWriter(self._background, self._run(open_()))

    def create_unbounded_ledger(self, name: str, **options: Any) -> int:
        """As `client_aio.Client.create_unbounded_ledger`."""
        return self._run(self._client.create_unbounded_ledger(name, **options))

    def read_unbounded_ledger(
        self, name_or_id: str | int, start: int | None = 0, *, follow: bool = True, password: bytes = b""
    ) -> Generator[Entry, None, None]:
        """As `client_aio.Client.read_unbounded_ledger`; a generator that blocks."""
        return self._iterate(
            lambda: self._client.read_unbounded_ledger(name_or_id, start, follow=follow, password=password)
        )

    def trim_unbounded_ledger(
        self, name_or_id: str | int, before_entry: int, *, password: bytes = b""
    ) -> int:
        """As `client_aio.Client.trim_unbounded_ledger`."""
        return self._run(self._client.trim_unbounded_ledger(name_or_id, before_entry, password=password))

    def list_unbounded_ledgers(self) -> list[tuple[str, int]]:
        """As `client_aio.Client.list_unbounded_ledgers`; returns a list."""

        async def collect() -> list[tuple[str, int]]:
            return [found async for found in self._client.list_unbounded_ledgers()]

        return self._run(collect())


class LogWriter(WriterHandle["Position"]):
    """Appends records to a log; see `client_aio.LogWriter`."""

    def __init__(self, background: LoopThread, writer: client_aio.LogWriter) -> None:
        super().__init__(background, writer, lambda payload, _: writer.append(payload), writer.append_batch)
        self._writer = writer
        self._entry_bytes_max = writer._context.config.entry_bytes_max

    @property
    def name(self) -> str:
        """As `client_aio.LogWriter.name`."""
        return self._writer.name

    @property
    def last_add_confirmed(self) -> Position | None:
        """As `client_aio.LogWriter.last_add_confirmed`."""
        return self._writer.last_add_confirmed

    def append(self, data: bytes | bytearray | memoryview) -> Position:
        """Append a record, wait until it is acknowledged, and return its position."""
        self._background.check_thread()
        return result_of(self.append_nowait(data))

    def append_nowait(self, data: bytes | bytearray | memoryview) -> AddFuture[Position]:
        """Append a record; blocks only while more than `max_in_flight_bytes` are in flight.

        Returns:
            A `concurrent.futures.Future` of its position. Cancelling it leaves the append running. Its
            callbacks run on the background thread and must not block.

        Raises:
            BackpressureError: called in such a callback, and more than `max_in_flight_bytes` are in flight.
        """
        self._check_process()
        return self._inbox.put(as_bytes(data, "a record"))

    def append_batch(self, records: Sequence[bytes]) -> tuple[Position, Position]:
        """Append many records, wait until all are acknowledged; return the first and the last position."""
        self._background.check_thread()
        return result_of(self.append_batch_nowait(records))

    def append_batch_nowait(self, records: Sequence[bytes]) -> AddFuture[tuple[Position, Position]]:
        """Append many records with one future; blocks only while too many bytes are in flight.

        Returns:
            A `concurrent.futures.Future` of the first and the last position, as of
            `client_aio.LogWriter.append_batch`. Otherwise as that of `append_nowait`.

        Raises:
            BackpressureError: as for `append_nowait`.
        """
        self._check_process()
        return self._inbox.put_batch(as_batch(records, self._entry_bytes_max, None))

    def roll(self) -> None:
        """As `client_aio.LogWriter.roll`."""
        self._behind_inbox(self._writer.roll)

    def close(self, *, at_ack_quorum: bool = False) -> None:
        """As `client_aio.LogWriter.close`."""
        self._behind_inbox(lambda: self._writer.close(at_ack_quorum=at_ack_quorum))


class LogClient(ClientHandle):
    """The log operations of a client; a part of `Client`."""

    def open_log(self, name: str, **options: Any) -> LogWriter:
        """As `client_aio.Client.open_log`; blocks until the log is open."""

        async def open_() -> client_aio.LogWriter:
            return await self._client.open_log(name, **options)

        return LogWriter(self._background, self._run(open_()))

    def create_log(self, name: str, **options: Any) -> None:
        """As `client_aio.Client.create_log`."""
        self._run(self._client.create_log(name, **options))

    @overload
    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["raise"] = "raise",
        password: bytes = b"",
    ) -> Generator[LogRecord, None, None]: ...

    @overload
    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["skip"],
        password: bytes = b"",
    ) -> Generator[LogRecord | LogGap, None, None]: ...

    def read_log(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: OnGap = "raise",
        password: bytes = b"",
    ) -> Generator[LogRecord, None, None] | Generator[LogRecord | LogGap, None, None]:
        """As `client_aio.Client.read_log`; a generator that blocks."""
        for batch in self._read_log(name, start, follow, wait, on_gap, password):
            if isinstance(batch, LogGap):
                yield batch
            else:
                yield from batch

    @overload
    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["raise"] = "raise",
        password: bytes = b"",
    ) -> Generator[LogBatch, None, None]: ...

    @overload
    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: Literal["skip"],
        password: bytes = b"",
    ) -> Generator[LogBatch | LogGap, None, None]: ...

    def read_log_batches(
        self,
        name: str,
        start: Start = None,
        *,
        follow: bool = False,
        wait: bool = False,
        on_gap: OnGap = "raise",
        password: bytes = b"",
    ) -> Generator[LogBatch, None, None] | Generator[LogBatch | LogGap, None, None]:
        """As `client_aio.Client.read_log_batches`; a generator that blocks."""
        return self._read_log(name, start, follow, wait, on_gap, password)

    def _read_log(
        self, name: str, start: Start, follow: bool, wait: bool, on_gap: OnGap, password: bytes
    ) -> Generator[LogBatch | LogGap, None, None]:
        return self._iterate(lambda: self._client._read(name, start, follow, wait, on_gap, password))

    def add_to_log(self, name: str, ledger_ids: list[int], **options: Any) -> AddedToLog:
        """As `client_aio.Client.add_to_log`."""
        return self._run(self._client.add_to_log(name, ledger_ids, **options))

    def log_metadata(self, name: str) -> LogMetadata:
        """As `client_aio.Client.log_metadata`."""
        return self._run(self._client.log_metadata(name))

    def list_logs(self) -> list[str]:
        """As `client_aio.Client.list_logs`; returns a list."""

        async def collect() -> list[str]:
            return [name async for name in self._client.list_logs()]

        return self._run(collect())

    def truncate_log(
        self, name: str, before: Position | tuple[int, int] | str, *, password: bytes = b""
    ) -> list[LogRow]:
        """As `client_aio.Client.truncate_log`."""
        return self._run(self._client.truncate_log(name, before, password=password))

    def delete_log(self, name: str, *, password: bytes = b"") -> None:
        """As `client_aio.Client.delete_log`."""
        self._run(self._client.delete_log(name, password=password))

    def sweep_log_orphans(self, *, older_than_s: float = 3600.0, password: bytes = b"") -> SweepReport:
        """As `client_aio.Client.sweep_log_orphans`."""
        return self._run(self._client.sweep_log_orphans(older_than_s=older_than_s, password=password))
