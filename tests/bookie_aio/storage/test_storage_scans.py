"""Reads of what is not in memory: few waits, off the loop, and what follows is fetched ahead."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bookie_aio.storage.disk.disk import RealDisk, RealFile
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.messages import Stop
from tests.support.storage import SMALL, Store, entries_of, make_block

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bookie_aio.wire.blocks import Buffer

LEDGERS = range(1, 21)


class ColdFile(RealFile):
    """A file of which nothing is in memory, while the test says so."""

    def __init__(self, disk: ColdDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._cold = disk

    def read_nowait(self, offset: int, size: int) -> Buffer | None:
        return None if self._cold.is_cold else super().read_nowait(offset, size)

    async def read(self, offset: int, size: int) -> Buffer:
        self._cold.count(self._path, "read", [(offset, size)])
        return await super().read(offset, size)

    async def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self._cold.count(self._path, "read_many", ranges)
        return await super().read_many(ranges)

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._cold.count(self._path, "will_need", ranges)
        super().will_need(ranges)


class ColdDisk(RealDisk):
    """Counts what is read of segments."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cold = False
        self.calls: Counter[str] = Counter()
        self.ranges: dict[str, list[tuple[int, int]]] = {}

    def count(self, path: str, what: str, ranges: Sequence[tuple[int, int]]) -> None:
        if path.endswith(".segment"):
            self.calls[what] += 1
            self.ranges.setdefault(what, []).extend(ranges)

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return ColdFile(self, file._descriptor, path)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """Return a store with many ledgers mixed, one entry at a time, over several sealed segments."""
    opened = await Store.open(tmp_path / "b1", disk=ColdDisk())
    for entry in range(100):
        for ledger_id in LEDGERS:
            block = make_block(ledger_id, entry, [b"%d/%d" % (ledger_id, entry) * 30])
            opened.engine.append_block(block, lambda _: None)
        await opened.barrier()
    await opened.settled()
    yield opened
    await opened.close()


def disk_of(store: Store) -> ColdDisk:
    assert isinstance(store.disk, ColdDisk)
    store.disk.calls.clear()
    store.disk.ranges.clear()
    store.disk.is_cold = True
    return store.disk


async def test_a_scan_of_one_ledger_among_many_waits_once_for_each_segment(store: Store) -> None:
    disk = disk_of(store)
    found, stop, _ = await store.read(7, 0, 99)
    assert stop is Stop.END
    assert found == {entry: b"%d/%d" % (7, entry) * 30 for entry in range(100)}
    segments = len(await store.engine._lookup.sources(7, 0, 99))
    assert segments > 3
    assert disk.calls["read_many"] <= segments
    assert disk.calls["read"] <= 2  # a segment with one run of it
    assert disk.calls["will_need"] == 0  # that was all


async def test_what_a_scan_asks_for_next_is_fetched_ahead(store: Store) -> None:
    disk = disk_of(store)
    _, stop, at = await store.read(7, 0, 99, budget=5_000)
    assert stop is Stop.BUDGET
    ahead = set(disk.ranges["will_need"])
    assert ahead
    disk.ranges.clear()
    _, _, following = await store.read(7, at, 99, budget=5_000)
    assert following > at
    assert set(disk.ranges["read_many"]) & ahead


async def test_nothing_is_fetched_ahead_of_what_was_in_memory(store: Store) -> None:
    disk = disk_of(store)
    disk.is_cold = False
    _, stop, _ = await store.read(7, 0, 99, budget=5_000)
    assert stop is Stop.BUDGET
    assert disk.calls["will_need"] == disk.calls["read_many"] == 0


