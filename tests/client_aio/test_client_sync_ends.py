"""What is read blocking and left unfinished: at the end of the process, in a fork, and as garbage."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest

from client_aio.sync.background import Background, Handle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SCRIPT = """
import os, sys
from client_aio.sync.background import Handle, get_background

async def count():
    for number in range(9):
        yield number

numbers = Handle(get_background())._iterate(count)
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


def test_a_reading_that_is_collected_on_the_loop_is_closed() -> None:
    closed = asyncio.Event()

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(9):
                yield number
        finally:
            await asyncio.sleep(0)
            closed.set()

    background = Background()
    readings = [Handle(background)._iterate(count)]
    assert next(readings[0]) == 0

    async def collect() -> None:
        readings.clear()
        await closed.wait()

    try:
        background.run(asyncio.wait_for(collect(), 60))
    finally:
        background.stop()
