"""Checkers that blame nobody who is right: histories that are legal, and were once taken for violations.

No seed has met them; they were constructed. Each brings about what the simulated network and metadata store
may do at the worst moment there is.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from client_aio import Client
from metadata.ids import ledger_key
from tests.sim.checkers import unbounded_after_healing
from tests.sim.faults import upkeep
from tests.sim.profiles import draw_plan
from tests.sim.simulation import run_plan, run_script
from tests.sim.test_sim_schedules import PLAN, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.sim.checkers.unbounded_lifecycle import Life
    from tests.sim.simulation import Simulation

PAUSE_S = 3.9
SEEDS_MAX = 30


def test_what_a_bookie_said_stays_said_when_it_forgets_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is paused with the answers on their way, and counts them when all is over."""
    real, ends = upkeep.Upkeep.__init__, []

    def soon(self: upkeep.Upkeep, simulation: Simulation) -> None:
        real(self, simulation)
        self.sweep_interval_s, self.unnamed_grace_s = 1.0, 0.4  # as many seeds have them

    async def script(simulation: Simulation) -> None:
        stage, history = Stage(simulation), simulation.history
        await stage.write(write_quorum=2)
        assert stage.ledger is not None
        ledger_id, leaves = stage.ledger.ledger_id, stage.ensemble[0]
        stage.add()
        await asyncio.sleep(0.004)  # The adds have left.
        paused_at = simulation.loop.now
        simulation.loop.pause(simulation.network.processes["w"])
        simulation.cut_metadata("w", PAUSE_S, is_paused=True)
        await asyncio.sleep(0.3)
        simulation.stop_bookie(leaves, has_power=True, back_after=0.1)
        await stage.recover()  # Another bookie takes the entry over, and is named instead.
        await asyncio.sleep(paused_at + PAUSE_S - simulation.loop.now)
        ends.append(((leaves, ledger_id) in history.words.forgotten, history.ledger(ledger_id).acked))
        simulation.loop.resume(simulation.network.processes["w"])
        await asyncio.sleep(1)
        ends.append((True, history.ledger(ledger_id).acked))

    monkeypatch.setattr(upkeep.Upkeep, "__init__", soon)
    result = run_script(replace(PLAN, client_settings={}), script)
    assert ends == [(True, -1), (True, 0)]  # It was forgotten first, and acknowledged then.
    assert result.is_good, f"{result.text}\n{result.story}"


def test_a_ledger_that_is_deleted_while_the_names_are_listed_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, listed = unbounded_after_healing._Checker.names, Client.list_unbounded_ledgers
    checkers: list[unbounded_after_healing._Checker] = []
    deleted: list[int] = []

    async def checked(self: unbounded_after_healing._Checker) -> None:
        checkers.append(self)
        await names(self)
        checkers.remove(self)

    async def listing(self: Client) -> AsyncGenerator[tuple[str, int], None]:
        named = checkers[0]._lives.named if checkers else None
        if named is not None and not checkers[0]._lives.life(named).is_deleted:
            checkers[0]._simulation.tree.drop(ledger_key(named))
            deleted.append(named)
        async for row in listed(self):
            yield row

    monkeypatch.setattr(unbounded_after_healing._Checker, "names", checked)
    monkeypatch.setattr(Client, "list_unbounded_ledgers", listing)
    _assert_good_until(deleted)


def test_a_ledger_that_is_deleted_while_it_is_judged_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, deleted = unbounded_after_healing._Checker.read, list[int]()

    async def read(self: unbounded_after_healing._Checker, life: Life) -> None:
        deleted.append(life.ledger_id)
        self._simulation.tree.drop(ledger_key(life.ledger_id))
        await real(self, life)

    monkeypatch.setattr(unbounded_after_healing._Checker, "read", read)
    _assert_good_until(deleted)


def _assert_good_until(deleted: list[int]) -> None:
    """Run seeds whose ledgers are remade, until one of them leaves a ledger that was `deleted` here.

    No seed is named: whether a seed's last ledger outlives the run changes with every change of timing.
    """
    for seed in range(SEEDS_MAX):
        result = run_plan(draw_plan("remade-ledgers", seed))
        assert result.is_good, f"seed {seed}: {result.text}"
        if deleted:
            return
    pytest.fail(f"none of {SEEDS_MAX} seeds left a ledger to delete")


def test_a_list_that_was_asked_for_before_an_acknowledgement_need_not_have_the_entry() -> None:
    """A slow bookie lists, and then acknowledges what it had received before."""
    result = run_plan(draw_plan("duelling-holders", 1324044))
    assert result.is_good, result.text
