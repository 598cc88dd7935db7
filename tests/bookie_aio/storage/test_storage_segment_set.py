"""Many segments: what a start reads of them, what stays in memory, and what is no longer kept of a ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.disk.disk import RealFile
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import segment_name
from bookie_aio.storage.segment.segment import LruCache
from bookie_aio.wire.messages import Stop
from tests.support.storage import SMALL, FaultyDisk, Store, make_block

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from pathlib import Path

    from bookie_aio.storage.disk.disk import File
    from bookie_aio.wire.blocks import Buffer

TIGHT = replace(SMALL, files_max=3, heads_bytes_max=1, locations_bytes_max=1)


async def fill(store: Store, ledger_ids: range, entries: range) -> None:
    """Store interleaved entries of some ledgers, so that segments are sealed."""
    for first in entries:
        for ledger_id in ledger_ids:
            block = make_block(ledger_id, first, [b"%d/%d" % (ledger_id, first) * 40])
            store.engine.append_block(block, lambda _: None)
        if first % 16 == 0:
            await store.barrier()
    await store.barrier()
    await store.settled()


async def assert_reads(store: Store, ledger_ids: range, entries: range) -> None:
    for ledger_id in ledger_ids:
        found, stop, _ = await store.read(ledger_id, entries[0], entries[-1])
        assert stop is Stop.END
        assert found == {entry: b"%d/%d" % (ledger_id, entry) * 40 for entry in entries}


async def test_a_start_reads_nothing_of_sealed_segments_but_their_names(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await fill(store, range(10), range(300))
    await store.close()
    disk = FaultyDisk()
    again = await Store.open(tmp_path / "b1", disk=disk)
    sealed = len(again.engine._segments.sealed())
    assert sealed > 10
    # The checkpoint (144 bytes for each ledger, 48 for each segment), the witness, and of the one segment
    # that was sealed after it the header and the head of the index.
    assert disk.bytes_read < 72 + 10 * 144 + 48 * (sealed + 1) + 5 * 4096 + 1000
    await assert_reads(again, range(10), range(300))
    await again.close()


async def test_little_memory_and_few_files_are_enough(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1", TIGHT)
    await fill(store, range(5), range(300))
    await assert_reads(store, range(5), range(300))
    assert len(store.engine._segments.file_cache) <= 3 + len(store.engine._segments.in_memory)
    assert len(store.engine._segments.sealed()) > 5
    await store.close()


async def test_small_groups_touch_one_page_each(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    for entry in range(20):
        await store.add(make_block(1, entry, [b"x" * 1024]))
    crashed = await store.crash_into(tmp_path / "crashed")
    data = (crashed / segment_name(1)).read_bytes()
    header = form.parse_segment_header(data)
    at, starts = form.DATA_OFFSET, []
    while len(starts) < 20:
        group = form.peek_group_header(data[at:], header, at, len(data))
        if group is None:
            at = form.next_page(at + 1)
            continue
        assert group.offset // 4096 == (group.end - 1) // 4096
        starts.append(group.offset)
        at = group.end
    assert any(start % 4096 == 0 for start in starts[1:])
    assert any(start % 4096 for start in starts)
    await store.close()
    for path in (crashed, tmp_path / "b1"):
        again = await Store.open(path)
        assert not again.engine.notes
        assert (await again.read(1, 0, 19))[1] is Stop.END
        await again.close()


async def test_groups_are_written_up_to_the_end_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    write_and_sync = RealFile.write_and_sync

    def noted(
        file: RealFile,
        buffers: Sequence[Buffer],
        offset: int,
        then: Sequence[tuple[File, Buffer]],
        *,
        at_once: bool,
    ) -> asyncio.Future[None]:
        ends.append(offset + sum(map(len, buffers)))
        return write_and_sync(file, buffers, offset, then, at_once=at_once)

    monkeypatch.setattr(RealFile, "write_and_sync", noted)
    store = await Store.open(tmp_path / "b1")
    for entry in range(200):
        await store.add(make_block(1, entry, [b"x" * (1 + 97 * entry % 9000)]))
    assert len(ends) == 200
    # In part written, a page of a file that was a segment before is read from the disk first.
    assert [end for end in ends if end % 4096] == []
    assert len(store.engine._segments.sealed()) > 5
    await store.close()


async def test_a_group_that_is_missing_before_a_page_is_noticed(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    for entry in range(8):
        await store.add(make_block(1, entry, [b"x" * 1024]))
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    path = crashed / segment_name(1)
    data = bytearray(path.read_bytes())
    header = form.parse_segment_header(data)
    second = form.peek_group_header(data[4096:], header, 4096, len(data))
    assert second is not None
    third = form.peek_group_header(data[second.end :], header, second.end, len(data))
    assert third is not None
    last_of_page = form.peek_group_header(data[third.end :], header, third.end, len(data))
    assert last_of_page is not None
    assert form.next_page(last_of_page.end) == 8192
    data[last_of_page.offset] ^= 1  # what follows on the next page looks as if it came behind the third
    path.write_bytes(data)
    again = await Store.open(crashed)
    assert again.engine.marking.concerns_all
    assert (await again.read(1, 2, 2))[1] is Stop.UNKNOWN
    assert (await again.read(1, 3, 7))[1] is Stop.END
    await again.close()


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_trimmed_entries_are_not_there(tmp_path: Path, is_clean: bool, is_sealed: bool) -> None:
    store = await Store.open(tmp_path / "b0")
    await fill(store, range(1, 3), range(100))
    await store.wait(lambda done: store.engine.append_trim(1, 60, done))
    await store.wait(lambda done: store.engine.append_trim(1, 50, done))  # changes nothing
    if is_sealed:
        await fill(store, range(2, 3), range(100, 500))
    for number in range(3):
        assert store.engine.first_entry(1) == 60
        assert await store.read(1, 59, 99) == ({}, Stop.NO_SUCH_ENTRY, 59)
        await assert_reads(store, range(1, 2), range(60, 100))
        await assert_reads(store, range(2, 3), range(100))
        assert (await store.engine.list_entries(1, 0, 1000))[0] == [(60, 0, 40, 1)]
        path = store.path if is_clean else await store.crash_into(tmp_path / f"b{number + 1}")
        await store.close()
        store = await Store.open(path)
    await store.close()


@pytest.mark.parametrize("is_clean", [False, True])
@pytest.mark.parametrize("fillers", [1, 500])
async def test_what_was_forgotten_does_not_come_back(tmp_path: Path, is_clean: bool, fillers: int) -> None:
    # Without compaction, which would write a checkpoint that knows everything.
    config = replace(SMALL, compaction=replace(SMALL.compaction, compact_below=0.0))
    store = await Store.open(tmp_path / "b0", config)
    await fill(store, range(1, 3), range(300))
    assert len(store.engine._segments.sealed()) > 2
    await store.fence(1, 7)
    await store.wait(lambda done: store.engine.append_forget(1, done))
    assert store.engine.last_entry(1) == -1
    await fill(store, range(1, 2), range(40, 45))
    await fill(store, range(2, 3), range(300, 300 + fillers))
    for number in range(3):
        assert await store.read(1, 0, 0) == ({}, Stop.NO_SUCH_ENTRY, 0)
        assert await store.read(1, 45, 45) == ({}, Stop.NO_SUCH_ENTRY, 45)
        await assert_reads(store, range(1, 2), range(40, 45))
        await assert_reads(store, range(2, 3), range(300))
        assert (store.engine.term(1), store.engine.last_entry(1)) == (7, 44)
        path = store.path if is_clean else await store.crash_into(tmp_path / f"b{number + 1}")
        await store.close()
        store = await Store.open(path, config)
    await store.close()


def test_a_cache_forgets_what_was_not_used_for_longest() -> None:
    cache: LruCache[str, int] = LruCache(10)
    cache.put("a", 1, 4)
    cache.put("b", 2, 4)
    assert cache.get("a") == 1
    cache.put("c", 3, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert cache.cost == 8
    cache.put("d", 4, 100)  # more than all the room, and yet of use to whoever reads it now
    assert (len(cache), cache.get("d")) == (1, 4)
