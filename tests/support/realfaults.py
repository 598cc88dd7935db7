"""Waiting for what real faults bring about: an acknowledgement, the end of a process, a full bookie."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import client_aio
    from benchmarks.crash_writer import Writer
    from tests.support.cluster import BookieProcess

WAIT_S = 30


async def acknowledged(writer: Writer, entry_id: int) -> None:
    """Wait until the writer's entry of that id is acknowledged."""
    reached = asyncio.Event()

    def look() -> None:
        if writer.acknowledged >= entry_id or writer.failure is not None:
            reached.set()

    writer.watchers.append(look)
    look()
    await asyncio.wait_for(reached.wait(), WAIT_S)
    writer.watchers.remove(look)
    assert writer.acknowledged >= entry_id, f"the writer failed: {writer.failure!r}"


async def replaced(ledger: client_aio.LedgerWriter, writer: Writer, bookie_id: str) -> None:
    """Wait until the bookie is out of the ensemble, which must not stop the writer."""
    async with asyncio.timeout(WAIT_S):
        while bookie_id in ledger.metadata.last_fragment.bookies:
            await acknowledged(writer, writer.acknowledged + 1)
    await acknowledged(writer, writer.acknowledged + 500)


async def exit_code_of(bookie: BookieProcess) -> int:
    """Wait for a bookie to end by itself."""
    assert bookie.child is not None
    return await asyncio.wait_for(bookie.child.wait(), WAIT_S)


async def registered(client: client_aio.Client, bookie_id: str, *, writable: bool) -> None:
    """Wait until the metadata store says so of a bookie."""
    async with asyncio.timeout(WAIT_S):
        while bookie_id not in client.bookies or client.bookies[bookie_id].is_writable is not writable:
            await client._context.pool.directory.refresh()
