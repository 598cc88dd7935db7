"""A start that has lost the table of ledgers learns from the indexes, in whatever order it comes to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from bookie_aio.storage.ledgers.checkpoint import encode_checkpoint, parse_checkpoint
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.segment import SegmentRow
from bookie_aio.wire.messages import Stop
from tests.support.storage import SMALL, Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

TABLED = dataclasses.replace(SMALL, live_ledgers_max=0)
LEDGERS, LEDGER = range(20), 5


async def write_segment(path: Path, entry_id: int, *, forget: bool = False) -> None:
    """Put an entry of each ledger into a segment of their own."""
    store = await Store.open(path, TABLED)
    for ledger_id in LEDGERS:
        await store.add(make_block(ledger_id, entry_id, [b"%d-%d" % (ledger_id, entry_id)]))
    if forget:
        await store.wait(lambda done: store.engine.append_forget(LEDGER, done))
        await store.add(make_block(LEDGER, entry_id, [b"%d-%d" % (LEDGER, entry_id)]))
    await store.close()


def lose_the_table(path: Path, place: int) -> int:
    """Take the table away, and from the checkpoint that a segment was sealed; gives its number."""
    checkpoint = path / form.CHECKPOINT
    known = parse_checkpoint(checkpoint.read_bytes())
    number = sorted(known.segments)[place]
    rows = {**known.segments, number: SegmentRow(number, known.segments[number].generation)}
    data = encode_checkpoint(
        known.next_segment, rows.values(), known.marks, [], known.deleted.packed(), known.table, known.number
    )
    checkpoint.write_bytes(b"".join(map(bytes, data)))
    (path / form.table_name(known.table)).unlink()
    return number


async def test_a_segment_whose_index_was_made_again_counts_though_it_is_learnt_from_last(
    tmp_path: Path,
) -> None:
    for entry_id in range(3):
        await write_segment(tmp_path, entry_id)
    lose_the_table(tmp_path, 0)  # as a crash does between the index and the next checkpoint
    store = await Store.open(tmp_path)
    await store.settled()
    found = await store.read(LEDGER, 0, 2)
    await store.close()
    assert found[:2] == ({0: b"5-0", 1: b"5-1", 2: b"5-2"}, Stop.END)


async def test_what_was_stored_behind_a_forgetting_counts_though_a_later_segment_was_learnt_from_first(
    tmp_path: Path,
) -> None:
    await write_segment(tmp_path, 0)
    await write_segment(tmp_path, 1, forget=True)
    await write_segment(tmp_path, 2)
    number = lose_the_table(tmp_path, 1)
    (tmp_path / form.index_name(number)).unlink()
    store = await Store.open(tmp_path)
    await store.settled()
    found = await store.read(LEDGER, 1, 2)
    await store.close()
    assert found[:2] == ({1: b"5-1", 2: b"5-2"}, Stop.END)
