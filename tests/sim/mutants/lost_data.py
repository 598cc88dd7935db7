"""Planted bugs of lost data: a file or a directory of another time, number or bookie is believed."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_RECOVERY = "bookie_aio.storage.crash_recovery:CrashRecovery"
_CHECK = "bookie_aio.storage.found_files:FoundFiles.check"
_WITNESS_TESTS = "tests/bookie_aio/storage/test_storage_witness.py"
_DOUBT_TESTS = "tests/bookie_aio/storage/test_storage_doubt.py"
_PEER_TESTS = "tests/bookie_aio/server/test_server_peer_ages.py"

MUTANTS = [
    Mutant(
        101, "a checkpoint of the past is believed",
        (Edit(f"{_RECOVERY}._judge", "if checkpoint.number < self._newest:", "if False:"),),
        ("stale-files",),
        note="72 is the same bug, caught by a test; here a profile has to find it",
    ),
    Mutant(
        102, "the durable end that the witness names is not heard",
        (Edit(f"{_RECOVERY}._replay_one", "claimed = self._files.claimed_end(segment_id)", "claimed = 0"),),
        ("stale-files", "damaged-files"),
        note="71 is the same bug, caught by a test",
    ),
    Mutant(
        103, "a segment that is listed and missing is no loss",
        (Edit(f"{_RECOVERY}._open_unsealed",
              'await self._lose(segment_id, f"segment {segment_id} is missing")', "pass"),),
        ("damaged-files",),
    ),
    Mutant(
        104, "an intact file counts, whichever segment, bookie and life it is of",
        (Edit(_CHECK, "if found.segment_id != segment_id:", "if False:"),
         Edit(_CHECK, "if found.owner != self._owner:", "if False:"),
         Edit(_CHECK, "if generations and", "if False and")),
        ("damaged-files",),
    ),
    Mutant(
        105, "a table of ledgers that is missing or damaged is no loss",
        (Edit(f"{_RECOVERY}._read_table", "found.lose_all(str(error))\n        self._is_table_lost = True",
              "pass"),),
        ("damaged-files",),
    ),
    Mutant(
        580, "a damaged entry that is listed puts all of its ledger in doubt",
        (Edit("bookie_aio.storage.read.lookup:Lookup.mark", "is_of_listed=True", "is_of_listed=False"),),
        tests=("tests/bookie_aio/server/test_server_damage.py", "-k", "listed_and_damaged"),
        note="nothing is denied: two such entries, on two bookies, keep a ledger from being taken over",
    ),
    Mutant(
        581, "a start that lost the highest LAC of a ledger is in no doubt",
        (Edit("bookie_aio.storage.segment.replay:Damage.is_in_doubt",
              "return ledger_id in self.lost or self.harmed.get(ledger_id, NO_ENTRY) > lac",
              "return ledger_id in self.lost"),),
        tests=(_DOUBT_TESTS,),
        note="a reader that wants the LAC would be told a lower one",
    ),
    Mutant(
        582, "a checkpoint forgets that a ledger is in doubt",
        (Edit("bookie_aio.storage.ledgers.checkpoint:pack_state", "if not state.is_in_doubt:", "if True:"),),
        tests=("tests/bookie_aio/storage/test_storage_marks.py", "-k", "ends_no_doubt"),
        note="healed-disks restarts no bookie in doubt before its mark is lifted",
    ),
    Mutant(
        583, "a start forgets that a journaled mark puts its ledger in doubt",
        (Edit("bookie_aio.storage.segment.replay:Replayed.apply",
              "(ledger_id, row.first, row.is_of_listed)", "(ledger_id, row.first, True)"),),
        tests=(_DOUBT_TESTS,),
        note="the next checkpoint has the mark, so only a crash before it shows the difference",
    ),
    Mutant(
        586, "a checkpoint has a mark of listed entries before anything durable stands behind them",
        (Edit("bookie_aio.storage.ledgers.checkpoint:pack_state",
              "_FLAG_OF_LISTED if state.listed >= state.marked else _FLAG_UNPROVEN", "_FLAG_OF_LISTED"),),
        tests=(_DOUBT_TESTS, "-k", "that_a_start_drops"),
        note="a power cut has to come between the checkpoint and the witness, with the newest group damaged",
    ),
    Mutant(
        590, "a start takes what it listed for proven before its own first group is durable",
        (Edit("bookie_aio.storage.crash_recovery:RecoveredState._is_in_doubt",
              "self.ends_unproven or ", ""),),
        tests=(_DOUBT_TESTS, "-k", "in_the_page_cache"),
        note="as 586, behind a start that could not write",
    ),
    Mutant(
        587, "a damaged statement of a LAC is forgotten",
        (Edit("bookie_aio.storage.segment.replay:Replayed.apply",
              "self._harm(row)\n                continue\n", "continue\n"),),
        tests=(_DOUBT_TESTS,),
        note="as 581",
    ),
    Mutant(
        588, "an index that is rebuilt marks no damage of its segment",
        (Edit("bookie_aio.storage.maintenance.sealer:IndexRebuilder._rebuild",
              "for ledger_id in found.damage.ledgers:", "for ledger_id in found.damage.lost:"),),
        tests=(_DOUBT_TESTS, "-k", "rebuilt"),
        note="nobody would repair it",
    ),
    Mutant(
        589, "behind a set-back, a bookie with a mark counts as one that may have had more than it lists",
        (Edit("client_aio.ledger.recovery:Recovery._list_one", "if is_damaged:", "if False:"),),
        tests=("tests/client_aio/test_client_reach.py", "-k", "list_counts"),
        note="the look before the fence went by another answer, so a takeover could fence, and then fail",
    ),
    Mutant(
        500, "a directory without its age counts as a new one",
        (Edit("bookie_aio.core.identity:compare_ages",
              "if file is None:\n        return Standing.OLDER",
              "if file is None:\n        return Standing.SAME"),),
        ("partial-restores",),
    ),
    Mutant(
        501, "the cookie of another bookie, or of another life, is as good as its own",
        (Edit("bookie_aio.core.identity:_check_owner", "if cookie.bookie_id != bookie_id:", "if False:"),
         Edit("bookie_aio.core.identity:decide", "if found != stored:", "if False:")),
        ("damaged-files",),
    ),
    Mutant(
        106, "a witness of the past is believed",
        (Edit(f"{_RECOVERY}._judge", "if claimed + 1 < self._newest:", "if False:"),),
        tests=(_WITNESS_TESTS, "-k", "zeroed_tail"),
    ),
    Mutant(
        107, "a start does not claim the checkpoint that it found",
        (Edit("bookie_aio.storage.segment.witness:WitnessFiles.catch_up",
              "if self._oldest < self.checkpoint:", "if False:"),),
        tests=("tests/sim/test_sim_crashstates.py", "-k", "two_crashes"),
    ),
    Mutant(
        108, "what the age file says of the storage is not heard",
        (Edit(f"{_RECOVERY}.__init__", "for held in earlier)", "for held in ())"),),
        ("partial-restores",),
    ),
    Mutant(
        109, "a claim that a start has read counts as durable",
        (Edit("bookie_aio.storage.segment.witness:WitnessFiles.catch_up", "await self.sync()", "pass"),),
        tests=("tests/sim/test_sim_crashstates.py", "-k", "page_cache_is_made_durable"),
    ),
    Mutant(
        110, "a bookie goes on when its age cannot be written for a disk that fails",
        (Edit("bookie_aio.server.age:BookieAge._write",
              'self._engine.health.fail(error, "writing the age")', "pass"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "fails_under_the_age"),
    ),
    Mutant(
        563, "a bookie denies entries while it waits to judge an event that it has heard of",
        (Edit("bookie_aio.server.age:BookieAge.learn_events",
              "self._in_question.hear(heard,", "self._in_question.hear((),"),),
        tests=("tests/bookie_aio/server/test_server_in_question.py", "-k", "while_the_age_is_being_written"),
    ),
    Mutant(
        564, "a bookie denies entries while the marks of a set-back that it found wait for the disk",
        (Edit("bookie_aio.server.age:BookieAge._judge_ids",
              "self._in_question.hear(verdict.events,", "self._in_question.hear((),"),),
        tests=("tests/bookie_aio/server/test_server_in_question.py", "-k", "wait_for_the_disk"),
    ),
    Mutant(
        565, "a bookie that does not know what it lost lists what it has left",
        (Edit("bookie_aio.server.handlers.admin:InspectHandler._answer_entries",
              "if request.ledger_id < self._engine.marking.in_question_below:", "if False:"),),
        tests=("tests/bookie_aio/server/test_server_in_question.py", "-k", "while_the_age_is_being_written"),
    ),
    Mutant(
        566, "a recovery believes what a bookie denies that has not judged an event",
        (Edit("client_aio.ledger.recovery_scope:RecoveryScope.believed",
              "bookie_id in self.unjudged", "False"),),
        tests=("tests/client_aio/test_client_recovery_scope.py", "-k", "counts_for_nothing"),
    ),
    Mutant(
        591, "a writer changes older metadata without asking whether it was fenced",
        (Edit("client_aio.ledger.standing:Standing._judge",
              "await self._doubts(ledger_id, apply, events, deadline) if events else \"\"", '""'),),
        tests=("tests/integration/test_set_back.py", "-k", "does_not_go_on"),
        note="of 700 seeds of set-back-under-writers one shows it",
    ),
    Mutant(
        592, "a bookie that lost data may say that nobody fenced the ledger",
        (Edit("client_aio.ledger.standing:Standing._ask_one",
              "answer.is_damaged or not is_judged", "False"),),
        tests=("tests/integration/test_set_back.py", "-k", "does_not_say"),
    ),
    Mutant(
        596, "a change that is tried again behind a set-back is not judged anew",
        (Edit("client_aio.ledger.standing:Standing.make",
              "await held.update(change.apply, guard)", "await held.update(change.apply)"),),
        tests=("tests/integration/test_set_back.py", "-k", "judged_anew"),
    ),
    Mutant(
        597, "bookies decide where the metadata refuse a writer's change",
        (Edit("client_aio.ledger.standing:Standing._doubts", "if apply(metadata) is None:", "if False:"),),
        tests=("tests/integration/test_set_back.py", "-k", "decide_without"),
    ),
    Mutant(
        598, "a writer that has changed older metadata asks its bookies before each further change",
        (Edit("client_aio.ledger.standing:Standing.make", "if is_done:", "if False:"),),
        tests=("tests/integration/test_set_back.py", "-k", "asks_no_more"),
    ),
    Mutant(
        520, "a recovery by older metadata asks the bookies that these name",
        (Edit("client_aio.ledger.recovery_scope:recovery_scope", "if not events:", "if True:"),),
        tests=("tests/integration/test_set_back.py", "-k", "other_bookies_acknowledged"),
    ),
    Mutant(
        521, "one bookie that denies an entry ends a recovery that asks all",
        (Edit("client_aio.ledger.recovery_scope:RecoveryScope.of",
              "len(bookies), metadata.ack_quorum), is_wide", "len(bookies), len(bookies)), is_wide"),),
        tests=("tests/integration/test_set_back.py", "-k", "enough_bookies_answer"),
    ),
    Mutant(
        522, "entries below the LAC that other bookies have are not written back",
        (Edit("client_aio.ledger.recovery:Recovery._before",
              "if self._scope.is_wide", "if False"),),
        tests=("tests/integration/test_set_back.py", "-k", "other_bookies_acknowledged"),
    ),
    Mutant(
        549, "entries below the LAC that fewer named bookies than a quorum have are not written back",
        (Edit("client_aio.ledger.recovery_scope:FragmentLists.before",
              "short = self._first_short(acknowledged)", "short = None"),),
        tests=("tests/client_aio/test_client_recovery_scope.py", "-k", "fewer_of_the_named"),
    ),
    Mutant(
        555, "entries that are trimmed count as those that fewer bookies than a quorum have",
        (Edit("client_aio.ledger.recovery_scope:FragmentLists._first_short",
              "owed[index_from(owed, self._first_kept) :]", "owed"),),
        tests=("tests/integration/test_set_back.py", "-k", "trimmed_behind"),
    ),
    Mutant(
        556, "the length behind trimmed entries is read from the last one of these",
        (Edit("client_aio.ledger.recovery_scope:FragmentLists.holders_behind",
              "if self._first_kept != first_kept or", "if True or"),),
        tests=("tests/integration/test_set_back.py", "-k", "trimmed_behind"),
    ),
    Mutant(
        557, "entries are written back though nobody outside of their write set can have them",
        (Edit("client_aio.ledger.recovery_scope:open_classes",
              "if silent.difference(write_set(first % size, size, metadata.write_quorum))", "if True"),),
        tests=("tests/integration/test_set_back.py", "-k", "writes_nothing_back"),
    ),
    Mutant(
        558, "a recovery writes back as fast as it reads",
        (Edit("client_aio.ledger.recovery:Recovery._search",
              "return replication.window.bytes_held <= self._config.max_in_flight_bytes", "return True"),),
        tests=("tests/integration/test_writer_against_recovery.py", "-k", "holds_no_more"),
    ),
    Mutant(
        559, "a ledger is created below the event of a set-back, under an id that was drawn before",
        (Edit("metadata.access.ledgers:LedgerStore.create_ledger",
              "max(floor, not_free_below((await SetBacks.read(self.store)).events))", "floor"),),
        tests=("tests/metadata/test_ledger_store.py", "-k", "event_of_a_set_back"),
    ),
    Mutant(
        560, "a bookie without a registration is not asked whether an id is free",
        (Edit("client_aio.ledger.create:create_metadata",
              "found if isinstance(found, BookieConnection) else context.pool.peek(name)",
              "found if isinstance(found, BookieConnection) else None"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "id_is_free"),
    ),
    Mutant(
        561, "what a formatting wrote before it was killed counts as durable",
        (Edit("bookie_aio.server.registration:_format",
              "await _write_draft(disk, path, None if draft == fresh else fresh)",
              "draft == fresh or await _write_draft(disk, path, fresh)"),),
        ("first-starts",),
    ),
    Mutant(
        562, "only the directory's own name is made durable, and not those of its parents",
        (Edit("bookie_aio.storage.disk.disk:sync_path",
              "disk.parents(directory)", "disk.parents(directory)[:1]"),),
        tests=("tests/bookie_aio/server/test_server_identity.py", "-k", "made_durable"),
    ),
    Mutant(
        523, "a bookie that no write set of an entry has lists it in its place",
        (Edit("client_aio.ledger.recovery_scope:first_displaced",
              "if seat not in write_set(each % size, size, metadata.write_quorum)", "if seat >= size"),),
        tests=("tests/client_aio/test_client_recovery_scope.py", "-k", "out_of_place"),
    ),
    Mutant(
        490, "a bookie looks at the ages of others now and then only",
        (Edit("bookie_aio.server.age:BookieAge._raise_for_ever", "self.number != self._looked_at or", ""),),
        tests=(_PEER_TESTS, "-k", "whenever_it_has_raised"),
    ),
    Mutant(
        491, "a bookie that ends does not look at the ages of others",
        (Edit("bookie_aio.server.age:BookieAge.close", "if self.number != self._looked_at:", "if False:"),),
        tests=(_PEER_TESTS, "-k", "that_ends"),
    ),
    Mutant(
        492, "an age of another bookie that is too low proves nothing at a start",
        (Edit("bookie_aio.server.age:BookieAge.settle",
              "if await self._is_untold(await self._stored.find_older(self._file.peers)):", "if False:"),),
        tests=(_PEER_TESTS, "-k", "that_wrote_nothing"),
    ),
    Mutant(
        493, "an age of another bookie that is too low proves a set-back again and again",
        (Edit("bookie_aio.server.age:BookieAge._is_untold",
              "return not all(is_told(peer, events) for peer in older)", "return True"),),
        tests=(_PEER_TESTS, "-k", "under_a_bookie"),
    ),
    Mutant(
        494, "a new bookie under the id of one that was removed is taken for older metadata",
        (Edit("bookie_aio.server.stored_ages:StoredAges._see",
              'if incarnation and before.incarnation not in ("", incarnation):', "if False:"),
         Edit("bookie_aio.server.stored_ages:StoredAges._see",
              "bool(incarnation) and before.incarnation == incarnation", "True")),
        tests=(_PEER_TESTS, "-k", "under_the_id_of_one"),
    ),
    Mutant(
        495, "the age of another bookie counts as the own one",
        (Edit("bookie_aio.server.age:read_age", "age.owner in (0, owner)", "True"),),
        tests=(_PEER_TESTS, "-k", "is_a_damaged_one"),
    ),
    Mutant(
        524, "a loss by older metadata does not name the bookies that have what is lost",
        (Edit("client_aio.ledger.accept_loss:_find_end_without",
              "first_displaced(metadata, seat, found[name].rows) is not None", "False"),),
        tests=("tests/integration/test_set_back.py", "-k", "have_what_is_lost"),
    ),
    Mutant(
        502, "a recovery by older metadata asks the bookies that these name",
        (Edit("client_aio.ledger.recovery_scope:recovery_scope", "if not events:", "if True:"),),
        ("set-back-ensembles",),
        note="520 is the same bug, caught by a test",
    ),
    Mutant(
        503, "entries below the LAC that other bookies have are not written back",
        (Edit("client_aio.ledger.recovery:Recovery._before",
              "if self._scope.is_wide", "if False"),),
        ("set-back-ensembles", "set-back-under-writers"),
        note="522 is the same bug, caught by a test",
    ),
    Mutant(
        504, "a bookie looks at the ages of others now and then only",
        (Edit("bookie_aio.server.age:BookieAge._raise_for_ever", "self.number != self._looked_at or", ""),),
        ("set-back-both",),
        note="490 is the same bug, caught by a test",
    ),
    Mutant(
        525, "ids that a client drew and did not use yet raise no age",
        (Edit("bookie_aio.server.age:BookieAge.learn_ids", "self._groups_covered = -1", "pass"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "gave_it_out_again"),
    ),
    Mutant(
        526, "whether an id is free goes by the counter alone",
        (Edit("bookie_aio.server.age:BookieAge.learn_ids", "await self.check()", "pass"),),
        tests=("tests/bookie_aio/server/test_server_age.py", "-k", "gave_it_out_again"),
    ),
]  # fmt: skip
