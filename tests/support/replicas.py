"""Looking at single replicas from the outside, and damaging them on the disk."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.blocks import LacStatement, parse_blocks
from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Stop

if TYPE_CHECKING:
    from pathlib import Path

    import client_aio
    from tests.support.cluster import BookieProcess

WAIT_S = 30


class Stored(NamedTuple):
    """An entry as a bookie stores it."""

    payload: bytes
    statement: LacStatement
    running: int
    checksum: int


async def stop_of(client: client_aio.Client, bookie_id: str, ledger_id: int, entry_id: int) -> Stop:
    """Ask one bookie for one entry, and give why its answer ends."""
    _, stop = await _read(client, bookie_id, ledger_id, range(entry_id, entry_id + 1))
    return stop


async def stored(
    client: client_aio.Client, bookie_id: str, ledger_id: int, entry_ids: range
) -> dict[int, Stored]:
    """Read the entries that one bookie gives, one by one where it cannot give them all."""
    found, stop = await _read(client, bookie_id, ledger_id, entry_ids)
    if stop is not Stop.END:
        for entry_id in set(entry_ids) - found.keys():
            found |= (await _read(client, bookie_id, ledger_id, range(entry_id, entry_id + 1)))[0]
    return found


async def _read(
    client: client_aio.Client, bookie_id: str, ledger_id: int, entry_ids: range
) -> tuple[dict[int, Stored], Stop]:
    connection = await client._context.pool.get(bookie_id)
    found: dict[int, Stored] = {}
    following = entry_ids.start
    while True:
        answer, body = await connection.call(
            Read(ledger_id, NO_TERM, 0, following, entry_ids[-1], entry_ids.step, 1 << 20),
            ReadAnswer,
            timeout_s=WAIT_S,
        )
        for block in parse_blocks(body):
            assert block.payload_is_intact()
            columns = (block.entry_ids, block.payloads(), block.running, block.checksums)
            for entry_id, payload, running, checksum in zip(*columns, strict=True):
                found[entry_id] = Stored(bytes(payload), block.statement, running, checksum)
        if answer.stop != Stop.BUDGET:
            return found, Stop(answer.stop)
        following = answer.stop_entry


async def everything(client: client_aio.Client, ledger_id: int) -> list[tuple[int, bytes]]:
    """Read a ledger from its first entry to its last."""
    async with client.open_ledger(ledger_id) as reader:
        return [tuple(entry) async for entry in reader.read(0, reader.last_add_confirmed)]


async def every_copy(client: client_aio.Client, ledger_id: int) -> None:
    """Wait until each bookie of a ledger that answers holds all that it owes.

    An entry is acknowledged by its ack quorum, so the slowest bookie may still have to store it. A test that
    goes on to kill a bookie, and to count copies, waits for that one first.
    """
    async with asyncio.timeout(WAIT_S):
        while any(one.entries_missing for one in await client.ledger_replicas(ledger_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def lose(bookie: BookieProcess) -> None:
    """Kill a bookie, with all that it had on its disk."""
    await bookie.kill()
    shutil.rmtree(bookie.directory)


def flip(directory: Path, payload: bytes, behind: int = 0) -> None:
    """Turn a bit of each copy of a payload in a stopped bookie's segments, so many bytes behind its start."""
    flipped = 0
    for path in directory.glob("*.segment"):
        with path.open("r+b") as file:
            data = file.read()
            at = data.find(payload)
            while at >= 0:
                file.seek(at + behind)
                file.write(bytes([data[at + behind] ^ 1]))
                flipped += 1
                at = data.find(payload, at + 1)
    assert flipped, f"{payload!r} is in no segment of {directory}"
