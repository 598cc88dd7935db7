"""Judgement: after healing, every ledger is recovered, read twice, and its copies are counted.

Owns the checks of the last phase of a run. Those that hold at every moment are the history's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from metadata.errors import BookKeeperError, NoSuchLedgerError
from tests.sim.history import write_set

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from client_aio import Client
    from tests.sim.simulation import Simulation

RECOVERY_BOUND_S = 40.0
JUDGES: list[Callable[[Simulation, Client], Awaitable[None]]] = []
"""Further checks by profiles of other parts, run by the judging client after those of bounded ledgers."""


async def judge(simulation: Simulation) -> None:
    """Recover, read and count, with a new client."""
    await simulation.spawn_client("judge", _judge)


async def _judge(simulation: Simulation, client: Client) -> None:
    history = simulation.history
    for ledger_id in list(history.ledgers):
        record = history.ledgers[ledger_id]
        if record.metadata is None or record.is_deleted:
            continue
        if not await _recover(simulation, client, ledger_id):
            return
        await _read_all(simulation, client, ledger_id, "judge")
    second: Any = simulation.spawn_client("second", _second)
    await second
    await _count_copies(simulation, client)
    for further in JUDGES:
        await further(simulation, client)


async def _second(simulation: Simulation, client: Client) -> None:
    for ledger_id, record in list(simulation.history.ledgers.items()):
        if record.metadata is not None and not record.is_deleted:
            await _read_all(simulation, client, ledger_id, "second")


async def _recover(simulation: Simulation, client: Client, ledger_id: int) -> bool:
    loop = simulation.loop
    give_up_at = loop.now + RECOVERY_BOUND_S
    while True:
        try:
            await client.open_ledger(ledger_id, recover=True)
        except BookKeeperError as error:
            if loop.now > give_up_at:
                simulation.history.fail(
                    "Liveness", f"ledger {ledger_id} cannot be closed though all faults are over: {error!r}"
                )
                return False
            simulation.history.note("judge", f"recovering ledger {ledger_id}:", repr(error))
            await asyncio.sleep(0.5)
        else:
            return True


async def _read_all(simulation: Simulation, client: Client, ledger_id: int, who: str) -> None:
    history = simulation.history
    record = history.ledger(ledger_id)
    error: Exception | None = None
    for _ in range(4):
        following = 0
        try:
            async with client.open_ledger(ledger_id) as reader:
                last = reader.last_add_confirmed
                async for entry in reader.read(0, last):
                    history.require(
                        entry.entry_id == following,
                        "NoOutOfOrderEntries",
                        lambda entry=entry, following=following: (
                            f"{entry.entry_id} was read, not {following}"
                        ),
                    )
                    history.read(who, ledger_id, entry.entry_id, entry.data)
                    following += 1
        except NoSuchLedgerError:
            history.require(
                record.is_deleted, "AllAckedEntriesAreReadable", lambda: f"ledger {ledger_id} is gone"
            )
            return
        except BookKeeperError as failure:
            history.note(who, f"reading ledger {ledger_id} at {following}:", repr(failure))
            error = failure
            await asyncio.sleep(0.5)
        else:
            break
    needed = max(
        record.acked, record.read_up_to, record.closed_last if record.closed_last is not None else -1
    )
    history.require(
        following > needed,
        "AllAckedEntriesAreReadable",
        lambda: f"{who} could read ledger {ledger_id} up to {following - 1} only, of {needed}: {error!r}",
    )


def _check_listing(simulation: Simulation, ledger_id: int, bookie: str, held: set[int]) -> None:
    """Check that a bookie, which says that it lost nothing, lists what it acknowledged and is to hold."""
    history = simulation.history
    record = history.ledger(ledger_id)
    assert record.metadata is not None
    last = record.closed_last
    assert last is not None
    for entry_id in history.promised.get((bookie, ledger_id), ()):
        if entry_id <= last and entry_id not in held and bookie in write_set(record.metadata, entry_id):
            history.fail(
                "NoForgottenAdd",
                f"{bookie} acknowledged entry {entry_id} of ledger {ledger_id} and does not list it",
            )
            return


async def _count_copies(simulation: Simulation, client: Client) -> None:
    """Check that Qa bookies of each entry's write set list it, one less where a disk was dishonest."""
    from client_aio.replicas import list_entries

    history, context = simulation.history, client._context
    for ledger_id, record in list(history.ledgers.items()):
        metadata = record.metadata
        if metadata is None or record.is_deleted or record.closed_last is None or record.deferred:
            continue
        held: dict[str, set[int]] = {}
        for bookie in sorted({name for fragment in metadata.fragments for name in fragment.bookies}):
            if bookie in simulation.wiped:
                continue
            held[bookie] = set()
            try:
                connection = await context.pool.get(bookie)
                rows, is_damaged = await list_entries(connection, ledger_id, 0, record.closed_last, 2.0)
            except BookKeeperError as error:
                history.note("judge", f"{bookie} did not list ledger {ledger_id}:", repr(error))
                rows, is_damaged = [], True
            for row in rows:
                held[bookie].update(row.entry_ids)
            if not is_damaged:
                _check_listing(simulation, ledger_id, bookie, held[bookie])
            if is_damaged:
                held[bookie].update(range(record.closed_last + 1))  # unknown counts as perhaps
        for entry_id in range(record.closed_last + 1):
            owing = write_set(metadata, entry_id)
            copies = [name for name in owing if name in simulation.wiped or entry_id in held[name]]
            if len(copies) < metadata.ack_quorum:
                history.fail(
                    "AllCommittedEntriesReachAckQuorum",
                    f"entry {entry_id} of closed ledger {ledger_id} is on {copies} only, of {owing}",
                )
                return
