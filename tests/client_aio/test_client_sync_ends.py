"""What ends the blocking adapter, or must not: the process, a fork, garbage, callbacks, signals' handlers."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from client_aio.sync import loop_thread
from client_aio.sync.loop_thread import Handle, LoopThread
from client_aio.sync.submit_queue import SubmitQueue

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import AsyncGenerator, Callable

SCRIPT = """
import os, sys
from client_aio.sync.loop_thread import Handle, get_loop_thread

async def count():
    for number in range(9):
        yield number

numbers = Handle(get_loop_thread(), None)._iterate(count)
assert next(numbers) == 0
if "fork" in sys.argv:
    child = os.fork()
    if not child:
        del numbers
        sys.exit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 7)
"""


# The child leaves the contexts of its parent by SystemExit.
FORKED_INSIDE = """
import os, sys
from client_aio.sync.client import Client, LedgerReader
from client_aio.sync.loop_thread import get_loop_thread
from client_aio.sync.writer import WriterHandle

class Closable:
    bytes_in_flight = max_in_flight_bytes = 0
    async def close(self):
        pass
    abort = close

thread, handle = get_loop_thread(), Closable()
with Client(thread, handle), WriterHandle(thread, handle, None, None), LedgerReader(thread, handle):
    child = os.fork()
    if not child:
        sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 7)
"""


@pytest.mark.parametrize("how", ["end", "fork", "fork inside"])
async def test_a_process_ends_though_something_was_left_unfinished(how: str) -> None:
    script = FORKED_INSIDE if how == "fork inside" else SCRIPT
    arguments = ["-W", "ignore::DeprecationWarning", "-c", script, how]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, said) == (0, b"")


class Taken:
    """A writer that has room."""

    bytes_in_flight, max_in_flight_bytes = 0, 1000

    async def drain(self) -> None:
        raise AssertionError("there is room")


def test_what_is_put_in_after_an_interrupt_is_taken() -> None:
    background = LoopThread()
    wakes: list[Callable[[], object]] = []

    def wake(call: Callable[[], object]) -> object:
        wakes.append(call)
        if len(wakes) == 1:
            raise KeyboardInterrupt
        return background.loop.call_soon(call)

    def add(payload: bytes, entry_id: int | None) -> asyncio.Future[int]:
        added = background.loop.create_future()
        added.set_result(len(payload))
        return added

    class Loop:
        call_soon_threadsafe = staticmethod(wake)
        create_future = background.loop.create_future

    class Here:
        loop = Loop()
        is_here = False

    inbox: SubmitQueue[int] = SubmitQueue(cast("Any", Here()), Taken(), add, cast("Any", None))
    try:
        with pytest.raises(KeyboardInterrupt):
            inbox.put(b"interrupted")
        futures: list[concurrent.futures.Future[int]] = []

        async def put() -> None:
            futures.append(inbox.put(b"then"))

        background.run(put())
        assert futures[0].result(60) == len(b"then")
    finally:
        background.stop()


def test_a_reading_that_is_collected_on_the_loop_is_closed() -> None:
    closed = asyncio.Event()

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(9):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.set()

    background = LoopThread()
    readings = [Handle(background, None)._iterate(count)]
    assert next(readings[0]) == 0

    async def collect() -> None:
        readings.clear()
        await closed.wait()

    try:
        background.run(asyncio.wait_for(collect(), 60))
    finally:
        background.stop()


def done_in_time(call: Callable[[], object]) -> None:
    """Call on a thread of its own, since a call that waits for ever would keep the test."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


async def nothing() -> None:
    """Do nothing."""


@pytest.mark.parametrize("make_loop", [loop_thread._new_loop, asyncio.new_event_loop])
def test_a_callback_that_exits_or_stops_the_loop_ends_no_other_call(
    monkeypatch: pytest.MonkeyPatch, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    monkeypatch.setattr(loop_thread, "_new_loop", make_loop)
    background = LoopThread()
    told: list[object] = []
    background.loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    try:
        for callback in (sys.exit, background.loop.stop):
            background.loop.call_soon_threadsafe(callback)
            done_in_time(lambda: background.run(nothing()))
    finally:
        background.stop()
        background.loop.close()
    assert [type(one) for one in told] == [SystemExit]


class Held(Taken):
    """A writer that is full and held up. Each look at it may be interrupted, as by a signal."""

    bytes_in_flight = 2000

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self._interrupt = interrupt

    @property
    def is_held_up(self) -> bool:
        interrupt, self._interrupt = self._interrupt, nothing_else
        interrupt()
        return True

    async def drain(self) -> None:
        """There is room again."""


def nothing_else() -> None:
    """Do nothing."""


def test_a_handler_of_a_signal_may_add_while_its_thread_waits_for_room() -> None:
    background = LoopThread()
    added: list[bytes] = []

    def add(payload: bytes, entry_id: int | None) -> asyncio.Future[int]:
        added.append(payload)
        return background.loop.create_future()

    inbox: SubmitQueue[int] = SubmitQueue(
        background, Held(lambda: inbox.put(b"by the handler")), add, cast("Any", None)
    )
    try:
        inbox.put(bytes(1000))
        background.run(inbox.emptied())
        done_in_time(lambda: inbox.put(b"by the thread"))
        background.run(inbox.emptied())
    finally:
        background.stop()
    assert added[1:] == [b"by the handler", b"by the thread"]


def test_a_payload_that_cannot_be_added_fails_and_the_next_one_is_added() -> None:
    background = LoopThread()

    def add(payload: bytes, entry_id: int | None) -> asyncio.Future[int]:
        if payload == b"x":
            raise MemoryError("no memory for it")
        future: asyncio.Future[int] = background.loop.create_future()
        future.set_result(len(payload))
        return future

    inbox: SubmitQueue[int] = SubmitQueue(background, cast("Any", Taken()), add, cast("Any", None))
    try:
        refused, taken = inbox.put(b"x"), inbox.put(b"yy")
        assert taken.result(60) == 2
        with pytest.raises(MemoryError):
            refused.result(60)
    finally:
        background.stop()
