"""Seeds that once failed: each found a bug in this project's own code, and stays here."""

from __future__ import annotations

import pytest

from tests.sim.cluster.quiet import quiet
from tests.sim.crash.states import record
from tests.sim.profiles import all_profiles, draw_plan
from tests.sim.simulation import run_plan

PACE = 1.0
"""Most of them are of a time before seeds drew one."""


def replay(profile: str, seed: int, *, pace: float | None = PACE) -> None:
    """Run a seed; all invariants hold."""
    assert profile in all_profiles()
    result = run_plan(draw_plan(profile, seed, pace=pace))
    assert result.is_good, result.text


@pytest.mark.parametrize("seed", [25, 30])
def test_a_bookie_that_compacts_can_be_closed(seed: int) -> None:
    """Closing waited for a compaction, whose copies waited for a segment that came and was not taken."""
    with quiet():
        assert record(seed)  # or it raises that nobody will ever close the engine


@pytest.mark.parametrize(("profile", "seed"), [("refusals", 5067)])
def test_a_segment_is_not_given_up_when_space_ran_out_for_its_copies(profile: str, seed: int) -> None:
    """Compaction took copies that were dropped for want of space for durable, and gave up the only ones."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("read-errors", 68), ("read-errors", 70)])
def test_what_cannot_be_read_for_a_while_is_not_lost_for_good(profile: str, seed: int) -> None:
    """Ledgers were marked damaged for ever, by reads and by a start, and with one copy never recovered."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("forced-entries", 542)])
def test_a_second_power_cut_soon_after_a_start_is_not_taken_for_damage(profile: str, seed: int) -> None:
    """The segment whose tail was elsewhere by then was gone, and nothing said where the one before ended.

    `test_sim_crashstates.py` looks for more of the kind.
    """
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("displaced-holders", 39)])
def test_a_roll_ends_when_its_writer_is_aborted_as_it_is_asked_for(profile: str, seed: int) -> None:
    """The task that was to see to it was cancelled before it first ran."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("duelling-logs", 800139)])
def test_a_table_of_ledgers_is_not_removed_under_the_name_of_an_older_one(profile: str, seed: int) -> None:
    """A start listed a left-over table for removal, and then wrote a new one under the same name."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-bookie", 801618)])
def test_nobody_waits_for_a_bookie_whose_id_has_ended(profile: str, seed: int) -> None:
    """A check did, whose command was killed behind that order, and before it removed the cookie."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("repaired-by-hand", 804550)])
def test_many_ledgers_may_take_long_to_repair(profile: str, seed: int) -> None:
    """A check gave auto recovery forty seconds, however many ledgers lacked copies."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("calm-after-storm", 79)])
def test_entries_of_a_bulk_that_broke_are_sent(profile: str, seed: int) -> None:
    """They waited for the next add, which never came, until their time was over and the writer failed."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("calm-after-storm", 800554)])
def test_a_bookie_whose_age_meets_a_failing_disk_ends_at_once(profile: str, seed: int) -> None:
    """It served on, and ended at the next change of a name: a reader then missed it in the calm."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("forced-entries", 811148)])
def test_a_batch_that_waits_for_room_behind_unsent_entries_does_not_stop_the_loop(
    profile: str, seed: int
) -> None:
    """It waited for the sent entries only, which were forced already: again and again, without a rest."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("auto-recovery", 831453)])
def test_a_bookie_that_has_just_started_keeps_its_seat(profile: str, seed: int) -> None:
    """A worker met it between its start and its registration, and copied its entries to another one."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("repaired-by-hand", 841553)])
def test_a_task_may_end_after_the_disk_went_whose_entries_its_worker_saw(profile: str, seed: int) -> None:
    """The checker held the worker for wrong: the deletion of the task took effect later than the loss."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("accepted-losses", 853425)])
def test_a_bookie_that_falls_silent_behind_its_list_is_recorded_as_lost(profile: str, seed: int) -> None:
    """Its entries were given up, and the metadata named others that may have entries behind the end."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("racing-closers", 58)])
def test_a_writer_that_has_closed_its_ledger_does_not_fail(profile: str, seed: int) -> None:
    """A late refusal of an add that had its ack quorum failed it, and it could not be closed again."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("racing-closers", 1013)])
def test_two_closes_at_once_come_to_the_same(profile: str, seed: int) -> None:
    """One met a recovery under way and failed the writer; the other met its end, and closed the writer."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("replaced-logs", 7), ("replaced-logs", 12)])
