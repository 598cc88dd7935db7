"""Space comes back, and nothing that counts goes with it."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.read.reader import StoredCopy, newest_copies
from bookie_aio.storage.repair_writes import store_missing
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.index import Run
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.support.helddisk import HeldDisk
from tests.support.storage import (
    SMALL,
    FaultyDisk,
    Store,
    copy_as_a_crash_leaves_it,
    make_block,
    unaccounted_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.storage.disk.disk import RealFile
    from bookie_aio.storage.journal import Done
    from bookie_aio.storage.segment.segment_set import Source
    from bookie_aio.wire.blocks import Block

KEPT = range(1, 4)
NO_SPARES = replace(SMALL, space=replace(SMALL.space, spare_bytes_max=0))


def content(ledger_id: int, entry: int) -> bytes:
    return b"%d/%d " % (ledger_id, entry) * 60


async def write(store: Store, ledger_ids: range, entries: range) -> None:
    for entry in entries:
        for ledger_id in ledger_ids:
            block = make_block(ledger_id, entry, [content(ledger_id, entry)])
            store.engine.append_block(block, lambda _: None)
        await store.barrier()


async def delete(store: Store, ledger_id: int) -> None:
    await store.wait(lambda done: store.engine.append_tombstone(ledger_id, done))


async def assert_kept(store: Store, entries: range) -> None:
    for ledger_id in KEPT:
        assert not store.engine.is_damaged(ledger_id)
        found, stop, _ = await store.read(ledger_id, entries[0], entries[-1])
        assert (stop, found) == (Stop.END, {entry: content(ledger_id, entry) for entry in entries})


async def store_with_dead_ledgers(path: Path, disk: FaultyDisk | None = None) -> Store:
    """Return a store in which ledgers that are kept and others are mixed, one part in four of all kept."""
    store = await Store.open(path, SMALL, disk)
    await write(store, range(1, 13), range(60))
    await store.settled()
    return store


async def test_dead_segments_are_used_again_or_removed(tmp_path: Path) -> None:
    for config in (SMALL, NO_SPARES):
        store = await Store.open(tmp_path / f"{config.space.spare_bytes_max}", config)
        await write(store, range(1, 2), range(400))
        await store.settled()
        before = store.engine.metrics()["segments"]
        await delete(store, 1)
        await store.settled()
        assert not unaccounted_files(store)
        names = os.listdir(store.path)
        spares = [name for name in names if name.endswith(".spare")]
        assert len([name for name in names if name.endswith(".segment")]) <= 2, before
        assert bool(spares) is (config is SMALL)
        await write(store, range(2, 3), range(200))
        await store.settled()
        if spares:  # written again, in another life
            assert len([name for name in os.listdir(store.path) if name.endswith(".spare")]) < len(spares)
        crashed = await store.crash_into(tmp_path / f"crashed{config.space.spare_bytes_max}")
        await store.close()
        again = await Store.open(crashed, config)
        assert (await again.read(2, 0, 199))[1] is Stop.END
        assert again.engine.list_ledgers(0, 10)[0] == [2]
        assert not again.engine.notes
        await again.settled()
        assert not unaccounted_files(again)
        await again.close()


class WithoutDescriptors(FaultyDisk):
    """A disk on which spare files cannot be opened for a while."""

    refusals = 0

    async def open(self, path: str) -> RealFile:
        if self.refusals and path.endswith(form.SPARE_SUFFIX):
            self.refusals -= 1
            error = DiskFullError("too many open files")
            error.is_of_space = False
            raise error
        return await super().open(path)


async def test_spare_files_that_could_not_be_opened_are_still_there(tmp_path: Path) -> None:
    disk = WithoutDescriptors()
    store = await Store.open(tmp_path / "b1", disk=disk)
    await write(store, range(1, 2), range(400))
    await delete(store, 1)
    await store.settled()
    assert len(store.engine._allocator._spares) >= 2
    disk.refusals = 5
    for entry in range(200):
        try:
            await store.add(make_block(2, entry, [content(2, entry)]))
        except DiskFullError:
            await asyncio.sleep(SMALL.space.retry_s)
    assert not disk.refusals
    await store.settled()
    assert not unaccounted_files(store)
    await store.close()


async def test_mostly_dead_segments_are_compacted(tmp_path: Path) -> None:
    store = await store_with_dead_ledgers(tmp_path / "b1")
    bytes_before = sum(segment.end for segment in store.engine._segments.by_id.values())
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    await assert_kept(store, range(60))
    bytes_after = sum(segment.end for segment in store.engine._segments.by_id.values())
    assert bytes_after < bytes_before * 0.6
    reclaimed = store.engine.metrics()["reclaimed"]
    assert isinstance(reclaimed, dict)
    assert reclaimed["compacted"] > 3
    assert not unaccounted_files(store)
    await store.close()
    again = await Store.open(tmp_path / "b1")
    await assert_kept(again, range(60))
    await again.close()


async def test_compaction_keeps_the_copy_that_counts(tmp_path: Path) -> None:
    store = await store_with_dead_ledgers(tmp_path / "b1")
    # Newer copies of some entries, and ones of a later term, while the older ones still lie there.
    await store.add(make_block(1, 10, [b"newer"] * 5))
    await store.add(make_block(2, 20, [b"later"] * 5, content_term=3))
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    for life in range(2):
        found, stop, _ = await store.read(1, 0, 59)
        assert stop is Stop.END
        assert found == {n: b"newer" if 10 <= n < 15 else content(1, n) for n in range(60)}
        assert await store.read(2, 19, 30) == ({19: content(2, 19)}, Stop.STALE_METADATA, 20)
        assert (await store.read(2, 20, 24, content_term=3))[0] == dict.fromkeys(range(20, 25), b"later")
        assert (await store.read(2, 25, 59))[1] is Stop.END
        if not life:
            await store.close()
            store = await Store.open(tmp_path / "b1")
    await store.close()


async def test_an_add_that_comes_while_its_entry_is_copied_stays_the_newest(tmp_path: Path) -> None:
    store = await store_with_dead_ledgers(tmp_path / "b1")
    append_copy, added = store.engine.append_copy, []
    lookup = store.engine._lookup
    sources = lookup.sources

    async def sources_and_an_add(ledger_id: int, low: int, high: int) -> object:
        found = await sources(ledger_id, low, high)
        if ledger_id in KEPT and len(added) < 30:
            added.append((ledger_id, low))
            store.engine.append_block(make_block(ledger_id, low, [b"in between"]), lambda _: None)
        return found

    lookup.sources = sources_and_an_add
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    lookup.sources = sources
    assert len(added) == 30
    assert append_copy is not None
    for ledger_id, entry in added:
        assert (await store.read(ledger_id, entry, entry))[0] == {entry: b"in between"}
    await store.close()


async def test_an_add_that_comes_while_interleaved_runs_are_copied_loses_none_of_them(tmp_path: Path) -> None:
    """Of two write sets, say: the one copied later has entries below the one that the add concerns."""
    store = await Store.open(tmp_path / "b1")
    kept = {n: b"kept %d" % n for n in range(300) if n % 3 != 1}
    for first in (0, 2):
        ids = range(first, 300, 3)
        await store.add(make_block(1, first, [kept[n] for n in ids], stride=3))
    (holder,) = store.engine._segments.by_id.values()
    await write(store, range(2, 12), range(30))
    await store.add(make_block(1, 150, [b"newer"]))
    sources, added = store.engine._lookup.sources, asyncio.Event()

    async def sources_and_an_add(ledger_id: int, low: int, high: int) -> object:
        found = await sources(ledger_id, low, high)
        if ledger_id == 1 and not added.is_set():
            added.set()
            store.engine.append_block(make_block(1, 153, [b"newer still"]), lambda _: None)
        return found

    store.engine._lookup.sources = sources_and_an_add
    for ledger_id in range(2, 12):
        await delete(store, ledger_id)
    await store.settled()
    assert added.is_set()
    assert holder.is_gone
    found = {}
    for first in (0, 2):
        part, stop, _ = await store.read(1, first, 299, stride=3)
        assert stop is Stop.END
        found |= part
    assert found == kept | {150: b"newer", 153: b"newer still"}
    await store.close()


@pytest.mark.parametrize("what", ["forget", "trim", "delete"])
async def test_what_counts_no_more_while_it_is_copied_does_not_come_back(tmp_path: Path, what: str) -> None:
    """The copies of the round under way would be behind the record that says so."""
    store = await store_with_dead_ledgers(tmp_path / "b1")
    engine, sources, accepted = store.engine, store.engine._lookup.sources, list[int]()

    async def sources_and_a_change(ledger_id: int, low: int, high: int) -> object:
        found = await sources(ledger_id, low, high)
        if ledger_id == 2 and not accepted:
            accepted.append(low)
            if what == "forget":
                engine.append_forget(2, lambda _: None)
            elif what == "trim":
                engine.append_trim(2, 50, lambda _: None)
            else:
                engine.append_tombstone(2, lambda _: None)
        return found

    engine._lookup.sources = sources_and_a_change
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    assert len(accepted) == 1
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    for one in (engine, again.engine):
        assert one.marking.list_excused(0, 9, 0)[0] == ([2] if what == "forget" else [])
        assert one.last_entry(2) == (59 if what == "trim" else -1)
    found, stop, _ = await again.read(2, 50, 59)
    assert (stop, len(found)) == ((Stop.END, 10) if what == "trim" else (Stop.NO_SUCH_ENTRY, 0))
    assert (await again.read(2, 49, 49))[1] is Stop.NO_SUCH_ENTRY
    for ledger_id in (1, 3):
        assert (await again.read(ledger_id, 0, 59))[1] is Stop.END
    await again.close()


@pytest.mark.parametrize("what", ["trim", "forget"])
async def test_trimmed_and_forgotten_entries_give_back_their_space(tmp_path: Path, what: str) -> None:
    store = await Store.open(tmp_path / "b1")
    await write(store, range(1, 3), range(600))
    await delete(store, 2)
    await store.settled()
    before = len(store.engine._segments.by_id)
    assert before > 3
    if what == "trim":
        await store.wait(lambda done: store.engine.append_trim(1, 550, done))
    else:
        await store.wait(lambda done: store.engine.append_forget(1, done))
    await store.settled()
    assert len(store.engine._segments.by_id) <= (before + 1) // 2
    found, stop, _ = await store.read(1, 550, 599)
    assert (stop, len(found)) == ((Stop.END, 50) if what == "trim" else (Stop.NO_SUCH_ENTRY, 0))
    assert not unaccounted_files(store)
    await store.close()


async def test_a_crash_at_each_step_loses_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await store_with_dead_ledgers(tmp_path / "b1", disk)
    crashes: list[tuple[str, Path]] = []

    def crash(what: str, path: str) -> None:
        step = f"{what} {os.path.splitext(path)[1]}"
        crashes.append((step, copy_as_a_crash_leaves_it(store.path, tmp_path / f"crash{len(crashes)}")))

    disk.on_step = crash
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    disk.journal_s = 0.03  # copies take longer to become durable than anything else that is done meanwhile
    await store.settled()
    disk.on_step = lambda what, path: None
    await store.close()
    steps = {step for step, _ in crashes}
    assert {"unlink .index", "rename .spare", "rename .segment", "rename ", "create .new"} <= steps
    assert len(crashes) > 40
    for step, path in crashes:
        again = await Store.open(path)
        try:
            await assert_kept(again, range(60))
            assert not again.engine.notes
            await again.settled()
            await assert_kept(again, range(60))
            assert not unaccounted_files(again)
        except BaseException as error:
            error.add_note(f"after {step}")
            raise
        await again.close()
        shutil.rmtree(path)


async def test_dead_segments_make_room_on_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b1", NO_SPARES, disk)
    await write(store, range(1, 2), range(200))
    await store.settled()
    disk.is_full = True
    room = asyncio.Event()

    def freed(what: str, path: str) -> None:
        if what == "truncate":
            disk.is_full = False
            room.set()

    disk.on_step = freed
    await delete(store, 1)
    await asyncio.wait_for(room.wait(), 10)
    await store.settled()
    assert len([name for name in os.listdir(store.path) if name.endswith(".index")]) == 0
    await write(store, range(2, 3), range(100))
    assert (await store.read(2, 0, 99))[1] is Stop.END
    await store.close()


async def test_a_segment_with_a_damaged_block_stays_and_its_ledger_is_marked(tmp_path: Path) -> None:
    store = await store_with_dead_ledgers(tmp_path / "b1")
    (source,) = (await store.engine._lookup.sources(1, 0, 0))[:1]
    (run,) = await source.overlapping(0, 0, 1)
    path = store.path / form.segment_name(source.segment.segment_id)
    with path.open("r+b") as file:
        file.seek(run.offset + run.head_bytes)
        file.write(b"?")
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    assert store.engine.is_damaged(1)
    assert path.exists()
    assert await store.read(1, 0, 0) == ({}, Stop.UNKNOWN, 0)
    for ledger_id in KEPT:
        assert (await store.read(ledger_id, 1, 59))[1] is Stop.END
    await store.close()


async def test_damage_that_was_repaired_holds_up_no_compaction(tmp_path: Path) -> None:
    """The other entries of the block count. For the damaged one a repair has stored a newer copy."""
    payloads = [b"kept %d" % entry for entry in range(10)]
    store = await Store.open(tmp_path / "b1", SMALL)
    store.engine.append_block(make_block(99, 0, payloads), lambda _: None)
    await write(store, range(1, 13), range(60))
    await store.settled()
    (source,) = await store.engine._lookup.sources(99, 0, 9)
    (run,) = await source.overlapping(0, 9, 1)
    path = store.path / form.segment_name(source.segment.segment_id)
    with path.open("r+b") as file:
        file.seek(run.offset + run.head_bytes + sum(map(len, payloads[:6])))
        file.write(b"?")
    assert (await store.read(99, 0, 9))[1:] == (Stop.UNKNOWN, 6)
    assert await store_missing(store.engine, make_block(99, 0, payloads), is_trusted=True) == 1
    marking = store.engine.marking
    await store.wait(lambda done: marking.lift(99, marking.of(99), 1, done))
    await write(store, range(1, 13), range(60, 120))
    for ledger_id in range(1, 13):
        await delete(store, ledger_id)
    await store.settled()
    assert source.segment.is_gone
    assert not store.engine.is_damaged(99)
    assert await store.read(99, 0, 9) == (dict(enumerate(payloads)), Stop.END, 10)
    await store.close()


def test_the_winners_among_copies() -> None:
    def found(segment: int, first: int, count: int, stride: int = 1, term: int = 0) -> StoredCopy:
        run = Run(first, term, 4096, count, stride, 96, 10)
        return StoredCopy(term, segment, 4096, run, None)

    mine = found(2, 10, 10)
    older, newer = found(1, 0, 100), found(3, 12, 3)
    assert newest_copies(mine, [older, mine], 99) == [range(10, 20)]
    assert newest_copies(mine, [older, mine, newer], 99) == [range(10, 12), range(15, 20)]
    assert newest_copies(mine, [mine, newer], 13) == [range(10, 12)]
    assert newest_copies(mine, [mine, found(1, 0, 100, term=1)], 99) == []
    assert newest_copies(mine, [mine, found(3, 11, 3, stride=3)], 99) == [
        range(10, 11), range(12, 14), range(15, 17), range(18, 20)
    ]  # fmt: skip
    striped = found(2, 1, 4, stride=3)
    assert newest_copies(striped, [striped, found(3, 0, 9)], 99) == [range(10, 13, 3)]


@pytest.mark.pure
async def test_a_segment_stays_when_a_copy_is_accepted_and_then_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space may run out between the two, and nothing need wait behind the copy by then."""
    store = await store_with_dead_ledgers(tmp_path / "b1")
    dropped = 0

    def drop(block: Block, done: Done) -> None:
        nonlocal dropped
        dropped += 1
        done(DiskFullError("no space left"))

    with monkeypatch.context() as patched:
        patched.setattr(store.engine, "append_copy", drop)
        for ledger_id in range(4, 13):
            await delete(store, ledger_id)
        await store.settled()
    assert dropped
    await assert_kept(store, range(60))
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    await assert_kept(again, range(60))
    await again.close()


