"""Profiles in which older metadata lead: what was written behind the copy must not be cut off.

`lost_data` has the profile in which nobody reads what was written before the metadata store was set back.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError
from tests.sim.faults.older_store import CLIENTS_GO_ON, NEWEST_RETURNS
from tests.sim.plan import profile
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.plan import Actor, Draw, Plan
    from tests.sim.simulation import Simulation

_FIVE = ("b1", "b2", "b3", "b4", "b5")
_THREE = ("b1", "b2", "b3")
_RAISED_AFTER_S = 4.6
"""Longer than two ticks of a bookie's age: one in which it raises the age, and one in which others see it."""


@role
async def recoverer_of_before(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Recover and read the ledgers that the copy knows, once some bookie has told of the set-back."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/before")
    history = simulation.history
    while not simulation.is_healed:
        records = [history.ledger(one) for one in simulation.ledgers_of_copy if one not in history.ignored]
        wanted = [one.ledger_id for one in records if one.present is not None and not one.is_gone]
        if wanted and history.is_set_back_told:
            ledger_id = rng.choice(wanted)
            try:
                async with client.open_ledger(ledger_id, recover=True) as opened:
                    history.note(actor.name, "recovered", ledger_id, opened.last_add_confirmed)
                    async for entry in opened.read(0, opened.last_add_confirmed):
                        history.read(actor.name, ledger_id, entry.entry_id, entry.data)
            except BookKeeperError as error:
                history.note(actor.name, f"recovering ledger {ledger_id}:", repr(error))
        await asyncio.sleep(0.6 * rng.random())


def _newest(draw: Draw) -> str:
    return draw.rng.choice((NEWEST_RETURNS, ""))


@profile
def set_back_ensembles(draw: Draw) -> Plan:
    """Ensembles change behind a copy of the metadata. Its ledgers are then recovered by the older metadata.

    Bookies of a ledger are away when the copy has been taken, so others take their seats. All clients end
    with the set-back. A bookie that has kept its seat is away afterwards, while ledgers are recovered.
    """
    rng = draw.rng
    draw.bookies, draw.duration = _FIVE, rng.uniform(13.0, 15.0)
    copied_at, lasts = rng.uniform(1.0, 2.0), rng.uniform(_RAISED_AFTER_S, 6.0)
    back_at = copied_at + lasts
    for _ in range(rng.choice((1, 2, 3))):
        draw.writer(ack_at_least=2, entries=rng.choice((20, 200)), gap=0.05, rest=0.2)
    at = copied_at
    for _ in range(rng.choice((1, 2, 2, 3))):
        at += rng.uniform(0.2, 1.2)
        draw.fault("holder_killed", "", at=at, lasts=max(0.5, back_at - at + rng.uniform(-0.5, 0.3)))
    draw.fault(
        "metadata_set_back", "", at=copied_at, lasts=lasts, amount=rng.choice((0.5, 0.5, 1.0)),
        other=_newest(draw),
    )  # fmt: skip
    for _ in range(rng.choice((0, 1, 1, 2))):
        draw.fault("holder_killed", "", at=back_at + rng.uniform(0.4, 1.0), lasts=rng.uniform(1.0, 4.0))
    for _ in range(rng.choice((1, 2))):
        draw.actor("recoverer_of_before", back_at + rng.uniform(0.1, 1.0))
    if rng.random() < 0.5:
        name = draw.writer(ack_at_least=2, entries=8, gap=0.05)
        draw.starts(name, back_at + rng.uniform(0.1, 1.0))
    draw.some("kill_bookie", list(draw.bookies), 1)
    draw.some("disk_slow", list(draw.bookies), 2)
    return draw.plan(power_cut_at_end=rng.random() < 0.3)


@profile
def set_back_under_writers(draw: Draw) -> Plan:
    """The metadata store is set back under clients that go on with the metadata that they know.

    Bookies go on as well, or are started again.
    """
    rng = draw.rng
    draw.bookies, draw.duration = _FIVE, rng.uniform(10.0, 14.0)
    copied_at, lasts = rng.uniform(1.0, 3.0), rng.uniform(_RAISED_AFTER_S, 5.5)
    back_at = copied_at + lasts
    draw.crowd(recoverers=rng.choice((0, 1, 2)), ack_at_least=2)
    for _ in range(rng.choice((0, 1, 2))):
        draw.writer(ack_at_least=2, entries=rng.choice((20, 200)), gap=0.05, rest=0.2)
    if rng.random() < 0.3:
        draw.actor("deleter", rng.uniform(0.5, back_at + 1.0))
    if rng.random() < 0.3:
        draw.actor("restored_log_writer", rng.uniform(0.0, back_at))
    for before, after in ((copied_at, back_at), (back_at, back_at + 2.0)):
        for _ in range(rng.choice((0, 1, 1, 2))):
            draw.fault("holder_killed", "", at=rng.uniform(before, after), lasts=rng.uniform(0.5, 4.0))
    draw.fault(
        "metadata_set_back", "", at=copied_at, lasts=lasts, amount=rng.random(),
        other=f"{CLIENTS_GO_ON}, {_newest(draw)}",
    )  # fmt: skip
    if rng.random() < 0.5:
        draw.actor("recoverer_of_before", back_at + rng.uniform(0.1, 2.0))
    for kind in ("kill_client", "meta_slow", "pause"):
        draw.some(kind, draw.clients, 1)
    draw.some("kill_bookie", list(draw.bookies), 2)
    return draw.plan(power_cut_at_end=rng.random() < 0.3)


@profile
def set_back_both(draw: Draw) -> Plan:
    """One bookie's directories and the metadata are put back together; the others start as they were.

    The copies are of one moment, at which all run. Long enough afterwards, one of the others goes away. The
    next entries are on the third bookie, and on the one that is set back. Then the third one is away, while
    ledgers are recovered. The other one has run for two ticks behind the copy. So it may know that the copy
    is older than what it saw; without that time, nothing tells.
    """
    rng = draw.rng
    draw.bookies, draw.duration = _THREE, rng.uniform(15.0, 17.0)
    draw.dishonest, away, holder = rng.sample(_THREE, 3)
    copied_at = rng.uniform(0.8, 2.5)
    away_at = copied_at + rng.uniform(_RAISED_AFTER_S, 6.0)
    back_at = away_at + rng.uniform(0.6, 2.0)
    quorums = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2, "guaranteed_write_quorum": False}
    for _ in range(rng.choice((1, 2))):
        draw.writer(quorums=quorums, entries=rng.choice((40, 300)), gap=0.05, rest=0.2)
    draw.actor("recoverer", rng.uniform(copied_at, back_at))
    if rng.random() < 0.8:
        draw.fault("kill_bookie", away, at=away_at, lasts=back_at - away_at + rng.uniform(0.0, 0.5))
    draw.fault(
        "both_set_back", rng.choice((holder, holder, holder, "")), at=copied_at, lasts=back_at - copied_at,
        amount=rng.uniform(2.0, 5.0), other=_newest(draw),
    )  # fmt: skip
    for _ in range(rng.choice((1, 2))):
        draw.actor("recoverer_of_before", back_at + rng.uniform(0.1, 1.0))
    if rng.random() < 0.5:
        name = draw.writer(quorums=quorums, entries=8, gap=0.05)
        draw.starts(name, back_at + rng.uniform(0.1, 1.0))
    return draw.plan(segment_bytes=rng.choice((24, 32, 64)) * 1024, power_cut_at_end=rng.random() < 0.3)
