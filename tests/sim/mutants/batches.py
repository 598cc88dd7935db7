"""Planted bugs of batches: adds that share a future, and wait for room together."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_WRITERS = ("all-uses", "cut-short", "racing-closers")

MUTANTS = [
    Mutant(
        350, "the future of a batch is done with its first entry",
        (Edit("client_aio.ledger.futures:BatchAdd.acknowledged",
              "if not self.left and not self.future.done():", "if not self.future.done():"),),
        _WRITERS,
    ),
    Mutant(
        351, "a batch that is partly acknowledged fails as not done",
        (Edit("client_aio.ledger.futures:BatchAdd.fail",
              "Outcome.UNKNOWN if number or self.is_sent else Outcome.NOT_DONE", "Outcome.NOT_DONE"),),
        ("racing-closers", "all-uses"),
    ),
    Mutant(
        352, "it is forgotten that a batch was sent when its writer fails",
        (Edit("client_aio.ledger.futures:note_sent", "add.is_sent = True", "pass"),),
        ("racing-closers", "all-uses"),
    ),
    Mutant(
        353, "a batch that comes while the log rolls loses all records but its first",
        (Edit("client_aio.log.healing:Healer._take_run", "for data in payloads:",
              "for data in payloads[:1]:"),),
        ("duelling-logs", "log-crashes"),
    ),
    Mutant(
        354, "a single entry overtakes a batch that waits for room",
        (Edit("client_aio.ledger.waiting_adds:WaitingAdds.must_hold",
              "self.is_busy or not self._queue.is_piece(payloads)", "not self._queue.is_piece(payloads)"),),
        _WRITERS,
    ),
    Mutant(
        355, "a batch that is taken in pieces loses its tail",
        (Edit("client_aio.core.add_window:AddQueue.take",
              "if first.taken < len(first.payloads):\n            break", "pass"),),
        _WRITERS,
    ),
    Mutant(
        356, "what waits behind overdue adds goes on, and overtakes them",
        (Edit("client_aio.unbounded.writer:UnboundedLedgerWriter._give_up",
              ", *self._waiting.give_up()", ""),),
        tests=("tests/integration/test_batches.py", "-k", "overdue"),
    ),
    Mutant(
        357, "a failed batch counts all of its entries as acknowledged",
        (Edit("client_aio.ledger.futures:BatchAdd.fail", "number = self.count - self.left",
              "number = self.count"),),
        _WRITERS,
    ),
    Mutant(
        358, "a batch takes the acknowledgements of the adds behind it",
        (Edit("client_aio.ledger.futures:complete_runs", "run = min(add.left, count - index)",
              "run = count - index"),
         Edit("client_aio.ledger.futures:complete_runs", "while adds[index + run - 1] is not add:",
              "while False:")),
        _WRITERS,
    ),
    Mutant(
        359, "a flush waits for the first of the adds that wait for room",
        (Edit("client_aio.ledger.waiting_adds:WaitingAdds.passed",
              "self._passed.wait_for(self._queue.queued)",
              "self._passed.wait_for(self._queue.taken + 1)"),),
        _WRITERS,
    ),
    Mutant(
        360, "a bulk whose iterable raises leaves unsent what it took before",
        (Edit("client_aio.ledger.writer:LedgerWriter._take_all",
              "    finally:\n        self._replicator.schedule_flush()", "    finally:\n        pass"),),
        tests=("tests/integration/test_writer_interleavings.py", "-k", "iterable_could"),
    ),
]  # fmt: skip
