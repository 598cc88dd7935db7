"""Adds that wait in front of a writer: for room in its window, or for the end of a bulk before them.

Large batches (`add_batch`) and bulks (`add_entries`) bring more than a window holds. They are taken piece by
piece. All adds made meanwhile wait behind them, so that nothing overtakes: entries get their ids in the order
of the calls.

Owns the task that takes what waits, and the turn of a bulk. `client_aio.core.add_window.AddQueue` owns the
order and the size of the pieces. Does not own the window, nor what a failure does: that calls `give_up`.

Invariant: `is_busy` is set as long as an add waits or a bulk has its turn. The writer then puts every add
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from client_aio.core.add_window import AddQueue
from client_aio.ledger.futures import BatchAdd, EntryWaiters, fail_all
from metadata.errors import BackpressureError, BookKeeperError, EntryTooLargeError, InvalidArgumentError
from metadata.owned_task import OwnedTask

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from client_aio.ledger.futures import AnyAdd

HARD_LIMIT_FACTOR = 4


class WaitingAdds:
    """The adds of one writer that wait, in their order.

    Args:
        take: takes entries of one add behind all that were taken before.
        send: sends what was taken.
        make_room: returns when at most `max_in_flight_bytes` of taken entries are in flight. Raises a
            BookKeeperError where the writer has failed, or where there will be no room though it goes on.
        on_idle: called when no add waits any more.
        name: that of the task.
    """

    def __init__(
        self,
        take: Callable[[Sequence[bytes], Any], None],
        send: Callable[[], None],
        make_room: Callable[[], Awaitable[None]],
        on_idle: Callable[[], None],
        max_in_flight_bytes: int,
        name: str,
    ) -> None:
        self.is_busy = False
        self._take, self._send = take, send
        self._make_room, self._on_idle = make_room, on_idle
        self._name = name
        self._queue: AddQueue[Any] = AddQueue(max_in_flight_bytes)
        self._has_turn = False  # a bulk
        self._passed = EntryWaiters()
        self._moved = asyncio.Event()
        self._task: OwnedTask | None = None
        self._error: BookKeeperError | None = None  # which dropped adds though the writer went on

    def __bool__(self) -> bool:
        """Return whether entries wait. The place of a bulk is none: it may never add one."""
        return self._queue.taken < self._queue.queued

    @property
    def bytes_held(self) -> int:
        """Return the bytes of the entries that wait, with the overhead of each."""
        return self._queue.bytes_held

    def must_hold(self, payloads: Sequence[bytes]) -> bool:
        """Return whether entries have to wait: others do, or they are too many to be taken at once."""
        return self.is_busy or not self._queue.is_piece(payloads)

    def put(self, payloads: Sequence[bytes], add: AnyAdd) -> None:
        """Take entries later, behind all that wait."""
        self._queue.put(payloads, add)
        self._go_on()

    async def passed(self) -> None:
        """Wait until all adds that wait now have been taken, or dropped.

        Raises:
            BookKeeperError: adds were dropped for want of room since the last call that raised this.
        """
        if self:
            await self._passed.wait_for(self._queue.queued)
        error, self._error = self._error, None
        if error is not None:
            raise error.with_traceback(None)

    async def moved(self) -> None:
        """Wait until some of what waits has been taken or dropped."""
        self._moved.clear()
        await self._moved.wait()

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for all adds before this call, and have all others wait until the context is left.

        Raises:
            BookKeeperError: the error of the adds that were given up, this one with them.
        """
        if self.is_busy:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.put((), granted)
            self._go_on()
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled() and granted.exception() is None:
                    self._end_turn()  # Granted in the same event-loop iteration.
                raise
        self.is_busy = self._has_turn = True
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._has_turn = False
        self._go_on()

    def give_up(self) -> list[AnyAdd]:
        """Drop all that wait, none of which has been sent; returns the adds, in their order."""
        dropped = self._queue.give_up()
        self._note_taken()
        return dropped

    def _note_taken(self) -> None:
        self._passed.reached(self._queue.taken)
        self._moved.set()

    def _go_on(self) -> None:
        self.is_busy = self._has_turn or bool(self._queue)
        if not self.is_busy:
            self._on_idle()
        elif not self._has_turn and (self._task is None or self._task.done()):
            self._task = OwnedTask(self._run, self._name)

    async def _run(self) -> None:
        queue = self._queue
        while queue and not self._has_turn:
            granted = queue.take_place()
            if granted is not None:
                if not granted.done():
                    self._has_turn = True
                    granted.set_result(None)
                continue
            try:
                await self._make_room()
            except BookKeeperError as error:
                if dropped := self.give_up():
                    self._error = error
                    fail_all(dropped, error)
                continue
            for payloads, add in queue.take():
                if isinstance(add, BatchAdd):
                    add.is_sent = True  # What is left of it may be given up before the writer fails.
                self._take(payloads, add)
            self._note_taken()
            self._send()
            await asyncio.sleep(0)
        self._go_on()


