"""Planted bugs of the client's side of replication: recovery, acknowledging, ensemble changes, metadata."""

from __future__ import annotations

from typing import Any

from tests.sim.mutants.planting import Edit, Mutant, Swap

_WINDOW = "client_aio.core.add_window:AddWindow"
_REPLICATOR = "client_aio.ledger.replication:Replicator"
_RECOVERY = ("duelling-recoverers", "split-brain", "chaos", "power-cuts")
_CHANGES = ("slow-bookie", "rolling-restarts", "chaos", "metadata-faults")


def _strict_step(original: Any) -> Any:
    """Recovery keeps an entry only where Qa bookies have it (mutant 20)."""
    from client_aio.core.recovery import Ask, End, Found, Inconclusive, proves_absent, write_set

    def step(self: Any) -> Any:
        entry_id = self.following
        kind = entry_id % self._stride
        seats = write_set(entry_id % self._ensemble_size, self._ensemble_size, self._write_quorum)
        # Seats of which it is known that they hold the entry are not asked again.
        holders = [seat for seat in seats if entry_id in self.__dict__.get("held", {}).get(seat, ())]
        if len(holders) >= self._ack_quorum:
            self.following = entry_id + 1
            return Found(entry_id, self._present.pop(entry_id))
        absent = [seat for seat in seats if self._verdicts.get((kind, seat)) == (entry_id, True)]
        if entry_id > self._lac and proves_absent(len(absent), self._write_quorum, self._ack_quorum):
            return End(entry_id - 1)
        unasked = [seat for seat in seats if self._is_unasked(kind, seat, entry_id) and seat not in holders]
        if unasked:
            self._outstanding.update((kind, seat) for seat in unasked)
            return [Ask(seat, entry_id, self._stride) for seat in unasked]
        if any((kind, seat) in self._outstanding for seat in seats):
            return None
        if entry_id in self._present and entry_id > self._lac:
            return End(entry_id - 1)
        return Inconclusive(entry_id, list(seats))

    return step


def _counting_answer(original: Any) -> Any:
    def answer(self: Any, ask: Any, blocks: Any, stop: Any, stop_entry: int) -> None:
        held = self.__dict__.setdefault("held", {}).setdefault(ask.seat, set())
        for block in blocks:
            held.update(block.entry_ids)
        original(self, ask, blocks, stop, stop_entry)

    return answer


def _blind(kinds: str) -> Edit:
    """Write one's own version over whatever others have made of it."""
    return Edit(
        "client_aio.core.ensemble_change:MetadataUpdate.conflicted",
        "self._wanted = self._apply(metadata)",
        f"if type(getattr(self._apply, '__self__', None)).__name__ not in {kinds!r}:\n"
        "        self._wanted = self._apply(metadata)",
    )


