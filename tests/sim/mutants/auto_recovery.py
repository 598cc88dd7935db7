"""Planted bugs of auto recovery: of the auditor, of workers, and of the repair that they rely on."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_REPAIR = "client_aio.admin.repair:Repair"
_COPIER = "client_aio.admin.repair:_Copier"
_WORKER = "client_aio.autorecovery.worker:Worker"
_AUDITOR = "client_aio.autorecovery.auditor:Auditor"
_AUDIT = "client_aio.core.audit"
_ABANDONED = "client_aio.autorecovery.abandoned"
_DRAIN = "client_aio.autorecovery.drain:Drain"
_PROFILES = ("auto-recovery", "rolling-absences")
_LEAVING = ("leaving-bookie",)

MUTANTS = [
    Mutant(
        250, "a repair counts a seat before its entries are there",
        (Edit(f"{_REPAIR}._repair_part", "await copier.copy()", "pass"),),
        ("auto-recovery", "repaired-by-hand"),
    ),
    Mutant(
        251, "a repair counts copies that the target has not acknowledged",
        (Edit(f"{_COPIER}._copy_run",
              "await self._ask_target(self._store_when_it_may(block))",
              "asyncio.gather(self._store(block), return_exceptions=True)"),
         Edit(f"{_COPIER}._copy_run",
              "await self._ask_target(asyncio.gather(*map(self._store_when_it_may, blocks[first:])))",
              "asyncio.gather(*map(self._store, blocks[first:]), return_exceptions=True)")),
        ("auto-recovery",),
    ),
    Mutant(
        252, "a lock outlives the session of its worker",
        (Edit("metadata.access.repair_tasks:RepairTasks.lock", "return await self.store.register(key, ",
              "make = lambda value: self.store.create(key, value)\n"
              "    made = await make(b'{}')\n"
              "    class Lock:\n"
              "        async def close(_):\n"
              "            await self.store.delete(key, made)\n"
              "    return Lock() or (key, "),),
        ("auto-recovery",),
    ),
    Mutant(
        253, "a bookie counts as lost as soon as it is gone",
        (Edit(f"{_AUDIT}:BookieStates.lost", "if gone_s > self._delay_s", "if gone_s >= 0.0"),),
        _PROFILES,
    ),
    Mutant(
        254, "a bookie that does not answer loses its seats, lost or not",
        (Edit(f"{_AUDIT}:seats_to_repair",
              "is_gone = replica.bookie_id in lost and replica.bookie_id not in running", "is_gone = True"),),
        _PROFILES,
    ),
    Mutant(
        255, "a task that has failed is over",
        (Edit(f"{_WORKER}._settle", "if outcome.is_done:", "if True:"),),
        ("auto-recovery",),
    ),
    Mutant(
        256, "a worker does not look again whether every copy is there",
        (Edit(f"{_WORKER}._attempt", "if not lacking and not errors:", "if True:"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "cannot_be_repaired"),
    ),
    Mutant(
        257, "tasks end when they are taken",
        (Edit(f"{_WORKER}._do_locked", "await self._set_rate()",
              "await self._tasks.done(ref, version)\n    await self._set_rate()"),),
        ("auto-recovery",),
    ),
    Mutant(
        258, "a repair copies what the first answer has of the entries that are missing",
        (Edit(f"{_COPIER}._copy_run", "rest = rest.after(blocks[-1].last_entry)", "rest = None"),),
        ("auto-recovery",),
    ),
    Mutant(
        259, "the auditor never reads an open ledger again",
        (Edit(f"{_AUDITOR}._pass",
              "self._growing_turns.next(sorted(growing), elapsed_s, config.reads_per_pass)", "[]"),
         Edit(f"{_AUDITOR}._reread_growing", "if lost and", "if False and")),
        tests=("tests/integration/test_autorecovery.py", "-k", "beside_a_live_writer"),
        note="the auditor that is elected after a run reads every ledger once, and finds them closed",
    ),
    Mutant(
        260, "nobody compares what a bookie lists with what it owes",
        (Edit(f"{_AUDITOR}._check", "if not bad:\n        return", "if True:\n        return"),),
        _PROFILES,
    ),
    Mutant(
        261, "a bookie that comes back goes on being gone",
        (Edit(f"{_AUDIT}:BookieStates.look",
              "for name in [one for one in self.gone_s if one in running or one not in wanted]:",
              "for name in []:"),),
        tests=("tests/client_aio/core/test_client_audit.py", "-k", "seen_to_be_gone"),
        note="a worker looks itself whether the bookie is registered, so it takes two absences",
    ),
    Mutant(
        262, "a WATCH says deleted before the adds that were accepted earlier are durable",
        (Edit("bookie_aio.server.handlers.lac:LacHandler._answer_watch",
              "if not any(map(self._engine.is_deleted, ledger_ids)):", "if True:"),),
        tests=("tests/bookie_aio/server/test_server_watches.py", "-k", "deleted_is_told"),
    ),
    Mutant(
        361, "a bookie that answers and is not registered loses its seat",
        (Edit(f"{_WORKER}._takes_copies", "record is None or record.is_writable",
              "record is not None and record.is_writable"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "keeps_its_seat"),
        note="auto-recovery 831453 found it: the look at the bookies has to fall into a restart",
    ),
    Mutant(
        367, "a bookie is drained by metadata that may be older than what it holds",
        (Edit("client_aio.autorecovery.drain:Drain._check_answered",
              "if unanswered_below(", "if False and unanswered_below("),),
        tests=("tests/integration/test_lifecycle.py", "-k", "older_than_what_it_holds"),
    ),
    Mutant(
        370, "a task is done though the bookie that it names does not answer",
        (Edit(f"{_WORKER}._attempt", "if name in task.concerned | doubted", "if False"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "does_not_answer"),
    ),
    Mutant(
        450, "a bookie that was named and not verified is not in doubt",
        (Edit(f"{_WORKER}._attempt",
              "doubted.update(name for name in names if name and name not in seats.replaced)", "pass"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "is_verified"),
    ),
    Mutant(
        451, "a task is done though its repair failed",
        (Edit(f"{_WORKER}._attempt", "if not lacking and not errors:", "if not lacking and not silent:"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "whose_repair_failed"),
    ),
    Mutant(
        452, "a bookie that lists everything lacks nothing, whatever its task says",
        (Edit(f"{_WORKER}._attempt", "set(task.doubted), False\n", "set(), False\n"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "sample_found"),
    ),
    Mutant(
        453, "a task that failed goes on naming the bookies of its beginning",
        (Edit(f"{_WORKER}._settle",
              "outcome.entries_lost, outcome.doubted", "outcome.entries_lost, task.doubted"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "lack_entries_now"),
    ),
    Mutant(
        454, "a seat that is to move to another rack moves to any bookie",
        (Edit(f"{_WORKER}._spread", "by=new", "preferred=new"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "or_stays"),
    ),
    Mutant(
        455, "a bookie that was lost once stays lost for its task",
        (Edit(f"{_WORKER}._lost_still", "if name in record.lost", "if True"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "lost_no_more"),
        note="a worker looks itself whether the bookie is registered, so it takes two absences",
    ),
    Mutant(
        371, "a task that fails takes every turn",
        (Edit(f"{_WORKER}._next", "if fresh and free[0].name in self._rests:", "if False:"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "every_second_turn"),
    ),
    Mutant(
        372, "a bookie that does not say what it holds holds nothing",
        (Edit("client_aio.autorecovery.drain:Drain._look", "self._held is None or metadata",
              "self._held is not None and metadata"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "tied_by_every_recovery"),
    ),
    Mutant(
        381, "tasks that never end keep all places",
        (Edit("client_aio.core.failed_tasks:FailedTasks.choose",
              "surplus = max(len(failed) - self._share, 0)", "surplus = 0"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "never_end"),
        note="simulated runs have fewer ledgers than the table has places",
    ),
    Mutant(
        382, "a bookie that let an attempt to connect time out is not asked again",
        (Edit("client_aio.bookies.pool:BookiePool.get_briefly",
              "async with awake_timeout(_CONNECT_GRACE_S):", "async with awake_timeout(0.0):"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "that_hangs"),
    ),
    Mutant(
        383, "every look waits in full for a bookie that hangs",
        (Edit("client_aio.bookies.pool:BookiePool.get_briefly",
              "if self._loop.time() >= self._hangs_until.get(bookie_id, 0.0):", "if True:"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "that_hangs"),
    ),
    Mutant(
        384, "a new auditor takes every start of a bookie for settled",
        (Edit(f"{_AUDIT}:BookieStates.look",
              "if self._starts.get(name) != start:", "if self._starts.get(name, start) != start:"),
         Edit(f"{_AUDITOR}._begin", "record.gone_s, record.settled", "record.gone_s")),
        tests=("tests/integration/test_autorecovery.py", "-k", "nobody_audited"),
        note="after a run every ledger is checked within two seconds",
    ),
    Mutant(
        385, "a bookie stays settled when a task goes that only a check can make again",
        (Edit(f"{_AUDITOR}._give_way", "self._unsettle(failed.bookies_checked)", "pass"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "only_a_check"),
    ),
    Mutant(
        456, "a ledger whose metadata do not parse fails the checks of the others",
        (Edit(f"{_AUDITOR}._check_due", "except MetadataCorruptError as error:",
              "except ZeroDivisionError as error:"),),
        tests=("tests/integration/test_auditor.py", "-k", "do_not_parse"),
    ),
    Mutant(
        457, "a check in which a bookie gave no answer is not made again",
        (Edit(f"{_AUDITOR}._check_those_missed", "self._checks.add(ledger_id, due)", "pass"),),
        tests=("tests/integration/test_auditor.py", "-k", "met_silence"),
    ),
    Mutant(
        458, "each drain fills a quarter of the places for tasks",
        (Edit(f"{_DRAIN}._make_tasks", "// max(len(orders.leaving), 1)", ""),),
        tests=("tests/integration/test_autorecovery.py", "-k", "drain_leaves_places"),
    ),
    Mutant(
        459, "a task that a drain makes of a ledger set aside lacks the reasons of the former task",
        (Edit(f"{_AUDITOR}._give_way", "self._find(ledger_id, one.copies, one.reasons)", "pass"),),
        tests=("tests/integration/test_auditor.py", "-k", "set_aside"),
    ),
    Mutant(
        531, "a ledger that has a task is not checked",
        (Edit(f"{_AUDITOR}._check", "if ledger_id not in self.index:",
              "if ledger_id in self._refs or ledger_id not in self.index:"),),
        tests=("tests/integration/test_auditor.py", "-k", "adds_to_a_task"),
        note="simulated runs have no racks, and every worker does every task",
    ),
    Mutant(
        532, "a failed attempt overwrites what was added to its task meanwhile",
        (Edit("metadata.access.repair_tasks:RepairTasks.note_failure",
              "failed = failed.merged(new_reasons(now.reasons, task.reasons))", "pass"),),
        tests=("tests/metadata/test_repair_tasks.py", "-k", "failure_is_noted"),
    ),
    Mutant(
        533, "new damage is told by the number of marks",
        (Edit(f"{_AUDITOR}._ask_bookies", 'ledgers["last_mark"]', 'ledgers["damaged"]'),),
        tests=("tests/integration/test_auditor.py", "-k", "new_damage"),
        note="every ledger is checked within two seconds",
    ),
    Mutant(
        534, "checks of ledgers whose data were lost wait their turn",
        (Edit(f"{_AUDITOR}._check_ledgers_of", "is_urgent=is_urgent)", "is_urgent=False)"),),
        tests=("tests/integration/test_auditor.py", "-k", "new_damage"),
        note="as 533",
    ),
    Mutant(
        535, "a drain gives up while workers repair other ledgers first",
        (Edit(f"{_AUDIT}:Pace.idle_s", "max(self._moved_at, self._worked_at)", "self._moved_at"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "drain_goes_on_while"),
        note="a drain that gave up is run again",
    ),
    Mutant(
        552, "a bookie does not look at its order behind its registration",
        (Edit("bookie_aio.server.bookie:Bookie._register", "await self._order.look()", "pass"),),
        tests=("tests/bookie_aio/server/test_server_space.py", "-k", "hears_that_it_has_left"),
    ),
    Mutant(
        553, "a bookie that has left obeys the order that a second drain gives",
        (Edit("bookie_aio.server.registration:StandingOrder._read_now",
              "if await self._has_left()", "if order is None and await self._has_left()"),),
        tests=("tests/bookie_aio/server/test_server_space.py", "-k", "hears_that_it_has_left"),
    ),
    Mutant(
        554, "a drain overlooks a bookie that has just registered",
        (Edit("client_aio.autorecovery.drain:Drain._is_registered",
              "await self._store.sync(available_key(self._bookie_id))", "pass"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "just_registered"),
    ),
    Mutant(
        536, "a worker counts those who read beside it once for each ledger",
        (Edit(f"{_WORKER}._look_around", "await self._set_rate()", "pass"),),
        tests=("tests/integration/test_worker_bounds.py", "-k", "share_the_rate"),
        note="no checker looks at rates",
    ),
    Mutant(
        537, "a ledger is abandoned though its last fragment needs no other bookie",
        (Edit(f"{_ABANDONED}:AbandonedLedgers._see",
              "if not may_be_left(fragment.bookies, gone, _usable(self._context)):", "if False:"),),
        tests=("tests/integration/test_abandoned.py", "-k", "may_have_a_writer"),
        note="a writer that is fenced loses nothing that was acknowledged",
    ),
    Mutant(
        538, "a ledger is abandoned though entries came meanwhile",
        (Edit("client_aio.core.abandonment:Standing.note",
              "stands = sight is not None and sight == before",
              "stands = sight is not None and before is not None"),),
        tests=("tests/client_aio/core/test_client_abandonment.py", "-k", "whatever_moves"),
        note="as 537",
    ),
    Mutant(
        539, "an old task fences a writer that has moved since",
        (Edit(f"{_ABANDONED}:end_abandoned",
              "is_open and not may_be_left(fragment.bookies, gone, _usable(context))", "False"),),
        tests=("tests/integration/test_abandoned.py", "-k", "task_fences"),
        note="as 537",
    ),
    Mutant(
        362, "all workers of a host work at once",
        (Edit(f"{_WORKER}._waits_for_others",
              "others >= workers_at_once(self._context) and not is_urgent(ref)", "False"),),
        tests=("tests/integration/test_autorecovery.py", "-k", "one_host"),
    ),
    Mutant(
        290, "a repair by hand takes a ledger that a worker has locked",
        (Edit("client_aio.autorecovery.cluster_repair:ClusterRepair._repair",
              "if ledger_id not in await self._tasks.locked():", "if True:"),
         Edit("client_aio.autorecovery.cluster_repair:ClusterRepair._repair",
              "lock = await self._tasks.lock(ledger_id, self.name)",
              "lock = await self._tasks.lock(ledger_id + 1_000_000, self.name)")),
        tests=("tests/cli/test_cli_cluster_repair.py", "-k", "locked"),
        note="rule 14 holds for repairs at the same time: the lock spares work, and is no safety",
    ),
    Mutant(
        291, "a fragment that was repaired while it was verified counts as bad",
        (Edit("client_aio.autorecovery.verification:Verification._part",
              "if present == part:", "if True:"),),
        tests=("tests/cli/test_cli_verify.py", "-k", "changes"),
        note="simulated runs read every copy by the checker's own reads",
    ),
    Mutant(
        292, "a dump has a head that refers to pages that it lacks",
        (Edit("metadata.access.dump:_with_pages", "if present.version == head.version:", "if True:"),),
        tests=("tests/metadata/test_dump.py", "-k", "changes_while"),
        note="lists in simulated runs are too short for pages",
    ),
    Mutant(
        293, "a restored counter is not above the ledgers of the dump",
        (Edit("metadata.access.dump:read_dump",
              "counter = max(counter, _least_id(number, key, value))", "pass"),),
        tests=("tests/metadata/test_dump.py", "-k", "counter_is_above"),
        note="no simulated run restores a dump",
    ),
    Mutant(
        270, "a cookie is removed before the copies are made",
        (Edit(f"{_AUDIT}:ties_of", "ties |= Ties.COPIES", "pass"),),
        _LEAVING,
    ),
    Mutant(
        271, "nobody looks at all ledgers again before a cookie is removed",
        (Edit(f"{_DRAIN}._move", "ties, _ = await self._scan()", "ties = {}"),),
        _LEAVING,
    ),
    Mutant(
        272, "a bookie that is to leave goes on taking entries",
        (Edit("bookie_aio.server.handlers.add:AddHandler._is_forbidden", "mode = self._order.mode",
              "return False"),),
        tests=("tests/bookie_aio/server/test_server_space.py", "-k", "an_order_makes"),
        note="clients choose it no more all the same, and the last look finds what names it",
    ),
    Mutant(
        273, "a bookie that is to leave takes the entries of recoveries",
        (Edit("bookie_aio.server.handlers.add:AddHandler._is_forbidden",
              "if mode == READ_ONLY and request.flags & _RECOVERY:", "if request.flags & _RECOVERY:"),),
        tests=("tests/bookie_aio/server/test_server_space.py", "-k", "an_order_makes"),
        note="it takes a recovery that chose the bookie before the order, and ends after the last look",
    ),
    Mutant(
        274, "the last fragment of an open ledger does not keep a bookie",
        (Edit(f"{_AUDIT}:ties_of", "elif is_growing:", "elif False:"),),
        _LEAVING,
    ),
    Mutant(
        275, "a bookie does not read its order",
        (Edit("bookie_aio.server.registration:StandingOrder._read_now",
              "mode = \"\" if order is None", "mode = \"\" if True"),),
        tests=("tests/bookie_aio/server/test_server_space.py", "-k", "before_its_start"),
        note="clients read the order, too, and the drain waits until the bookie obeys",
    ),
    Mutant(
        276, "the age of a bookie that has left goes with its cookie",
        (Edit(f"{_DRAIN}._remove", "await self._store.delete(cookie_key(self._bookie_id))",
              "await self._store.delete(cookie_key(self._bookie_id))\n"
              "        await self._store.delete('bookies/ages/' + self._bookie_id)"),),
        _LEAVING,
    ),
    Mutant(
        277, "a seat counts as given away when its task is made",
        (Edit(f"{_DRAIN}._look_again", "if ties:", "if ties & ~Ties.COPIES:"),
         Edit(f"{_DRAIN}._move", "ties, _ = await self._scan()",
              "ties = {one: each for one, each in (await self._scan())[0].items()"
              " if each & ~Ties.COPIES}")),
        _LEAVING,
    ),
    Mutant(
        278, "a repair names a bookie although it was ordered to leave meanwhile",
        (Edit("client_aio.ledger.metadata_update:VersionedLedgerMetadata.replace_bookie",
              "new, absent), guard)", "new, absent))"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "comes_late and False"),
        note="one compare-and-set has to be under way for longer than a whole drain",
    ),
    Mutant(
        376, "a repair of an unbounded ledger names a bookie although it was ordered to leave meanwhile",
        (Edit("client_aio.unbounded.paged_fragments:VersionedFragments.replace_bookie",
              "self._change(change, guard)", "self._change(change)"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "comes_late and True"),
        note="as 278",
    ),
    Mutant(
        377, "a bookie that denies what is found nowhere is kept for it",
        (Edit(f"{_REPAIR}._absent", "absent if self._lost in copier.withholding else None", "absent"),
         Edit(f"{_REPAIR}._forget_absent", "kept = copier.withholding if copier.lost else ()",
              "kept = copier.withholding | {self._lost} if copier.lost else ()")),
        tests=("tests/integration/test_repair.py", "-k", "denies_what_is_found_nowhere"),
        note="nothing is lost: the bookie cannot leave the cluster",
    ),
    Mutant(
        380, "a repair that stood still removes the records of the next one",
        (Edit(f"{_REPAIR}._forget_absent", "if bookies[seat] == target else None", "if True else None"),),
        tests=("tests/integration/test_repair.py", "-k", "that_stood_still"),
        note="it has to stand still while its bookie is lost, and replaced",
    ),
    Mutant(
        530, "a repair passes over an entry that a list shows",
        (Edit(f"{_COPIER}._copy_run",
              "if rest.first != again_at and lists_first(rest, listings):", "if False:"),),
        tests=("tests/integration/test_repair.py", "-k", "for_a_moment"),
        note="leaving-bookie 1025056 found it: a source has to be silent for as long as the reads take",
    ),
    Mutant(
        573, "a repair does not ask those again in the end that did not answer",
        (Edit(f"{_COPIER}.copy", "if self.lost and await self._is_one_back():", "if False:"),),
        tests=("tests/integration/test_repair.py", "-k", "asked_again_in_the_end"),
        note="an entry has to be unreadable elsewhere, and is lost for this repair only",
    ),
    Mutant(
        574, "a fragment that cannot be repaired keeps the next ones from it",
        (Edit("client_aio.admin.repair:Repair.run",
              "self._failed[part.first_entry] = error", "raise"),),
        tests=("tests/integration/test_repair.py", "-k", "keeps_no_other_one_from_it and down"),
        note="a fragment has to be left on bookies that are gone",
    ),
    Mutant(
        575, "a lost bookie that does not answer keeps its fragment from being repaired",
        (Edit(f"{_COPIER}.copy", ".intersection(self._part.bookies) - {self._lost}", ""),),
        tests=("tests/integration/test_repair.py", "-k", "keeps_no_other_one_from_it and damaged"),
        note="as 574",
    ),
    Mutant(
        576, "a bookie that has left and registers once more is named in new fragments",
        (Edit("client_aio.bookies.pool:BookieDirectory.refresh", "if name not in left", "if True"),),
        tests=("tests/client_aio/test_client_pool.py", "-k", "registers_once_more"),
        note="leaving-holders-bookie 1281704 found it, where a drain read open ledgers less often",
    ),
    Mutant(
        577, "writers that wait for a bookie wake one another",
        (Edit("client_aio.bookies.pool:BookieDirectory.refresh",
              "if (available, orders.by_bookie) != self._as_read:", "if True:"),),
        tests=("tests/client_aio/test_client_pool.py", "-k", "only_where_something_has_changed"),
        note="nothing is lost: the metadata store is kept busy",
    ),
    Mutant(
        579, "who looks for a bookie is served by a read that began before",
        (Edit("client_aio.bookies.pool:BookieDirectory.refresh_since",
              "self._recent_from < since", "False"),),
        tests=("tests/client_aio/test_client_pool.py", "-k", "begins_no_earlier"),
        note="an operation fails which would have found the bookie",
    ),
    Mutant(
        585, "a worker tries one task after another where no bookie is left for the copies",
        (Edit("client_aio.autorecovery.worker:Worker._attempt",
              "isinstance(error, NotEnoughBookiesError)", "False"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "less_and_less"),
        note="nothing is lost: the metadata store is kept busy",
    ),
    Mutant(
        378, "records of absent entries are left over where all entries are there",
        (Edit("client_aio.autorecovery.worker:Worker._attempt",
              "await self._clear_absent(ledger_id)", "Counter()"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "verified_elsewhere"),
        note="as 377",
    ),
    Mutant(
        379, "a write to ZooKeeper does not depend on its guard",
        (Edit("metadata.backends.zookeeper.store:ZooKeeperMetadataStore.compare_and_set",
              "check = None if guard is None else", "check = None if True else"),),
        tests=("tests/metadata/test_contract.py", "-k", "guarded and zookeeper"),
        note="the simulator's store is its own",
    ),
    Mutant(
        440, "a restore that was stopped clears what another run of it has restored",
        (Edit("metadata.access.dump:Restore._clear", "store.delete(key, guard=guard)", "store.delete(key)"),),
        tests=("tests/metadata/test_dump.py", "-k", "was_stopped and ledgers"),
        note="no simulated run restores a dump",
    ),
    Mutant(
        441, "a registration removes the key that another process has made in place of its own",
        (Edit("metadata.backends.zookeeper.registration:ZooKeeperRegistration._put",
              "session.delete(path, stat.version, count)", "session.delete(path, stat.version)"),),
        tests=("tests/metadata/test_zookeeper_faults.py", "-k", "expires_meanwhile and moves"),
        note="as 379",
    ),
    Mutant(
        442, "a deletion in ZooKeeper does not depend on its guard",
        (Edit("metadata.backends.zookeeper.store:ZooKeeperMetadataStore.delete",
              "check = None if guard is None else", "check = None if True else"),),
        tests=("tests/metadata/test_contract.py", "-k", "guarded_delete and zookeeper"),
        note="as 379",
    ),
    Mutant(
        279, "a new ledger leaves a seat to a bookie that leaves the cluster",
        (Edit("client_aio.bookies.ensemble_finder:EnsembleFinder._with_seats_left",
              "known.difference_update(directory.orders.leaving)", "pass"),),
        tests=("tests/integration/test_lifecycle.py", "-k", "seat_is_left"),
        note="nothing that was acknowledged is there, and the drain looks again",
    ),
    Mutant(
        542, "a verification believes that a bookie answers with what it was asked for",
        (Edit("client_aio.admin.replicas:_verify_range", "in blocks_in_order(asked, body):",
              "in __import__('bookie_aio.wire.blocks', fromlist=['']).parse_blocks(body):"),),
        tests=("tests/client_aio/test_client_replicas.py", "-k", "other_entries"),
        note="no simulated bookie answers with other entries",
    ),
    Mutant(
        547, "an auditor checks a ledger that is being repaired, and the task begins again",
        (Edit(f"{_AUDITOR}._check_due", "left.keys() & await self._tasks.locked()", "set()"),),
        tests=("tests/integration/test_auditor.py", "-k", "being_repaired"),
        note="leaving-holders-bookie 1034674 found it: the check and a long repair have to end in one order",
    ),
    Mutant(
        548, "a bookie counts as settled before a check of it that was put off",
        (Edit(f"{_AUDITOR}._put_off", "self.index.named(ledger_id, self._settling)", "()"),),
        tests=("tests/integration/test_auditor.py", "-k", "being_repaired"),
        note="the auditor has to die in between",
    ),
    Mutant(
        567, "the start of a bookie that has left for good settles",
        (Edit("client_aio.core.audit:BookieStates.look", "for name in self._back_s.keys() - running.keys():",
              "for name in (self._back_s.keys() - running.keys()) & wanted:"),),
        tests=("tests/client_aio/core/test_client_audit.py", "-k", "leaves_for_good"),
        note="leaving-bookie 1262176 found it",
    ),
]  # fmt: skip
