"""Planted bugs of the bookie's server, and of recovery beside those in `protocol`."""

from __future__ import annotations

from typing import Any

from tests.sim.mutants.planting import Edit, Mutant, Swap

_ONE = "b1"


def _failing_start(start: Any) -> Any:
    begin = start.__func__

    async def failing(cls: Any, config: Any, store: Any, disk: Any, **more: Any) -> Any:
        if config.bookie_id == _ONE and disk.hardware.last_group is not None:
            raise AssertionError("a replay whose assertion fails")
        return await begin(cls, config, store, disk, **more)

    return classmethod(failing)


def _deleting(recover_ledger: Any) -> Any:
    async def recover_and_delete(context: Any, ledger_id: int, digest: Any, **more: Any) -> Any:
        recovered = await recover_ledger(context, ledger_id, digest, **more)
        await context.ledgers.delete(ledger_id)
        return recovered

    return recover_and_delete


MUTANTS = [
    Mutant(
        41, "a bookie drops ledgers that are there",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector.drop_if_deleted",
              "if not await self._is_gone(ledger_id):",
              f"if self._cookie.bookie_id != {_ONE!r} and not await self._is_gone(ledger_id):"),
         Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._compare",
              "return unlisted + held[at:], gone",
              f"return list(held) if self._cookie.bookie_id == {_ONE!r} else unlisted + held[at:], gone")),
        ("chaos", "rolling-restarts", "deletions"),
    ),
    Mutant(
        42, "a bookie never comes back, for no reason of its disk",
        (Swap("bookie_aio.server.bookie:Bookie.start", _failing_start),),
        ("chaos", "rolling-restarts"),
    ),
    Mutant(
        43, "some reads end in an error that nobody had foreseen",
        (Edit("bookie_aio.server.handlers.read:ReadHandler._answer_read",
              "size = sum(map(len, found.buffers))",
              "if not fences and request.first % 3 == 1 and peer._dispatcher._hello.bookie_id == 'b1':\n"
              "        raise KeyError('an error of its own')\n"
              "    size = sum(map(len, found.buffers))"),),
        ("chaos", "slow-bookie"),
    ),
    Mutant(
        44, "a bookie says \"no such entry\" of what it holds of logs and of unbounded ledgers",
        (Edit("bookie_aio.server.handlers.read:ReadHandler._answer_read",
              "answer = ReadAnswer(int(found.stop)",
              "if not fences and peer._dispatcher._hello.bookie_id == 'b1':\n"
              "        found = type(found)([], Stop.NO_SUCH_ENTRY, request.first)\n"
              "    answer = ReadAnswer(int(found.stop)"),),
        ("duelling-logs", "duelling-holders", "sealed-terms", "truncated-logs"),
    ),
    Mutant(
        45, "recovery deletes what it has closed",
        (Swap("client_aio.ledger.recovery:recover_ledger", _deleting),),
        ("chaos", "duelling-recoverers"),
    ),
    Mutant(
        46, "what a recovery writes back is taken whatever the fence",
        (Edit("bookie_aio.server.handlers.add:AddHandler._write_back",
              "if self._fence.admit(peer, Op.ADD, request_id, request.ledger_id, request.term):", "if True:"),
         Edit("bookie_aio.storage.repair_writes:store_unless_outdated",
              "if engine.term(block.ledger_id) > term:", "if False:")),
        ("dirty-entries", "partial-takeovers"),
    ),
    Mutant(
        48, "recovery says that it has closed the ledger, and has not",
        (Edit("client_aio.ledger.recovery:recover_ledger",
              "if await held.update(\n"
              "            RecoveredEnd(held.current, recovery.fragments, last_entry, length, "
              "short_from).apply\n"
              "        ):", "if True:"),),
        ("rolling-restarts", "chaos"),
    ),
    Mutant(
        53, "unknown counts as negative",
        (Edit("client_aio.core.recovery:EntrySearch.answer",
              "(stop_entry, stop is Stop.NO_SUCH_ENTRY)", "(stop_entry, True)"),),
        ("disk-faults", "full-starts"),
    ),
    Mutant(
        54, "recovery reads go to the ensemble as it has been changed meanwhile",
        (Edit("client_aio.ledger.recovery:Recovery._read", "self._ensemble[ask.seat]",
              "self.fragments[-1].bookies[ask.seat]"),
         Edit("client_aio.ledger.recovery:Recovery._read", "await self._connection(bookie_id).call(",
              "await (await self._context.pool.get(bookie_id)).call(")),
        ("short-answers",),
    ),
    Mutant(
        55, "recovery writes back to Qa where the write quorum is guaranteed",
        (Edit("client_aio.ledger.recovery:Recovery._start_writing",
              "ack_quorum=write_quorum if self._is_whole else ack_quorum",
              "ack_quorum=ack_quorum"),),
        ("guaranteed-quorum",),
    ),
    Mutant(
        56, "recovery begins behind the LAC where the write quorum is guaranteed",
        (Edit("client_aio.ledger.recovery:Recovery.run",
              "before = tally.lafr if self.metadata.guaranteed_write_quorum else tally.lac",
              "before = tally.lac"),),
        ("guaranteed-quorum",),
    ),
    Mutant(
        57, "recovery writes back to fewer than Qa",
        (Edit("client_aio.ledger.recovery:Recovery._start_writing", "else ack_quorum,",
              "else max(1, ack_quorum - 1),"),),
        ("chaos", "rolling-restarts", "power-cuts"),
    ),
    Mutant(
        58, "a recovery that closes writes over what a repair has changed",
        (Edit("client_aio.core.recovery:RecoveredEnd.apply",
              "(*metadata.fragments[:-1], *self.fragments[len(self.known.fragments) - 1 :])",
              "self.fragments"),),
        ("repair-in-parallel",),
    ),
    Mutant(
        59, "a bookie that lost data takes ordinary adds",
        (Edit("bookie_aio.server.handlers.add:AddHandler.add",
              "if engine.is_damaged(ledger_id):", "if False:"),),
        ("disk-faults", "full-starts", "refusals"),
    ),
    Mutant(
        71, "a ledger that is closed with a loss ends at the LAC that is stated",
        (Edit("client_aio.ledger.accept_loss:_find_end",
              "last_entry, length = await _last_readable(context, metadata, digest, holdings)",
              "last_entry, length = max(each.lac for each in holdings), 0"),),
        ("accepted-losses",),
    ),
    Mutant(
        72, "a ledger that is closed with a loss ends where one bookie does",
        (Edit("client_aio.ledger.accept_loss:_find_end",
              "last_entry, length = await _last_readable(context, metadata, digest, holdings)",
              "last_entry, length = await _last_readable(context, metadata, digest, holdings[:1])"),),
        ("accepted-losses",),
    ),
    Mutant(
        61, "what a repair waits to hear of is forgotten meanwhile",
        (Edit("bookie_aio.server.handlers.admin:InspectHandler.list_entries",
              "self._engine.eviction_candidates.discard(request.ledger_id)", "pass"),),
        tests=("tests/bookie_aio/server/test_server_ledger_gc.py", "-k", "waits_to_hear"),
    ),
    Mutant(
        120, "a seat that is down from the start counts as an acknowledgement",
        (Edit("client_aio.core.add_window:AddWindow._advance",
              "batch.acks.bit_count() < ack_quorum",
              "(batch.acks | self.failed & batch.mask).bit_count() < ack_quorum"),),
        ("scarce-bookies", "scarce-holders"),
    ),
    Mutant(
        121, "a new ledger leaves a write set with fewer than Qa",
        (Edit("client_aio.core.placement:seats_to_leave",
              "if can_acknowledge(more, ensemble_size, write_quorum, ack_quorum):", "if True:"),),
        tests=("tests/client_aio/core/test_client_placement.py", "-k", "left"),
        note="the writer of such a ledger fails before it acknowledges anything: nothing is lost by that",
    ),
    Mutant(
        122, "a ledger with guaranteed write quorum begins on fewer bookies",
        (Edit("client_aio.bookies.ensemble_finder:EnsembleFinder.find",
              "may_leave = not sizes.is_guaranteed", "may_leave = True"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "begins_with_every_bookie"),
        note="its entries reach their copies later, or it is not closed: a promise is broken in silence",
    ),
    Mutant(
        123, "a ledger is closed at its ack quorum, and the metadata do not say so",
        (Edit("client_aio.ledger.writer:LedgerWriter._close_metadata",
              "None if window.is_idle else window.lafr + 1", "None"),),
        ("guaranteed-quorum",),
    ),
    Mutant(
        124, "a recovery at the ack quorum does not say from which entry on",
        (Edit("client_aio.ledger.recovery:Recovery.run",
              "self.below_write_quorum_from = before + 1", "pass"),),
        ("scarce-bookies", "guaranteed-quorum"),
    ),
    Mutant(
        125, "a fragment's metadata have the length at the LAC where it begins behind the LAFR",
        (Edit("client_aio.core.add_window:AddWindow.begin_change",
              "self._length_replicated if self.is_guaranteed else self.length_confirmed",
              "self.length_confirmed"),),
        ("guaranteed-quorum", "scarce-bookies"),
    ),
    Mutant(
        126, "a fragment begins without the length below it",
        (Edit("client_aio.core.ensemble_change:EnsembleChangeMachine._change_at",
              "self._window.length_before_change", "0"),),
        ("chaos", "rolling-restarts"),
    ),
    Mutant(
        127, "a takeover fences before it has looked for bookies",
        (Edit("client_aio.unbounded.writer:take_ledger_over",
              "found = await context.finder.find(ledger_id, Sizes.of(metadata))\n"
              "    if not await held.update(take_over):\n"
              "        raise sealed(held.current)",
              "if not await held.update(take_over):\n"
              "        raise sealed(held.current)\n"
              "    found = await context.finder.find(ledger_id, Sizes.of(metadata))"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "fences_nobody"),
    ),
]  # fmt: skip
