"""Planted bugs of terms, of content terms, and of logs."""

from __future__ import annotations

from tests.sim.mutants.planting import Edit, Mutant

_TERMS = ("dirty-entries", "duelling-holders", "partial-takeovers")
_HEALING = ("healing-logs",)
_HEALING_TERMS = ("healing-terms",)
_LOGS = ("duelling-logs", "log-crashes", "added-logs")

MUTANTS = [
    Mutant(
        21, "the content term is not compared on reads",
        (Edit("bookie_aio.storage.read.reader:Reader.read",
              "best is None or best.content_term < self._content_term", "best is None"),
         Edit("bookie_aio.storage.read.reader:Reader.read",
              "best.content_term > self._content_term", "False"),
         Edit("client_aio.core.read_plan:blocks_in_order",
              "or block.content_term != asked.content_term", "or False")),
        _TERMS,
        note="neither by bookies nor by clients",
    ),
    Mutant(
        22, "a LAC of a newer term is used with old metadata",
        (Edit("client_aio.ledger.reader:LedgerReader._is_behind",
              "statement.content_term > self._metadata.last_fragment.content_term", "False"),
         Edit("client_aio.core.read_plan:RangeRead.__init__", "self._heeds_stale = plan.can_refresh",
              "self._heeds_stale = False")),
        ("stale-followers", "dirty-entries"),
        note="nor is it heeded that a bookie knows a later term of the entry, which is a second guard",
    ),
    Mutant(
        23, "terms are compared wrongly: the one before the held is let in",
        (Edit("bookie_aio.core.fencing:judge",
              "Verdict.RAISE if request_term > held_term else Verdict.REFUSE",
              "Verdict.RAISE if request_term > held_term else "
              "Verdict.ACCEPT if request_term == held_term - 1 else Verdict.REFUSE"),),
        _TERMS,
    ),
    Mutant(
        24, "only one of the last two ledgers of a log is fenced",
        (Edit("client_aio.core.log_chain:to_recover", "head.newest[-NOT_CLOSED_MAX:]", "head.newest[-1:]"),),
        _LOGS,
    ),
    Mutant(
        40, "a roll writes to the next ledger before the adds to the previous one are acknowledged",
        (Edit("client_aio.log.roller:Roller._switch", "await old.flush()", "pass"),),
        _LOGS,
    ),
    Mutant(
        47, "a reader of a log reads an open ledger as if it were complete",
        (Edit("client_aio.log.reader:LogReading._source", "if is_complete and not is_closed:",
              "if not is_closed:"),),
        ("truncated-logs", "versatile-logs"),
    ),
    Mutant(
        160, "a writer that heals sends records again that its failed ledger holds",
        (Edit("client_aio.core.healing:Backlog.ended", "reversed(rest)", "reversed(known + rest)"),),
        _HEALING,
    ),
    Mutant(
        161, "a writer that heals completes records that are behind the end of its failed ledger",
        (Edit("client_aio.core.healing:Backlog.ended",
              "min(max(0, last_entry + 1 - self._first_entry), len(self._cut))", "len(self._cut)"),),
        _HEALING,
    ),
    Mutant(
        162, "a writer that heals sends the records that were cut off behind those that were held",
        (Edit("client_aio.core.healing:Backlog.ended", "extendleft(reversed(rest))", "extend(rest)"),),
        _HEALING,
    ),
    Mutant(
        163, "a writer that heals goes on though another client has taken its log over",
        (Edit("client_aio.log.healing:Opener._check_own", "not is_still_own(head, self._made)", "False"),),
        _HEALING,
    ),
    Mutant(
        164, "records that wait behind overdue ones go on, and overtake them",
        (Edit("client_aio.core.healing:Backlog.give_up", "(*self._cut, *self._held)", "self._cut"),
         Edit("client_aio.core.healing:Backlog.give_up",
              "self._cut, self._held, self.bytes_held = [], deque(), 0", "self._cut = []")),
        _HEALING,
    ),
    Mutant(
        230, "a writer that heals takes its ledger back from another client",
        (Edit("client_aio.core.healing:OwnTerms.include", "term in self._terms", "True"),),
        _HEALING_TERMS,
    ),
    Mutant(
        231, "a writer that heals completes entries that are behind the recovered end of its term",
        (Edit("client_aio.core.healing:Intake.go_on", "self._backlog.ended(last_entry)",
              "self._backlog.ended(1 << 60)"),),
        _HEALING_TERMS,
    ),
    Mutant(
        232, "a writer that heals sends entries again that its former term holds",
        (Edit("client_aio.core.healing:Intake.go_on", "self._backlog.ended(last_entry)",
              "self._backlog.ended(self._window.lac)"),),
        _HEALING_TERMS,
    ),
    Mutant(
        233, "entries of a term go on though overdue ones before them have failed",
        (Edit("client_aio.unbounded.writer:UnboundedLedgerWriter._give_up",
              "self._intake.give_up(self._loss.error)",
              "[token for _, token in self._intake._backlog._cut]"),),
        _HEALING_TERMS,
    ),
    Mutant(
        234, "the ids of a bulk are as if all overdue entries were in the ledger",
        (Edit("client_aio.core.healing:Intake.go_on",
              "self.shift = self._number - len(self._backlog) - last_entry", "self.shift = 0"),),
        tests=("tests/client_aio/core/test_client_healing.py",),
    ),
    Mutant(
        236, "a task that the application has cancelled is not started again",
        (Edit("metadata.owned_task:OwnedTask._done", "task.cancelled() and not self.is_cancelled", "False"),),
        _HEALING_TERMS,
    ),
    Mutant(
        237, "a recovery fences before it knows that it has bookies to write back to",
        (Edit("client_aio.ledger.recovery:_Reach._has_seats", "return not self._is_whole and", "return"),),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "content_with_qa"),
    ),
    Mutant(
        390, "a new ledger is handed out when every bookie has answered that it locked it",
        (Edit("client_aio.ledger.replication:Replicator.ask_enough",
              "return carries_on(answered, *sizes)", "return False"),),
        tests=("tests/integration/test_passwords.py", "-k", "hung_disk"),
    ),
    Mutant(
        391, "a recovery fences where too few bookies can be written back to",
        (Edit("client_aio.ledger.recovery:_Reach._has_seats",
              "return not self._is_whole and can_acknowledge(self._missing, *self._sizes)",
              "return not self._is_whole"),),
        tests=("tests/client_aio/test_client_reach.py", "-k", "could_be_written_back_to"),
    ),
    Mutant(
        392, "a bookie that fell silent while a loss is accepted is asked again at once",
        (Edit("client_aio.ledger.accept_loss:_find_end",
              "await asyncio.sleep(context.config.replacement_retry_s)", "pass"),),
        tests=("tests/client_aio/test_client_accept_loss.py", "-k", "restarts"),
    ),
    Mutant(
        393, "a recovery that writes nothing back is refused for want of bookies to write back to",
        (Edit("client_aio.ledger.recovery:_Reach.error",
              "not (self._is_whole or await self._must_write_back(first))", "False"),),
        tests=("tests/client_aio/test_client_reach.py", "-k", "writes_nothing_back"),
    ),
    Mutant(
        514, "a loss is accepted where a close at Qa would give nothing up",
        (Edit("client_aio.ledger.accept_loss:recover_with_loss",
              "recover_ledger(context, ledger_id, digest, at_ack_quorum=at_ack_quorum)",
              "recover_ledger(context, ledger_id, digest)"),
         Edit("client_aio.ledger.accept_loss:recover_with_loss",
              "held.current.guaranteed_write_quorum and not at_ack_quorum", "False")),
        tests=("tests/integration/test_scarce_bookies.py", "-k", "before_a_loss"),
    ),
    Mutant(
        515, "a reader of an unbounded ledger that was sealed with a loss ends there in silence",
        (Edit("client_aio.unbounded.operations:UnboundedLedgerReader._check_loss",
              "self._metadata.given_up is not None", "False"),),
        tests=("tests/integration/test_ways_on.py", "-k", "readers_are_told"),
    ),
    Mutant(
        516, "an unbounded ledger is sealed with a loss under the term of its writer",
        (Edit("client_aio.unbounded.seal:seal_with_loss", "partial(take_over, least=least)",
              "lambda now: __import__('dataclasses').replace(now, state=LedgerState.IN_RECOVERY)"),),
        tests=("tests/integration/test_ways_on.py", "-k", "sealed_with_a_loss_is_fenced"),
    ),
    Mutant(
        517, "the entries of a bookie that is merely down are given up for those of the fragment before",
        (Edit("metadata.access.bookies:are_gone", "return staying.isdisjoint(bookies)", "return True"),),
        tests=("tests/client_aio/test_client_accept_loss.py", "-k", "come_back"),
    ),
    Mutant(
        518, "a writer that heals looks only between attempts whether it still has its log or its ledger",
        (Edit("client_aio.healing:_until_lost", "if await is_lost():", "if False:"),),
        tests=("tests/integration/test_unbounded_healing.py", "-k", "hears_at_once"),
    ),
    Mutant(
        519, "a writer that heals does not know the term that it was taking when all tasks were cancelled",
        (Edit("client_aio.core.healing:OwnTerms.draw", "self._unheard[token] = self._wanted", "pass"),),
        tests=("tests/integration/test_unbounded_healing.py", "-k", "while_it_took_the_term"),
    ),
    Mutant(
        235, "why a bookie refuses the term is not asked of the metadata",
        (Edit("client_aio.ledger.ensemble_change:EnsembleChangeTask._fail_fenced",
              "await self._context.ledgers.read(ledger_id, sync=True)", "pass"),),
        tests=("tests/integration/test_buried_ids.py", "-k", "only_fenced_yet"),
    ),
    Mutant(
        63, "an addition does not look whose ledger it is",
        (Edit("client_aio.log.add_ledgers:_check_addable", 'if metadata.log not in ("", log_name):',
              "if False:"),),
        ("owned-ledgers",),
    ),
    Mutant(
        165, "an older batch of a query, and other records under its number, count as added",
        (Edit("client_aio.log.add_ledgers:Addition.is_repeated",
              'last.batch_id == ours.batch_id and ours.content in ("", last.content)', "True"),),
        ("replaced-logs",),
    ),
    Mutant(
        64, "a ledger is freed without raising the version of the list",
        (Edit("client_aio.log.truncation:_sweep_ledgers", "return head if left_over else None",
              "return None"),),
        tests=("tests/integration/test_ways_on.py", "-k", "while_it_is_being_listed"),
    ),
    Mutant(
        65, "a sweep takes a ledger's age from two machines' clocks",
        (Edit("client_aio.log.truncation:_without_young",
              "await context.ledgers.age_s(each.ledger_id) >= older_than_s",
              "context.now_ms() - (await context.ledgers.read(each.ledger_id))[0].created_ms "
              ">= older_than_s * 1000"),),
        ("owned-ledgers",),
    ),
    Mutant(
        66, "a gap is what cannot be read just now",
        (Edit("client_aio.log.gaps:is_missing",
              "isinstance(error, NoSuchLedgerError) and error.ledger_id == reader_id", "True"),),
        ("owned-ledgers",),
    ),
    Mutant(
        67, "a deletion by hand does not look whether a log lists the ledger",
        (Edit("client_aio.log.ownership:delete_unlisted", "if owner is not None:", "if False:"),),
        ("owned-ledgers",),
    ),
    Mutant(
        68, "a repair forgets who may still hold what it found nowhere",
        (Edit("client_aio.admin.repair:Repair._absent",
              "absent if self._lost in copier.withholding else None", "None"),),
        tests=("tests/integration/test_ways_on.py", "-k", "gap_after_a_repair"),
    ),
    Mutant(
        69, "a log that is closed with a loss ends there in silence",
        (Edit("client_aio.log.reader:LogReading._row",
              "if is_finished and reader.metadata.given_up is not None:", "if False:"),),
        tests=("tests/integration/test_ways_on.py", "-k", "cannot_be_recovered"),
    ),
    Mutant(
        70, "a claim that stands there already is not written again",
        (Edit("client_aio.log.ownership:claim", "check(metadata)",
              "check(metadata)\n                if metadata.log == log_name:\n                    return"),),
        tests=("tests/integration/test_ways_on.py", "-k", "listed_meanwhile"),
    ),
    Mutant(
        238, "a log is taken over for custom metadata that it has no room for",
        (Edit("client_aio.log.healing:Opener._check_custom", "head.with_custom(self._custom)", "pass"),),
        tests=("tests/integration/test_log_states.py", "-k", "fences_nobody"),
    ),
    Mutant(
        239, "an addition fences before it looks whether the log lists the ledger",
        (Edit("client_aio.log.add_ledgers:_try_to_add",
              "await _check_unlisted(context, lists, head, addition)\n    await takeover.fence()",
              "await takeover.fence()\n    await _check_unlisted(context, lists, head, addition)"),),
        tests=("tests/integration/test_log_states.py", "-k", "fences_nobody"),
    ),
    Mutant(
        412, "the end of a failed ledger waits for the recovery of the ledger behind it",
        (Edit("client_aio.log.healing:Opener.try_again",
              "except BookKeeperError:", "except LogFencedError:"),),
        tests=("tests/integration/test_log_healing.py", "-k", "waits_for_no_other"),
    ),
    Mutant(
        413, "a former ledger that cannot be closed fails the current one of its log",
        (Edit("client_aio.log.roller:Roller._close_old",
              "self._unclosed = error\n                return", "raise"),),
        tests=("tests/integration/test_log_states.py", "-k", "closed_by_another_call"),
    ),
    Mutant(
        414, "a writer that rolls keeps the id of each ledger that it has made",
        (Edit("client_aio.log.writer:LogWriter.switch_to",
              "self._healer.opener.forget_before(ledger.ledger_id)", "pass"),),
        tests=("tests/integration/test_log_states.py", "-k", "keeps_the_ids"),
    ),
    Mutant(
        470, "an addition looks for a ledger of its log in the newest rows only",
        (Edit("client_aio.log.add_ledgers:_check_unlisted",
              "addition.replace or await _is_any_claimed(context, below, lists.name)", "addition.replace"),),
        tests=("tests/integration/test_log_states.py", "-k", "lists_in_a_page"),
    ),
    Mutant(
        471, "a loss at the end of a row is passed over where the rows known begin behind it",
        (Edit("client_aio.log.reader:LogReading._row", "if cursor.at.ledger_id > row.id:", "if False:"),),
        tests=("tests/client_aio/test_client_gaps.py", "-k", "accepted"),
    ),
    Mutant(
        512, "a ledger that was deleted by force keeps its log from being truncated",
        (Edit("client_aio.log.truncation:_bounded", "suppress(NoSuchLedgerError)",
              "suppress(UnauthorizedAccessError)"),),
        tests=("tests/integration/test_ways_on.py", "-k", "truncated_though"),
    ),
    Mutant(
        513, "the end of a log lies in a ledger that is CLOSED, before what was lost there",
        (Edit("client_aio.log.reader:LogReading._end", "if not reader.is_closed:", "if True:"),),
        tests=("tests/client_aio/test_client_gaps.py", "-k", "not_told"),
    ),
    Mutant(
        240, "an election is not held on its client's event loop",
        (Edit("client_aio.election:LeaderElection._check_loop", "check_running(self._loop)", "pass"),),
        tests=("tests/integration/test_event_loops.py", "-k", "each_public_call"),
    ),
]  # fmt: skip
