"""The client's nouns for code without an event loop: plain scripts, notebooks, Spark executors.

    with client_aio.sync.connect("sqlite:///var/lib/bookies/metadata.db") as client:
        with client.create_ledger() as ledger:
            ledger.add_entry(b"hello")                 # blocks until it is acknowledged
            ledger.add_entry_nowait(b"world")          # a concurrent.futures.Future
            ledger.flush()

One background thread per process runs one event loop, made when it is first needed; all clients share it. A
process that was forked makes its own: it must not use handles from before the fork, and gets a clear error
when it does. Nothing relies on `atexit`, since Spark's forked workers end without it: use the handles as
context managers, or close them. Clients and handles cannot be pickled; ship the URI and connect there.

Handles may be used from several threads. What the methods mean, raise and leave behind on an interrupt is
said at their namesakes in `client_aio.client`, `client_aio.writer` and `client_aio.reader`; an interrupted
call is cancelled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import client_aio
from client_aio.core.window import BATCH_BYTES_MAX, ENTRY_OVERHEAD_BYTES
from metadata.errors import BookKeeperError, ClientClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
    from types import TracebackType

    from client_aio.entries import Entry, EntryBatch
    from metadata.ledger import LedgerMetadata

__all__ = ["Client", "LedgerReader", "LedgerWriter", "connect"]

T = TypeVar("T")

_CHUNKS_AHEAD = 4


class _Background:
    """The event loop of this process, on its own thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="bookie-aio", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt of the waiting thread cancels it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgumentError("client_aio.sync must not be called from its own event loop")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_lock = threading.Lock()
_background: _Background | None = None


def _get_background() -> _Background:
    """Give this process's background loop, making it where there is none, or only a parent's."""
    global _background
    with _lock:
        if _background is None or _background.pid != os.getpid():
            _background = _Background()
        return _background


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it at the fork


os.register_at_fork(after_in_child=_renew_lock)


class _Handle:
    """What client, writer and reader have in common: the loop they live on."""

    def __init__(self, background: _Background) -> None:
        self._background = background

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_process()
        except BaseException:
            coroutine.close()
            raise
        return self._background.run(coroutine)

    def _check_process(self) -> None:
        if self._background.pid != os.getpid():
            raise ClientClosedError(
                f"this {type(self).__name__} was opened in process {self._background.pid} and cannot be used "
                f"in its fork {os.getpid()}: connect there"
            )

    def __reduce__(self) -> str:
        raise TypeError(
            f"a client_aio.sync.{type(self).__name__} cannot be pickled: send the metadata URI, and connect "
            "where it is used (in Spark: inside the function given to foreachPartition)"
        )


def connect(metadata: str, **settings: Any) -> Client:
    """Connect to a cluster; blocks. Arguments as for `client_aio.connect`."""
    background = _get_background()

    async def open_() -> client_aio.Client:
        return await client_aio.connect(metadata, **settings)

    return Client(background, background.run(open_()))


