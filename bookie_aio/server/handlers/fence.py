"""Fence: how a request with a term is refused, or raises the term of its ledger (rule 7).

Owns the step from the verdict on a term to the append of a higher one. Owns the answer to a term below the
held one, too. The verdict itself is `bookie_aio.core.fencing`'s. READ and READ_LAC with a term, WRITE_LAC,
write-backs and final repairs use `admit`. An ordinary ADD has checks of its own between the verdict and the
append (`add`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.core.fencing import Verdict, judge
from bookie_aio.server.responder import WAITING_BYTES
from bookie_aio.wire.messages import Status

if TYPE_CHECKING:
    from bookie_aio.metrics import RequestMetrics
    from bookie_aio.server.responder import Peer, Responder
    from bookie_aio.storage.engine import Engine
    from bookie_aio.wire.messages import Op
    from metadata.errors import StorageError


class Fence:
    """Raises the terms of ledgers at this bookie."""

    def __init__(self, engine: Engine, responder: Responder, metrics: RequestMetrics) -> None:
        self._engine = engine
        self._responder = responder
        self._metrics = metrics

    def admit(self, peer: Peer, op: Op, request_id: int, ledger_id: int, term: int) -> bool:
        """Judge the term of a request, and append it where it is above the held term.

        Return whether the request may go on. Where it may not, the refusal is already on its way.

        Raises:
            DiskFullError: there is no room for the term; nothing was appended.
        """
        held = self._engine.term(ledger_id)
        verdict = judge(held, term)
        if verdict is Verdict.REFUSE:
            self.refuse_term(peer, op, request_id, held)
            return False
        if verdict is Verdict.RAISE:
            self.raise_term(peer, ledger_id, term)
        return True

    def raise_term(self, peer: Peer, ledger_id: int, term: int) -> None:
        """Append a term above the held one. Raises DiskFullError.

        The append has no answer of its own. The caller's answer waits for its own append, or for a barrier,
        behind this one.
        """
        self._metrics.fences += 1
        self._engine.append_term(ledger_id, term, lambda error: peer.release(WAITING_BYTES))
        peer.hold(WAITING_BYTES)

    def refuse_term(self, peer: Peer, op: Op, request_id: int, held: int) -> None:
        """Answer INVALID_TERM with the held term, once that term is durable.

        Rule 3: the client concludes from the answer that the bookie keeps this term.
        """
        self._metrics.refused_terms += 1

        def answer(error: StorageError | None) -> None:
            if error is None:
                reason = f"this bookie holds term {held} for the ledger"
                self._responder.refuse(peer, op, request_id, Status.INVALID_TERM, reason, held)
            else:
                self._responder.answer_storage_error(peer, op, request_id, error)

        self._responder.after_barrier(peer, answer)
