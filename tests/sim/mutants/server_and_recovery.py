"""Planted bugs of the bookie's server, and of recovery beside those in `protocol`."""

from __future__ import annotations

from typing import Any

from bookie_aio.server.backpressure import _in_slow_lane
from tests.sim.mutants.planting import Edit, Mutant, Swap

_ONE = "b1"
_BURIED_TESTS = "tests/integration/test_buried_ids.py"


def _failing_start(start: Any) -> Any:
    begin = start.__func__

    async def failing(cls: Any, config: Any, store: Any, disk: Any, **more: Any) -> Any:
        if config.bookie_id == _ONE and disk.hardware.last_group is not None:
            raise AssertionError("a replay whose assertion fails")
        return await begin(cls, config, store, disk, **more)

    return classmethod(failing)


def _as_a_generator(timed: Any) -> Any:
    def timed_by_a_generator(lane: Any, work: Any, price: float) -> Any:
        return _in_slow_lane(work, lane._effort, lambda began: lane._spend(began, price))

    return timed_by_a_generator


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
              f"return (list(held) if self._cookie.bookie_id == {_ONE!r} else unlisted + held[at:]), gone")),
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
        320, "asyncio's own transports get several buffers by writelines",
        (Edit("metadata.transports:gathering_write", "if not isinstance(transport, asyncio.Transport):",
              "if True:"),),
        tests=("tests/metadata/test_transports.py", "-k", "trusted_with_writelines"),
    ),
    Mutant(
        321, "a read runs as a generator, which only Python 3.11 takes",
        (Swap("bookie_aio.server.backpressure:SlowLane.timed", _as_a_generator),),
        ("chaos",),
    ),
    Mutant(
        44, "a bookie says \"no such entry\" of what it holds of logs and of unbounded ledgers",
        (Edit("bookie_aio.server.handlers.read:ReadHandler._answer_read",
              "    stop = found.stop\n",
              "    if not fences and peer._dispatcher._hello.bookie_id == 'b1':\n"
              "        found = type(found)([], Stop.NO_SUCH_ENTRY, request.first)\n"
              "    stop = found.stop\n"),),
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
        (Edit("client_aio.ledger.recovery:Recovery._read", "self._scope.bookies[ask.seat]",
              "self.fragments[-1].bookies[ask.seat]"),),
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
        (Edit("client_aio.ledger.recovery:_acknowledged",
              "tally.lafr if metadata.guaranteed_write_quorum else tally.lac", "tally.lac"),),
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
        (Edit("bookie_aio.server.handlers.add:AddHandler._judge",
              "if engine.is_in_doubt(ledger_id):", "if False:"),),
        ("disk-faults", "full-starts", "refusals"),
    ),
    Mutant(
        220, "a ledger that is closed with a loss ends at the LAC that is stated",
        (Edit("client_aio.ledger.accept_loss:_find_end_without",
              "await reads.last_readable(list(holdings.values()), below)",
              "(max(each.lac for each in holdings.values()), 0)"),),
        ("accepted-losses",),
    ),
    Mutant(
        221, "a ledger that is closed with a loss ends where one bookie does",
        (Edit("client_aio.ledger.accept_loss:_find_end_without", "list(holdings.values()), below)",
              "list(holdings.values())[:1], below)"),),
        ("accepted-losses",),
    ),
    Mutant(
        222, "the entries of a bookie that falls silent behind its list are lost without a record",
        (Edit("client_aio.ledger.accept_loss:_Reads._length_at", "raise _FellSilent(",
              "return None\n        raise _FellSilent("),),
        ("accepted-losses",),
    ),
    Mutant(
        61, "what a repair waits to hear of is forgotten meanwhile",
        (Edit("bookie_aio.server.handlers.admin:InspectHandler.list_entries",
              "self._engine.eviction_candidates.discard(request.ledger_id)", "pass"),),
        tests=("tests/bookie_aio/server/test_server_ledger_gc.py", "-k", "waits_to_hear"),
    ),
    Mutant(
        81, "time in which the client's own loop did not run counts for its deadlines",
        (Edit("client_aio.core.liveness:Liveness.excused_s",
              "now - self._looked_at if self.was_late else 0.0", "0.0"),
         Edit("client_aio.bookies.connection:BookieConnection._check_deadlines",
              "is_read=False", "is_read=True")),
        ("own-blocking",),
    ),
    Mutant(
        82, "a recovery waits until every bookie is fenced or has failed",
        (Edit("client_aio.ledger.recovery:Recovery._fence",
              "self._patience_s(tally, map(tasks.__getitem__, waiting))", "None"),),
        ("hung-minority",),
    ),
    Mutant(
        83, "a ledger that is tailed stays at bookies that hang",
        (Edit("client_aio.tails:Tails.look", "if doubtful != self._doubtful:", "if False:"),),
        ("hung-minority",),
    ),
    Mutant(
        84, "a fence goes on one answer below coverage, and the reads of the recovery do not fence",
        (Edit("client_aio.core.recovery:FenceTally.is_covered",
              "covers_all_write_sets(self._answered, *self._sizes)",
              "covers_all_write_sets(self._answered, *self._sizes[:2], self._sizes[2] + 1)"),
         Edit("client_aio.core.recovery:recovery_read", "Read(metadata.ledger_id, term,",
              "Read(metadata.ledger_id, -1,")),
        ("split-brain", "late-adds"),
        note="the fence alone is equivalent: recovery reads fence as well",
    ),
    Mutant(
        85, "a doubtful bookie is never asked",
        (Edit("client_aio.core.read_plan:ReadPlan.order",
              "return sorted(bookies[start:] + bookies[:start], key=asked_last.__contains__)",
              "return [each for each in bookies if each not in asked_last] or list(bookies)"),),
        tests=("tests/client_aio/core/test_client_read_plan.py", "-k", "doubtful"),
    ),
    Mutant(
        86, "a ledger that moves while no WATCH waits is not told",
        (Edit("bookie_aio.core.long_polls:WatchTable.move",
              "self._moved.setdefault(watcher, {})[ledger_id] = None", "self._count -= 1"),),
        tests=("tests/bookie_aio/core/test_core_long_polls.py",),
    ),
    Mutant(
        410, "the end of a WATCH counts in whatever round it was sent",
        (Edit("client_aio.tails:WatchedBookie._answered", "if sent_in == self._round:", "if True:"),),
        tests=("tests/client_aio/test_client_watched_bookie.py",),
    ),
    Mutant(
        411, "what a WATCH finds moved is in the answer to the one before",
        (Edit("bookie_aio.server.handlers.lac:Watches.change", "self._end(peer)", "pass"),
         Edit("bookie_aio.server.handlers.lac:Watches.wait",
              "timer = self._loop", "self._end(peer)\n    timer = self._loop"),),
        tests=("tests/bookie_aio/server/test_server_watches.py", "-k", "own_answer"),
    ),
    Mutant(
        120, "a seat that is down from the start counts as an acknowledgement",
        (Edit("client_aio.core.add_window:AddWindow.advance",
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
        (Edit("client_aio.unbounded.writer:open_term",
              "found = await context.finder.find(held.current.ledger_id, Sizes.of(held.current))\n"
              "    while not await held.update(begin):",
              "is_taken = await held.update(begin)\n"
              "    found = await context.finder.find(held.current.ledger_id, Sizes.of(held.current))\n"
              "    if not is_taken:"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "fences_nobody"),
    ),
    Mutant(
        140, "a start takes an older directory for the newest one",
        (Edit("bookie_aio.core.identity:compare_ages",
              "return Standing.AHEAD if file.number > stored.number else Standing.OLDER",
              "return Standing.AHEAD if file.number > stored.number else Standing.SAME"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "directory_set_back"),
    ),
    Mutant(
        141, "an intended age that an earlier start wrote to the store is not known again",
        (Edit("bookie_aio.core.identity:compare_ages",
              "if (stored.number, stored.token) == (file.intended, file.intended_token):", "if False:"),),
        ("rolling-restarts", "power-cuts", "metadata-faults", "chaos"),
    ),
    Mutant(
        142, "a start draws an age of its own while an earlier one is on its way",
        (Edit("bookie_aio.core.identity:judge_age", "if pending:", "if False:"),),
        tests=("tests/bookie_aio/core/test_age.py", "-k", "no_history"),
    ),
    Mutant(
        143, "the first bookie that notices a set-back of the metadata tells no other",
        (Edit("bookie_aio.core.identity:judge_ids",
              "found = (*events, SetBack(token, bookie_id, counter, at, []))", "found = tuple(events)"),),
        tests=("tests/bookie_aio/core/test_age.py", "-k", "every_order"),
    ),
    Mutant(
        144, "a bookie in doubt of the metadata drops what they do not list",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._check_droppable",
              "if ledger_id < self._age.in_doubt_below:", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "until_an_operator_answers"),
    ),
    Mutant(
        363, "a bookie that came after a set-back folds ids that older metadata do not list",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector.sweep",
              "below = self._age.unanswered_below", "below = self._age.in_doubt_below"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "came_after_a_set_back"),
    ),
    Mutant(
        364, "what older metadata say others keep is evicted once an operator has answered",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._forget_unnamed",
              "below = self._age.not_free_below", "below = self._age.unanswered_below"),
         Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._forget_unnamed",
              "if ledger_id >= self._age.not_free_below:", "if True:")),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "never_evicted"),
    ),
    Mutant(
        365, "at a bookie that came after a set-back, marks end by the word of older metadata",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._end_marks",
              " or self._age.unanswered_below", ""),
         Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._end_marks",
              " and not self._age.unanswered_below", "")),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "came_after_a_set_back"),
    ),
    Mutant(
        366, "a mark is lifted by the word of older metadata that nobody has answered for",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector.check_store",
              "if ledger_id < self._age.unanswered_below:", "if ledger_id < self._age.in_doubt_below:"),),
        tests=("tests/bookie_aio/server/test_server_healing.py", "-k", "older_copy"),
    ),
    Mutant(
        368, "a look that finds the metadata set back raises no age",
        (Edit("bookie_aio.server.age:BookieAge._judge_copy",
              "await self._raise(self._engine.counts.groups)", "pass"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "idle_bookie_is_one_event"),
    ),
    Mutant(
        369, "a dump reads the ages of the bookies behind the ledgers",
        (Edit("metadata.access.dump:_first_records", "for group in _FIRST:", "for group in _FIRST[1:]:"),
         Edit("metadata.access.dump:_records", "if is_late or not _is_first(key):",
              "if key not in of_bookies:"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "vouches_for_no_ledger"),
    ),
    Mutant(
        540, "a dump reads cookies, retired ids and orders behind the ledgers",
        (Edit("metadata.access.dump:_first_records", "for group in _FIRST:", "for group in _FIRST[:1]:"),
         Edit("metadata.access.dump:_records", "if is_late or not _is_first(key):",
              "if key not in of_bookies:"),),
        tests=("tests/metadata/test_dump.py", "-k", "changing_cluster_names"),
        note="no simulated run dumps a store",
    ),
    Mutant(
        541, "a dump does not read the cookies of bookies that came while it read the ledgers",
        (Edit("metadata.access.dump:_records", "if is_late or", "if"),),
        tests=("tests/metadata/test_dump.py", "-k", "changing_cluster_names"),
        note="as 540",
    ),
    Mutant(
        373, "a takeover counts terms that were used behind an older copy",
        (Edit("metadata.model.ledger:LedgerMetadata.take_over", "max(self.term + 1, least)",
              "self.term + 1"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "not_counted_again"),
    ),
    Mutant(
        374, "what was evicted by newer metadata is denied under older ones",
        (Edit("bookie_aio.server.age:BookieAge._judge_ids",
              "await _mark_excused(self._engine, self._bookie_id, below, before.marks_at(at))", "pass"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "not_denied_under_older"),
    ),
    Mutant(
        386, "marks that ended by newer metadata stay ended under older ones",
        (Edit("bookie_aio.storage.marking:Marking.list_excused",
              "(state.was_evicted or state.lifted > above)", "state.was_evicted"),
         Edit("bookie_aio.storage.marking:Marking.has_ended_since",
              "self._ledgers.marks.numbers[1] > ended", "False")),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "ended"),
    ),
    Mutant(
        387, "an event counts as known though there was no room for its marks",
        (Edit("bookie_aio.server.age:BookieAge._judge_ids",
              "after = replace(after, set_backs=before.set_backs, copy_age=at)",
              "after = replace(after, has_lost=False)"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "without_room"),
    ),
    Mutant(
        388, "a recovery is told that a trimmed entry is not there",
        (Edit("bookie_aio.server.handlers.read:ReadHandler._answer_read",
              "is_trimmed = fences and", "is_trimmed = False and"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "trimmed"),
    ),
    Mutant(
        389, "a store that knows an age which the directory never had is an older one",
        (Edit("bookie_aio.core.identity:compare_ages",
              "not file.has_reached(stored.token, stored.number)", "False"),),
        tests=("tests/bookie_aio/core/test_age.py", "-k", "never_had"),
    ),
    Mutant(
        420, "a set-back that was found is forgotten with the answer of the store",
        (Edit("bookie_aio.server.age:BookieAge._raise",
              "is_behind = self._file.is_ahead", "is_behind = False"),
         Edit("bookie_aio.server.age:BookieAge.check", "AHEAD or self._file.is_ahead:", "AHEAD:")),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "set_back_is_not_forgotten"),
    ),
    Mutant(
        421, "a judgement that a lost answer interrupted counts as ended",
        (Edit("bookie_aio.server.age:BookieAge._judge_ids", "self._is_judging = True", "pass"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "counter_that_fell"),
    ),
    Mutant(
        422, "a request that is cancelled interrupts the judgement of a set-back",
        (Edit("metadata.owned_task:OwningLock.run",
              "await asyncio.wait([task])",
              "try:\n        await asyncio.shield(task)\n"
              "    except asyncio.CancelledError:\n        task.cancel()\n        raise"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "request_that_is_cancelled"),
    ),
    Mutant(
        430, "a frame waits for room although no other frame is being read",
        (Edit("bookie_aio.server.backpressure:ReceiveRoom.reserve", "and budget.reservations:",
              "and budget.used > self._counted:"),),
        tests=("tests/bookie_aio/server/test_server_receive_room.py", "-k", "keep_no_frame_waiting"),
    ),
    Mutant(
        431, "any number of requests may wait for the metadata store",
        (Edit("bookie_aio.server.handlers.store_waits:StoreWaits.of",
              "if self._waiting[peer] >= self._own_max or self._waiting.total() >= self._all_max:",
              "if False:"),),
        tests=("tests/bookie_aio/server/test_server_store_waits.py", "-k", "leaves_room_for_reads"),
    ),
    Mutant(
        432, "the repairs of one frame run all at once",
        (Edit("bookie_aio.server.connection:Connection.run_read", "if is_below and not", "if not"),),
        tests=("tests/bookie_aio/server/test_server_store_waits.py", "-k", "as_many_at_once"),
    ),
    Mutant(
        433, "requests that wait for their turn among the reads count nowhere",
        (Edit("bookie_aio.server.connection:Connection.run_read",
              "held = request_bytes + WAITING_BYTES", "held = 0"),),
        tests=("tests/bookie_aio/server/test_server_store_waits.py", "-k", "their_turn_count"),
    ),
    Mutant(
        460, "marks of all ledgers end by what a sweep read before a set-back",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._end_marks",
              "if self._settled_for != (number, heard):", "if self._settled_for[0] != number:"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "sweep_read"),
    ),
    Mutant(
        461, "marks of all ledgers that an event found no room for are never written",
        (Edit("bookie_aio.storage.ledgers.marks:Marks.ended_bound",
              "return self._fenced", "return NO_LEDGER if self.number else self._fenced"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "written_later"),
    ),
    Mutant(
        462, "an event that was answered at once does not stop a lift by metadata of before",
        (Edit("bookie_aio.server.healing:Healing.lift", "if self._age.events_heard != heard:", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "looks_at_its_entries"),
    ),
    Mutant(
        463, "a set-back marks again what was lifted by metadata that the copy has",
        (Edit("bookie_aio.storage.marking:Marking.list_excused",
              "state.lifted > above", "state.lifted"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "the_copy_has"),
    ),
    Mutant(
        464, "no age is raised between the metadata's word and a lift",
        (Edit("bookie_aio.server.healing:Healing.lift",
              "await self._age.raise_if_written(is_forced=True)", "pass"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "the_copy_has"),
    ),
    Mutant(
        465, "an age gets a number that another bookie saw of a lost start",
        (Edit("bookie_aio.server.age:BookieAge._raise",
              "intended.next_number", "intended.number + 1"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "after_a_lost_start"),
    ),
    Mutant(
        466, "a lift goes by metadata that were read before its age was raised, perhaps in an older copy",
        (Edit("bookie_aio.server.healing:Healing.lift",
              "if await self._ledgers.read(ledger_id, sync=True) != found:", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "raised_in_the_copy"),
    ),
    Mutant(
        467, "marks of all ledgers end by metadata that were read before the age was raised",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector._end_marks",
              "self._settled, self._is_second_look = IdRanges(), True", "self._is_second_look = True"),),
        tests=("tests/bookie_aio/server/test_server_set_back.py", "-k", "raised_in_the_copy"),
    ),
    Mutant(
        496, "a ledger whose id all its bookies have buried is never closed",
        (Edit("client_aio.ledger.recovery:is_buried", "return all(", "return False and all("),),
        tests=(_BURIED_TESTS, "-k", "that_all_bookies_have_buried"),
    ),
    Mutant(
        497, "a ledger is closed as empty though a bookie may hold what was acknowledged",
        (Edit("client_aio.ledger.recovery:is_buried", "return all(", "return any("),),
        tests=(_BURIED_TESTS, "-k", "only_some_bookies"),
    ),
    Mutant(
        498, "an unbounded ledger that had a writer is made anew where its bookies have buried it",
        (Edit("client_aio.unbounded.operations:UnboundedLedgerOperations._replace_buried",
              "if (fragment.first_entry, fragment.content_term) != (0, 0):", "if False:"),),
        tests=(_BURIED_TESTS, "-k", "had_a_writer"),
    ),
    Mutant(
        499, "a bookie buries a ledger that was made while it looked into a deletion of its id",
        (Edit("bookie_aio.server.ledger_gc:LedgerGarbageCollector.drop_if_deleted",
              "engine.known.is_known(ledger_id) == is_known", "True"),),
        tests=("tests/bookie_aio/server/test_server_ledger_gc.py", "-k", "looked_into"),
    ),
    Mutant(
        375, "a record is a gap though a bookie that may have it did not answer",
        (Edit("client_aio.log.gaps:_lost_entry", " or error.is_unanswered", ""),),
        tests=("tests/client_aio/test_client_gaps.py",),
    ),
    Mutant(
        145, "an id that was drawn a moment ago is refused without another look at the counter",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._take",
              "self._given_ids.wait(peer, ledger_id, len(body), go_on, may_wait_aside=is_aside)",
              'go_on("")'),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "drawn_a_moment_ago"),
    ),
    Mutant(
        146, "fences of ids that were not given out are stored",
        (Edit("bookie_aio.server.dispatcher:Dispatcher._take",
              "if ledger_id is not None and ledger_id >= self._given_ids.below and _stores(request):",
              "if False:"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "nothing_is_stored"),
    ),
    Mutant(
        147, "a creation does not listen to a bookie that knows the id",
        (Edit("client_aio.ledger.create:create_metadata", "if refused is None:", "if True:"),),
        tests=("tests/integration/test_set_back.py", "-k", "draws_others"),
    ),
    Mutant(
        148, "a start on a full disk forgets the age that an earlier start intended",
        (Edit("bookie_aio.server.age:BookieAge.begin",
              'verdict.file if is_earlier else verdict.file.intend(0, "")', 'verdict.file.intend(0, "")'),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "not_forgotten"),
    ),
    Mutant(
        88, "a repair without the password may make up a content term",
        (Edit("bookie_aio.server.password_ledgers:PasswordLedgers._names",
              "if not have_term(fragments, entries, block.content_term):", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_ledger_auth.py", "-k", "give_that_content_term"),
    ),
    Mutant(
        550, "a bookie does not know the content terms of fragments that are in pages",
        (Edit("bookie_aio.server.password_ledgers:PasswordLedgers._names",
              "if ref is not None:", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_ledger_auth.py", "-k", "page_gives"),
    ),
    Mutant(
        551, "of a block in two pages, only the first page is looked at",
        (Edit("bookie_aio.core.authorisation:Repairable.parts",
              "max(bisect_right(starts, last_entry), 1)", "begin + 1"),),
        tests=("tests/bookie_aio/server/test_server_ledger_auth.py", "-k", "page_gives"),
    ),
]  # fmt: skip
