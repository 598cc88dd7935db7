"""Crash states of the storage engine: some of them, chosen by chance, and that a loss would be seen."""

from __future__ import annotations

import multiprocessing
from itertools import pairwise

import pytest

from bookie_aio.storage.segment.format import CHECKPOINT, RESERVE, SEGMENT_SUFFIX, WITNESS
from tests.sim.cluster.quiet import quiet
from tests.sim.crash.chains import start_on_a_full_disk, sweep_chains
from tests.sim.crash.states import (
    HOME,
    Step,
    Sweep,
    Work,
    by_chance,
    check_state,
    image_of,
    record,
    record_from,
    sweep,
    with_names,
)
from tests.sim.mutants.__main__ import everything


def test_whatever_a_power_cut_leaves_nothing_acknowledged_is_lost() -> None:
    result = sweep(1, part=0.01)
    assert result.states > 200
    assert result.by_kind["write_and_sync"] > 50
    assert not result.failures


def test_nothing_acknowledged_is_lost_by_starts_one_upon_another() -> None:
    result = sweep_chains(3, chains=4)
    assert result.states > 200
    assert result.damaged > 0
    assert not result.failures


def _check_power_cuts(step: Step, count: int) -> None:
    for number in range(count):
        assert not check_state(step.facts, by_chance(step, f"{number}")), step.call


def test_a_copy_that_may_be_in_the_page_cache_only_is_no_reason_to_cut_the_other_one() -> None:
    """A start fails to sync the tail elsewhere; the next one wants room, and has its power cut.

    The power was cut before these starts, too: after a kill, the witness proves every acknowledged group. And
    the first file that is cut is synced before, so that a tail which nobody failed to sync is durable then.
    """
    tried = 0
    with quiet():
        for at_work in record(1, restarts=0)[::3]:
            started = start_on_a_full_disk("started", with_names(at_work, 0), at_work.facts)
            for failing in (each for each in started if each.call[0] == "write_and_sync"):
                left = image_of(failing.hardware)
                for name, inode in left.directories[HOME].entries.items():
                    if name.endswith(SEGMENT_SUFFIX) and inode.dirty:
                        inode.forget_dirty()
                for cut_off in start_on_a_full_disk("again", left, failing.facts):
                    _check_power_cuts(cut_off, 1)
                    tried += 1
    assert tried > 100


def test_a_start_makes_names_durable_before_it_goes_by_them() -> None:
    """A process is killed as it writes one; the next one wants room, and has its power cut."""
    tried = 0
    with quiet():
        for killed in record(0):
            if killed.call[0] != "rename" or not killed.call[2].endswith(CHECKPOINT):
                continue
            left = image_of(killed.hardware)
            for names in (left.directories[HOME].entries, left.directories[HOME].durable):
                names.pop(RESERVE, None)  # which would be all the room that is wanted
            for cut_off in start_on_a_full_disk("started", left, killed.facts):
                if cut_off.call[0] == "unlink":
                    _check_power_cuts(cut_off, 4)
                    tried += 1
    assert tried > 50


def test_two_crashes_each_between_a_checkpoint_and_its_claim_are_no_witness_of_the_past() -> None:
    """A start claims the checkpoint that it found before it writes the next one."""
    tried = 0
    with quiet():
        for at_work in record(0, restarts=0):
            call = at_work.call
            if call[0] != "write" or not call[1].endswith(WITNESS) or call[2] == 0:
                continue  # it is no claim of a checkpoint
            work = Work(turns=0, deletes_from=0, first_ledger=0)
            for again in record_from("started", with_names(at_work, 0), at_work.facts, work, 0):
                assert not check_state(again.facts, with_names(again, 0)), again.call
                tried += 1
    assert tried > 50


def test_nothing_is_acknowledged_at_the_step_that_makes_it_durable() -> None:
    """Else a state in which that write is torn has lost what nobody was told."""
    with quiet():
        steps = record(1)
    written, checked = bytearray(), 0
    for before, step in pairwise(steps):
        if before.hardware.loop is not step.hardware.loop:  # another recording begins
            written.clear()
            continue
        for ledger_id, entry_id in step.facts.acked - before.facts.acked:
            name = b"%d/%d/" % (ledger_id, entry_id)
            if step.facts.issued[ledger_id, entry_id]:
                assert name in written, (name, step.call[:3])
                checked += 1
        if step.call[0] == "write_and_sync":
            written += step.call[3]
    assert checked > 100


def test_a_claim_that_a_start_reads_from_the_page_cache_is_made_durable_by_it() -> None:
    """A kill between a claim and its sync, a start that writes a checkpoint, and a power cut: no damage."""
    tried = 0
    with quiet():
        claims = False
        for at_work in record(0, restarts=0):
            call = at_work.call
            if claims and call[0] == "sync" and call[1].endswith(WITNESS):
                work = Work(turns=0, deletes_from=0, first_ledger=0)
                killed = image_of(at_work.hardware)
                for again in record_from("started", killed, at_work.facts, work, 0):
                    assert not check_state(again.facts, with_names(again, 0)), again.call
                    tried += 1
            claims = call[0] == "write" and call[1].endswith(WITNESS) and call[2] != 0
    assert tried > 50


def _with_bug(number: int) -> Sweep:
    next(mutant for mutant in everything() if mutant.number == number).plant()
    return sweep(1, part=0.01, until_failure=True)


@pytest.mark.parametrize("number", [1, 26])
def test_lost_syncs_are_seen(number: int) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_with_bug, (number,)).failures
