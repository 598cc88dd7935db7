"""Profiles in which much is written: segments are compacted meanwhile, and links fill up."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError
from tests.sim.plan import profile
from tests.sim.workloads.ledger import add, role

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.plan import Actor, Draw, Plan
    from tests.sim.simulation import Simulation


@role
async def filler(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write ledgers that are deleted soon, so that little of the segments they fill counts."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/filler")
    settings = actor.settings
    while not simulation.is_healed:
        try:
            async with client.create_ledger(**settings["quorums"]) as ledger:
                simulation.created(actor.name, ledger.ledger_id)
                for _ in range(settings["bursts"]):
                    for _ in range(settings["burst"]):
                        await add(simulation, actor.name, ledger, rng, settings["bytes"])
                    await asyncio.sleep(settings["gap"] * rng.random() * 2)
            simulation.deleting(ledger.ledger_id)
            await client.delete_ledger(ledger.ledger_id)
            simulation.history.note(actor.name, "deleted", ledger.ledger_id)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "filling:", repr(error))
            await asyncio.sleep(0.3)


@profile
def compacted_stripes(draw: Draw) -> Plan:
    """Entries of striped ledgers are written back while the segments that have them are compacted.

    The writer does not hear its acknowledgements, so that many entries lie above the LAC, and are sealed,
    when others recover the ledger.
    """
    rng = draw.rng
    sizes = rng.choice(((4, 2, 2), (4, 3, 2), (3, 2, 2), (3, 2, 1)))
    quorums = {"ensemble_size": sizes[0], "write_quorum": sizes[1], "ack_quorum": sizes[2]}
    writer = draw.writer(
        entries=400, burst=rng.choice((3, 16)), gap=0.03, rest=0.05, bytes=rng.choice((20, 200)),
        closes=False, quorums=quorums,
    )  # fmt: skip
    for _ in range(rng.choice((1, 2))):
        draw.actor(
            "filler", rng.uniform(0.0, 0.5), quorums=quorums, bursts=rng.choice((2, 5)), burst=8, gap=0.04,
            bytes=1200,
        )  # fmt: skip
    recoverers = [
        draw.actor("recoverer", rng.uniform(0.5, 1.5), of=writer, times=20, gap=1.0)
        for _ in range(rng.choice((1, 2, 3)))
    ]
    draw.actor("reader", rng.uniform(0.5, 2.0))
    if rng.random() < 0.4:
        draw.actor("repairer", rng.uniform(1.0, draw.duration * 0.8))
    at = 0.5
    while at < draw.duration:
        lasts = rng.uniform(0.3, 2.0)
        for bookie in draw.bookies:
            draw.fault("block_one_way", writer, other=bookie, at=at, lasts=lasts, amount=1.0)
        at += lasts + rng.uniform(0.1, 0.8)
    for bookie in draw.bookies:
        if rng.random() < 0.7:
            draw.fault("disk_cold", bookie, at=0.3, lasts=draw.duration, amount=rng.random())
    for kind in ("kill_bookie", "power_cut", "disk_full", "disk_read_errors", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("link_slow", recoverers, 3)
    return draw.plan(segment_bytes=rng.choice((24, 32)) * 1024)


@profile
def crowded_links(draw: Draw) -> Plan:
    """Links that are slow or silent fill up, in both directions: writing pauses, and goes on."""
    rng = draw.rng
    for _ in range(rng.choice((1, 2))):
        draw.writer(entries=60, burst=16, gap=0.1, bytes=4000, closes=rng.random() < 0.5)
    draw.actor("tailer", 0.5)
    for _ in range(2):
        draw.actor("reader", rng.uniform(0.5, 2.0))
    draw.actor("recoverer", rng.uniform(1.0, draw.duration * 0.9))
    for _ in range(rng.randint(3, 8)):
        draw.fault(
            rng.choice(("link_slow", "block_one_way", "block_both")), rng.choice(draw.clients),
            other=rng.choice(draw.bookies), lasts=rng.uniform(0.3, 1.5), amount=rng.random(),
        )  # fmt: skip
    draw.some("pause", [*draw.bookies, *draw.clients], 2, lasts=(0.3, 1.5))
    draw.some("disk_slow", list(draw.bookies), 2)
    draw.some("cut_reset", draw.clients, 3)
    draw.some("kill_bookie", list(draw.bookies), 2)
    return draw.plan(segment_bytes=128 * 1024)