class Client(_Handle):
    """A connection to a cluster; see `client_aio.Client`."""

    def __init__(self, background: _Background, client: client_aio.Client) -> None:
        super().__init__(background)
        self._client = client

    def create_ledger(self, **options: Any) -> LedgerWriter:
        """Create a ledger and open it for writing. Options as for `client_aio.Client.create_ledger`."""

        async def create() -> client_aio.LedgerWriter:
            return await self._client.create_ledger(**options)

        return LedgerWriter(self._background, self._run(create()))

    def open_ledger(self, ledger_id: int, *, recover: bool = False, password: bytes = b"") -> LedgerReader:
        """Open a ledger for reading; **takes over** with `recover=True`."""

        async def open_() -> client_aio.LedgerReader:
            return await self._client.open_ledger(ledger_id, recover=recover, password=password)

        return LedgerReader(self._background, self._run(open_()))

    def delete_ledger(self, ledger_id: int, *, password: bytes = b"") -> None:
        """Delete a ledger."""
        self._run(self._client.delete_ledger(ledger_id, password=password))

    def list_ledgers(self) -> list[int]:
        """Give the ids of all ledgers, ascending."""

        async def collect() -> list[int]:
            return [ledger_id async for ledger_id in self._client.list_ledgers()]

        return self._run(collect())

    def ledger_metadata(self, ledger_id: int) -> LedgerMetadata:
        """Read a ledger's metadata."""
        return self._run(self._client.ledger_metadata(ledger_id))

    def close(self) -> None:
        """Close the client; open writers are aborted."""
        self._run(self._client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Added(NamedTuple):
    payload: bytes
    entry_id: int | None
    future: concurrent.futures.Future[int]


class LedgerWriter(_Handle):
    """Adds entries to a ledger; see `client_aio.LedgerWriter`."""

    def __init__(self, background: _Background, writer: client_aio.LedgerWriter) -> None:
        super().__init__(background)
        self._writer = writer
        self._inbox: deque[_Added] = deque()
        self._inbox_is_due = False
        self._room = threading.Condition()
        self._bytes_in_flight = 0
        self._bytes_max = writer.max_in_flight_bytes
        self._draining: asyncio.Task[None] | None = None  # on the loop

    @property
    def ledger_id(self) -> int:
        """Give the ledger's id."""
        return self._writer.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Give the ledger's metadata as this writer last wrote it."""
        return self._writer.metadata

    @property
    def last_add_confirmed(self) -> int:
        """Give the id of the last acknowledged entry, −1 for none."""
        return self._writer.last_add_confirmed

    @property
    def length(self) -> int:
        """Give the payload bytes of all acknowledged entries."""
        return self._writer.length

    def add_entry(self, data: bytes | bytearray | memoryview, entry_id: int | None = None) -> int:
        """Add an entry, wait until it is acknowledged, and return its id."""
        return self.add_entry_nowait(data, entry_id).result()

    def add_entry_nowait(
        self, data: bytes | bytearray | memoryview, entry_id: int | None = None
    ) -> concurrent.futures.Future[int]:
        """Add an entry; blocks only while more than `max_in_flight_bytes` are in flight.

        Args:
            entry_id: as for `client_aio.LedgerWriter.add_entry`. Where it is refused, so is the future.

        Returns:
            A future of the entry's id. Cancelling it leaves the add running. Its callbacks run on the
            background thread and must not block.
        """
        self._check_process()
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"an entry is bytes, not {type(data).__name__}")
        payload = bytes(data)
        self._writer.check_size(payload)
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        with self._room:
            self._room.wait_for(lambda: self._bytes_in_flight <= self._bytes_max)
            self._bytes_in_flight += len(payload) + ENTRY_OVERHEAD_BYTES
            self._inbox.append(_Added(payload, entry_id, future))
            is_first, self._inbox_is_due = not self._inbox_is_due, True
        if is_first:  # one wake-up of the loop for all that is put in until it comes
            self._background.loop.call_soon_threadsafe(self._take_inbox)
        return future

    def add_entries(self, entries: Iterable[bytes | bytearray | memoryview]) -> tuple[int, int]:
        """Add many entries under contiguous ids, wait until all are acknowledged; returns first and last id.

        The iterable runs on the calling thread, a few MiB ahead of what is sent.
        """
        self._check_process()
        bulk = _Bulk(self._background, self._writer)
        chunk: list[bytes] = []
        size = 0
        try:
            for data in entries:
                if not isinstance(data, (bytes, bytearray, memoryview)):
                    raise InvalidArgumentError(f"an entry is bytes, not {type(data).__name__}")
                chunk.append(bytes(data))
                size += len(chunk[-1]) + ENTRY_OVERHEAD_BYTES
                if size >= BATCH_BYTES_MAX:
                    bulk.put(chunk)
                    chunk, size = [], 0
            bulk.put(chunk)
        except BaseException:
            bulk.cancel()
            raise
        return bulk.finish()

    def flush(self) -> None:
        """Wait until everything added so far is acknowledged; raises the first failure."""

        async def flush() -> None:
            await self._take_whole_inbox()
            await self._writer.flush()

        self._run(flush())

    def force(self) -> int:
        """Make durable, and acknowledge, everything added so far (deferred sync); returns the LAC."""

        async def force() -> int:
            await self._take_whole_inbox()
            return await self._writer.force()

        return self._run(force())

    def close(self) -> LedgerMetadata:
        """Flush, and close the ledger for ever."""

        async def close() -> LedgerMetadata:
            await self._take_whole_inbox()
            return await self._writer.close()

        return self._run(close())

    def abort(self) -> None:
        """Give up; the ledger stays OPEN for recovery."""
        self._run(self._writer.abort())

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

    async def _take_whole_inbox(self) -> None:
        self._take_inbox()
        while self._draining is not None:
            await asyncio.wait([self._draining])

    async def _drain(self) -> None:
        with contextlib.suppress(BookKeeperError):  # each add in the inbox is told of it
            await self._writer.drain()
        self._draining = None
        self._add_inbox()

    def _take_inbox(self) -> None:
        """On the loop: add what the threads have put in, once the writer has room.

        Deferred sync, or guaranteed write quorum, keeps entries in flight whose futures are done.
        """
        if self._writer.bytes_in_flight <= self._bytes_max:
            self._add_inbox()
        elif self._draining is None:
            self._draining = self._background.loop.create_task(self._drain(), name="drain")

    def _add_inbox(self) -> None:
        with self._room:
            inbox, self._inbox = self._inbox, deque()
            self._inbox_is_due = False
        for payload, entry_id, future in inbox:
            complete = self._completer(future, len(payload) + ENTRY_OVERHEAD_BYTES)
            try:
                added = self._writer.add_entry(payload, entry_id)
            except BookKeeperError as error:  # of this one; those behind it are added all the same
                added = self._background.loop.create_future()
                added.set_exception(error)
            added.add_done_callback(complete)

    def _completer(
        self, future: concurrent.futures.Future[int], size: int
    ) -> Callable[[asyncio.Future[int]], None]:
        def complete(added: asyncio.Future[int]) -> None:
            with self._room:
                self._bytes_in_flight -= size
                self._room.notify()
            if not future.set_running_or_notify_cancel():
                return
            error = added.exception()
            if error is None:
                future.set_result(added.result())
            else:
                future.set_exception(error)

        return complete


