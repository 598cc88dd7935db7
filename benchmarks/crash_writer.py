"""The writer of the crash runs: distinguishable entries, a full window, a record of acknowledgements.

Owns the contents of the entries, so that a reader knows the content of each. As a program it writes to a
ledger until it is killed. It prints the ledger's id. Then it prints the last entry acknowledged, once for
each sweep of acknowledgements:

    python -m benchmarks.crash_writer URI SEED IN_FLIGHT
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING

import uvloop

import client_aio

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY_BYTES_MAX = 4096
BURST_MAX = 40


def payload(seed: int, entry_id: int) -> bytes:
    """Return the payload of entry `entry_id` of that seed's run: most name themselves, some are empty."""
    size = (seed * 7919 + entry_id * 104_729) % ENTRY_BYTES_MAX
    if size < 64:
        return b""
    name = b"run %d entry %d;" % (seed, entry_id)
    return (name * (size // len(name) + 1))[:size]


class Writer:
    """Keeps a window of adds full, and counts. `acknowledged` is the last entry acknowledged, −1 for none.

    Adds come in bursts of uneven size, one burst in an event-loop iteration. Several blocks are therefore in
    flight at any time, each in another state.
    """

    def __init__(self, ledger: client_aio.LedgerWriter, seed: int, in_flight: int) -> None:
        self._ledger, self._seed, self._in_flight = ledger, seed, in_flight
        self._bursts = random.Random(seed)
        self._room = asyncio.Event()
        self.issued = 0
        self.acknowledged = -1
        self.out_of_order = 0
        self.failure: BaseException | None = None
        self.watchers: list[Callable[[], None]] = []

    async def run(self, entries: int | None = None) -> None:
        """Write until an add fails (see `failure`), or until so many entries are acknowledged."""
        while self.failure is None and (entries is None or self.acknowledged < entries - 1):
            self._room.clear()
            room = self._in_flight - (self.issued - self.acknowledged - 1)
            if entries is not None:
                room = min(room, entries - self.issued)
            for _ in range(min(room, self._bursts.randint(1, BURST_MAX))):
                self._add()
            if room > BURST_MAX:
                await asyncio.sleep(0)
            else:
                await self._room.wait()

    def _add(self) -> None:
        entry_id, self.issued = self.issued, self.issued + 1
        try:
            future = self._ledger.add_entry(payload(self._seed, entry_id))
        except client_aio.BookKeeperError as error:
            self.failure = error
            self._room.set()
            return
        future.add_done_callback(lambda future: self._done(entry_id, future))

    def _done(self, entry_id: int, future: asyncio.Future[int]) -> None:
        error = future.exception()
        if error is not None:
            self.failure = self.failure or error
        elif future.result() == entry_id == self.acknowledged + 1:
            self.acknowledged = entry_id
        else:
            self.out_of_order += 1
        for watcher in self.watchers:
            watcher()
        self._room.set()


async def main() -> None:
    uri, seed, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async with client_aio.connect(uri) as client, client.create_ledger() as ledger:
        print("ledger", ledger.ledger_id, flush=True)
        writer = Writer(ledger, seed, in_flight)
        loop, is_told = asyncio.get_running_loop(), True

        def tell() -> None:
            nonlocal is_told
            is_told = True
            print("acknowledged", writer.acknowledged, flush=True)

        def watch() -> None:
            nonlocal is_told
            if is_told:
                is_told = False
                loop.call_soon(tell)

        writer.watchers.append(watch)
        # A little at random, so that not every run dies in the same phase of its groups.
        await asyncio.sleep(random.Random(seed).uniform(0, 0.01))
        await writer.run()
        raise writer.failure or AssertionError("the window is never empty")


if __name__ == "__main__":
    uvloop.run(main())
