"""The queue from threads to a writer on the loop: one wake-up of the loop takes all payloads queued by then.

Owns the bound on the queue: `put` blocks while more than `max_in_flight_bytes` are in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from client_aio.core.add_window import ENTRY_OVERHEAD_BYTES
from client_aio.sync.add_future import AddFuture
from client_aio.sync.loop_thread import Room
from metadata.errors import BackpressureError, BookKeeperError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from client_aio.sync.loop_thread import LoopThread

R = TypeVar("R")


class Writer(Protocol):
    """The writer behind a queue, as the queue uses it."""

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes not acknowledged yet."""

    @property
    def max_in_flight_bytes(self) -> int:
        """Return the bytes above which `drain` waits."""

    @property
    def is_held_up(self) -> bool:
        """Return whether the entries in flight wait for an id that has not been added yet."""

    async def drain(self) -> None:
        """Wait until at most `max_in_flight_bytes` are in flight."""


class _Put(NamedTuple):
    payload: Any
    entry_id: int | None
    future: AddFuture[Any]
    size: int
    add: Callable[[Any, int | None], asyncio.Future[Any]]


class SubmitQueue(Generic[R]):
    """The queue of one writer.

    Args:
        add: adds a payload, under an id where the caller passed one. Called on the loop.
        add_batch: adds a batch of payloads, as `LedgerWriter.add_batch` does. Called on the loop.
    """

    def __init__(
        self,
        background: LoopThread,
        writer: Writer,
        add: Callable[[bytes, int | None], asyncio.Future[R]],
        add_batch: Callable[[list[bytes]], asyncio.Future[tuple[R, R]]],
    ) -> None:
        self._background = background
        self._writer = writer
        self._add = add
        self._add_batch = add_batch
        self._waiting: deque[_Put] = deque()
        self._is_due = False
        # Of the threads, never of the loop. A signal's handler may add while its thread waits for room.
        self._putting = threading.RLock()
        self._room = Room()
        self._bytes_put = 0  # by the threads
        self._bytes_done = 0  # by the loop
        self._bytes_max = writer.max_in_flight_bytes
        self._draining: asyncio.Task[None] | None = None  # on the loop

    def put(self, payload: bytes, entry_id: int | None = None) -> AddFuture[R]:
        """Queue a payload, waiting for room; return a future of the result of `add`.

        An interrupt while it waits may leave the payload queued or not.

        Raises:
            BackpressureError: on the loop, in a callback: there is no room, and only the loop can make room.
        """
        future: AddFuture[R] = AddFuture()
        self._put(_Put(payload, entry_id, future, len(payload) + ENTRY_OVERHEAD_BYTES, self._add))
        return future

    def put_batch(self, payloads: list[bytes]) -> AddFuture[tuple[R, R]]:
        """Queue a batch as `put` does: it waits for room once, however large it is."""
        future: AddFuture[tuple[R, R]] = AddFuture()
        size = sum(map(len, payloads)) + ENTRY_OVERHEAD_BYTES * len(payloads)
        self._put(_Put(payloads, None, future, size, lambda batch, _: self._add_batch(batch)))
        return future

    def _put(self, put: _Put) -> None:
        if self._background.is_here:
            self._put_here(put)
            return
        try:
            with self._putting:
                self._room.wait_for(self._has_room)
                self._waiting.append(put)
                self._bytes_put += put.size
            if not self._is_due:
                self._is_due = True
                self._wake()
        except BaseException:
            # An interrupt may have struck between the append and the wake-up. A second one does no harm.
            self._wake()
            raise

    def _has_room(self) -> bool:
        if self._bytes_put - self._bytes_done <= self._bytes_max:
            return True
        # Entries held up by a gap make no room. The calling thread may have the entry that fills the gap.
        return not self._waiting and self._writer.is_held_up

    def _put_here(self, put: _Put) -> None:
        """Queue on the loop, which must wait neither for room nor for a thread that waits for room."""
        if not self._has_room():
            raise BackpressureError(f"more than {self._bytes_max:,} bytes are in flight: add from a thread")
        # The loop must not write `_bytes_put`, which the threads write under their lock.
        self._bytes_done -= put.size
        self._waiting.append(put)
        self._background.loop.call_soon(self._take)

    def _wake(self) -> None:
        self._background.loop.call_soon_threadsafe(self._take)

    async def emptied(self) -> None:
        """Add all payloads queued so far. On the loop."""
        self._take()
        while self._draining is not None:
            await asyncio.wait([self._draining])

    def _take(self) -> None:
        """Add the payloads that the threads have queued, once the writer has room.

        The futures alone do not tell: with deferred sync or guaranteed write quorum, entries stay in flight
        after their futures are done.
        """
        if self._writer.bytes_in_flight <= self._bytes_max:
            self._add_all()
        elif self._draining is None:
            self._draining = self._background.loop.create_task(self._drain(), name="drain")
            self._draining.add_done_callback(self._drained)

    async def _drain(self) -> None:
        with contextlib.suppress(BookKeeperError):  # Each add in the queue fails with it.
            await self._writer.drain()

    def _drained(self, draining: asyncio.Task[None]) -> None:
        self._draining = None
        if not draining.cancelled():
            draining.result()
        self._add_all()

    def _add_all(self) -> None:
        self._is_due = False  # First: a payload queued from now on comes with a wake-up of its own.
        for _ in range(len(self._waiting)):
            payload, entry_id, future, size, add = self._waiting.popleft()
            complete = self._completer(future, size)
            try:
                added = add(payload, entry_id)
            except Exception as error:  # This payload is refused; those behind it are added.
                added = self._background.loop.create_future()
                added.set_exception(error)
            added.add_done_callback(complete)
        self._room.notify()  # All entries may wait behind a gap; see `_has_room`.

    def _completer(self, future: AddFuture[Any], size: int) -> Callable[[asyncio.Future[Any]], None]:
        def complete(added: asyncio.Future[Any]) -> None:
            self._bytes_done += size
            self._room.notify()
            future.complete(self._background.loop, added)

        return complete


def as_bytes(data: bytes | bytearray | memoryview, what: str) -> bytes:
    """Copy a payload, or raise InvalidArgumentError where it is not bytes."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"{what} is bytes, not {type(data).__name__}")
    return bytes(data)