class _Bulk:
    """One `add_entries` that is fed from another thread, a bounded number of chunks ahead."""

    def __init__(self, background: _Background, writer: client_aio.LedgerWriter) -> None:
        self._background = background
        self._queue: asyncio.Queue[list[bytes] | None] = asyncio.Queue(_CHUNKS_AHEAD)
        self._done: asyncio.Task[tuple[int, int]]

        async def start() -> None:
            self._done = asyncio.create_task(writer.add_entries(self._entries()))

        background.run(start())

    def put(self, chunk: list[bytes]) -> None:
        """Hand over a chunk; raises what ended the adding."""
        self._background.run(self._put(chunk))

    def finish(self) -> tuple[int, int]:
        """Wait for the acknowledgement of all."""

        async def finish() -> tuple[int, int]:
            await self._put(None)
            return await self._done

        return self._background.run(finish())

    def cancel(self) -> None:
        """Give up adding; what was taken stays added."""

        async def cancel() -> None:
            self._done.cancel()
            with contextlib.suppress(BaseException):
                await self._done

        self._background.run(cancel())

    async def _put(self, chunk: list[bytes] | None) -> None:
        put = asyncio.ensure_future(self._queue.put(chunk))
        await asyncio.wait([put, self._done], return_when=asyncio.FIRST_COMPLETED)
        if self._done.done():
            put.cancel()
            await self._done

    async def _entries(self) -> AsyncGenerator[bytes, None]:
        while (chunk := await self._queue.get()) is not None:
            for data in chunk:
                yield data


class LedgerReader(_Handle):
    """Reads a ledger; see `client_aio.LedgerReader`."""

    def __init__(self, background: _Background, reader: client_aio.LedgerReader) -> None:
        super().__init__(background)
        self._reader = reader

    @property
    def ledger_id(self) -> int:
        """Give the ledger's id."""
        return self._reader.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """Give the metadata as last read."""
        return self._reader.metadata

    @property
    def last_add_confirmed(self) -> int:
        """Give the highest LAC that this handle has seen, −1 for none."""
        return self._reader.last_add_confirmed

    @property
    def is_closed(self) -> bool:
        """Tell whether the ledger is known to be closed."""
        return self._reader.is_closed

    def read_last_add_confirmed(self) -> int:
        """Ask the bookies for the LAC, and return the highest seen."""
        return self._run(self._reader.read_last_add_confirmed())

    def read(self, first: int, last: int) -> Iterator[Entry]:
        """Read the entries first to last, inclusive, in order."""
        for batch in self.read_batches(first, last):
            yield from batch

    def read_batches(self, first: int, last: int) -> Iterator[EntryBatch]:
        """Read as `read` does, in batches."""
        return self._iterate(lambda: self._reader.read_batches(first, last))

    def read_unconfirmed(self, first: int, last: int) -> Iterator[Entry]:
        """Read entries whether acknowledged or not; see `client_aio.LedgerReader.read_unconfirmed`."""
        return self._iterate(lambda: self._reader.read_unconfirmed(first, last))

    def tail(self, from_entry: int = 0) -> Iterator[Entry]:
        """Read from an entry on and follow what is added, until the ledger is closed."""
        return self._iterate(lambda: self._reader.tail(from_entry))

    def _iterate(self, start: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        self._check_process()
        items = start()

        async def advance() -> T | None:
            return await anext(items, None)

        async def finish() -> None:
            await items.aclose()

        try:
            while (item := self._run(advance())) is not None:
                yield item
        finally:
            self._run(finish())

    def close(self) -> None:
        """Free the handle. The ledger is not touched."""
        self._run(self._reader.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