async def test_a_full_disk_stops_compaction_until_there_is_room(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await store_with_dead_ledgers(tmp_path / "b1", disk)
    disk.is_full = True
    with pytest.raises(DiskFullError):
        await write(store, range(1, 13), range(60, 90))
    last = store.engine.last_entry(1)
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.barrier()
    back = asyncio.Event()
    store.engine._on_writable = lambda is_writable: back.set()
    disk.is_full = False
    await asyncio.wait_for(back.wait(), 10)
    await store.settled()
    await assert_kept(store, range(last))
    assert not unaccounted_files(store)
    await store.close()


@pytest.mark.parametrize("is_low", [False, True])
async def test_small_entries_that_all_count_are_not_copied_again_and_again(
    tmp_path: Path, is_low: bool
) -> None:
    disk = FaultyDisk()
    disk.free = 1 << 40
    config = replace(SMALL, space=replace(SMALL.space, floor_free_bytes=10**6, spare_bytes_max=0))
    store = await Store.open(tmp_path / "b1", config, disk)
    disk.free = 1 if is_low else 1 << 40
    store.engine._allocator.look()
    for entry in range(600):  # each alone in its group
        await store.add(make_block(1, entry, [b"x"]), from_reserve=True)
    await store.wait(lambda done: store.engine.append_trim(1, 1, done))  # somebody looks
    await store.settled()
    reclaimed = store.engine.metrics()["reclaimed"]
    assert isinstance(reclaimed, dict)
    assert store.engine._allocator.is_low is is_low
    assert reclaimed["copied_bytes"] <= 600 * 97
    assert len((await store.read(1, 1, 599))[0]) == 599
    await store.close()


@pytest.mark.pure
async def test_a_close_while_compacting_waits_for_the_copy_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment that it was to go to was cut and sealed before it came."""
    disk = HeldDisk()
    one_copy_at_a_time = replace(SMALL, compaction=replace(SMALL.compaction, bytes_per_s=1))
    store = await Store.open(tmp_path / "b1", one_copy_at_a_time, disk)
    engine, lookup = store.engine, store.engine._lookup
    sources, append_copy, barrier = lookup.sources, engine.append_copy, engine.barrier
    is_copying, may_copy, copied = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def sources_when_told(ledger_id: int, low: int, high: int) -> list[Source]:
        is_copying.set()
        await may_copy.wait()
        return await sources(ledger_id, low, high)

    def note_copy(block: Block, done: Done) -> None:
        append_copy(block, done)
        copied.set()

    def barrier_that_lets_go(done: Done) -> None:
        barrier(done)
        if engine.is_closed:
            disk.release()

    await write(store, range(1, 13), range(60))
    await store.settled()
    with monkeypatch.context() as patched:
        patched.setattr(lookup, "sources", sources_when_told)
        patched.setattr(engine, "append_copy", note_copy)
        patched.setattr(engine, "barrier", barrier_that_lets_go)
        for ledger_id in range(4, 13):
            await delete(store, ledger_id)
        await is_copying.wait()
        disk.hold()
        engine.append_block(make_block(20, 0, [b"in flight"]), lambda _: None)
        await disk.arrived.wait()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)  # it waits for the block
        may_copy.set()
        await copied.wait()
        disk.release()  # the block, and
        disk.hold()  # not the copy behind it
        await closing
        assert not disk.waiting
    disk.close()
    assert not store.failures
    again = await Store.open(tmp_path / "b1")
    assert not again.engine.notes
    await assert_kept(again, range(60))
    await again.close()


async def test_a_block_that_is_larger_than_segments_are_now_stays_where_it_is(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    large = os.urandom(25_000)
    await store.add(make_block(7, 0, [large]))
    for entry in range(30):
        await store.add(make_block(1, entry, [os.urandom(5000)]))
    await store.close()
    lowered = replace(SMALL, segment_bytes=20 * 1024, group_bytes_max=8 * 1024)
    again = await Store.open(tmp_path / "b1", lowered)
    await again.wait(lambda done: again.engine.append_tombstone(1, done))
    await again.settled()
    assert again.engine._compactor._immovable
    await asyncio.wait_for(again.add(make_block(2, 0, [b"goes on"])), 10)
    assert await again.read(7, 0, 0) == ({0: large}, Stop.END, 1)
    await again.close()


@pytest.mark.parametrize("has_index", [False, True])
async def test_segments_that_were_given_up_are_used_where_the_copies_are_lost(
    tmp_path: Path, has_index: bool
) -> None:
    """A crash between the checkpoint and the removal leaves the files, and damage meets their copies."""
    store = await store_with_dead_ledgers(tmp_path / "b1")
    before = await store.crash_into(tmp_path / "before")
    for ledger_id in range(4, 13):
        await delete(store, ledger_id)
    await store.settled()
    await assert_kept(store, range(60))
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    old, new = ({path.name for path in one.glob(f"*{form.SEGMENT_SUFFIX}")} for one in (before, crashed))
    given_up, copies = sorted(old - new), sorted(new - old)
    assert given_up
    assert copies
    for name in given_up:
        shutil.copy(before / name, crashed)
        index = name.replace(form.SEGMENT_SUFFIX, form.INDEX_SUFFIX)
        if has_index and (before / index).exists():
            shutil.copy(before / index, crashed)
    whole = copy_as_a_crash_leaves_it(crashed, tmp_path / "whole")
    for name in copies:
        (crashed / name.replace(form.SEGMENT_SUFFIX, form.INDEX_SUFFIX)).unlink(missing_ok=True)
        with (crashed / name).open("r+b") as file:
            file.seek(form.DATA_OFFSET)
            file.write(bytes((crashed / name).stat().st_size - form.DATA_OFFSET))
    for _ in range(2):
        again = await Store.open(crashed)
        for ledger_id in KEPT:
            assert again.engine.is_damaged(ledger_id)
            found, stop, _ = await again.read(ledger_id, 0, 59)
            assert (stop, found) == (Stop.END, {entry: content(ledger_id, entry) for entry in range(60)})
        for ledger_id in range(4, 13):
            assert not (await again.read(ledger_id, 0, 59))[0]
        await again.settled()
        await again.close()
    again = await Store.open(whole)  # without damage they are removed
    await assert_kept(again, range(60))
    await again.settled()
    assert not set(given_up) & {path.name for path in whole.iterdir()}
    await again.close()
