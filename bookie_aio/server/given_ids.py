"""Ledger ids that have been given out: nothing is stored for any other id.

A stranger can name any id in a fence or a DELETE. A record of each would be kept for ever, and a tombstone of
an id that comes later would refuse its ledger. So a request that stores something waits here, where its id is
at or above the id counter as last read. The counter is read again, and the request goes on, or is refused. A
client's id is never refused wrongly: the counter was raised before the id was handed out.

Owns the reading of the counter, and the requests that wait for it. One reading serves all requests that came
before it began. Readings follow one another at a bounded rate, whoever asks, and take a tenth of the time.

A connection that waits handles no other request. Adds of writers are the exception. Some of them wait aside,
since the adds of other ledgers behind them must go on while the metadata store is away.

Invariant: requests for one ledger that came over one connection go on in their order (rule 3).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from bookie_aio.server.responder import WAITING_BYTES
from metadata.errors import BookKeeperError, MetadataUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from bookie_aio.server.responder import Peer

_READ_EVERY_S = 0.005
"""The least time between the beginnings of two readings."""
_READ_EVERY_S_MAX = 0.08
"""The same where a reading takes long: ten times as long as the last one took, but no more than this."""
_ASIDE_MAX = 128
"""Adds that wait aside, over all connections. They go on in one event-loop iteration."""
_ASIDE_OF_PEER_MAX = 64
_PATIENCE_S = 3.0
"""The time after which a reading that got no answer fails the requests that wait."""


GoOn = Callable[[str | None], None]


class _Waiting:
    """A request that waits."""

    __slots__ = ("go_on", "ledger_id", "peer", "size")

    def __init__(self, peer: Peer, ledger_id: int, size: int, go_on: GoOn) -> None:
        self.peer = peer
        self.ledger_id = ledger_id
        self.size = size
        self.go_on = go_on


class GivenIds:
    """The ids that have been given out, as far as this bookie knows.

    `below` is the id below which all ids are taken to have been given out.
    """

    def __init__(self, below: int, read: Callable[[], Awaitable[int]]) -> None:
        """`read` returns the counter, or raises MetadataError; see `BookieAge.learn_ids`."""
        self.below = below
        self.readings = 0
        self._read = read
        self._waiting: list[_Waiting] = []  # aside
        self._aside: Counter[Peer] = Counter()
        self._interval_s = _READ_EVERY_S
        self._next: asyncio.Future[None] | None = None  # the reading that has not begun
        self._reading: asyncio.Task[None] | None = None
        self._began_at = float("-inf")
        self._read_at = float("-inf")  # the beginning of the last reading that succeeded

    def wait(self, peer: Peer, ledger_id: int, size: int, go_on: GoOn, *, may_wait_aside: bool) -> None:
        """Let the present request of a connection wait for a reading that begins after the request came.

        Args:
            peer: the connection.
            ledger_id: the ledger of the request, at or above `below`.
            size: the bytes of the request's body. They count against the peer's limits.
            go_on: called with None where the id has been given out, else with the reason for a refusal. The
                reason is empty where the id has not been given out. It may be called within this call.
            may_wait_aside: the connection goes on with its next requests meanwhile, where there is room.
        """
        if peer.received_at < self._read_at:  # the last reading began after the request had arrived
            go_on("")
            return
        reading = self._schedule()
        if may_wait_aside and len(self._waiting) < _ASIDE_MAX and self._aside[peer] < _ASIDE_OF_PEER_MAX:
            peer.hold(size + WAITING_BYTES)
            self._aside[peer] += 1
            self._waiting.append(_Waiting(peer, ledger_id, size + WAITING_BYTES, go_on))
            return

        def read() -> None:
            error = reading.exception()
            assert error is None or isinstance(error, BookKeeperError)
            go_on(self._refusal(ledger_id, error))

        peer.go_on_after(reading, read)

    async def covers(self, ledger_id: int) -> bool:
        """Return whether an id has been given out; reads the counter where that is not known.

        Raises:
            MetadataError: the counter cannot be read.
        """
        if ledger_id < self.below:
            return True
        await self.read_again()
        return ledger_id < self.below

    async def read_again(self, *, unless_read_within_s: float = 0.0) -> None:
        """Read the counter, in a reading that begins after this call, unless one was begun shortly before.

        Raises:
            MetadataError: the counter cannot be read.
        """
        if asyncio.get_running_loop().time() - self._read_at < unless_read_within_s:
            return
        await asyncio.shield(self._schedule())

    def _schedule(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
        if self._reading is None or self._reading.done():
            self._reading = loop.create_task(self._read_on())
        return self._next

    async def _read_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self._next is not None:
            await asyncio.sleep(max(0.0, self._began_at + self._interval_s - loop.time()))
            self._began_at = loop.time()
            done, self._next = self._next, None
            served, self._waiting = self._waiting, []
            error: BookKeeperError | None = None
            is_cancelled = False
            self.readings += 1
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self.below = max(self.below, await self._read())
            except BookKeeperError as raised:
                error = raised
            except TimeoutError:
                error = MetadataUnavailableError("the metadata store did not return the id counter in time")
            except (Exception, asyncio.CancelledError) as raised:  # the requests that wait must be answered
                error = MetadataUnavailableError(f"the id counter could not be read: {raised!r}")
                is_cancelled = isinstance(raised, asyncio.CancelledError)
            took_s = loop.time() - self._began_at
            self._interval_s = min(max(10 * took_s, _READ_EVERY_S), _READ_EVERY_S_MAX)
            if error is None:
                self._read_at = self._began_at
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()  # it may be that nobody awaits it
            # The ids of some requests that came during the reading are covered by it as well. They go on now:
            # a later request for the same ledger does not wait any more, and must not overtake them.
            late = self._waiting
            self._waiting = [each for each in late if each.ledger_id >= self.below]
            for each in (*served, *(each for each in late if each.ledger_id < self.below)):
                each.peer.release(each.size)
                self._aside[each.peer] -= 1
                if not self._aside[each.peer]:
                    del self._aside[each.peer]
                if each.peer.is_open:
                    each.go_on(self._refusal(each.ledger_id, error))
            if is_cancelled:
                raise asyncio.CancelledError

    def _refusal(self, ledger_id: int, error: BookKeeperError | None) -> str | None:
        if ledger_id < self.below:
            return None
        return "" if error is None else str(error)

    async def close(self) -> None:
        """Stop reading. Requests of a reading under way are refused; those behind it are not answered.

        Their connections are about to be closed.
        """
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        for each in self._waiting:
            each.peer.release(each.size)
        self._waiting = []
        self._aside.clear()
