"""The blocking writers: `WriterHandle`, which all share, and the writer of a ledger.

A `SubmitQueue` stands before the writer on the loop; see `client_aio.ledger.writer`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from client_aio.core.add_window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES
from client_aio.sync.loop_thread import AddFuture, Handle, LoopThread, Room, result_of
from client_aio.sync.submit_queue import SubmitQueue, Writer, as_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
    from types import TracebackType

    import client_aio
    from metadata.model.ledger import LedgerMetadata


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
        add: as of `SubmitQueue`.
    """

    def __init__(
        self,
        background: LoopThread,
        writer: AnyWriter,
        add: Callable[[bytes, int | None], asyncio.Future[R]],
    ) -> None:
        super().__init__(background)
        self._any_writer = writer
        self._inbox: SubmitQueue[R] = SubmitQueue(background, writer, add)

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
        super().__init__(background, writer, writer.add_entry)
        self._writer = writer

    @property
    def ledger_id(self) -> int:
        """Return the ledger's id."""
        return self._writer.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Return the ledger's metadata as this writer last wrote it."""
        return self._writer.metadata

    @property
    def last_add_confirmed(self) -> int:
        """Return the id of the last acknowledged entry, −1 for none."""
        return self._writer.last_add_confirmed

    @property
    def length(self) -> int:
        """Return the payload bytes of all acknowledged entries."""
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

    def add_entries(self, entries: Iterable[bytes | bytearray | memoryview]) -> tuple[int, int]:
        """Add many entries under contiguous ids, wait until all are acknowledged; return first and last id.

        The iterable runs on the calling thread, a few MiB ahead of the entries sent.
        """
        return self.add_chunks(_chunks(entries))

    def add_chunks(self, chunks: Iterable[list[bytes]]) -> tuple[int, int]:
        """Add as `add_entries` does, in lists of a size that the caller chooses; some 512 KiB are best."""
        self._check_process()
        bulk = _Bulk(self._background, self._writer)
        try:
            bulk.start(self._inbox.emptied)
            for chunk in chunks:
                bulk.put(chunk)
            return bulk.finish()
        except BaseException:
            bulk.cancel()
            raise

    def force(self) -> int:
        """Make all adds so far durable and acknowledge them (deferred sync); return the LAC."""
        return self._behind_inbox(self._writer.force)

    def close(self) -> LedgerMetadata:
        """Flush, and close the ledger for ever."""
        return self._behind_inbox(self._writer.close)


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
