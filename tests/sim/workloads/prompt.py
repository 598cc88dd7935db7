"""Roles that expect an answer in time: where a quorum lives, and where only the client itself stood still.

A run has no other faults than pauses, so that every wait beyond the bounds here is the client's own doing.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError, LedgerFencedError, MetadataUnavailableError
from tests.sim.workloads.ledger import add, role

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

_TAIL_S = 4.0
"""From the add to the sight of it. A bookie is known to be silent after one second, a read asks a second
bookie after one more."""
_RECOVERY_S = 0.5
"""Less than any timeout of a client here."""
_ADD_S = 20.0
"""The longest timeout of an add is 8 s. A loop that is late at each look may need twice that."""
_NOTICED_S = 0.3
"""From a bookie's registration to a client's sight of it."""


@role
async def prompt_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Add to one ledger after another; with `blames_nobody`, no bookie may count as failed.

    With `ends`, each add is acknowledged or fails in time.
    """
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/writer")
    settings, history = actor.settings, simulation.history
    # A bookie that has not started is rightly left out of a ledger.
    while not simulation.served.issuperset(simulation.plan.bookies):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(_NOTICED_S)
    while not simulation.is_healed:
        try:
            ledger = await client.create_ledger(**settings["quorums"])
        except BookKeeperError as error:
            history.note(actor.name, "could not create a ledger:", repr(error))
            await asyncio.sleep(0.3)
            continue
        simulation.created(actor.name, ledger.ledger_id)
        sent_at = history.ledger(ledger.ledger_id).sent_at
        try:
            for _ in range(settings["entries"]):
                sent_at[len(sent_at)] = simulation.loop.now
                future = await add(simulation, actor.name, ledger, rng, settings["bytes"])
                await asyncio.sleep(settings["gap"] * rng.random() * 2)
                blamed = {*ledger.failed_bookies, *client.quarantined_bookies}
                if settings["blames_nobody"] and blamed:
                    text = f"{actor.name} has stood still, and blames {', '.join(sorted(blamed))}"
                    history.fail("NobodyIsBlamed", text)
                if settings.get("ends"):
                    await asyncio.wait([future])
                    _check_end(simulation, actor.name, sent_at[len(sent_at) - 1])
                await future
            if settings["closes"]:
                await ledger.close()
            else:
                await asyncio.sleep(10.0)  # until it is recovered
                await ledger.abort()
        except BookKeeperError as error:
            if isinstance(error, LedgerFencedError):
                history.told_fenced(actor.name, ledger.ledger_id, error)
            if settings["blames_nobody"] and isinstance(error, MetadataUnavailableError):
                text = f"{actor.name} has stood still, and blames the metadata store: {error}"
                history.fail("NobodyIsBlamed", text)
            history.note(actor.name, f"writing ledger {ledger.ledger_id} ended:", repr(error))
            await ledger.abort()


def _check_end(simulation: Simulation, who: str, sent_at: float) -> None:
    took_s = simulation.loop.now - sent_at
    text = f"an add of {who} was under way for {took_s:.1f} s"
    simulation.history.require(took_s <= _ADD_S, "DeadlinesEnd", lambda: text)


@role
async def prompt_tailer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Follow every ledger; each entry is seen soon after it was added."""
    history, followed = simulation.history, -1
    while True:
        followed = ledger_id = await simulation.newest_ledger(after=followed, by=actor.settings["of"])
        try:
            async with client.open_ledger(ledger_id) as opened:
                async for entry in opened.tail():
                    history.read(actor.name, ledger_id, entry.entry_id, entry.data)
                    late_s = simulation.loop.now - history.ledger(ledger_id).sent_at[entry.entry_id]
                    if late_s > _TAIL_S:
                        seen = f"{actor.name} saw entry {entry.entry_id} of ledger {ledger_id}"
                        history.fail("TailsArePrompt", f"{seen} after {late_s:.1f} s")
        except BookKeeperError as error:
            history.note(actor.name, f"tailing ledger {ledger_id}:", repr(error))


@role
async def prompt_recoverer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Recover the newest ledger; the quorum that lives is enough."""
    history = simulation.history
    ledger_id = await simulation.newest_ledger(after=-1, by=actor.settings["of"])
    begun = simulation.loop.now
    await client.open_ledger(ledger_id, recover=True)
    took_s = simulation.loop.now - begun
    text = f"{actor.name} recovered ledger {ledger_id} in {took_s:.1f} s"
    history.require(took_s <= _RECOVERY_S, "RecoveryIsPrompt", lambda: text)
