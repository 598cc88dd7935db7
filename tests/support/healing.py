"""What tests of writers that heal have in common: two bookies that go, a writer's state, takeovers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    import pytest

    from client_aio import Client, LogWriter, UnboundedLedgerWriter, WriterState
    from client_aio.context import ClientContext
    from tests.support.cluster import Cluster

LASTS_S = 60


async def state_is(writer: LogWriter | UnboundedLedgerWriter, wanted: WriterState) -> None:
    """Wait until a writer is in a state."""
    async with asyncio.timeout(LASTS_S), contextlib.aclosing(writer.states()) as states:
        async for state in states:
            if state is wanted:
                return
    raise AssertionError(f"{writer} was never {wanted}")


def stop_two(cluster: Cluster) -> None:
    """Stop the two bookies to be lost: whatever is sent from now on is outstanding when they are killed.

    A writer that has heard of both losses before an append holds that one back, and nothing is outstanding.
    """
    for name in ("b1", "b2"):
        cluster[name].stop()


async def lose_two(cluster: Cluster) -> None:
    """Kill two bookies."""
    await asyncio.gather(cluster["b1"].kill(), cluster["b2"].kill())


async def bring_back(cluster: Cluster) -> None:
    """Start the two bookies."""
    await asyncio.gather(cluster["b1"].start(), cluster["b2"].start())


def hold_up(monkeypatch: pytest.MonkeyPatch, module: ModuleType, client: Client) -> asyncio.Event:
    """Let a client's takeovers wait for ever for the answers of bookies; the event tells that one waits.

    Args:
        module: that which calls `check_reach`.
    """
    waits, check_reach = asyncio.Event(), module.check_reach

    async def check(context: ClientContext, *arguments: Any, **options: Any) -> None:
        if context is client._context:
            waits.set()
            await asyncio.Event().wait()
        await check_reach(context, *arguments, **options)

    monkeypatch.setattr(module, "check_reach", check)
    return waits
