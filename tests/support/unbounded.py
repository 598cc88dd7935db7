"""What tests of unbounded ledgers have in common: two clients of a cluster, numbered entries, reading all."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import client_aio
from metadata.backends.uri import open_store
from metadata.ids import fragments_key
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WAIT_S = 30
NAME = "payments"
FRAGMENT_ENTRIES = 3


@asynccontextmanager
async def clients(
    tmp_path: Path, bookies: int = 3, **settings: object
) -> AsyncIterator[tuple[client_aio.Client, client_aio.Client, Cluster]]:
    """Return two clients of a cluster."""
    async with (
        Cluster(tmp_path, bookies=bookies) as cluster,
        client_aio.connect(cluster.uri, **settings) as one,
        client_aio.connect(cluster.uri, **settings) as other,
    ):
        yield one, other, cluster


def numbered(first: int, last: int) -> list[bytes]:
    """Return the payloads of entries whose payloads are their ids."""
    return [b"%d" % n for n in range(first, last + 1)]


async def grow(ledger: client_aio.UnboundedLedgerWriter, fragments: int) -> None:
    """Add fragments of a few numbered entries each."""
    for _ in range(fragments):
        if ledger.last_add_confirmed >= 0:
            await ledger.roll()
        following = ledger.last_add_confirmed + 1
        await ledger.add_entries(numbered(following, following + FRAGMENT_ENTRIES - 1))


async def pages_of(cluster: Cluster, ledger_id: int) -> list[str]:
    """List the pages that are there, whether or not a head refers to them."""
    async with await open_store(cluster.uri) as store:
        return await store.children(fragments_key(ledger_id))


async def everything(
    client: client_aio.Client, start: int | None = 0, name: str | int = NAME
) -> list[tuple[int, bytes]]:
    """Read an unbounded ledger up to its end as it is now."""
    async with aclosing(client.read_unbounded_ledger(name, start, follow=False)) as entries:
        return [tuple(entry) async for entry in entries]
