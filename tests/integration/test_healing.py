"""A bookie that lost data is healed: marks are bounded, and lifted ledger by ledger (rule 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.blocks import encode_block
from bookie_aio.wire.messages import Add, Done, LiftMark, LiftMarkAnswer, Stop
from metadata.errors import LedgerFencedError, MalformedFrameError
from metadata.ids import TERM_WRITER
from tests.integration.test_damage import fill, ledgers_of, missing
from tests.support.cluster import BookieProcess, Cluster
from tests.support.replicas import WAIT_S, everything, stop_of

if TYPE_CHECKING:
    from pathlib import Path


async def mark_of(client: client_aio.Client, bookie_id: str, ledger_id: int, lift: int = 0) -> int:
    """Ask a bookie for the mark of a ledger, or to lift it."""
    connection = await client._context.pool.get(bookie_id)
    request = LiftMark(ledger_id, lift)
    answer, _ = await connection.call(request, LiftMarkAnswer, timeout_s=WAIT_S, ledger_id=ledger_id)
    return answer.mark


async def add_late(client: client_aio.Client, bookie_id: str, ledger_id: int, entry_id: int) -> None:
    """Add an entry as a writer would that has not heard that its ledger was closed."""
    connection = await client._context.pool.get(bookie_id)
    block = encode_block(
        ledger_id=ledger_id, content_term=0, first_entry=entry_id, stride=1, lac=-1, lafr=-1,
        payloads=[b"late"], running=[4],
    )  # fmt: skip
    add = Add(ledger_id, TERM_WRITER, 0)
    await connection.call(add, Done, body=block, timeout_s=WAIT_S, ledger_id=ledger_id)


async def lose_segments(bookie: BookieProcess, *, with_indexes: bool) -> None:
    """End a bookie, remove the segments that hold entries, and start it again."""
    await bookie.end()
    for index in bookie.directory.glob("*.index"):
        index.with_suffix(".segment").unlink()
        if with_indexes:
            index.unlink()
    await bookie.start()


@pytest.mark.parametrize("with_indexes", [True, False])
async def test_a_bookie_that_lost_a_segment_is_healed_ledger_by_ledger(
    tmp_path: Path, with_indexes: bool
) -> None:
    """Three bookies, each of which is in every ensemble."""
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        closed = [await fill(client), await fill(client, 7)]
        writer = await client.create_ledger()
        await writer.add_entries([b"x"] * 10)
        old = [*closed, writer.ledger_id]
        await lose_segments(cluster["b1"], with_indexes=with_indexes)
        await client._context.pool.directory.refresh()
        figures = await ledgers_of(client, "b1")
        assert figures["all_damaged"] is with_indexes
        for ledger_id in old:
            assert await stop_of(client, "b1", ledger_id, 50) is Stop.UNKNOWN
        if with_indexes:
            assert isinstance(figures["all_damaged_up_to"], int)
            assert figures["all_damaged_up_to"] >= max(old)
        # Ledgers that are created now are on all three bookies, and acknowledged by all three.
        async with (
            client_aio.connect(cluster.uri) as other,
            other.create_ledger(ack_quorum=3) as ledger,
        ):
            await ledger.add_entries([b"new"] * 5)
        assert not await mark_of(client, "b1", ledger.ledger_id)
        await writer.add_entries([b"y"] * 5)  # acknowledged by the two others
        await heal(client, cluster, old, writer)


async def heal(
    client: client_aio.Client, cluster: Cluster, old: list[int], writer: client_aio.LedgerWriter
) -> None:
    mark = await mark_of(client, "b1", old[0])
    with pytest.raises(MalformedFrameError, match="lacks 50 of the entries"):
        await mark_of(client, "b1", old[0], lift=mark)
    mark = await mark_of(client, "b1", writer.ledger_id)
    with pytest.raises(MalformedFrameError, match="it is OPEN"):
        await mark_of(client, "b1", writer.ledger_id, lift=mark)
    await writer.close()
    for ledger_id in old:
        report = await client.repair_ledger(ledger_id, replace="b1", by="b1")
        assert (report.is_mark_lifted, report.mark_left) == (True, "")
    for how in ("end", "kill"):
        for ledger_id, count in zip(old, (50, 7, 15), strict=True):
            assert await missing(client, ledger_id) == dict.fromkeys(("b1", "b2", "b3"), (0, False))
            assert await stop_of(client, "b1", ledger_id, count) is Stop.NO_SUCH_ENTRY
            assert len(await everything(client, ledger_id)) == count
            with pytest.raises(LedgerFencedError):
                await add_late(client, "b1", ledger_id, count)
        assert (await ledgers_of(client, "b1"))["lifted"] == len(old)
        await getattr(cluster["b1"], how)()
        await cluster["b1"].start()
        await client._context.pool.directory.refresh()
    # A further loss is a further mark.
    await lose_segments(cluster["b1"], with_indexes=True)
    await client._context.pool.directory.refresh()
    for ledger_id in old:
        assert await stop_of(client, "b1", ledger_id, 50) is Stop.UNKNOWN