MUTANTS = [
    Mutant(
        4, "recovery does not fence: neither its LAC reads nor its recovery reads",
        (Edit("client_aio.core.recovery:recovery_read", "return Read(metadata.ledger_id, term,",
              "return Read(metadata.ledger_id, -1,"),
         Edit("client_aio.core.recovery:fencing_lac_read", "recovery_term(metadata)", "-1")),
        ("late-adds", *_RECOVERY),
        note="leaving the fence out of the recovery reads alone is equivalent: each follows a fencing LAC "
        "read over the same connection, so its bookie is fenced by then; leaving it out of the LAC reads "
        "alone is too, since an end takes negatives of recovery reads, which fence",
    ),
    Mutant(
        5, "coverage of one answer: Qa negatives are taken for Qw − Qa + 1",
        (Swap("client_aio.core.recovery:proves_absent",
              lambda _: lambda negatives, write_quorum, ack_quorum: negatives >= ack_quorum),),
        ("late-adds", *_RECOVERY),
        note="one answer to the fencing LAC reads is equivalent: recovery reads fence as well, and the end "
        "takes Qw − Qa + 1 negatives, each from a bookie that is fenced by then; so the other coverage, that "
        "of the end, is what is miscounted",
    ),
    Mutant(
        6, "one negative means absent",
        (Swap("client_aio.core.recovery:proves_absent", lambda _: lambda negatives, *_: negatives >= 1),),
        _RECOVERY,
    ),
    Mutant(
        7, "a timeout counted as negative",
        (Edit("client_aio.core.recovery:EntrySearch.error", "self._silent.add(key)",
              "self._verdicts[key] = (max(ask.first, self.following), True)"),),
        ("late-adds", *_RECOVERY),
    ),
    Mutant(
        8, "recovery does not re-replicate",
        (Edit("client_aio.ledger.recovery:Recovery._write_back", "replication.replicator.schedule_flush()",
              "window = replication.window; window.ack_quorum = 0; window.flush(); window.advance()"),),
        _RECOVERY,
    ),
    Mutant(
        9, "close at the LAC without reading forward",
        (Edit("client_aio.ledger.recovery:Recovery._search", "search = EntrySearch(",
              "return first_entry - 1\n    search = EntrySearch("),),
        _RECOVERY,
    ),
    Mutant(
        10, "acknowledging out of order",
        (Edit(f"{_WINDOW}.advance", "while groups:\n        group = groups[0]",
              "for group in list(groups):"),
         Edit(f"{_WINDOW}.advance", "                return done", "                break"),
         Edit(f"{_WINDOW}.advance",
              "        groups.popleft()\n        assert group.first_entry == self.lac + 1\n"
              "        self.lac = group.last_entry",
              "        else:\n            groups.remove(group)\n"
              "            self.lac = max(self.lac, group.last_entry)\n"
              "            done.append(group)\n        continue"),),
        ("slow-bookie", "chaos"),
    ),
    Mutant(
        11, "acknowledging at Qa − 1",
        (Edit(f"{_WINDOW}.advance", "batch.acks.bit_count() < ack_quorum",
              "batch.acks.bit_count() < max(ack_quorum - 1, 1)"),),
        _CHANGES,
    ),
    Mutant(
        12, "the LAC includes what is not acknowledged",
        (Edit(f"{_WINDOW}.lac_to_state", "return self.lac if", "return self._next_entry - 1 if"),),
        _CHANGES,
    ),
    Mutant(
        13, "ensemble change without compare-and-set", (_blind("EnsembleChange"),),
        ("split-brain", "duelling-recoverers", "chaos"),
    ),
    Mutant(
        14, "wrong first entry of a fragment",
        (Edit(f"{_WINDOW}.begin_change", "(self.lafr if self.is_guaranteed else self.lac) + 1",
              "self._next_entry"),),
        _CHANGES,
    ),
    Mutant(
        15, "a late acknowledgement of a replaced bookie counts",
        (Edit(f"{_WINDOW}.acknowledged", "if epoch != self._epochs[seat]:", "if False:"),
         Edit(f"{_REPLICATOR}._answered", "if epoch != window.epoch(index):", "if False:")),
        ("refusals", "resends", *_CHANGES),
    ),
    Mutant(
        16, "no resend to the new bookie",
        (Edit(f"{_WINDOW}.commit_change", "self._vacate(replaced & ~replacements)",
              "self.failed &= ~replaced\n"
              "    for seat in indexes_of(replaced & ~replacements):\n"
              "        self._epochs[seat] += 1\n"
              "    return []"),),
        _CHANGES,
        note="what the replaced bookie had acknowledged is taken to be at the new one",
    ),
    Mutant(
        17, "acknowledging during an ensemble change",
        (Edit(f"{_WINDOW}.advance", "if self._frozen:", "if False:"),),
        _CHANGES,
    ),
    Mutant(
        18, "close without compare-and-set", (_blind("Closing RecoveredEnd"),),
        ("late-adds", "duelling-recoverers", "split-brain"),
    ),
    Mutant(
        19, "recovery adds carry an advancing LAC",
        (Edit("client_aio.ledger.recovery:Recovery._start_writing",
              "stated_lac=tally.lac", "stated_lac=None"),),
        _RECOVERY,
    ),
    Mutant(
        20, "recovery demands Qa copies to keep an entry",
        (Swap("client_aio.core.recovery:EntrySearch.step", _strict_step),
         Swap("client_aio.core.recovery:EntrySearch.answer", _counting_answer)),
        ("late-adds", *_RECOVERY),
    ),
    Mutant(
        31, "unknown outcome of a compare-and-set taken for failure",
        (Edit("client_aio.ledger.metadata_update:VersionedLedgerMetadata._update",
              "await self._pause(deadline, error)",
              "update.conflicted(*await self._read(deadline))"),
         Edit("client_aio.core.ensemble_change:EnsembleChange.is_met_by",
              "return metadata.state is LedgerState.OPEN and", "return False and")),
        ("lost-changes", "metadata-faults"),
        note="what is there is then read as somebody else's doing: a writer withdraws for its own change. It "
        "would recognise that change by its content, which mends it, and is taken out as well",
    ),
    Mutant(
        32, "unknown outcome of a compare-and-set taken for success",
        (Edit("client_aio.ledger.metadata_update:VersionedLedgerMetadata._update",
              "await self._pause(deadline, error)",
              "update.written(attempt.version)\n"
              "            self.current, self.version = update.metadata, update.version\n"
              "            return True"),),
        ("lost-changes", "metadata-faults"),
    ),
    Mutant(
        33, "ids drawn twice: the counter is written whatever its version is",
        (Edit("metadata.backends.zookeeper.store:ZooKeeperMetadataStore.allocate_ids",
              "seal_counter(start + count), stat.version)", "seal_counter(start + count), -1)"),),
        tests=("tests/metadata/test_contract.py", "-k", "ids_are_given_out_once and zookeeper"),
        note="there are no sequential nodes to be made twice: ids come from a counter under compare-and-set",
    ),
    Mutant(
        34, "an ephemeral is not created again after its session expired",
        (Edit("metadata.backends.zookeeper.store:ZooKeeperMetadataStore.register",
              "self._session.add_watcher(self._path(key), self._look_now)", "pass"),),
        tests=("tests/metadata/test_contract.py", "-k", "expired_session_registers_anew and zookeeper"),
    ),
    Mutant(
        37, "repair raises the term of an open ledger",
        (Edit("client_aio.admin.repair:_Copier.__init__",
              "can_fence = metadata.is_closed and (metadata.digest == DIGEST_CRC or token is not None)",
              "can_fence = True"),),
        ("repair-in-parallel",),
    ),
    Mutant(
        38, "a replacement does not yet hold (LAFR, LAC] at the compare-and-set",
        (Edit(f"{_WINDOW}.copies_first", "return self.is_guaranteed and bool(self._retained)",
              "return False"),),
        ("guaranteed-quorum", "slow-bookie", "chaos"),
    ),
    Mutant(
        49, "a change of which a newcomer has failed is never abandoned",
        (Edit("client_aio.core.ensemble_change:EnsembleChangeMachine.copied",
              "return Abandon() if self._window.can_abandon else self.next()", "return self.next()"),),
        ("refusing-newcomers",),
    ),
    Mutant(
        60, "the LAFR that is stated is the LAC",
        (Edit("client_aio.core.add_window:AddWindow.lafr_to_state",
              "return self.lafr if self._stated_lafr is None",
              "return self.lac if self.is_guaranteed"),),
        ("guaranteed-quorum",),
    ),
    Mutant(
        62, "that a ledger has been deleted is believed of a bookie",
        (Edit("client_aio.ledger.ensemble_change:EnsembleChangeTask._check_that_it_exists",
              "await self._context.ledgers.read(ledger_id, sync=True)",
              "raise type(self._replicator._seats[0].failure or KeyError())('deleted')"),),
        tests=("tests/integration/test_buried_ids.py",),
    ),
    Mutant(
        128, "a close fails for want of copies that have come, while an ensemble change is written",
        (Edit("client_aio.ledger.replication:CopiesWatch._is_over", "owed and window.lac", "window.lac"),
         Edit("client_aio.ledger.replication:CopiesWatch._is_over",
              "(self._ends, self._fewest_owed))", "self._ends)"),),
        tests=("tests/sim/test_sim_schedules.py::"
               "test_a_close_does_not_fail_for_want_of_copies_that_have_come",),
    ),
    Mutant(
        129, "the time in which a client's own loop stood still counts for the deadlines of the metadata",
        (Edit("metadata.awake:AwakeClock._stood_s", "if now - self._due_at >= LATE_S", "if False"),
         Edit("metadata.awake:Reading.__init__", "self._left = _READING_ITERATIONS", "self._left = 1")),
        ("own-blocking",),
    ),
    Mutant(
        130, "the time in which a client stood still makes its log's appends overdue",
        (Edit("client_aio.healing:Healing._is_overdue", "self._context.clock.time()", "self._loop.time()"),),
        tests=("tests/client_aio/test_client_healing_shell.py", "-k", "stood_still"),
    ),
    Mutant(
        131, "a ledger begins without bookies whose answers its client has not read",
        (Edit("metadata.awake:AwakeClock._stood_s", "return now - self._looked_at",
              "return now - self._due_at"),),
        tests=("tests/metadata/test_awake.py",),
    ),
    Mutant(
        132, "a close that ends for want of copies names no bookie",
        (Edit("client_aio.ledger.replication:Replicator.describe_owing", "return ", "return '' and "),),
        ("refusing-newcomers",),
    ),
    Mutant(
        133, "a close ends for want of copies before the timeout",
        (Edit("client_aio.ledger.replication:CopiesWatch.__init__",
              "Patience(timeout_s)", "Patience(timeout_s / 2)"),),
        ("refusing-newcomers",),
    ),
    Mutant(
        134, "copies count against the fewest missing before their entries were acknowledged",
        (Edit("client_aio.ledger.replication:CopiesWatch._is_over",
              "ends != self._ends", "ends[0] != self._ends[0]"),),
        tests=("tests/sim/test_sim_schedules.py::"
               "test_a_close_does_not_fail_for_want_of_copies_that_have_come",),
    ),
    Mutant(
        135, "a warning that comes again and again is a line each time",
        (Edit("metadata.repeated_reports:RepeatedReports.report", "if found is None:", "if True:"),),
        tests=("tests/metadata/test_repeated_reports.py",),
    ),
    Mutant(
        136, "a writer that goes on without a bookie waits for the connection to it",
        (Edit("client_aio.bookies.ensemble_finder:EnsembleFinder._fill",
              " and not vacancy.goes_on_without", ""),),
        tests=("tests/integration/test_hung_bookies.py", "-k", "waits_for_no_bookie"),
    ),
    Mutant(
        137, "a takeover does not ask a bookie again that has come back",
        (Edit("client_aio.ledger.recovery:_Reach.ask", "for seat in silent}", "for seat in ()}"),),
        tests=("tests/integration/test_hung_bookies.py", "-k", "waits_for_no_bookie"),
    ),
    Mutant(
        505, "a deadline waits for a look that is on time",
        (Edit("metadata.awake:Standstills.excusable_s", "max(0.0, stood_s - self._longest_s)", "stood_s"),
         Edit("metadata.awake:Standstills.look", "self._longest_s += excused_s", "pass")),
        ("busy-loop",),
    ),
    Mutant(
        506, "a deadline ends before the answers that have come are read",
        (Edit("metadata.awake:Reading.__init__", "self._left = _READING_ITERATIONS", "self._left = 1"),),
        tests=("tests/metadata/test_awake.py", "-k", "came_in_time"),
    ),
    Mutant(
        507, "a request ends before an answer that many reads take is read",
        (Edit("client_aio.bookies.connection:BookieConnection._judge",
              "or (has_received and now < until)", ""),),
        tests=("tests/client_aio/test_client_busy_loop.py", "-k", "many_reads"),
    ),
    Mutant(
        508, "entries that others add are progress of a wait for copies",
        (Edit("client_aio.ledger.replication:CopiesWatch._is_over",
              "min(window.lac, self._target)", "window.lac"),),
        tests=("tests/client_aio/test_client_copies.py",),
    ),
    Mutant(
        509, "a close takes the adds that come while it waits",
        (Edit("client_aio.ledger.writer:LedgerWriter.is_closed", " or self._closes > 0", ""),),
        tests=("tests/integration/test_writer_interleavings.py", "-k", "takes_no_adds"),
    ),
    Mutant(
        510, "a bookie that hangs is sent each force",
        (Edit("client_aio.ledger.replication:Replicator.force", " and not _is_pending(seat.forcing)", ""),),
        tests=("tests/integration/test_hung_bookies.py", "-k", "force_goes_on"),
    ),
    Mutant(
        511, "a force is over when every bookie has answered",
        (Edit("client_aio.ledger.replication:Replicator.force",
              "asyncio.FIRST_COMPLETED", "asyncio.ALL_COMPLETED"),),
        tests=("tests/integration/test_hung_bookies.py", "-k", "force_goes_on"),
    ),
]  # fmt: skip