def as_batch(entries: object, entry_bytes_max: int, ledger_id: int | None) -> list[bytes]:
    """Return the entries of a batch, copied where they are not bytes.

    Raises:
        InvalidArgumentError: not a list or another sequence of bytes, or an empty one.
        EntryTooLargeError: an entry is above the limit.
    """
    if isinstance(entries, (bytes, bytearray, memoryview, str)) or not isinstance(entries, Sequence):
        raise InvalidArgumentError(
            f"a batch is a list of bytes, not {type(entries).__name__}", ledger_id=ledger_id
        )
    payloads: list[bytes] = list(entries)  # The caller may change the list once this call has returned.
    if not payloads:
        raise InvalidArgumentError("a batch has at least one entry", ledger_id=ledger_id)
    if set(map(type, payloads)) != {bytes}:
        for number, data in enumerate(payloads):
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise InvalidArgumentError(
                    f"entry {number} of the batch is bytes, not {type(data).__name__}", ledger_id=ledger_id
                )
            payloads[number] = bytes(data)
    if max(map(len, payloads)) > entry_bytes_max:
        number, size = next(
            (at, len(each)) for at, each in enumerate(payloads) if len(each) > entry_bytes_max
        )
        raise EntryTooLargeError(
            f"entry {number} of the batch has {size:,} bytes, above the limit of {entry_bytes_max:,}",
            ledger_id=ledger_id,
        )
    return payloads


class _Bounded(Protocol):
    """A writer, with its bytes in flight."""

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes that are not acknowledged yet."""

    @property
    def max_in_flight_bytes(self) -> int:
        """Return the bytes above which `drain` waits."""


def check_room(writer: _Bounded, what: str, ledger_id: int | None = None) -> None:
    """Raise BackpressureError when four times the bytes are in flight that `drain` waits for.

    Args:
        what: the writer's ledger or log, for the message.
    """
    held, limit = writer.bytes_in_flight, writer.max_in_flight_bytes
    if held > HARD_LIMIT_FACTOR * limit:
        raise BackpressureError(
            f"{held:,} bytes are in flight in {what}, more than {HARD_LIMIT_FACTOR} × max_in_flight_bytes: "
            "await drain() between adds",
            ledger_id=ledger_id,
        )


def as_entry(data: object, ledger_id: int) -> bytes:
    """Return a copy of an entry's bytes."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidArgumentError(f"an entry is bytes, not {type(data).__name__}", ledger_id=ledger_id)


def check_entries(entries: object) -> None:
    """Raise InvalidArgumentError unless this is an iterable, and not the bytes of one entry."""
    if isinstance(entries, (bytes, bytearray, memoryview, str)) or not (
        hasattr(entries, "__iter__") or hasattr(entries, "__aiter__")
    ):
        raise InvalidArgumentError(
            f"add_entries takes an iterable of entries, not {type(entries).__name__}; add_entry adds one"
        )
