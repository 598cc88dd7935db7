"""Ledger authorisation: the authoriser of a bookie, which keeps the locks of ledgers in its storage.

Invariant: the verdict on a token, the append of the lock and the append of the request itself are one step
(`dispatcher`). The lock is appended first, so it is durable no later than the first change made under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bookie_aio.core.authorisation import Access, judge_token, ledger_at_stake, lock_of
from bookie_aio.server.responder import WAITING_BYTES

if TYPE_CHECKING:
    from bookie_aio.server.responder import Peer
    from bookie_aio.storage.engine import Engine
    from bookie_aio.wire.messages import Message


class Authoriser(Protocol):
    """Decides whether a request may be carried out."""

    def authorise(self, peer: Peer, request: Message, auth: bytes | None) -> str | None:
        """Return None to allow the request, or the reason for refusing it."""


class LedgerAuthoriser:
    """Decides by the locks of ledgers, as `bookie_aio.core.authorisation` explains."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def authorise(self, peer: Peer, request: Message, auth: bytes | None) -> str | None:
        """Return None to allow the request, or the reason for refusing it. Raises DiskFullError."""
        ledger_id = ledger_at_stake(request, has_token=auth is not None)
        if ledger_id is None:
            return None
        lock = self._engine.lock(ledger_id)
        if auth is None and not lock:
            return None  # nearly every add: the ledger has no password
        access = judge_token(lock, auth)
        if access is Access.REFUSE:
            return f"ledger {ledger_id} has a password here, and the request {_fault(auth)}"
        if access is Access.LOCK and not self._engine.is_deleted(ledger_id):
            assert auth is not None
            # Counted on its own: the request itself may yet be refused, and would count nothing then.
            self._engine.append_lock(ledger_id, lock_of(auth), lambda error: peer.release(WAITING_BYTES))
            peer.hold(WAITING_BYTES)
        return None


def _fault(auth: bytes | None) -> str:
    return "carries no token" if auth is None else "carries a token that is not of this password"
