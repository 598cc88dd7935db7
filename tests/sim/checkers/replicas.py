"""Replicas: after healing, a bookie lists the entries of a ledger that it acknowledged and owes.

Owns the requests and the counting, for bounded and unbounded ledgers alike. The names:

- Liveness: once faults stop, every bookie whose disk is whole serves, and lists what it holds.
- HonestDisksLoseNothing: only the bookie whose medium may lie ever says that it has lost data; and one that
  was about to start when the metadata store was set back.
- NoForgottenAdd: a bookie lists what it acknowledged under the entry's content term, where it owes it.
- AllCommittedEntriesReachAckQuorum: Qa bookies of each entry's write set list it, or cannot tell.
- DamageStaysWhereItIs: where the answer of a bookie that lost data ends, that entry alone is unknown, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.bookies.connection import list_entries
from client_aio.core.digest import Digest
from client_aio.core.read_plan import ClassRange, checked_blocks
from metadata.errors import BookKeeperError, NoSuchLedgerError
from tests.sim.checkers.invariants import write_set_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bookie_aio.wire.listing import Row
    from client_aio import Client
    from client_aio.bookies.connection import BookieConnection
    from metadata.model.ledger import Fragment, LedgerMetadata
    from tests.sim.simulation import Simulation

SERVES_WITHIN_S = 20.0
_ASKING_S = 2.0
_DAMAGED_MAX = 20
"""So many damaged entries of a row are looked at."""


class Listing(NamedTuple):
    """What one bookie says that it holds of a ledger."""

    held: set[tuple[int, int]]
    """Content terms and entries."""
    cannot_tell: bool
    """It has lost data, and may have held anything; or its disk is gone for good."""
    asked_at: int = 0
    """The number of events before it was asked. What it acknowledged since then may not be listed."""


class Copies:
    """The counting of one checking client."""

    def __init__(self, simulation: Simulation, client: Client) -> None:
        self._simulation = simulation
        self._history = simulation.history
        self._pool = client._context.pool
        self._silent: set[str] = set()  # that never answered, and are not waited for again

    async def all_serve(self) -> None:
        """Check that every bookie comes back that can: a dishonest disk may have lost what a start needs."""
        simulation = self._simulation
        for bookie in simulation.plan.bookies:
            if bookie not in simulation.wiped.keys() | simulation.released and bookie != simulation.dishonest:
                await self._ask(bookie, ledger_id=0)

    async def count(
        self, metadata: LedgerMetadata, fragments: Iterable[Fragment], first: int, last: int
    ) -> None:
        """Check the copies of a ledger's entries, from `first` to `last`, of all its fragments."""
        fragments = list(fragments)
        listings: dict[str, Listing] = {}
        named = {name for fragment in fragments for name in fragment.bookies}
        for bookie in sorted(named | {each.bookie for each in metadata.absent}):
            listing = await self._ask(bookie, metadata.ledger_id)
            if listing is None:
                return
            listings[bookie] = listing
        ends = [each.first_entry for each in fragments[1:]] + [last + 1]
        for fragment, end in zip(fragments, ends, strict=True):
            for entry_id in range(max(first, fragment.first_entry), min(end, last + 1)):
                if not self._is_whole(metadata, fragment, entry_id, listings):
                    return

    def _is_whole(
        self, metadata: LedgerMetadata, fragment: Fragment, entry_id: int, listings: dict[str, Listing]
    ) -> bool:
        owing = write_set_of(metadata, fragment, entry_id)
        wanted, ledger_id = (fragment.content_term, entry_id), metadata.ledger_id
        copies = [each for each in owing if wanted in listings[each].held or listings[each].cannot_tell]
        for bookie in owing:
            promised = self._history.words.promised_under(bookie, ledger_id, fragment.content_term)
            if entry_id in promised and bookie not in copies:
                if promised[entry_id] >= listings[bookie].asked_at:
                    copies.append(bookie)  # a slow one: it was acknowledged when the list was under way
                    continue
                self._history.fail(
                    "NoForgottenAdd",
                    f"{bookie} acknowledged entry {entry_id} of ledger {ledger_id} and does not list it",
                )
                return False
        # A repair that found an entry nowhere names the former bookie of the seat, which still owes it.
        former = {
            each.bookie
            for each in metadata.absent
            if each.first_entry == fragment.first_entry and fragment.bookies[each.seat] in owing
        }
        copies += [
            each
            for each in sorted(former - set(owing))
            if wanted in listings[each].held or listings[each].cannot_tell
        ]
        if len(copies) < metadata.ack_quorum:
            self._history.fail(
                "AllCommittedEntriesReachAckQuorum",
                f"entry {entry_id} of ledger {ledger_id} is on {copies} only, of {owing}",
            )
            return False
        return True

    async def _ask(self, bookie: str, ledger_id: int) -> Listing | None:
        """Ask a bookie what it holds, until it answers; None where the ledger is gone, or it never does."""
        simulation, loop = self._simulation, self._simulation.loop
        if bookie in simulation.wiped or bookie in self._silent:
            return Listing(set(), cannot_tell=True)
        if bookie in simulation.released:
            return Listing(set(), cannot_tell=False)  # It left in order, so nobody needs a copy of its.
        give_up_at = loop.now + SERVES_WITHIN_S
        while True:
            asked_at = len(self._history.events)
            try:
                connection = await self._pool.get(bookie)
                rows, is_damaged = await list_entries(connection, ledger_id, 0, 1 << 62, _ASKING_S)
                break
            except NoSuchLedgerError:
                return None  # `bookie_promises` checks whether it may say so
            except BookKeeperError as error:
                self._history.note("judge", f"{bookie} did not list ledger {ledger_id}:", repr(error))
                if loop.now > give_up_at:
                    if bookie == simulation.dishonest:
                        self._silent.add(bookie)
                        return Listing(set(), cannot_tell=True)
                    self._history.fail("Liveness", f"{bookie} does not serve: {error!r}")
                    return None
                await asyncio.sleep(0.5)
        if is_damaged and bookie not in {simulation.dishonest, *simulation.starting_at_set_back}:
            text = f"{bookie} says that it lost data of ledger {ledger_id}; its disk never lied"
            self._history.fail("HonestDisksLoseNothing", text)
        if is_damaged:
            await self._read_damaged(connection, ledger_id, rows)
        held = {(row.content_term, entry_id) for row in rows for entry_id in row.entry_ids}
        return Listing(held, cannot_tell=is_damaged, asked_at=asked_at)

    async def _read_damaged(self, connection: BookieConnection, ledger_id: int, rows: list[Row]) -> None:
        """Check where the answers of a bookie that lost data end."""
        for row in rows:
            rest: ClassRange | None = ClassRange(
                ledger_id, row.content_term, row.first, row.entry_ids[-1], row.stride, (connection.bookie_id,)
            )
            damaged = 0
            while rest is not None and damaged < _DAMAGED_MAX:
                read = await self._read(connection, rest)
                if read is None:
                    break  # The disk fails to read, or the connection has ended.
                last, is_unknown = read
                if last is not None:
                    rest = rest.after(last)
                elif not is_unknown:
                    break
                else:
                    alone = await self._read(connection, rest._replace(last=rest.first))
                    if alone is not None and alone[0] is not None:
                        self._history.fail(
                            "DamageStaysWhereItIs",
                            f"{connection.bookie_id} gives entry {rest.first} of ledger {ledger_id}, but "
                            f"nothing of {rest.first} to {rest.last}",
                        )
                        return
                    damaged += 1
                    rest = rest.after(rest.first)

    async def _read(self, connection: BookieConnection, wanted: ClassRange) -> tuple[int | None, bool] | None:
        """Return the last entry that a bookie gives of a range, and whether the next one is unknown."""
        try:
            answer, body = await connection.call(
                wanted.request(1 << 20), ReadAnswer, timeout_s=_ASKING_S, ledger_id=wanted.ledger_id
            )
            blocks, answer = checked_blocks(wanted, answer, body, Digest(wanted.ledger_id))
        except BookKeeperError as error:
            self._history.note("judge", f"{connection.bookie_id} did not give {wanted}:", repr(error))
            return None
        return (blocks[-1].last_entry if blocks else None), answer.stop == Stop.UNKNOWN
