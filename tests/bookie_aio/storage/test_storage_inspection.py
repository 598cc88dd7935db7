"""Looking at a directory from the outside: contents are counted, damage is found, and nothing changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from bookie_aio.storage.data_directory import format_directory
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.disk.read_only import ReadOnlyDisk
from bookie_aio.storage.inspection import Inspection, Inspector
from bookie_aio.storage.segment import format as form
from metadata.access.bookies import Cookie
from metadata.errors import (
    CookieMismatchError,
    DirectoryInUseError,
    DiskFailedError,
    NoSuchKeyError,
    StorageError,
)
from tests.bookie_aio.storage.test_storage_scrubber import flip, group_of
from tests.support.storage import Store, make_block

if TYPE_CHECKING:
    from pathlib import Path

COOKIE = Cookie("b1", "cluster-1", "life-1", 1)
PAYLOAD = b"x" * 50


async def make_directory(path: Path) -> Path:
    """Write three ledgers to several segments: 2 is deleted at last, and 3 is trimmed."""
    disk = RealDisk()
    await format_directory(disk, str(path), COOKIE)
    disk.close()
    store = await Store.open(path)
    await store.fence(1, 7)
    for first in range(0, 1000, 10):
        for ledger_id in (1, 2, 3):
            await store.add(make_block(ledger_id, first, [PAYLOAD] * 10))
    await store.add(make_block(4, 0, [PAYLOAD] * 2, stride=3))
    await store.wait(lambda done: store.engine.append_tombstone(2, done))
    await store.wait(lambda done: store.engine.append_trim(3, 500, done))
    await store.settled()
    await store.close()
    return path


async def inspected(*paths: Path) -> Inspection:
    """Inspect, and check that not one file has changed by it."""

    def state() -> dict[str, tuple[bytes, int]]:
        files = [file for path in paths for file in sorted(path.iterdir())]
        return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before, disk, seen = state(), ReadOnlyDisk(), []
    try:
        found = await Inspector(disk, list(map(str, paths)), lambda *now: seen.append(now)).run()
    finally:
        disk.close()
    assert state() == before
    assert not seen or seen[-1][0] == seen[-1][1]
    return found


def group_of_ledger(path: Path, found: Inspection, ledger_id: int) -> tuple[Path, form.GroupHeader]:
    """Return a sealed segment, and a group in it that holds one block, of that ledger."""
    sealed = next(one for one in found.segments if one.is_sealed and one.ledgers == 3)
    segment = path / form.segment_name(sealed.segment_id)
    data = memoryview(segment.read_bytes())
    for number in range(1, 12):
        group = group_of(segment, number)
        rows = form.parse_group_rows(group, data[group.offset : group.end])
        if rows is not None and [row.ledger_id for row in rows] == [ledger_id]:
            return segment, group
    raise AssertionError(f"no group of ledger {ledger_id} in {segment}")


async def test_a_whole_directory_is_counted(tmp_path: Path) -> None:
    found = await inspected(await make_directory(tmp_path / "b1"))
    assert not found.is_damaged
    assert (found.damage, found.cookie) == ([], COOKIE)
    ledgers = {one.ledger_id: one for one in found.ledgers}
    assert {name: (one.entries, one.last_entry) for name, one in ledgers.items()} == {
        1: (1000, 999),
        3: (500, 999),
        4: (2, 3),
    }
    assert (ledgers[1].term, ledgers[3].first_kept, found.deleted_ranges) == (7, 500, [(2, 2)])
    assert ledgers[1].lac is not None
    assert sum(one.is_sealed for one in found.segments) > 1
    assert all(one.groups for one in found.segments)
    assert sum(one.live_bytes for one in found.segments) == sum(one.bytes for one in found.ledgers)
    for one in found.segments:
        assert one.live_bytes + one.dead_bytes >= one.used_bytes - form.DATA_OFFSET
        assert one.file_bytes >= one.used_bytes


async def test_a_flipped_bit_in_any_file_is_found_and_named(tmp_path: Path) -> None:
    path = await make_directory(tmp_path / "b1")
    segment, group = group_of_ledger(path, await inspected(path), 1)
    segment_id = form.id_of(segment.name, form.SEGMENT_SUFFIX)
    assert segment_id is not None

    body_at = group.offset + group.total_bytes - 20
    flip(segment, body_at)
    found = await inspected(path)
    (one,) = found.damage
    assert found.is_damaged
    assert (one.segment_id, one.counts) == (segment_id, True)
    assert one.ledger_id == 1
    assert one.first_entry is not None
    assert one.last_entry == one.first_entry + 9
    flip(segment, body_at)

    flip(segment, group.offset + 20)  # the head of a group: the index still has its blocks, which are whole
    found = await inspected(path)
    (one,) = found.damage
    assert (one.offset, one.counts, found.is_damaged) == (group.offset, False, False)
    flip(segment, group.offset + 20)

    index = path / form.index_name(segment_id)
    flip(index, 4096 + 10)
    found = await inspected(path)
    assert found.is_damaged
    assert "it is rebuilt from its segment" in found.damage[0].text
    flip(index, 4096 + 10)

    flip(path / form.CHECKPOINT, 100)
    found = await inspected(path)
    assert found.is_damaged
    assert any("checkpoint" in each.text for each in found.damage)
    flip(path / form.CHECKPOINT, 100)
    assert not (await inspected(path)).is_damaged

    segment.unlink()
    found = await inspected(path)
    assert found.is_damaged
    assert any("missing" in each.text for each in found.damage)
    assert {one.ledger_id for one in found.ledgers if one.is_marked} >= {1}


async def test_damage_of_a_deleted_ledger_does_not_count(tmp_path: Path) -> None:
    path = await make_directory(tmp_path / "b1")
    segment, group = group_of_ledger(path, await inspected(path), 2)
    flip(segment, group.end - 20)
    found = await inspected(path)
    assert [(one.ledger_id, one.counts) for one in found.damage] == [(2, False)]
    assert not found.is_damaged


async def test_a_directory_in_use_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = await make_directory(tmp_path / "b1")
    store = await Store.open(path)
    with pytest.raises(DirectoryInUseError, match="a bookie runs on"):
        await inspected(path)
    await store.close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSuchKeyError, match="no cookie"):
        await inspected(tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == []
    with pytest.raises(CookieMismatchError, match="has 1 directories: name all of them, not 2"):
        await inspected(path, path)
    disk = ReadOnlyDisk()
    for change in (disk.create, disk.unlink, disk.make_directory):
        with pytest.raises(DiskFailedError, match="only looked at"):
            await change(str(path / "file"))
    disk.close()


WRONG_FILES = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "link to nothing": lambda path: os.symlink("/nowhere/at/all", path),
    "link to itself": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("what", WRONG_FILES)
async def test_what_is_no_file_is_told_and_waited_for_by_nobody(tmp_path: Path, what: str) -> None:
    path, refused = await make_directory(tmp_path / "b1"), set[str]()
    for name in os.listdir(path):
        (path / name).rename(path / "aside")
        WRONG_FILES[what](path / name)
        disk = ReadOnlyDisk()
        try:
            await Inspector(disk, [str(path)], lambda *_: None).run()
        except (StorageError, NoSuchKeyError):
            refused.add(name)
        finally:
            disk.close()
        (path / name).rmdir() if what == "directory" else (path / name).unlink()
        (path / "aside").rename(path / name)
    assert not (await inspected(path)).is_damaged
    assert refused <= {"cookie.json", "lock"}, "all others are told with what there is besides"


EMPTY_FILES = {
    "a file of no bytes": lambda path: open(path, "wb").close(),
    "a pipe": os.mkfifo,
    "a link to /dev/null": lambda path: os.symlink("/dev/null", path),
}


@pytest.mark.parametrize("what", EMPTY_FILES)
async def test_a_sealed_segment_without_its_bytes_is_damage(tmp_path: Path, what: str) -> None:
    path = await make_directory(tmp_path / "b1")
    sealed = [one for one in (await inspected(path)).segments if one.is_sealed]
    assert sealed
    for one in sealed:
        file = path / form.segment_name(one.segment_id)
        file.rename(path / "aside")
        EMPTY_FILES[what](file)
        disk = ReadOnlyDisk()
        try:
            found = await Inspector(disk, [str(path)], lambda *_: None).run()
        finally:
            disk.close()
        assert found.is_damaged, one.path
        file.unlink()
        (path / "aside").rename(file)
