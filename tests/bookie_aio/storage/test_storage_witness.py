"""Files that contradict each other: older ones put back, damaged tails, one file in another's place.

The engine on a real disk, in a directory as a killed process leaves it. Each entry was acknowledged. So it is
given or is unknown, and is never "no such entry". No file that holds data is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.data_directory import format_directory
from bookie_aio.storage.disk.disk import RealDisk, RealFile, _typed
from bookie_aio.storage.ledgers.checkpoint import parse_checkpoint
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment import witness
from bookie_aio.storage.segment.files import cut_file
from bookie_aio.storage.segment.format import index_name, segment_name
from bookie_aio.wire.messages import Stop
from metadata.access.bookies import Cookie
from metadata.errors import CorruptRecordError, DiskFailedError
from tests.support.storage import SMALL, FaultyDisk, Store, copy_as_a_crash_leaves_it, lose_claims, make_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bookie_aio.wire.blocks import Buffer

FENCED, DELETED = 90, 91


async def add_some(store: Store, ledger_id: int, count: int, size: int = 300) -> None:
    """Add entries one by one, each in a group of its own."""
    for entry in range(count):
        await store.add(make_block(ledger_id, entry, [b"%d-%d " % (ledger_id, entry) * (size // 5)]))


async def work(path: Path, ledger_id: int) -> Store:
    """Have an engine store a ledger, a fence and a tombstone, and idle."""
    store = await Store.open(path)
    await store.settled()
    await add_some(store, ledger_id, 30)
    await store.fence(FENCED, ledger_id)
    await store.wait(lambda done: store.engine.append_tombstone(DELETED + ledger_id, done))
    await store.settled()
    return store


async def killed(tmp_path: Path, ledger_id: int = 1) -> Path:
    """Return the directory of a killed process."""
    store = await work(tmp_path / f"b{ledger_id}", ledger_id)
    path = await store.crash_into(tmp_path / f"killed{ledger_id}")
    await store.close()
    return path


def good_files(path: Path) -> set[str]:
    """Return the names of segments that hold groups, and of indexes."""
    found = set()
    for name in os.listdir(path):
        data = (path / name).read_bytes()
        is_used = name.endswith(".segment") and data[form.DATA_OFFSET :].startswith(form.GROUP_MAGIC)
        if is_used or name.endswith(".index"):
            found.add(name)
    return found


async def assert_unknown(path: Path, *ledger_ids: int, why: str, count: int = 30, damaged: str = "") -> Store:
    """Open an engine: all is marked, a line tells why, nothing is denied, and no good file goes.

    The rest of a damaged segment may be compacted.
    """
    before = good_files(path) - {damaged}
    store = await Store.open(path)
    assert store.engine.marking.concerns_all
    assert not store.engine.is_writable
    assert any(why in note for note in store.engine.notes), store.engine.notes
    for ledger_id in ledger_ids:
        at = 0
        while at < count:
            _, stop, at = await store.read(ledger_id, at, count - 1)
            assert stop in (Stop.END, Stop.UNKNOWN)
            at = count if stop is Stop.END else at + 1
    await store.settled()
    left = {name.removesuffix(".damaged") for name in os.listdir(path)}
    assert before <= left
    return store


async def still_unknown(store: Store) -> None:
    """Stop an engine that found a loss, and start it again: the loss is known, and not found anew."""
    await store.close()
    again = await Store.open(store.path)
    assert again.engine.marking.concerns_all
    assert len(again.engine.notes) == 1
    assert "before this start" in again.engine.notes[0]
    await again.close()


def used(path: Path) -> int:
    """Return the bytes of a segment up to its last group."""
    return len(path.read_bytes().rstrip(b"\0"))


def cut(data: bytearray, at: int) -> None:
    del data[at:]


def zero(data: bytearray, at: int) -> None:
    data[at:] = bytes(len(data) - at)


def swap(data: bytearray, at: int) -> None:
    page = at // 4096 * 4096
    other = page - 4096 if page > 4096 else page + 4096
    data[page : page + 4096], data[other : other + 4096] = (
        data[other : other + 4096],
        data[page : page + 4096],
    )


def lose_page(data: bytearray, at: int) -> None:
    page = at // 4096 * 4096
    data[page : page + 4096] = bytes(4096)


@pytest.mark.parametrize("share", [0.4, 0.8, 0.999])
@pytest.mark.parametrize("damage", [cut, zero, swap, lose_page])
async def test_a_damaged_tail_of_a_killed_process_is_damage(
    tmp_path: Path, damage: Callable[[bytearray, int], None], share: float
) -> None:
    path = await killed(tmp_path)
    segment = path / segment_name(1)
    data = bytearray(segment.read_bytes())
    damage(data, int(used(segment) * share))
    segment.write_bytes(data)
    await still_unknown(await assert_unknown(path, 1, why="segment 1 ", damaged=segment.name))


async def test_a_segment_that_is_shorter_than_its_header_says_is_damaged_though_no_witness_tells(
    tmp_path: Path,
) -> None:
    path = lose_claims(await killed(tmp_path))
    os.truncate(path / segment_name(1), used(path / segment_name(1)))  # all groups are still there
    await still_unknown(await assert_unknown(path, 1, why="and its header says"))


async def test_claims_that_a_power_cut_took_back_mark_nothing(tmp_path: Path) -> None:
    path = lose_claims(await killed(tmp_path))
    store = await Store.open(path)
    assert not store.engine.notes
    assert (await store.read(1, 0, 29))[1] is Stop.END
    assert store.engine.term(FENCED) == 1
    await store.close()


@pytest.mark.parametrize("ending", ["killed", "stopped"])
async def test_an_older_checkpoint_is_not_believed(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "b"
    store = await work(path, 1)
    await store.close()
    old = (path / form.CHECKPOINT).read_bytes()
    for ledger_id in (2, 3):
        store = await work(path, ledger_id)
        await store.close()
    store = await work(path, 4)
    if ending == "killed":
        path = await store.crash_into(tmp_path / "killed")
    await store.close()
    (path / form.CHECKPOINT).write_bytes(old)
    store = await assert_unknown(path, 1, 2, 3, 4, why="was set back")
    assert store.engine.last_entry(3) == 29
    # Both are in the segment that is replayed, if there is one.
    assert store.engine.term(FENCED) >= (4 if ending == "killed" else 1)
    await still_unknown(store)


async def test_an_older_witness_beside_a_zeroed_tail_is_not_believed(tmp_path: Path) -> None:
    """Each of the two alone is noticed by the other one. The checkpoint is what is left to tell."""
    store = await Store.open(tmp_path / "b")
    await store.settled()
    await add_some(store, 1, 3)
    old = await store.crash_into(tmp_path / "old")
    for _ in range(2):
        await store.engine._checkpointer.write()
    await add_some(store, 2, 30)
    path = await store.crash_into(tmp_path / "killed")
    await store.close()
    shutil.copy(old / form.WITNESS, path)
    segment = path / segment_name(1)
    data = bytearray(segment.read_bytes())
    zero(data, used(old / segment_name(1)) // 4096 * 4096 + 4096)
    segment.write_bytes(data)
    await still_unknown(await assert_unknown(path, 1, why="the witness was set back", count=3))


async def test_an_older_checkpoint_is_noticed_by_a_group_alone(tmp_path: Path) -> None:
    """The witness is as old as the checkpoint, and so is the header of the segment."""
    store = await Store.open(tmp_path / "b")
    await store.settled()
    await add_some(store, 1, 3)
    old = await store.crash_into(tmp_path / "old")
    await store.engine._checkpointer.write()
    await add_some(store, 2, 30)
    path = await store.crash_into(tmp_path / "killed")
    await store.close()
    for name in (form.CHECKPOINT, form.WITNESS):
        shutil.copy(old / name, path)
    await still_unknown(await assert_unknown(path, 1, 2, why="was set back", count=3))


async def test_an_older_checkpoint_takes_the_newest_table(tmp_path: Path) -> None:
    path = tmp_path / "b"
    for ledger_id in (1, 2, 3):
        store = await work(path, ledger_id)
        for more in range(4):
            await store.fence(10 + ledger_id * 10 + more, 7)
        await store.engine._checkpointer.write()
        if ledger_id == 1:
            old = await store.crash_into(tmp_path / "old")
        await store.close()
    tables = {name for name in os.listdir(path) if name.endswith(".ledgers")}
    assert tables
    assert tables != {name for name in os.listdir(old) if name.endswith(".ledgers")}
    shutil.copy(old / form.CHECKPOINT, path)
    store = await assert_unknown(path, 1, 2, 3, why="was set back")
    assert store.engine.term(22) == store.engine.term(33) == 7
    await store.close()


async def test_a_segment_of_another_life_is_put_aside(tmp_path: Path) -> None:
    path, other = await killed(tmp_path, 1), await killed(tmp_path, 2)
    shutil.copy(other / segment_name(1), path)
    store = await assert_unknown(path, 1, why="another generation")
    assert (path / f"{segment_name(1)}.damaged").exists()
    assert (await store.read(2, 0, 0))[1] is Stop.UNKNOWN  # it holds entries of another bookie's choosing
    await still_unknown(store)


async def formatted(tmp_path: Path, name: str) -> Path:
    """Return the directory of a killed process, with a cookie of its own."""
    disk = RealDisk()
    await format_directory(disk, str(tmp_path / name), Cookie(name, "cluster", name, 1))
    disk.close()
    store = await work(tmp_path / name, 1)
    path = await store.crash_into(tmp_path / f"{name}-killed")
    await store.close()
    return path


@pytest.mark.parametrize("name", [form.CHECKPOINT, form.WITNESS, segment_name(1)])
async def test_a_file_of_another_bookie_does_not_count(tmp_path: Path, name: str) -> None:
    path, other = await formatted(tmp_path, "b1"), await formatted(tmp_path, "b2")
    shutil.copy(other / name, path)
    await (await assert_unknown(path, 1, why="of another bookie")).close()


async def test_an_index_of_another_bookie_is_made_again(tmp_path: Path) -> None:
    for name in ("b1", "b2"):
        path = await formatted(tmp_path, name)
        store = await Store.open(path)
        await store.close()
    shutil.copy(path / index_name(1), tmp_path / "b1-killed")
    store = await Store.open(tmp_path / "b1-killed")
    assert not store.engine.marking.concerns_all
    assert (await store.read(1, 0, 29))[1] is Stop.END
    await store.close()


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
async def test_without_a_witness_nothing_is_denied_and_the_next_start_has_one(
    tmp_path: Path, damage: str
) -> None:
    path = await killed(tmp_path)
    file = path / form.WITNESS
    data = bytearray(file.read_bytes())
    data[40] ^= 4
    file.write_bytes(data if damage == "flipped" else data[: witness.PAGE_BYTES])
    if damage == "missing":
        file.unlink()
    store = await assert_unknown(path, 1, why="nothing tells which checkpoint")
    assert file.stat().st_size == 2 * witness.PAGE_BYTES
    await still_unknown(store)


async def test_a_segment_that_only_the_witness_names_is_missed(tmp_path: Path) -> None:
    """A segment that was made of the reserve is in no checkpoint."""
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b", disk=disk)
    await store.settled()
    disk.is_full = True
    entries = 0
    while (number := store.engine._journal.segment.segment_id) < 3:
        await store.add(make_block(1, entries, [b"x" * 9000]), from_reserve=True)
        entries += 1
    await store.add(make_block(1, entries, [b"x" * 9000]), from_reserve=True)
    path = await store.crash_into(tmp_path / "killed")
    disk.is_full = False
    await store.close()
    assert number not in parse_checkpoint((path / form.CHECKPOINT).read_bytes()).segments
    (path / segment_name(number)).unlink()
    store = await Store.open(path)
    assert any(f"segment {number} is missing" in note for note in store.engine.notes)
    assert (await store.read(1, entries, entries))[1] is Stop.UNKNOWN
    await store.close()


async def test_the_header_of_a_segment_is_damaged_and_no_checkpoint_lists_it(tmp_path: Path) -> None:
    """Its first group shows that it is not a file that a crash met as it was created."""
    path = lose_claims(await killed(tmp_path))
    data = bytearray((path / segment_name(1)).read_bytes())
    data[20] ^= 1
    (path / segment_name(7)).write_bytes(bytes(data[:4096]) + bytes(4096))
    (path / segment_name(8)).write_bytes(data.replace(b"\x01\0\0\0\0\0\0\0", b"\x08\0\0\0\0\0\0\0"))
    store = await Store.open(path)
    assert store.engine.marking.concerns_all
    await store.settled()
    assert (path / f"{segment_name(8)}.damaged").exists()
    assert not (path / segment_name(7)).exists()
    assert not (path / f"{segment_name(7)}.damaged").exists()
    await store.close()


# --- several directories ----------------------------------------------------------------------------


async def two_directories(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """Return two directories as they were after one life, and as a killed process left them much later."""
    now = [tmp_path / "a", tmp_path / "b"]
    store = await Store.open(now)
    await add_some(store, 1, 300)
    await store.close()
    old = [copy_as_a_crash_leaves_it(path, tmp_path / f"old-{path.name}") for path in now]
    store = await Store.open(now)
    await add_some(store, 2, 300)
    await store.fence(FENCED, 5)
    await store.settled()
    killed = [copy_as_a_crash_leaves_it(path, tmp_path / f"killed-{path.name}") for path in now]
    await store.close()
    return old, killed


@pytest.mark.parametrize("which", [0, 1])
async def test_a_directory_that_was_set_back_contradicts_the_other(tmp_path: Path, which: int) -> None:
    old, paths = await two_directories(tmp_path)
    shutil.rmtree(paths[which])
    shutil.copytree(old[which], paths[which])
    kept = good_files(paths[1 - which])
    store = await Store.open(paths)
    assert store.engine.marking.concerns_all
    for ledger_id in (1, 2):
        at = 0
        while at < 300:
            _, stop, at = await store.read(ledger_id, at, 299)
            assert stop in (Stop.END, Stop.UNKNOWN)
            at = 300 if stop is Stop.END else at + 1
    await store.settled()
    assert kept <= set(os.listdir(paths[1 - which]))
    await store.close()


async def test_one_witness_of_two_is_enough(tmp_path: Path) -> None:
    _, paths = await two_directories(tmp_path)
    (paths[0] / form.WITNESS).unlink()
    store = await Store.open(paths)
    assert not store.engine.marking.concerns_all
    assert "nothing is lost" in store.engine.notes[0]
    assert (await store.read(2, 0, 299))[1] is Stop.END
    assert (paths[0] / form.WITNESS).exists()
    await store.close()


# --- how it is written ------------------------------------------------------------------------------


async def test_each_acknowledged_group_is_claimed(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b")
    for entry in range(20):
        await store.add(make_block(1, entry, [b"x" * 100]))
        segment = store.engine._journal.segment
        acknowledged = segment.segment_id, segment.header.generation, segment.end
        data = (tmp_path / "b" / form.WITNESS).read_bytes()
        claim = witness.parse_page(witness.GROUPS_PAGE, data)
        # The thread may have claimed a later group by now: one that shows where the end was.
        assert claim[2:4] == acknowledged[:2]
        assert claim[4] >= acknowledged[2]
    held = parse_checkpoint((tmp_path / "b" / form.CHECKPOINT).read_bytes())
    page = witness.parse_page(witness.CHECKPOINTS_PAGE, data[witness.PAGE_BYTES :])
    assert page.checkpoint == held.number > 0
    await store.close()


async def test_a_group_whose_write_failed_is_not_claimed(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = await Store.open(tmp_path / "b", disk=disk)
    await add_some(store, 1, 3)
    await store.settled()
    before = (tmp_path / "b" / form.WITNESS).read_bytes()
    disk.fail_journal_write = disk.journal_writes + 1
    disk.torn_bytes = 200
    with pytest.raises(DiskFailedError):
        await store.add(make_block(1, 3, [b"x"]))
    assert (tmp_path / "b" / form.WITNESS).read_bytes() == before
    await store.close()


class CountingFile(RealFile):
    """A file that tells of its syncs."""

    def __init__(self, disk: CountingDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._counting = disk

    async def sync(self) -> None:
        await super().sync()
        if self._path.endswith(form.WITNESS):
            self._counting.syncs.put_nowait(None)


class CountingDisk(RealDisk):
    def __init__(self) -> None:
        super().__init__()
        self.syncs: asyncio.Queue[None] = asyncio.Queue()

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return CountingFile(self, file._descriptor, path)


async def test_a_claim_is_synced_once_when_the_bookie_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "IDLE_S", 3600.0)
    disk = CountingDisk()
    store = await Store.open(tmp_path / "b", disk=disk)
    await add_some(store, 1, 1)  # the first group of a segment is synced in any case
    await store.settled()
    files = store.engine._witness
    assert files is not None
    while files._task is not None:
        await asyncio.wait([files._task])

    def let_time_pass() -> None:
        if files._timer is not None:
            files._timer.cancel()
            files._look()

    for entry in (1, 3):
        while not disk.syncs.empty():
            disk.syncs.get_nowait()
        await store.add(make_block(1, entry, [b"x"]))
        await store.add(make_block(1, entry + 1, [b"x"]))
        let_time_pass()  # groups came in that time
        assert files._task is None
        let_time_pass()
        await asyncio.wait_for(disk.syncs.get(), 30)
        while files._task is not None:
            await asyncio.wait([files._task])
        assert files._synced_groups == files._groups
        assert files._timer is None  # and no other sync comes
        assert disk.syncs.empty()
    await store.close()


async def test_a_failed_write_of_the_witness_stops_the_bookie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(tmp_path / "b")
    await add_some(store, 1, 2)
    write = RealFile._write_sync_and_write

    def fail(
        file: RealFile, then: list[tuple[RealFile, Buffer]], buffers: Sequence[Buffer], offset: int
    ) -> None:
        write(file, [], buffers, offset)
        for each, _ in then:
            each._end_change()
        raise _typed(OSError(5, "Input/output error"), "writing the witness")

    monkeypatch.setattr(RealFile, "_write_sync_and_write", fail)
    with pytest.raises(DiskFailedError, match="witness"):
        await store.add(make_block(1, 2, [b"x"]))
    assert len(store.failures) == 1
    await store.close()


async def test_a_segment_that_is_being_cut_is_whole_at_each_moment(tmp_path: Path) -> None:
    path = lose_claims(await killed(tmp_path))
    disk = RealDisk()
    file = await disk.open(str(path / segment_name(1)))
    header = form.parse_segment_header(await file.read(0, form.DATA_OFFSET))
    end = used(path / segment_name(1))
    size = file.size()
    shortened = await cut_file(file, header, end)
    file.close()
    disk.close()
    data = (path / segment_name(1)).read_bytes()
    assert (len(data), shortened.capacity) == (end, end)
    for number, content in enumerate((data, data + bytes(size - end))):  # and before the cut
        case = tmp_path / f"case{number}"
        shutil.copytree(path, case)
        (case / segment_name(1)).write_bytes(content)
        store = await Store.open(case)
        assert not store.engine.notes
        assert (await store.read(1, 0, 29))[1] is Stop.END
        await store.close()


async def test_a_full_start_cuts_what_it_replays_and_the_next_start_sees_no_damage(tmp_path: Path) -> None:
    path, disk = lose_claims(await killed(tmp_path)), FaultyDisk()
    (path / form.RESERVE).unlink()
    size = (path / segment_name(1)).stat().st_size

    disk.is_full = True
    disk.is_full_for = lambda _: (path / segment_name(1)).stat().st_size == size
    store = await Store.open(path, SMALL, disk)
    assert (path / segment_name(1)).stat().st_size < size
    crashed = await store.crash_into(tmp_path / "again")
    disk.is_full = False
    await store.close()
    store = await Store.open(crashed)
    assert not store.engine.notes
    await store.close()


def test_a_page_is_refused_unless_it_is_whole_and_the_right_one() -> None:
    claim = witness.Claim(3, 4, 5, 6, 7)
    page = witness.encode_page(witness.GROUPS_PAGE, claim)
    assert len(page) == witness.PAGE_BYTES
    assert witness.parse_page(witness.GROUPS_PAGE, page) == claim
    for data in (page[:55], page[:50] + b"\1" + page[51:], b"x" + page[1:], bytes(4096)):
        with pytest.raises(CorruptRecordError):
            witness.parse_page(witness.GROUPS_PAGE, data)
    with pytest.raises(CorruptRecordError):
        witness.parse_page(witness.CHECKPOINTS_PAGE, page)
