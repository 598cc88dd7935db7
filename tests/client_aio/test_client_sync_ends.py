"""What is read blocking and left unfinished: at the end of the process, in a fork, and as garbage."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest

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


@pytest.mark.parametrize("how", ["end", "fork"])
async def test_a_process_ends_though_a_reading_was_left_unfinished(how: str) -> None:
    arguments = ["-W", "ignore::DeprecationWarning", "-c", SCRIPT, how]
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
