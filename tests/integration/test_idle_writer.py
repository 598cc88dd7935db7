"""A writer that adds nothing for a while: what it added last is seen all the same (rule 13)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

import client_aio
from tests.support.links import Links

if TYPE_CHECKING:
    from tests.support.cluster import Cluster


@pytest.mark.parametrize("is_unbounded", [False, True])
@pytest.mark.parametrize(("ensemble", "ack"), [(3, 2), (1, 1)])
async def test_the_last_entry_is_seen_though_connections_broke_before_the_lac_was_told(
    cluster: Cluster, is_unbounded: bool, ensemble: int, ack: int
) -> None:
    quorums = {"ensemble_size": ensemble, "write_quorum": ensemble, "ack_quorum": ack}
    async with (
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=0.5, replacement_retry_s=0.2) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        if is_unbounded:
            writer = await client.open_unbounded_ledger("a", **quorums)
            reader = None
        else:
            writer = await client.create_ledger(**quorums)
            reader = await other.open_ledger(writer.ledger_id)
        assert await writer.add_entry(b"the last") == 0
        for link in links.of("writer").values():
            link.reset()
        stream = other.read_unbounded_ledger("a") if reader is None else reader.tail()
        async with asyncio.timeout(30), aclosing(stream) as entries:
            entry = await anext(entries)
        assert entry.data == b"the last"
        assert await writer.add_entry(b"one more") == 1
        await writer.close()
