"""After healing, each unbounded ledger of `unbounded_lifecycle` is sealed, followed and read whole.

Owns the checks of the last phase. A ledger that was sealed in the run stays as it was, and nobody takes it
over any more. The checking client takes the last term of each other ledger, and seals it while a follower
reads.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

from metadata.errors import BookKeeperError, LedgerClosedError
from tests.sim.checkers.after_healing import CHECKERS
from tests.sim.checkers.replicas import Copies
from tests.sim.checkers.unbounded_calls import CALL_BOUND_S, EVERYTHING, Calls
from tests.sim.checkers.unbounded_lifecycle import NAME, Lives
from tests.sim.workloads.terms import check_replicas

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.checkers.unbounded_lifecycle import Life
    from tests.sim.simulation import Simulation

TAKEOVER_BOUND_S = 40.0
_TRIES = 5


async def _check_lives(simulation: Simulation, client: Client) -> None:
    """Check every ledger that is there, and where its name leads."""
    lives = Lives.find(simulation)
    if lives is None:
        return
    checker = _Checker(simulation, client, lives)
    for life in lives.alive():
        if simulation.history.words.is_late(life.ledger_id):
            continue  # nobody uses it
        if not await checker.seal(life) or simulation.history.violation is not None:
            return
        # It may be deleted at any moment by the late request of somebody who is dead. Whether that was asked
        # for is checked where it happens (`Lives`, DeletionsAreAskedFor).
        if not life.is_deleted:
            await checker.read(life)
        if not life.is_deleted:
            await checker.count_copies(life)
    await checker.names()


class _Checker:
    """The checks that the checking client makes of unbounded ledgers."""

    def __init__(self, simulation: Simulation, client: Client, lives: Lives) -> None:
        self._simulation = simulation
        self._history = simulation.history
        self._client = client
        self._lives = lives
        self._calls = Calls(simulation, "judge", random.Random(0))

    async def seal(self, life: Life) -> bool:
        """Bring a ledger to its end, in time, with somebody who follows it."""
        ledger_id, loop = life.ledger_id, self._simulation.loop
        give_up_at = loop.now + TAKEOVER_BOUND_S
        following = asyncio.create_task(self._follow(life))
        while life.end is None:
            if life.is_deleted:
                await following
                return True
            handle = await self._calls.take_over(self._client, ledger_id, cuts=0.0, create=False)
            if handle is not None:
                self._calls.add(handle, 10)
                try:
                    await self._calls.close(handle, seal=True)
                except BookKeeperError as error:
                    self._history.note("judge", f"sealing {ledger_id}:", repr(error))
            if loop.now > give_up_at:
                self._lives.fail("Liveness", f"ledger {ledger_id} can be neither taken over nor sealed")
                return False
            await asyncio.sleep(0.2)
        _, waiting = await asyncio.wait([following], timeout=CALL_BOUND_S)
        self._lives.require(not waiting, "SealsAreKept", f"who follows {ledger_id} has come to no end")
        try:
            await self._client.open_unbounded_ledger(ledger_id, password=self._lives.password)
        except LedgerClosedError:
            return True
        except BookKeeperError as error:
            self._history.note("judge", "taking over what is sealed:", repr(error))
            return True
        self._lives.fail("SealsAreKept", f"ledger {ledger_id} is sealed, and was taken over")
        return False

    async def _follow(self, life: Life) -> None:
        for left in range(_TRIES, 0, -1):
            entries = self._client.read_unbounded_ledger(life.ledger_id, None, password=self._lives.password)
            try:
                seen = await self._calls.iterate(entries, life.ledger_id, None, -1, EVERYTHING)
            except BookKeeperError as error:
                self._history.note("judge", "following:", repr(error))
                if life.is_deleted:
                    return
                self._lives.require(left > 1, "AllCommittedIdsAreReadable", f"following: {error!r}")
                await asyncio.sleep(0.5)
                continue
            following = life.first_entry if seen.following is None else seen.following
            is_whole = life.end is not None and following == life.end + 1
            self._lives.require(is_whole, "SealsAreKept", f"the follower ended at {seen}; {life.end}")
            return

    async def read(self, life: Life) -> None:
        """Read all of it, twice: by its id, and by a reader's handle."""
        for who in ("judge", "judge again"):
            for left in range(_TRIES, 0, -1):
                try:
                    found = await self._all_of(life, by_handle=who == "judge again")
                except BookKeeperError as error:
                    self._history.note(who, "reading:", repr(error))
                    if life.is_deleted:
                        return
                    self._lives.require(left > 1, "AllCommittedIdsAreReadable", f"{who}: {error!r}")
                    await asyncio.sleep(0.5)
                else:
                    self._lives.check_read(who, life, found)
                    break

    async def _all_of(self, life: Life, *, by_handle: bool) -> list[tuple[int, bytes]]:
        if not by_handle:
            entries = self._client.read_unbounded_ledger(
                life.ledger_id, None, follow=False, password=self._lives.password
            )
        else:
            reader = await self._client.open_ledger(life.ledger_id, password=self._lives.password)
            text = f"a reader's LAC is {reader.last_add_confirmed}, the end {life.end}"
            self._lives.require(reader.last_add_confirmed == life.end, "SealsAreKept", text)
            entries = reader.read(reader.metadata.first_entry, reader.last_add_confirmed)
        async with aclosing(entries):
            return [(entry.entry_id, entry.data) async for entry in entries]

    async def count_copies(self, life: Life) -> None:
        """Check that no entry has fewer than Qa copies, and what the list of replicas says of them."""
        metadata = life.metadata
        assert metadata is not None
        assert metadata.last_entry is not None
        try:
            replicas = await self._client.ledger_replicas(life.ledger_id)
        except BookKeeperError as error:
            self._history.note("judge", "asking for replicas:", repr(error))
            return
        check_replicas(self._lives, life, replicas)
        copies = Copies(self._simulation, self._client)
        await copies.count(metadata, life.fragments, life.first_entry, metadata.last_entry)

    async def names(self) -> None:
        """Check where the name leads, and what is listed."""
        for _ in range(_TRIES):
            wanted = self._wanted_names()
            try:
                listed = [row async for row in self._client.list_unbounded_ledgers()]
            except BookKeeperError as error:
                self._history.note("judge", "listing:", repr(error))
                return
            if wanted == self._wanted_names():  # else somebody's late request came in between
                self._lives.require(listed == wanted, "NamesLeadToOne", f"listed are {listed}, not {wanted}")
                return

    def _wanted_names(self) -> list[tuple[str, int]]:
        named = self._lives.named
        return [] if named is None or self._lives.life(named).is_deleted else [(NAME, named)]


CHECKERS.append(_check_lives)
