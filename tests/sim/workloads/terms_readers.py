"""Roles that read unbounded ledgers in every way, from any entry, and stop in the middle."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from client_aio.unbounded.operations import UnboundedLedgerReader
from metadata.errors import BookKeeperError
from metadata.ids import NO_ENTRY
from tests.sim.checkers.unbounded_calls import EVERYTHING, Calls, Seen
from tests.sim.checkers.unbounded_lifecycle import NAME
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client, LedgerReader
    from tests.sim.checkers.unbounded_lifecycle import Life
    from tests.sim.plan import Actor
    from tests.sim.simulation import Simulation


class _Follower:
    """One client that reads in all ways that there are."""

    def __init__(self, simulation: Simulation, actor: Actor, client: Client) -> None:
        self._client = client
        self._settings = actor.settings
        self._loop = simulation.loop
        self._rng = random.Random(f"{simulation.plan.seed}/{actor.name}/versatile")
        self._calls = Calls(simulation, actor.name, self._rng)
        self._lives = self._calls.lives
        self.who = actor.name

    async def run(self) -> None:
        """Read, from anywhere, for a while, again and again."""
        rng = self._rng
        while self._loop.now < self._settings["until"]:
            life = self._lives.newest
            if life is not None and life.metadata is not None:
                which: str | int = NAME if rng.random() < 0.7 else life.ledger_id
                way = self._iterate(which, life) if rng.random() < 0.65 else self._read(which)
                await self._calls.make(f"reading {which}", way)
            await asyncio.sleep(self._settings["rest"] * rng.random())
        await self._lives.is_over.wait()
        await self._calls.finish(10.0)

    def _anywhere(self, life: Life) -> int:
        rng = self._rng
        top = max(life.known(), default=0)
        return rng.choice((0, life.first_entry, rng.randint(0, top + 2), max(0, top - 3)))

    async def _iterate(self, which: str | int, life: Life) -> None:
        """Read by `read_unbounded_ledger`; one that follows may come to an end only where it is sealed."""
        rng = self._rng
        start, follows = rng.choice((None, self._anywhere(life))), rng.random() < 0.6
        count = rng.choice((1, 10, EVERYTHING, EVERYTHING))
        entries = self._client.read_unbounded_ledger(
            which, start, follow=follows, password=self._lives.password
        )
        ledger_id = None if which == NAME else life.ledger_id
        seen = await self._calls.iterate(entries, ledger_id, start, -1, count)
        if follows:
            self._check_end(seen)

    def _check_end(self, seen: Seen) -> None:
        """Check that one who follows came to an end only where the ledger has one."""
        if not seen.is_at_end or seen.ledger_id is None:
            return
        life = self._lives.life(seen.ledger_id)
        end, following = life.end, life.first_entry if seen.following is None else seen.following
        is_end = end is not None and following > end
        text = f"{self.who} came to an end before {seen.following} of {seen.ledger_id}, which ends at {end}"
        self._lives.require(is_end, "SealsAreKept", text)

    async def _read(self, which: str | int) -> None:
        """Open the ledger, and read by its handle, also after what it could not read."""
        rng = self._rng
        async with self._client.open_ledger(which, password=self._lives.password) as reader:
            for _ in range(rng.randint(1, 8)):
                lac, behind = reader.last_add_confirmed, self._behind(reader)
                try:
                    await self._use(reader)
                except BookKeeperError as error:
                    self._calls.history.note(self.who, "reading by a handle:", repr(error))
                life = self._lives.life(reader.ledger_id)
                text = f"{self.who} read the LAC {reader.last_add_confirmed}"
                now = self._behind(reader)
                is_ahead = reader.last_add_confirmed >= lac and now[0] >= behind[0] and now[1] >= behind[1]
                self._lives.require(is_ahead, "HandlesGoForward", f"{text} after {lac}")
                is_true = reader.last_add_confirmed <= self._lives.lac_of(life)
                self._lives.require(is_true, "NoDirtyReads", text)
                await asyncio.sleep(0.2 * rng.random())

    def _behind(self, reader: LedgerReader) -> tuple[int, int]:
        assert isinstance(reader, UnboundedLedgerReader)
        return reader.metadata.term, reader.first_entry

    async def _use(self, reader: LedgerReader) -> None:
        rng, calls, life = self._rng, self._calls, self._lives.life(reader.ledger_id)
        first, lac = self._anywhere(life), reader.last_add_confirmed
        last = rng.choice((lac, max(first - 1, lac - 2), first))
        count = rng.choice((1, 10, EVERYTHING))
        match rng.choice(("refresh", "lac", "first_lac", "read", "batches", "tail", "tails", "unconfirmed")):
            case "refresh":
                await self._refresh(reader, life)
            case "lac":
                await reader.read_last_add_confirmed()
            case "first_lac":
                await reader.try_read_last_add_confirmed()
            case "read" if last >= first - 1:
                await calls.iterate(reader.read(first, last), life.ledger_id, first, last, count)
            case "batches" if last >= first - 1:
                known = rng.choice((NO_ENTRY, self._lives.lac_of(life)))
                if last == lac < known:  # as far as another one knows, by a handle of the past perhaps
                    last = known
                entries = _entries_of(reader.read_batches(first, last, known_lac=known))
                await calls.iterate(entries, life.ledger_id, first, last, count)
            case "tail":
                await self._tail(reader, reader.tail(first), first, count)
            case "tails":
                await self._tail(reader, _entries_of(reader.tail_batches(first)), first, count)
            case "unconfirmed":
                await self._unconfirmed(reader, life, first, first + rng.choice((0, 3, 50)))

    async def _refresh(self, reader: LedgerReader, life: Life) -> None:
        before = life.metadata
        await reader.refresh()
        assert before is not None
        now = reader.metadata
        is_new = now.term >= before.term and now.first_entry >= before.first_entry
        is_new &= now.last_fragment.first_entry >= before.last_fragment.first_entry or now.term > before.term
        self._lives.require(is_new, "HandlesGoForward", f"{self.who} read {now}, which was {before} by then")

    async def _tail(self, reader: LedgerReader, entries: Any, first: int, count: int) -> None:
        try:
            async with asyncio.timeout(self._rng.random() * 2):
                self._check_end(await self._calls.iterate(entries, reader.ledger_id, first, -1, count))
        except TimeoutError as error:
            if isinstance(error, BookKeeperError):
                raise

    async def _unconfirmed(self, reader: LedgerReader, life: Life, first: int, last: int) -> None:
        """Read beyond the LAC; what lies below it is the ledger's, and none of it is left out."""
        lac, following = reader.last_add_confirmed, first
        entries = reader.read_unconfirmed(first, last)
        try:
            async for entry_id, value in entries:
                text = f"{self.who} read {entry_id}, not {following}, unconfirmed"
                self._lives.require(entry_id == following, "NoOutOfOrderEntries", text)
                see = self._lives.see if entry_id <= lac else self._lives.see_unconfirmed
                see(self.who, life.ledger_id, entry_id, bytes(value))
                following = entry_id + 1
        finally:
            await entries.aclose()
        is_all = following > min(last, lac) or following < life.first_entry or life.is_deleted
        text = f"{self.who} read {first} to {last} unconfirmed, up to {following} only, of {lac}"
        self._lives.require(is_all, "AllCommittedIdsAreReadable", text)


async def _entries_of(batches: Any) -> Any:
    """Return the entries of batches, and let go of them."""
    try:
        async for batch in batches:
            for entry in batch:
                yield entry
    finally:
        await batches.aclose()


@role
async def versatile_follower(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Read the ledger in all ways that there are, from anywhere, and stop in the middle."""
    await _Follower(simulation, actor, client).run()
