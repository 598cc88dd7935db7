"""What tests of writers that heal have in common: two of three bookies that go, and a writer's state."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client_aio import LogWriter, UnboundedLedgerWriter, WriterState
    from tests.support.cluster import Cluster

LASTS_S = 60


async def state_is(writer: LogWriter | UnboundedLedgerWriter, wanted: WriterState) -> None:
    """Wait until a writer is in a state."""
    async with asyncio.timeout(LASTS_S), contextlib.aclosing(writer.states()) as states:
        async for state in states:
            if state is wanted:
                return
    raise AssertionError(f"{writer} was never {wanted}")


async def lose_two(cluster: Cluster) -> None:
    """Kill two bookies."""
    await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())


async def bring_back(cluster: Cluster) -> None:
    """Start the two bookies."""
    await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())
