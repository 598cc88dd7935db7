"""Processes that run auto recovery, repair a whole cluster by hand, or have a bookie leave."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from client_aio.autorecovery.cluster_repair import ClusterRepair
from client_aio.autorecovery.drain import Drain
from client_aio.autorecovery.service import AutoRecovery
from metadata.errors import BookKeeperError
from tests.sim.checkers.auto_recovery import QUICK
from tests.sim.checkers.unbounded_lifecycle import Lives
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation


@role
async def auto_recoverer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Run auto recovery until the process is killed; some are ended in order, and begun again."""
    if actor.settings.get("of_unbounded"):
        _announce(simulation)
    lives = actor.settings.get("lives", 0.0)
    config = replace(QUICK, recover_after_s=actor.settings.get("recover_after_s"))
    number = 0
    while True:
        number += 1
        async with AutoRecovery(client, config, name=f"{actor.name}.{number}") as recovery:
            await asyncio.sleep(lives or 1000.0)
            assert recovery.worker is not None
            simulation.history.note(actor.name, "auto recovery ends in order:", repr(recovery.worker.record))


@role
async def operator(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Repair the whole cluster by hand, again and again; every bookie that is down counts as lost."""
    while True:
        await asyncio.sleep(actor.settings["rest"])
        repairing = ClusterRepair(client._context, bytes_per_s=200_000)
        try:
            found = await repairing.find(lambda *_: None)
            async with aclosing(repairing.repair(found, ledgers_at_once=2)) as repaired:
                async for ledger, outcome in repaired:
                    simulation.stats["repaired_by_hand"] += outcome.is_done
                    simulation.history.note(actor.name, f"repairs {ledger.ledger_id} by hand:", repr(outcome))
        except BookKeeperError as error:
            simulation.history.note(actor.name, "gives a repair by hand up:", repr(error))


@role
async def drainer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Have a bookie leave, and go on until it has; some begin while another one is at it, or was killed."""
    settings = actor.settings
    if settings.get("of_unbounded"):
        _announce(simulation)
    while not simulation.is_healed:
        drain = Drain(
            client._context,
            settings["bookie"],
            successor=settings["successor"],
            recover_after_s=settings["recover_after_s"],
            settle_s=0.5,
            stall_s=4.0,
            config=QUICK,
        )
        try:
            report = await drain.run()
        except BookKeeperError as error:
            simulation.history.note(actor.name, "the drain ended:", repr(error))
            await asyncio.sleep(0.3)
        else:
            simulation.history.note(actor.name, "the drain is done:", repr(report))
            return


def _announce(simulation: Simulation) -> None:
    """Tell the checker of unbounded ledgers that any bookie of theirs may be replaced by a repair."""
    lives, bookies = Lives.of(simulation), simulation.plan.bookies

    def before_each_change(*_: object) -> None:
        for life in lives.all.values():
            life.repairs.update(bookies)

    simulation.tree.watchers.insert(0, before_each_change)
