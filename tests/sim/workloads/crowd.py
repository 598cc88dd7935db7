"""A client that writes many ledgers at once, so that most of its adds travel in company (ADDS).

Each round adds to several ledgers in one event-loop iteration. The ledgers differ: some have a password, some
are of deferred sync. Others recover them and delete them one by one. So a frame has blocks that a bookie must
refuse beside blocks that it must take.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError, LedgerFencedError
from tests.sim.workloads.ledger import payload, role

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.ledger.writer import LedgerWriter
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation

PASSWORD = b"a secret of many ledgers"


class _Open:
    """One of the ledgers that a juggler writes."""

    def __init__(self, simulation: Simulation, actor: Actor, ledger: LedgerWriter, *, deferred: bool) -> None:
        self._simulation = simulation
        self._who = actor.name
        self.ledger = ledger
        self._deferred = deferred
        self._received: list[tuple[asyncio.Future[int], asyncio.Future[int]]] = []  # and not forced
        self._forcing: asyncio.Task[None] | None = None
        self._last: asyncio.Future[int] | None = None
        if deferred:
            # A force has acknowledged before the task that awaits it goes on.
            simulation.history.confirmers.append(self._confirm)

    def _confirm(self) -> None:
        self._simulation.history.confirmed(self._who, self.ledger.ledger_id, self.ledger.last_add_confirmed)

    def add(self, rng: random.Random, size: int) -> bool:
        """Add an entry. Return False where the ledger has failed, as its last add has shown."""
        if self._last is not None and self._last.done():
            error = None if self._last.cancelled() else self._last.exception()
            if error is not None:
                if isinstance(error, LedgerFencedError):
                    self._simulation.history.told_fenced(self._who, self.ledger.ledger_id, error)
                return False
        history, ledger_id = self._simulation.history, self.ledger.ledger_id
        data = payload(ledger_id, len(history.ledger(ledger_id).issued), int(size * rng.random() * 2))
        self._last = added = self.ledger.add_entry(data)
        if self._deferred:  # what is done is received only: a force acknowledges it
            acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._received.append((added, acknowledged))
            history.issued(self._who, ledger_id, data, acknowledged)
        else:
            history.issued(self._who, ledger_id, data, added)
        return True

    def force(self) -> None:
        """Force what was added, in a task, unless a force is under way."""
        if self._deferred and self._received and (self._forcing is None or self._forcing.done()):
            received, self._received = self._received, []
            self._forcing = asyncio.create_task(self._force(received))

    async def _force(self, received: list[tuple[asyncio.Future[int], asyncio.Future[int]]]) -> None:
        try:
            await asyncio.gather(*(added for added, _ in received))
            await self.ledger.force()
        except BookKeeperError as error:
            self._simulation.history.note(self._who, f"forcing {self.ledger.ledger_id}:", repr(error))
            return
        for added, acknowledged in received:
            acknowledged.set_result(added.result())

    async def end(self, rng: random.Random, *, closes: bool) -> None:
        """Close the ledger, or let it go."""
        if self._forcing is not None:
            await asyncio.wait([self._forcing])
        try:
            if closes:
                await self.ledger.close(at_ack_quorum=rng.random() < 0.2)
        except BookKeeperError as error:
            if isinstance(error, LedgerFencedError):
                self._simulation.history.told_fenced(self._who, self.ledger.ledger_id, error)
            self._simulation.history.note(self._who, f"closing {self.ledger.ledger_id}:", repr(error))
        await self.ledger.abort()


@role
async def juggler(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Write many ledgers at once, a few entries of each at a time."""
    rng = random.Random(f"{simulation.plan.seed}/{actor.name}/juggler")
    settings = actor.settings
    simulation.secret = PASSWORD
    held: list[_Open] = []
    ending: set[asyncio.Task[None]] = set()
    while not simulation.is_healed:
        while len(held) < settings["ledgers"] and not simulation.is_healed:
            opened = await _create(simulation, actor, client, rng)
            if opened is None:
                await asyncio.sleep(0.3)
                break
            held.append(opened)
        chosen = rng.sample(held, min(len(held), rng.randint(1, settings["at_once"])))
        for one in chosen:
            for _ in range(rng.choice((1, 1, 1, 3))):
                if not one.add(rng, settings["bytes"]):
                    held.remove(one)
                    ending.add(asyncio.create_task(one.end(rng, closes=False)))
                    break
        for one in held:
            if rng.random() < 0.3:
                one.force()
        if held and rng.random() < settings["retires"]:
            one = held.pop(rng.randrange(len(held)))
            ending.add(asyncio.create_task(one.end(rng, closes=rng.random() < 0.7)))
        ending = {task for task in ending if not task.done()}
        await asyncio.sleep(settings["gap"] * rng.random() * 2)
    await asyncio.gather(*ending, *(one.end(rng, closes=False) for one in held))


async def _create(simulation: Simulation, actor: Actor, client: Client, rng: random.Random) -> _Open | None:
    settings = actor.settings
    deferred, secret = rng.random() < settings["deferred"], rng.random() < settings["secret"]
    quorums = dict(rng.choice(settings["quorums"]))
    quorums["guaranteed_write_quorum"] = quorums["guaranteed_write_quorum"] and not deferred
    options = {"digest": "hmac-sha256", "password": PASSWORD} if secret else {}
    try:
        ledger = await client.create_ledger(deferred_sync=deferred, **quorums, **options)
    except BookKeeperError as error:
        simulation.history.note(actor.name, "could not create a ledger:", repr(error))
        return None
    simulation.created(actor.name, ledger.ledger_id)
    return _Open(simulation, actor, ledger, deferred=deferred)
