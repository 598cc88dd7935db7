"""Long polls with connections and timers, over the register of `bookie_aio.core.long_polls`.

Invariant: each poll ends exactly once. Its LAC, its timer or the shutdown of the bookie ends it with an
answer; the loss of its connection ends it without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.core.long_polls import PollRegister

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, KeysView

    from bookie_aio.server.responder import Peer


class _Poll:
    """A long poll that waits."""

    __slots__ = ("ledger_id", "peer", "request_id", "timer")

    def __init__(self, peer: Peer, request_id: int, ledger_id: int) -> None:
        self.peer = peer
        self.request_id = request_id
        self.ledger_id = ledger_id
        self.timer: asyncio.TimerHandle | None = None


class LongPolls:
    """All long polls that wait, over all connections."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection_polls_max: int,
        polls_max: int,
        answer: Callable[[Peer, int, int], None],
    ) -> None:
        """`answer` is called with peer, request id and ledger id, and answers with the present LAC."""
        self._loop = loop
        self._connection_polls_max = connection_polls_max
        self._polls_max = polls_max
        self._answer = answer
        self._register: PollRegister[_Poll] = PollRegister()
        self._polls_of: dict[Peer, set[_Poll]] = {}

    def __len__(self) -> int:
        return len(self._register)

    @property
    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that have polls."""
        return self._register.ledgers

    def add(self, peer: Peer, request_id: int, ledger_id: int, known_lac: int, wait_s: float) -> bool:
        """Let a request wait. Return False where too many wait, on its connection or on all of them."""
        polls = self._polls_of.get(peer, set())
        if len(polls) >= self._connection_polls_max or len(self) >= self._polls_max:
            return False
        self._polls_of[peer] = polls
        poll = _Poll(peer, request_id, ledger_id)
        poll.timer = self._loop.call_later(wait_s, self._timed_out, poll)
        polls.add(poll)
        self._register.add(ledger_id, known_lac, poll)
        return True

    def moved(self, ledger_id: int, lac: int) -> None:
        """Answer the polls of a ledger whose known LAC is below `lac`."""
        for poll in self._register.wake(ledger_id, lac):
            self._end(poll)
            self._answer(poll.peer, poll.request_id, ledger_id)

    def forget(self, peer: Peer) -> None:
        """Drop the polls of a lost connection, without answers."""
        for poll in self._polls_of.pop(peer, ()):
            assert poll.timer is not None
            poll.timer.cancel()
            self._register.drop(poll.ledger_id, poll)

    def drain(self) -> Iterator[tuple[Peer, int]]:
        """Take out all polls; yields peer and request id of each."""
        for poll in self._register.drain():
            self._end(poll)
            yield poll.peer, poll.request_id

    def _timed_out(self, poll: _Poll) -> None:
        if self._register.drop(poll.ledger_id, poll):
            self._end(poll)
            self._answer(poll.peer, poll.request_id, poll.ledger_id)

    def _end(self, poll: _Poll) -> None:
        assert poll.timer is not None
        poll.timer.cancel()
        polls = self._polls_of[poll.peer]
        polls.discard(poll)
        if not polls:
            del self._polls_of[poll.peer]