async def test_neighbours_are_read_together(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1", disk=ColdDisk())
    for entry in range(50):
        store.engine.append_block(make_block(1, entry, [b"x" * 100]), lambda _: None)
    await store.barrier()
    disk = disk_of(store)
    found, stop, _ = await store.read(1, 0, 49)
    assert (stop, len(found)) == (Stop.END, 50)
    assert len(disk.ranges["read_many"]) <= 3
    await store.close()


async def test_a_damaged_block_among_many_is_found_all_the_same(store: Store) -> None:
    source = (await store.engine._lookup.sources(7, 0, 99))[0]
    run = (await source.overlapping(0, 99, 200))[5]
    path = store.path / source.segment.path
    with path.open("r+b") as file:
        file.seek(run.offset + run.head_bytes)
        file.write(b"?")
    disk_of(store)
    found, stop, at = await store.read(7, 0, 99)
    assert (stop, at, sorted(found)) == (Stop.UNKNOWN, run.first, list(range(run.first)))
    assert store.engine.is_damaged(7)


async def test_what_was_written_last_stays_in_the_page_cache_and_what_is_before_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which segments the system is asked to let go of is certain; a page in use just then it may keep."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(4096))
    descriptor = os.open(probe, os.O_RDWR)
    os.fsync(descriptor)
    disk = RealDisk()
    try:
        file = RealFile(disk, descriptor, str(probe))
        if file.read_nowait(0, 4096) is None:
            pytest.skip("this file system does not tell what is in memory")
        await file.will_not_need()
        if file.read_nowait(0, 4096) is not None:
            pytest.skip("this file system lets go of nothing")
    finally:
        os.close(descriptor)
    let_go: list[str] = []
    ask = RealFile.will_not_need

    async def note(file: RealFile) -> None:
        let_go.append(file._path)
        await ask(file)

    monkeypatch.setattr(RealFile, "will_not_need", note)
    kept = 3 * SMALL.segment_bytes
    store = await Store.open(tmp_path / "b1", replace(SMALL, page_cache_bytes=kept), disk)
    for entry in range(40):
        await store.add(make_block(1, entry, [b"." * (SMALL.segment_bytes // 4)]))
    await store.settled()
    in_memory: list[bool] = []
    paths = sorted((tmp_path / "b1").glob("*.segment"))
    for path in paths:
        segment = await disk.open(str(path))
        in_memory.append(segment.read_nowait(0, 4096) is not None)
        segment.close()
    *sealed, _, _ = in_memory  # behind them the one that is written to, and the next
    assert len(sealed) > 6
    assert let_go == [str(path) for path in paths[: len(sealed) - 3]]
    assert sealed[-3:] == [True] * 3
    assert sealed.count(False) >= len(let_go) - 1
    found, stop, _ = await store.read(1, 0, 39)
    assert (len(found), stop) == (40, Stop.END)
    await store.close()


async def test_another_stride_than_what_was_added_costs_no_look_at_the_whole_block_for_each_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, turns = 0, 0
    parse_head = Block.parse_head

    def counting(view: memoryview) -> Block:
        nonlocal heads
        heads += 1
        return parse_head(view)

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    config = replace(SMALL, segment_bytes=4 << 20, group_bytes_max=2 << 20)
    store = await Store.open(tmp_path / "bookie", config)
    await store.add(make_block(1, 0, [b""] * 65_536, lac=-1))
    beside = asyncio.create_task(others())
    with monkeypatch.context() as patched:
        patched.setattr(Block, "parse_head", staticmethod(counting))
        found = await store.engine.read(1, 0, range(0, 65_536, 2), 10**9)
    beside.cancel()
    assert (found.stop, found.stop_entry) == (Stop.END, 65_536)
    assert list(entries_of(found.buffers)) == list(range(0, 65_536, 2))
    assert heads == 1
    assert turns >= 500  # of 512: nobody waited for longer than it takes to give 64 entries
    await store.close()


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(0, 40),
    st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_runs_of_all_strides_over_one_another_read_as_the_newest_of_each_entry(
    runs: list[tuple[int, int, int]], first: int, stride: int
) -> None:
    async def read() -> None:
        with tempfile.TemporaryDirectory() as directory:
            store = await Store.open(Path(directory) / "bookie")
            newest: dict[int, bytes] = {}
            for number, (start, step, count) in enumerate(runs):
                payloads = [b"%d of %d" % (number, n) for n in range(count)]
                await store.add(make_block(1, start, payloads, stride=step, lac=-1))
                newest.update(zip(range(start, start + step * count, step), payloads, strict=True))
            wanted = range(first, 120, stride)
            found, stop, stop_entry = await store.read(1, first, 119, stride=stride)
            there = list(takewhile(newest.__contains__, wanted))
            assert found == {entry_id: newest[entry_id] for entry_id in there}
            assert stop is Stop.NO_SUCH_ENTRY
            assert stop_entry == wanted[len(there)]
            await store.close()

    asyncio.run(read())
