"""Long polls as the server runs them: the register (`bookie_aio.core.long_polls`), with connections and
timers.

Invariant: each poll is answered once, by the LAC that it waited for, by its timer or by the bookie's end;
or not at all, when its connection is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.core.long_polls import PollRegister

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator, KeysView

    from bookie_aio.server.responder import Peer


class _Poll:
    """One long poll that waits."""

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
        """Take what answers a poll, with whatever there is, given peer, request id and ledger id."""
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
        """Return the ledgers somebody waits for."""
        return self._register.ledgers

    def add(self, peer: Peer, request_id: int, ledger_id: int, known_lac: int, wait_s: float) -> bool:
        """Let a request wait; gives False where too many do, on its connection or on all of them."""
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
        """Answer those whose LAC has come."""
        for poll in self._register.wake(ledger_id, lac):
            self._end(poll)
            self._answer(poll.peer, poll.request_id, ledger_id)

    def forget(self, peer: Peer) -> None:
        """Drop the polls of a connection that is gone."""
        for poll in self._polls_of.pop(peer, ()):
            assert poll.timer is not None
            poll.timer.cancel()
            self._register.drop(poll.ledger_id, poll)

    def drain(self) -> Iterator[tuple[Peer, int]]:
        """Take out all polls, giving peer and request id of each."""
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
