"""The wait for the last copies of entries (guaranteed write quorum), while others go on adding."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from client_aio.core.add_window import AddWindow
from client_aio.ledger.replication import CopiesWatch
from metadata.awake import AwakeClock
from metadata.errors import NotEnoughBookiesError
from tests.support.busyloop import BusyLoop, run_busy

if TYPE_CHECKING:
    from client_aio.core.add_window import Send

TIMEOUT_S = 2.0


class Copied:
    """A ledger on three bookies, of which the third stores nothing unless the test says so."""

    def __init__(self) -> None:
        self.window: AddWindow[None] = AddWindow(
            ledger_id=7, content_term=0, ensemble_size=3, write_quorum=3, ack_quorum=2,
            guaranteed_write_quorum=True,
        )  # fmt: skip
        self.owed: list[Send] = []
        self.clock = AwakeClock()
        self.clock.start()
        replicator = SimpleNamespace(window=self.window, describe_owing=lambda: "b3")
        self.watch = CopiesWatch(cast("Any", replicator), TIMEOUT_S, self.clock)

    def add(self) -> None:
        self.window.add(b"x", None)
        for send in self.window.flush():
            if send.seat == 2:
                self.owed.append(send)
            else:
                self.window.acknowledged(send)

    async def add_on(self) -> None:
        """Add twice a second, as another task of the application does."""
        while True:
            await asyncio.sleep(0.5)
            self.add()

    async def drain(self) -> None:
        while True:
            await self.watch.wait(asyncio.Event())

    async def until_over(self) -> str:
        with pytest.raises(NotEnoughBookiesError) as caught:
            await self.drain()
        return str(caught.value)


def test_a_wait_for_copies_ends_though_another_task_adds() -> None:
    async def main(loop: BusyLoop) -> None:
        copied = Copied()
        copied.add()
        adding = asyncio.create_task(copied.add_on())
        async with asyncio.timeout(2 * TIMEOUT_S):  # of virtual time
            why = await copied.until_over()
        assert "entries 0 to 0 " in why
        async with asyncio.timeout(TIMEOUT_S / 4):  # Nothing has come since.
            assert "entries 0 to 0 " in await copied.until_over()
        adding.cancel()
        copied.clock.stop()

    run_busy(main)


def test_copies_of_the_entries_waited_for_are_progress() -> None:
    async def main(loop: BusyLoop) -> None:
        copied = Copied()
        for _ in range(4):
            copied.add()
        adding = asyncio.create_task(copied.add_on())
        waiting = asyncio.ensure_future(copied.until_over())
        for _ in range(4):
            await asyncio.sleep(0.75 * TIMEOUT_S)
            assert not waiting.done()
            copied.window.acknowledged(copied.owed.pop(0))
        async with asyncio.timeout(2 * TIMEOUT_S):
            why = await waiting
        assert why.startswith("entries 4 to ")
        adding.cancel()
        copied.clock.stop()

    run_busy(main)