def test_a_log_is_replaced_only_once_it_has_been_taken_over(profile: str, seed: int) -> None:
    """Who opened it while earlier ledgers were being deleted went on acknowledging what was lost."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("replaced-logs", 5), ("truncated-logs", 5)])
def test_a_transaction_is_repeated_though_its_ledgers_are_gone(profile: str, seed: int) -> None:
    """They had been truncated or replaced since, and the addition was refused as one of no ledgers."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("remade-logs", 3), ("remade-logs", 4)])
def test_who_has_lost_a_log_is_told_so_in_terms_of_logs(profile: str, seed: int) -> None:
    """A writer that closed it, and a reader whose log was made anew, were told of a ledger that is gone."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("remade-ledgers", 13232)])
def test_a_ledger_that_its_maker_takes_back_late_is_not_missed(profile: str, seed: int) -> None:
    """Of the checker: the maker had lost the name and was dead, and the request to delete was on its way."""
    replay(profile, seed)


def test_a_reader_s_metadata_do_not_go_back() -> None:
    """Of several refreshes at once the one that had read first was answered last: OPEN again, it waited."""
    replay("sealed-terms", 2750, pace=2.0)


@pytest.mark.parametrize(("profile", "seed"), [("calm-after-storm", 100394)])
def test_a_bookie_that_is_writable_again_is_announced_so(profile: str, seed: int) -> None:
    """It was full while the metadata store could not be reached: "read-only" was announced, and stayed."""
    replay(profile, seed, pace=8)


@pytest.mark.parametrize(("profile", "seed"), [("mended-terms", 101870)])
def test_a_bookie_that_is_asked_to_force_does_not_hold_that_term(profile: str, seed: int) -> None:
    """Of the checker: FORCE raises no term (docs/PROTOCOL.md), and an older holder's recovery came later."""
    replay(profile, seed, pace=1)


@pytest.mark.parametrize(("profile", "seed"), [("disk-faults", 110694)])
def test_a_sync_beside_one_that_failed_is_no_word_for_a_file(profile: str, seed: int) -> None:
    """The checkpoint listed a segment by it, whose name the next power cut took away: all was marked."""
    replay(profile, seed, pace=8)


@pytest.mark.parametrize(("profile", "seed"), [("swept-logs", 107812)])
def test_what_was_cut_off_before_a_follower_began_is_not_missed(profile: str, seed: int) -> None:
    """Of the checker: a writer that was stopped for two seconds heard of its record that late."""
    replay(profile, seed, pace=1)


@pytest.mark.parametrize(("profile", "seed"), [("cut-short", 350203)])
def test_a_call_that_waits_for_several_lost_answers_is_not_one_that_hangs(profile: str, seed: int) -> None:
    """Of the checker: a read met a bookie that was down, and a metadata store that lost two answers."""
    replay(profile, seed, pace=4)


@pytest.mark.parametrize(("seed", "pace"), [(364499, 1), (367084, 4)])
def test_a_session_that_has_ended_makes_no_ephemeral(seed: int, pace: int) -> None:
    """The simulator's own: a dead candidate's request came late, and stood in the queue for ever."""
    replay("elected-logs", seed, pace=pace)


@pytest.mark.parametrize(("profile", "seed"), [("calm-after-storm", 1214565)])
def test_a_host_that_has_lost_power_is_no_black_hole_for_ever(profile: str, seed: int) -> None:
    """The simulator's own: what was sent later over a connection that was idle then got no reset."""
    replay(profile, seed, pace=8)


@pytest.mark.parametrize(("profile", "seed"), [("versatile-logs", 1312756)])
def test_a_page_that_is_made_behind_a_sweep_is_not_left_over_by_it(profile: str, seed: int) -> None:
    """Of the checker: the maker was dead, and his request came when the sweep had listed the pages."""
    replay(profile, seed, pace=2)


@pytest.mark.parametrize(("profile", "seed"), [("disk-faults", 500418)])
def test_that_data_was_lost_is_not_forgotten_by_starts_on_a_full_disk(profile: str, seed: int) -> None:
    """The mark that said so was the last group's, which went from file to file, and nobody held to it."""
    replay(profile, seed, pace=8)


