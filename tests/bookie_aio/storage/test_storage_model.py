"""Random histories against a dictionary, before and after sealing, a crash and a clean restart."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bookie_aio.storage.maintenance import compactor as compactor_module
from bookie_aio.storage.read.reader import read_block
from bookie_aio.storage.segment import index as index_module
from bookie_aio.storage.segment.index import MemoryIndex, Run, Runs
from bookie_aio.wire.messages import Stop
from tests.support.storage import SMALL, Store, entries_of, make_block

if TYPE_CHECKING:
    from bookie_aio.storage.config import StorageConfig
    from bookie_aio.storage.read.reader import StoredCopy
    from bookie_aio.wire.blocks import Block

Add = tuple[int, int, int, int, int, int]

adds = st.lists(
    st.tuples(
        st.integers(1, 3),  # ledger
        st.integers(0, 60),  # first entry
        st.integers(1, 12),  # entries
        st.sampled_from([1, 1, 2, 3]),  # stride
        st.sampled_from([0, 0, 0, 1, 2]),  # content term
        st.sampled_from([1, 40, 900]),  # bytes of each
    ),
    min_size=1,
    max_size=40,
)
Model = dict[tuple[int, int], tuple[int, bytes]]


def expect(
    model: Model, damaged: bool, ledger_id: int, term: int, ids: range
) -> tuple[dict[int, bytes], Stop]:
    """Return what a read without a budget finds, by the rules."""
    found: dict[int, bytes] = {}
    for entry_id in ids:
        held, data = model.get((ledger_id, entry_id), (-1, b""))
        if held != term:
            return found, Stop.STALE_METADATA if held > term else Stop.NO_SUCH_ENTRY
        found[entry_id] = data
    return found, Stop.END


async def check(store: Store, model: Model) -> None:
    for ledger_id in (1, 2, 3):
        mine = {entry: term for (owner, entry), (term, _) in model.items() if owner == ledger_id}
        assert store.engine.last_entry(ledger_id) == max(mine, default=-1)
        for term, stride, first in itertools.product((0, 1, 2), (1, 2, 3), (0, 1, 7, 30)):
            ids = range(first, 99, stride)
            got = await store.engine.read(ledger_id, term, ids, 10**9)
            assert (entries_of(got.buffers), got.stop) == expect(model, False, ledger_id, term, ids)
        await check_budget(store, model, ledger_id)
        listed: set[int] = set()
        at = 0
        while at >= 0:
            rows, following = await store.engine.list_entries(ledger_id, at, 3)
            for first, _, count, stride in rows:
                listed.update(range(first, first + count * stride, stride))
            assert following == -1 or following > at
            at = following
        assert listed == set(mine)


async def check_budget(store: Store, model: Model, ledger_id: int) -> None:
    """Read with a small budget: what comes together is the same, and no answer is much too large."""
    at, found = 0, dict[int, bytes]()
    while True:
        got = await store.engine.read(ledger_id, 0, range(at, 99), 1500)
        part = entries_of(got.buffers)
        assert len(part) <= 1 or sum(map(len, got.buffers)) <= 1500
        found |= part
        at = got.stop_entry
        if got.stop != Stop.BUDGET:
            break
    assert found == expect(model, False, ledger_id, 0, range(99))[0]


def append(
    store: Store, model: Model, one: Add, number: int, together: list[Block] | None = None, count_max: int = 1
) -> None:
    """Append a block, or put it to those that make one record when there are `count_max` of them."""
    ledger_id, first, count, stride, term, size = one
    payloads = [bytes([number, index]) * (size // 2) for index in range(count)]
    block = make_block(ledger_id, first, payloads, stride=stride, content_term=term, lac=-1)
    if together is None:
        store.engine.append_block(block, lambda _: None)
    else:
        together.append(block)
        if len(together) >= count_max:
            append_together(store, together)
    for entry_id, data in zip(block.entry_ids, payloads, strict=True):
        if term >= model.get((ledger_id, entry_id), (-1, b""))[0]:
            model[ledger_id, entry_id] = (term, data)


def append_together(store: Store, blocks: list[Block]) -> None:
    """Append the blocks as one record, and empty the list."""
    if blocks:
        body = b"".join([block.view for block in blocks])
        store.engine.append_blocks(list(blocks), body, lambda _: None)
        blocks.clear()


async def tell(
    path: Path, history: list[Add], pause_every: int, together: int, config: StorageConfig
) -> None:
    store, model = await Store.open(path / "b1", config), Model()
    waiting: list[Block] = []
    for number, one in enumerate(history):
        append(store, model, one, number, waiting if together > 1 else None, together)
        if number % pause_every == 0:
            await store.barrier()
    append_together(store, waiting)
    await store.barrier()
    await check(store, model)
    await store.settled()
    await check(store, model)
    crashed = await store.crash_into(path / "crashed")
    await store.close()
    for copy in (crashed, path / "b1"):
        again = await Store.open(copy, config)
        await check(again, model)
        await again.close()


DELETED = 9
TIGHT = replace(SMALL, files_max=2, heads_bytes_max=1, locations_bytes_max=1)


@given(
    history=adds,
    pause_every=st.integers(1, 20),
    together=st.sampled_from([1, 2, 5]),
    config=st.sampled_from([SMALL, TIGHT]),
)
@settings(max_examples=40, deadline=None)
def test_a_random_history_reads_as_its_model(
    history: list[Add], pause_every: int, together: int, config: StorageConfig
) -> None:
    with TemporaryDirectory() as path:
        asyncio.run(tell(Path(path), history, pause_every, together, config))


async def tell_compacting(path: Path, before: list[Add], during: list[Add]) -> None:
    store, model = await Store.open(path / "b1"), Model()
    for number, one in enumerate(before):
        append(store, model, one, number)
    for entry in range(100):  # most of what is in the segments, and deleted then
        store.engine.append_block(make_block(DELETED, entry, [bytes(2000)]), lambda _: None)
    await store.barrier()
    await store.settled()
    coming = list(enumerate(during, len(before)))

    async def read_and_add(found: StoredCopy, ledger_id: int, data: memoryview | bytes) -> Block:
        block = await read_block(found, ledger_id, data)
        if coming:
            number, one = coming.pop(0)
            append(store, model, one, number)
        return block

    with patch.object(compactor_module, "read_block", read_and_add):
        await store.wait(lambda done: store.engine.append_tombstone(DELETED, done))
        await store.settled()
    for number, one in coming:
        append(store, model, one, number)
    await store.barrier()
    await check(store, model)
    await store.close()
    again = await Store.open(path / "b1")
    await check(again, model)
    await again.close()


# Few shapes, which meet: write sets, what is sent again in other blocks, single entries of a recovery.
meeting = st.lists(
    st.builds(
        lambda first, count, stride, term: (1, first, count, stride, term, 40),
        st.integers(0, 8),
        st.sampled_from([8, 12, 16]),
        st.sampled_from([1, 2, 3, 3]),
        st.sampled_from([0, 0, 0, 0, 1]),
    )
    | st.builds(lambda first: (1, first, 1, 1, 0, 40), st.integers(0, 50)),
    min_size=1,
    max_size=8,
)


@given(before=meeting, during=meeting)
@settings(max_examples=40, deadline=None)
def test_a_random_history_reads_as_its_model_though_segments_are_compacted_meanwhile(
    before: list[Add], during: list[Add]
) -> None:
    with TemporaryDirectory() as path:
        asyncio.run(tell_compacting(Path(path), before, during))


runs = st.lists(
    st.tuples(st.integers(0, 500), st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=300
)


@given(
    runs=runs,
    low=st.integers(0, 500),
    span=st.integers(0, 200),
    count_max=st.integers(1, 20),
    turn=st.integers(1, 100),
)
@example(runs=[(first, 1, 1) for first in range(50)], low=0, span=50, count_max=10, turn=3)
@settings(max_examples=100, deadline=None)
def test_overlapping_runs_are_all_found(
    runs: list[tuple[int, int, int]], low: int, span: int, count_max: int, turn: int
) -> None:
    index = MemoryIndex()
    everything = [
        Run(first, 0, offset, entries, stride, 96, 10) for offset, (first, entries, stride) in enumerate(runs)
    ]
    for run in everything:
        index.add(1, run)
    held: Runs = index.ledgers[1]
    assert held.highest == max(run.last for run in everything)
    high = low + span
    with patch.object(index_module, "RUNS_PER_STEP", turn):
        found = held.overlapping(low, high, count_max)
    ordered = sorted(everything, key=lambda run: (run.first, run.offset))
    below = [run for run in ordered if run.first <= low <= run.last]
    above = [run for run in ordered if low < run.first <= high][:count_max]
    assert found == below + above
