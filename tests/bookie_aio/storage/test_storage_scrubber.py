"""Scrubbing finds damage before a reader does, and only what counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.maintenance.scrubber import ScrubConfig
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import index_name, segment_name
from bookie_aio.storage.segment.index import IndexHead, MemoryIndex
from bookie_aio.storage.segment.segment import SealedIndex
from bookie_aio.wire.messages import Stop
from tests.support.storage import SMALL, FaultyDisk, Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.storage.segment.index import LedgerRow

FAST = replace(SMALL, scrub=ScrubConfig(bytes_per_s=10**12))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


async def sealed_store(path: Path, disk: FaultyDisk | None = None) -> Store:
    """Return a store of some sealed segments, each with entries of ledgers 1 to 3."""
    store = await Store.open(path, FAST, disk)
    for first in range(0, 1000, 10):
        for ledger_id in (1, 2, 3):
            block = make_block(ledger_id, first, [b"%d" % ledger_id * 50] * 10)
            store.engine.append_block(block, lambda _: None)
        await store.barrier()
    await store.settled()
    return store


def group_of(path: Path, number: int) -> form.GroupHeader:
    data = path.read_bytes()
    header = form.parse_segment_header(data)
    at = form.DATA_OFFSET
    while True:
        group = form.peek_group_header(data[at:], header, at, len(data))
        if group is None:
            at = form.next_page(at + 1)
        elif group.number == number:
            return group
        else:
            at = group.end


def damaged(store: Store) -> list[int]:
    return [ledger_id for ledger_id in (1, 2, 3) if store.engine.is_damaged(ledger_id)]


async def test_what_is_intact_is_read_and_nothing_is_marked(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    scrubber = store.engine._scrubber
    await scrubber.scrub()
    sealed = store.engine._segments.sealed()
    assert scrubber.bytes_read > sum(one.end - form.DATA_OFFSET - 4096 * 10 for one in sealed)
    assert (scrubber.passes, scrubber.damaged, damaged(store)) == (1, 0, [])
    await store.close()


async def test_a_flipped_bit_in_a_sealed_segment_is_marked(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    path = store.path / segment_name(2)
    group = group_of(path, 1)
    flip(path, group.offset + group.head_bytes + 300)  # in the payload of the first block
    await store.engine._scrubber.scrub()
    assert len(damaged(store)) == 1
    hurt = damaged(store)[0]
    assert (await store.read(hurt, 0, 999))[1] is Stop.UNKNOWN
    assert store.engine._scrubber.damaged == 1
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert damaged(again) == [hurt]
    await again.close()


@pytest.mark.parametrize("unreadable", [".segment", ".index", segment_name(2)])
async def test_what_cannot_be_read_is_counted_and_not_marked(tmp_path: Path, unreadable: str) -> None:
    disk = FaultyDisk()
    store = await sealed_store(tmp_path / "b1", disk)
    scrubber = store.engine._scrubber
    disk.fail_reads_of = unreadable
    await scrubber.scrub()
    assert (scrubber.passes, scrubber.damaged, damaged(store)) == (1, 0, [])
    assert scrubber.unread > 0
    assert store.engine.is_writable
    disk.fail_reads_of = None
    flip(store.path / segment_name(3), group_of(store.path / segment_name(3), 1).end - 9)
    await scrubber.scrub()
    assert len(damaged(store)) == 1
    await store.close()


async def test_the_head_of_a_group_is_no_loss_once_it_is_sealed(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    path = store.path / segment_name(2)
    group = group_of(path, 2)
    flip(path, group.offset + 80)
    await store.engine._scrubber.scrub()
    assert damaged(store) == []
    assert not store.engine.marking.concerns_all
    # But a block behind it that fails is.
    flip(path, group.offset + group.head_bytes + 300)
    await store.engine._scrubber.scrub()
    assert len(damaged(store)) == 1
    await store.close()


@pytest.mark.parametrize("page", [0, 1])
async def test_a_damaged_index_is_rebuilt(tmp_path: Path, page: int) -> None:
    store = await sealed_store(tmp_path / "b1")
    path = store.path / index_name(2)
    good = path.read_bytes()
    flip(path, IndexHead(good).page_offset(page) + 9)
    await store.engine._scrubber.scrub()
    await store.settled()
    assert len(path.read_bytes()) == len(good)
    await store.engine._scrubber.scrub()
    assert store.engine._scrubber.damaged == 1
    assert damaged(store) == []
    await store.close()


async def test_damage_in_what_was_deleted_is_none(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    path = store.path / segment_name(2)
    group = group_of(path, 1)
    flip(path, group.offset + group.head_bytes + 300)
    row = form.parse_group_rows(group, memoryview(path.read_bytes())[group.offset :])
    assert row is not None
    await store.wait(lambda done: store.engine.append_tombstone(row[0].ledger_id, done))
    await store.engine._scrubber.scrub()
    assert damaged(store) == []
    assert store.engine._scrubber.damaged == 0
    await store.close()


async def test_it_reads_no_faster_than_it_is_told(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    scrubber = store.engine._scrubber
    scrubber._config = ScrubConfig(bytes_per_s=10**6)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    scrubber._background.pause = pause
    for _ in range(10):
        await scrubber.scrub()
    assert sum(pauses) >= (scrubber.bytes_read - 512 * 1024) / 10**6
    assert max(pauses) < 0.5
    await store.close()


async def test_passes_follow_each_other_until_the_end(tmp_path: Path) -> None:
    config = replace(FAST, scrub=ScrubConfig(bytes_per_s=10**12, interval_s=0.001))
    store = await Store.open(tmp_path / "b1", config)
    await store.add(make_block(1, 0, [b"x"]))
    while store.engine._scrubber.passes < 3:
        await store.add(make_block(1, 0, [b"x"]))
    await store.close()
    assert store.engine._scrubber._background.task is None


async def test_damage_in_what_was_trimmed_is_none(tmp_path: Path) -> None:
    store = await sealed_store(tmp_path / "b1")
    path = store.path / segment_name(1)
    group = group_of(path, 1)
    flip(path, group.offset + group.head_bytes + 300)
    for ledger_id in (1, 2, 3):
        await store.wait(lambda done, one=ledger_id: store.engine.append_trim(one, 20, done))
    await store.engine._scrubber.scrub()
    assert damaged(store) == []
    await store.close()


async def test_a_segment_can_be_given_up_while_a_mark_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await sealed_store(tmp_path / "b1")
    group = group_of(store.path / segment_name(2), 1)
    flip(store.path / segment_name(2), group.offset + group.head_bytes + 300)
    engine, segment = store.engine, store.engine._segments.by_id[2]
    mark = engine._lookup.mark

    async def give_up_and_mark(ledger_id: int, cause: Exception) -> None:
        # Before the mark: it may need a segment, whose checkpoint waits until this is done.
        await asyncio.wait_for(engine._remover.give_up(segment, is_dead=True), 5)
        await mark(ledger_id, cause)

    monkeypatch.setattr(engine._lookup, "mark", give_up_and_mark)
    await engine._scrubber.scrub()
    assert segment.is_gone
    assert len(damaged(store)) == 1
    await store.close()


@pytest.mark.parametrize("what", ["given up", "rebuilt"])
async def test_a_segment_may_change_while_its_blocks_are_checked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = await sealed_store(tmp_path / "b1")
    group = group_of(store.path / segment_name(2), 2)
    flip(store.path / segment_name(2), group.offset + 8)  # its head: blocks are found through the index
    engine, segment = store.engine, store.engine._segments.by_id[2]
    ledgers, changed = SealedIndex.ledgers, []

    async def change_then_look(sealed: SealedIndex) -> list[LedgerRow]:
        rows = await ledgers(sealed)
        if not changed:
            changed.append(what)
            if what == "given up":
                await engine._remover.give_up(segment, is_dead=True)
            else:
                await engine._segments.unseal(segment, MemoryIndex())
        return rows

    monkeypatch.setattr(SealedIndex, "ledgers", change_then_look)
    await engine._scrubber.scrub()
    assert changed
    assert (engine._scrubber.passes, damaged(store)) == (1, [])
    await store.close()