@pytest.mark.parametrize(("profile", "seed"), [("full-starts", 6000606)])
def test_a_segment_with_a_damaged_header_is_not_taken_for_one_that_was_never_made(
    profile: str, seed: int
) -> None:
    """It was removed without a word, and was the only proof that the segment before it was damaged."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("read-errors", 162)])
def test_what_a_repair_found_nowhere_is_read_from_the_former_bookie(profile: str, seed: int) -> None:
    """The former bookie was away, had the only copy, and was not asked any more: the entry was denied."""
    replay(profile, seed)


@pytest.mark.parametrize(("profile", "seed"), [("own-blocking", 1542)])
def test_a_bookie_that_has_not_started_is_rightly_left_out(profile: str, seed: int) -> None:
    """Of the checker: a ledger began before every bookie served."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("forced-entries", 9532)])
def test_a_closed_ledger_is_read_when_its_bookies_have_started(profile: str, seed: int) -> None:
    """Of the checker: it gave up after two seconds, and a start takes longer after a power cut."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("refusing-newcomers", 132)])
def test_an_age_that_an_earlier_start_intended_is_not_forgotten_on_a_full_disk(
    profile: str, seed: int
) -> None:
    """The earlier start's request came late, and the bookie took its directory for an older copy."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("set-back-under-writers", 3130)])
def test_a_ledger_that_was_deleted_may_end_anywhere_by_older_metadata(profile: str, seed: int) -> None:
    """Of the checker: the copy had it open, its bookies had dropped it, and it was closed without entries."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("forced-entries", 20000125)])
def test_leaving_a_writer_that_has_told_its_failure_closes_nothing(profile: str, seed: int) -> None:
    """Of the checker: a force had raised the failure, so that `async with` ended without an error."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("sealed-terms", 20000848)])
def test_a_ledger_that_was_created_below_the_id_floor_is_nobody_s_to_finish(profile: str, seed: int) -> None:
    """Of the workload: a dead creator's request came late, and the finisher took the ledger over."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-bookie", 1025056)])
def test_a_bookie_may_lack_what_the_one_before_it_never_had(profile: str, seed: int) -> None:
    """The only holder was away while a repair read. The checker took the seat for one without its copies."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("read-errors", 1032127)])
def test_the_bookie_before_a_seat_counts_for_what_it_still_holds(profile: str, seed: int) -> None:
    """Of the checker: the repair could not read it, recorded so, and then the ledger was closed."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-holders-bookie", 1034674)])
def test_a_check_adds_no_reasons_to_a_repair_under_way(profile: str, seed: int) -> None:
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("damaged-files", 1040813)])
def test_a_cookie_that_a_second_fault_brings_back_counts(profile: str, seed: int) -> None:
    """Of the fault: the cookie was emptied, and then that of the other directory was copied over it."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-bookie", 1090433)])
def test_a_bookie_that_left_while_it_started_does_not_serve(profile: str, seed: int) -> None:
    """It stood still, and of two drains the second gave it a new order."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-holders-bookie", 1053794)])
def test_a_page_says_what_a_repair_without_the_password_may_store(profile: str, seed: int) -> None:
    """A bookie missed a takeover, and its fragment had left the head of the metadata by then."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("scarce-bookies", 1120300)])
def test_a_directory_outlives_a_kill_in_the_formatting_and_a_power_cut(profile: str, seed: int) -> None:
    """Its draft was there at the next start, and nobody had synced the directory's name."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-bookie", 1155418)])
def test_what_a_bookie_gives_to_a_repair_counts_as_held(profile: str, seed: int) -> None:
    """Of the checker: the writer had closed the connection before the bookie stored its add."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("leaving-bookie", 1262176)])
def test_an_audit_goes_on_where_a_bookie_leaves_while_its_start_is_to_settle(profile: str, seed: int) -> None:
    """Its session had expired twice, a drain removed it, and the directory forgot it."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("versatile-logs", 1330098)])
def test_a_writer_counts_another_ledger_when_it_goes_on_there(profile: str, seed: int) -> None:
    """It counted the next one when the healing began, and a roll that was asked for meanwhile saw none."""
    replay(profile, seed, pace=None)


@pytest.mark.parametrize(("profile", "seed"), [("set-back-under-writers", 1351230)])
def test_an_id_may_have_been_dropped_by_metadata_that_an_older_copy_replaced(profile: str, seed: int) -> None:
    """Of the checker: the client drew the id by these, and no bookie could be asked whether it is free."""
    replay(profile, seed, pace=None)
