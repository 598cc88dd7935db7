"""Damage: what is lost is called lost (rule 4), and nothing else is harmed."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from itertools import accumulate
from pathlib import Path

import pytest
from crc32c import crc32c

from bookie_aio.storage.data_directory import format_directory, read_cookie
from bookie_aio.storage.disk.disk import RealDisk
from bookie_aio.storage.repair_writes import store_missing
from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import CHECKPOINT, RESERVE, TABLE_SUFFIX, index_name, segment_name
from bookie_aio.storage.segment.index import PAGE_BYTES, IndexHead
from bookie_aio.storage.segment.segment import Segment
from bookie_aio.wire.blocks import HEADER_BYTES, Block, encode_block, parse_blocks
from bookie_aio.wire.messages import Stop
from client_aio.core.digest import HmacDigest
from metadata.access.bookies import Cookie
from metadata.errors import CookieMismatchError, CorruptRecordError, DirectoryInUseError, DiskFailedError
from tests.support.storage import FaultyDisk, Store, entries_of, lose_claims, make_block


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def groups_of(path: Path) -> list[form.GroupHeader]:
    """Return the groups of a segment."""
    data = path.read_bytes()
    header = form.parse_segment_header(data)
    found, at = [], form.DATA_OFFSET
    while group := form.peek_group_header(data[at:], header, at, len(data)):
        found.append(group)
        at = group.end
    return found


async def crashed_store(tmp_path: Path, groups: int) -> Path:
    """Return the directory of a crashed bookie: one entry of ledger 1 and one of ledger 2 in each group."""
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    for number in range(groups):
        for ledger_id in (1, 2):
            store.engine.append_block(
                make_block(ledger_id, number, [b"%d" % ledger_id * 100]), lambda _: None
            )
        await store.barrier()
    await store.fence(2, 7)
    path = await store.crash_into(tmp_path / "crashed")
    await store.close()
    return path


@pytest.mark.parametrize("hurt", [1, 4])
async def test_a_flipped_bit_in_a_proven_group_damages_its_ledger_alone(tmp_path: Path, hurt: int) -> None:
    """Its entries stay listed. But the last block alone states the highest LAC that the bookie had."""
    path = await crashed_store(tmp_path, 5)
    group = groups_of(path / segment_name(1))[hurt]
    flip(path / segment_name(1), group.offset + group.head_bytes + 150)  # in ledger 1's payload
    denied = Stop.NO_SUCH_ENTRY if hurt == 1 else Stop.UNKNOWN
    for _ in range(2):  # and it is still known the next time
        store = await Store.open(path)
        assert store.engine.is_damaged(1)
        assert store.engine.is_in_doubt(1) is (hurt == 4)
        assert not store.engine.is_damaged(2)
        assert store.engine.term(2) == 7
        assert await store.read(1, 0, 4) == (dict.fromkeys(range(hurt), b"1" * 100), Stop.UNKNOWN, hurt)
        rest = range(hurt + 1, 5)
        assert await store.read(1, hurt + 1, 9) == (dict.fromkeys(rest, b"1" * 100), denied, 5)
        assert await store.read(1, 9, 9) == ({}, denied, 9)
        assert await store.read(2, 0, 4) == (dict.fromkeys(range(5), b"2" * 100), Stop.END, 5)
        assert await store.read(2, 9, 9) == ({}, Stop.NO_SUCH_ENTRY, 9)
        await store.close()


@pytest.mark.parametrize("where", [0, 5, 30, form.GROUP_HEADER_BYTES + 33])
async def test_a_group_whose_head_is_damaged_may_have_held_anything(tmp_path: Path, where: int) -> None:
    path = await crashed_store(tmp_path, 5)
    second = groups_of(path / segment_name(1))[1]
    flip(path / segment_name(1), second.offset + where)
    for _ in range(2):
        store = await Store.open(path)
        assert store.engine.is_damaged(1)
        assert store.engine.is_damaged(77)
        assert store.engine.term(2) == 7  # what follows the damage is found all the same
        assert await store.read(1, 1, 1) == ({}, Stop.UNKNOWN, 1)
        assert await store.read(2, 2, 4) == (dict.fromkeys((2, 3, 4), b"2" * 100), Stop.END, 5)
        assert 0 not in store.engine.list_ledgers(0, 10)[0]
        await store.close()


async def sealed_store(tmp_path: Path) -> Path:
    """Return the directory of a bookie that was closed: some sealed segments of ledgers 1 and 2."""
    store = await Store.open(tmp_path / "b1")
    for first in range(0, 3000, 10):
        for ledger_id in (1, 2):
            block = make_block(ledger_id, first, [b"%d" % ledger_id * 50] * 10)
            store.engine.append_block(block, lambda _: None)
    await store.fence(3, 9)
    await store.close()
    return tmp_path / "b1"


async def test_a_flipped_bit_found_by_a_read_is_marked_for_good(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    second = groups_of(path / segment_name(2))[0]
    flip(path / segment_name(2), second.offset + second.head_bytes + 250)
    store = await Store.open(path)
    hurt = [ledger_id for ledger_id in (1, 2) if (await store.read(ledger_id, 0, 2999))[1] == Stop.UNKNOWN]
    assert len(hurt) == 1
    assert [ledger_id for ledger_id in (1, 2) if store.engine.is_damaged(ledger_id)] == hurt
    _, _, at = await store.read(hurt[0], 0, 2999)
    assert (await store.read(hurt[0], at + 10, 2999))[1] == Stop.END
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert [ledger_id for ledger_id in (1, 2) if again.engine.is_damaged(ledger_id)] == hurt
    # An add over the copy that fails rewrites it: it is no duplicate.
    await again.add(make_block(hurt[0], at, [b"%d" % hurt[0] * 50] * 10))
    assert (await again.read(hurt[0], 0, 2999))[1] == Stop.END
    await again.close()


@pytest.mark.parametrize("part", ["magic", "head", "ledgers", "runs", "end"])
async def test_a_damaged_index_is_rebuilt(tmp_path: Path, part: str) -> None:
    path = await sealed_store(tmp_path)
    index = path / index_name(2)
    before = index.read_bytes()
    head = IndexHead(before)
    if part == "end":
        index.write_bytes(before[:-PAGE_BYTES])
    else:
        at = {"magic": 0, "head": 70, "ledgers": head.page_offset(0) + 9, "runs": head.page_offset(1) + 9}[
            part
        ]
        flip(index, at)
    store = await Store.open(path)
    for ledger_id in (1, 2):
        found, stop, _ = await store.read(ledger_id, 0, 2999)
        assert stop == Stop.END
        assert found == dict.fromkeys(range(3000), b"%d" % ledger_id * 50)
        assert not store.engine.is_damaged(ledger_id)
        assert await store.engine.list_entries(ledger_id, 0, 1000) == ([(0, 0, 3000, 1)], -1)
    await store.settled()
    data = index.read_bytes()
    head = IndexHead(data)
    assert len(data) == len(before)
    for page in range(len(head.crcs)):
        assert head.page_is_intact(page, data[head.page_offset(page) :][:PAGE_BYTES])
    await store.close()


@pytest.mark.parametrize("unreadable", ["", ".index"], ids=["everything", "indexes"])
async def test_what_cannot_be_read_for_a_while_is_unknown_and_not_lost(
    tmp_path: Path, unreadable: str
) -> None:
    disk = FaultyDisk()
    store = await Store.open(await sealed_store(tmp_path), disk=disk)
    disk.fail_reads_of = unreadable
    assert await store.read(1, 0, 2999) == ({}, Stop.UNKNOWN, 0)
    with pytest.raises(DiskFailedError):
        await store.engine.list_entries(1, 0, 1000)
    disk.fail_reads_of = None
    for ledger_id in (1, 2):
        assert await store.read(ledger_id, 0, 3000) == (
            dict.fromkeys(range(3000), b"%d" % ledger_id * 50), Stop.NO_SUCH_ENTRY, 3000
        )  # fmt: skip
    assert store.engine.is_writable
    await store.close()


@pytest.mark.parametrize("unreadable", [CHECKPOINT, TABLE_SUFFIX, "a segment", "its last group"])
async def test_a_start_concludes_nothing_from_what_cannot_be_read(tmp_path: Path, unreadable: str) -> None:
    """Not that it is lost, which would count for ever; nor that a group is torn: it was acknowledged."""
    path, disk = tmp_path / "crashed", FaultyDisk()
    for first in (0, 10):
        store = await Store.open(tmp_path / "b1")  # the second time, most ledgers rest in the table
        for ledger_id in range(20):
            await store.add(make_block(ledger_id, first, [b"%d" % ledger_id * 30] * 10))
        if first:
            await store.crash_into(path)
        await store.close()
    before = sorted(os.listdir(path))
    current = max(one for one in before if one.endswith(".segment") and groups_of(path / one))
    disk.fail_reads_of = current if " " in unreadable else unreadable
    if unreadable == "its last group":
        disk.fail_reads_behind = groups_of(path / current)[-1].offset
    with pytest.raises(DiskFailedError, match="start again"):
        await Store.open(path, disk=disk)
    assert sorted(os.listdir(path)) == before
    store = await Store.open(path)
    assert not store.engine.notes
    for ledger_id in range(20):
        expected = dict.fromkeys(range(20), b"%d" % ledger_id * 30)
        assert await store.read(ledger_id, 0, 20) == (expected, Stop.NO_SUCH_ENTRY, 20)
    await store.close()


async def test_a_segment_is_replayed_of_which_the_index_cannot_be_read_at_a_start(tmp_path: Path) -> None:
    """After a clean stop nothing but its index says that the last one is sealed; it has all that it tells."""
    path, disk = await sealed_store(tmp_path), FaultyDisk()
    disk.fail_reads_of = ".index"
    store = await Store.open(path, disk=disk)
    disk.fail_reads_of = None
    assert not store.engine.notes
    for ledger_id in (1, 2):
        expected = dict.fromkeys(range(3000), b"%d" % ledger_id * 50)
        assert await store.read(ledger_id, 0, 3000) == (expected, Stop.NO_SUCH_ENTRY, 3000)
    await store.close()


@pytest.mark.parametrize(
    ("damaged", "is_known_whose"), [(0, False), (0, True), (1, False)], ids=["any", "ledger", "before-tail"]
)
async def test_that_data_was_lost_is_still_known_after_a_start_on_a_full_disk(
    tmp_path: Path, damaged: int, is_known_whose: bool
) -> None:
    """No checkpoint had room to say so, and all that does is a mark in the tail.

    Each start finds the first group's damage again. The second group is proven by the tail behind it alone.
    The full start writes that tail into a new segment, which names the first group's end. From then on replay
    stops there, and only the mark tells of the loss (rule 4). No claim proves the mark's group after a power
    cut, so it is a tail as well.
    """
    path = lose_claims(await crashed_store(tmp_path, 2))
    group = groups_of(path / segment_name(1))[damaged]
    flip(path / segment_name(1), group.offset + (group.head_bytes + 150 if is_known_whose else 0))
    for number, is_full in enumerate((True, False, False)):
        disk = FaultyDisk()
        disk.is_full = is_full
        store = await Store.open(path, disk=disk)
        is_found_again = number == 0 or damaged == 0
        assert any("before this start" in note for note in store.engine.notes) != is_found_again
        assert store.engine.marking.concerns_all != is_known_whose
        assert store.engine.is_writable == (is_known_whose and not is_full)
        assert store.engine.is_damaged(1)
        assert store.engine.is_damaged(2) != is_known_whose
        assert (await store.read(1, damaged, damaged))[1] is Stop.UNKNOWN
        (group,) = groups_of(Path(store.engine._journal.segment.path))
        assert group.row_count == 2  # the fence and the mark, and no more of them each time
        path = lose_claims(await store.crash_into(tmp_path / str(number)))
        await store.close()


async def test_a_head_that_is_found_damaged_while_serving_ends_ordinary_adds_for_good(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    head = IndexHead((path / index_name(2)).read_bytes())
    flip(path / segment_name(2), groups_of(path / segment_name(2))[0].offset + 80)
    flip(path / index_name(2), head.page_offset(1) + 9)
    store = await Store.open(path)
    assert store.engine.is_writable
    for ledger_id in (1, 2):
        await store.read(ledger_id, 0, 2999)
    assert store.engine.marking.concerns_all
    assert store.writable == [False]
    assert not store.engine.is_writable
    assert store.engine.has_room
    await store.settled()
    crashed = await store.crash_into(tmp_path / "crashed")
    await store.close()
    again = await Store.open(crashed)
    assert not again.engine.is_writable
    await again.close()


async def test_an_index_that_is_rebuilt_is_read_though_somebody_opened_the_former_one_again(
    tmp_path: Path,
) -> None:
    path, disk = await sealed_store(tmp_path), FaultyDisk()
    index = str(path / index_name(2))
    flip(path / index_name(2), IndexHead((path / index_name(2)).read_bytes()).page_offset(1) + 9)
    store = await Store.open(path, disk=disk)
    former = store.engine._segments.by_id[2].sealed
    assert former is not None
    heads: list[asyncio.Task[IndexHead]] = []

    def read_again(what: str, path: str) -> None:
        if (what, path) == ("create", index + ".new"):
            heads.append(asyncio.create_task(former.head()))

    disk.on_step = read_again
    for ledger_id in (1, 2):
        expected = dict.fromkeys(range(3000), b"%d" % ledger_id * 50)
        assert await store.read(ledger_id, 0, 3000) == (expected, Stop.NO_SUCH_ENTRY, 3000)
        await store.settled()
    (head,) = heads
    await head
    sealed = store.engine._segments.by_id[2].sealed
    assert sealed is not None
    await sealed.check()
    await store.close()


async def test_an_index_that_cannot_be_read_for_a_while_still_tells_what_its_segment_does_not(
    tmp_path: Path,
) -> None:
    path, disk = await sealed_store(tmp_path), FaultyDisk()
    flip(path / segment_name(2), groups_of(path / segment_name(2))[0].offset + 80)
    store = await Store.open(path, disk=disk)
    for unreadable in (".index", None):
        disk.fail_reads_of = unreadable
        for ledger_id in (1, 2):
            expected = dict.fromkeys(range(3000), b"%d" % ledger_id * 50)
            found = ({}, Stop.UNKNOWN, 0) if unreadable else (expected, Stop.NO_SUCH_ENTRY, 3000)
            assert await store.read(ledger_id, 0, 3000) == found
            assert not store.engine.is_damaged(ledger_id)
    assert not store.engine.marking.concerns_all
    assert store.engine.is_writable
    await store.close()


async def test_a_missing_segment_is_lost_for_the_ledgers_in_its_index(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    (path / segment_name(2)).unlink()
    for _ in range(2):
        store = await Store.open(path)
        assert store.engine.is_damaged(1)
        assert not store.engine.is_damaged(3)
        assert store.engine.term(3) == 9
        _, stop, at = await store.read(1, 0, 2999)
        assert stop == Stop.UNKNOWN
        assert at > 0
        assert (await store.read(1, 2990, 2999))[1] == Stop.END
        await store.close()


async def test_a_missing_segment_without_index_may_have_held_anything(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    (path / segment_name(2)).unlink()
    (path / index_name(2)).unlink()
    for _ in range(2):
        store = await Store.open(path)
        assert store.engine.is_damaged(3)
        assert store.engine.notes
        assert await store.read(99, 0, 0) == ({}, Stop.UNKNOWN, 0)
        await store.close()


async def test_a_missing_last_segment_is_noticed(tmp_path: Path) -> None:
    path = await crashed_store(tmp_path, 3)
    (path / segment_name(1)).unlink()
    store = await Store.open(path)
    assert store.engine.is_damaged(1)
    await store.close()


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_fences_are_not_trusted_without_a_checkpoint(tmp_path: Path, how: str) -> None:
    path = await sealed_store(tmp_path)
    if how == "missing":
        (path / "checkpoint").unlink()
    else:
        flip(path / "checkpoint", 50)
    store = await Store.open(path)
    assert store.engine.is_damaged(3)
    assert (await store.read(1, 0, 2999))[1] == Stop.END  # what can be proved is served
    await store.close()


@pytest.mark.parametrize("lost", [CHECKPOINT, TABLE_SUFFIX])
async def test_a_segment_counts_although_its_index_and_what_knew_of_the_ledgers_are_lost(
    tmp_path: Path, lost: str
) -> None:
    """What later indexes say of a ledger made the older segment look like one from before it began."""
    path = tmp_path / "b1"
    for first, ledger_ids in ((0, range(6)), (60, range(12))):
        store = await Store.open(path)
        for entry in range(first, first + 60):
            for ledger_id in ledger_ids:
                store.engine.append_block(make_block(ledger_id, entry, [b"x" * 300]), lambda _: None)
            await store.barrier()
        await store.close()
    await (await Store.open(path)).close()  # most ledgers rest in the table by now
    names = os.listdir(path)
    (gone,) = [name for name in names if name.endswith(lost)]
    (path / gone).unlink()
    (path / index_name(1)).unlink()
    store = await Store.open(path)
    assert store.engine.marking.concerns_all
    await store.settled()
    assert {name for name in names if name.endswith(".segment")} <= set(os.listdir(path))
    for ledger_id in range(12):
        first = 0 if ledger_id < 6 else 60
        assert (await store.read(ledger_id, first, 119))[1] is Stop.END
    await store.close()


async def test_a_damaged_segment_header_is_made_up_for_by_the_index(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    flip(path / segment_name(2), 20)
    store = await Store.open(path)
    assert (await store.read(1, 0, 2999))[1] == Stop.END
    assert not store.engine.is_damaged(1)
    await store.close()


async def test_a_sealed_segment_that_was_cut_is_damaged(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    os.truncate(path / segment_name(2), 20_000)
    store = await Store.open(path)
    found, stop, at = await store.read(1, 0, 2999)
    assert stop == Stop.UNKNOWN
    assert store.engine.is_damaged(1)
    assert sorted(found) == list(range(at))
    await store.close()


async def test_a_payload_that_looks_like_a_group_is_not_taken_for_one(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    await store.add(make_block(1, 0, [b"x" * 10]))
    header = store.engine._journal.segment.header
    offset = store.engine._journal._offset
    # All that a client could know or guess, but not the generation.
    fake = form.GroupHeader(header.segment_id, 0, 5, offset + 500, 0, 0, 144, 0, 1)
    forged = form.encode_group_head(fake, [form.term_row(1, 99)])
    await store.add(make_block(1, 1, [forged * 40]))
    path = lose_claims(await store.crash_into(tmp_path / "crashed"))
    await store.close()
    second = groups_of(path / segment_name(1))[1]
    flip(path / segment_name(1), second.offset + 10)
    again = await Store.open(path)
    assert again.engine.term(1) == 0
    assert not again.engine.is_damaged(1)  # a bad last group is torn
    assert await again.read(1, 0, 1) == ({0: b"x" * 10}, Stop.NO_SUCH_ENTRY, 1)
    await again.close()


async def test_what_a_read_gives_before_damage_is_intact(tmp_path: Path) -> None:
    path = await sealed_store(tmp_path)
    store = await Store.open(path)
    sources = await store.engine._lookup.sources(1, 0, 2999)
    (second,) = [one for one in sources if one.segment.segment_id == 2]
    runs = await second.overlapping(0, 2999, 1000)
    flip(path / segment_name(2), runs[3].offset + runs[3].head_bytes + 1)
    found = await store.engine.read(1, 0, range(3000), 10**7)
    assert (found.stop, found.stop_entry) == (Stop.UNKNOWN, runs[3].first)
    assert sorted(entries_of(found.buffers)) == list(range(runs[3].first))
    # A part of the block that the damage is not in would have been good, but the ledger is marked now.
    partial = await store.engine.read(1, 0, range(runs[3].first + 5, 3000), 10**7)
    assert partial.stop == Stop.END
    await store.close()


async def test_a_directory_is_formatted_once(tmp_path: Path) -> None:
    disk, path = RealDisk(), str(tmp_path / "b1")
    cookie = Cookie("b1", "cluster", "incarnation", 1)
    assert await read_cookie(disk, path) is None
    await format_directory(disk, path, cookie)
    assert await read_cookie(disk, path) == cookie
    with pytest.raises(CookieMismatchError):
        await format_directory(disk, path, cookie)
    store = await Store.open(tmp_path / "b1")
    await store.add(make_block(1, 0, [b"x"]))
    with pytest.raises(DirectoryInUseError):
        await format_directory(disk, path, cookie, force=True)
    await store.close()
    other = Cookie("b1", "cluster", "another", 1)
    await format_directory(disk, path, other, force=True)
    assert await read_cookie(disk, path) == other
    assert sorted(os.listdir(path)) == ["checkpoint", "cookie.json", "lock", "witness"]
    store = await Store.open(tmp_path / "b1")
    assert store.engine.list_ledgers(0, 10) == ([], -1)
    assert not store.engine.is_damaged(1)
    assert (tmp_path / "b1" / RESERVE).exists()
    await store.close()
    (tmp_path / "b1" / "cookie.json").write_bytes(b"{")
    with pytest.raises(CorruptRecordError):
        await read_cookie(disk, path)
    disk.close()


async def test_a_directory_that_was_emptied_but_for_its_cookie_knows_nothing(tmp_path: Path) -> None:
    disk = RealDisk()
    await format_directory(disk, str(tmp_path / "b1"), Cookie("b1", "cluster", "incarnation", 1))
    disk.close()
    (tmp_path / "b1" / "checkpoint").unlink()
    store = await Store.open(tmp_path / "b1")
    assert store.engine.is_damaged(1)
    await store.close()


async def test_a_reader_that_goes_while_its_damage_is_marked_harms_nobody(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "b1")
    await store.settled()
    await store.add(make_block(1, 0, [b"a" * 100]))
    (group,) = groups_of(store.path / segment_name(1))
    flip(store.path / segment_name(1), group.offset + group.head_bytes + 150)
    reading = asyncio.create_task(store.read(1, 0, 0))
    await asyncio.sleep(0)  # one turn: the read finds the damage and waits for its mark
    assert store.engine.is_damaged(1)
    reading.cancel()
    again = asyncio.create_task(store.read(1, 0, 0))
    await store.add(make_block(2, 0, [b"b"]))
    assert await again == ({}, Stop.UNKNOWN, 0)
    assert reading.cancelled()
    assert store.failures == []
    await store.close()


async def test_a_writers_wrong_checksum_of_an_entry_is_no_damage(tmp_path: Path) -> None:
    # The block is as it was sent, which its other checksums prove: readers turn to other bookies, and the
    # ledger is not marked, or anybody could have it marked by sending such a block.
    block = bytearray(make_block(1, 0, [b"a" * 100, b"b" * 100, b"c" * 100]).view)
    checksums_at = HEADER_BYTES + 12 * 3
    block[checksums_at + 4] ^= 1
    block[4:8] = crc32c(bytes(block[8 : HEADER_BYTES + 16 * 3])).to_bytes(4, "little")
    store = await Store.open(tmp_path / "b1")
    await store.add(Block.parse(memoryview(bytes(block))))
    for wanted in (range(3), range(1, 3), range(1, 2)):
        found = await store.engine.read(1, 0, wanted, 10**6)
        assert found.stop == Stop.END
        (read,) = parse_blocks(memoryview(b"".join(found.buffers)))
        assert read.damaged_entries() == [1]
    assert not store.engine.is_damaged(1)
    await store.close()


PAYLOADS = [b"entry %d" % entry * entry for entry in range(1, 11)]


async def store_of_a_block(path: Path, state: str, block: Block | None = None) -> tuple[Path, int]:
    """Return the segment of a stopped bookie that has `PAYLOADS` as one block, and where they are in it."""
    store = await Store.open(path / "b1")
    store.engine.append_block(block or make_block(7, 0, PAYLOADS), lambda _: None)
    await store.barrier()
    if state == "killed":  # so that a start replays it
        directory = await store.crash_into(path / "killed")
        await store.close()
    else:
        await store.close()
        directory = store.path
    (segment,) = (each for each in directory.glob("*.segment") if PAYLOADS[9] in each.read_bytes())
    if state == "index lost":
        segment.with_suffix(".index").unlink()
    return segment, segment.read_bytes().index(PAYLOADS[0] + PAYLOADS[1])


async def check_all_reads(store: Store, wrong: set[int]) -> None:
    """Check that each range of entries is given up to the first one of these, and that these are unknown."""
    for first, last, stride, budget in itertools.product(range(10), range(10), (1, 2), (1, 500, 10**9)):
        wanted = range(first, last + 1, stride)
        found, stop, at = await store.read(7, first, last, stride=stride, budget=budget)
        while stop is Stop.BUDGET:
            more, stop, after = await store.read(7, at, last, stride=stride, budget=budget)
            assert after > at or stop is Stop.UNKNOWN
            found, at = found | more, after
        assert found == {entry: PAYLOADS[entry] for entry in wanted if entry < at}
        if stop is Stop.UNKNOWN:
            assert at in wrong & set(wanted)
        else:
            assert (stop, wrong & set(wanted)) == (Stop.END, set())


@pytest.mark.parametrize("state", ["ended", "killed", "index lost"])
@pytest.mark.parametrize("wrong", [{0}, {1}, {4}, {3, 7}, {9}], ids=str)
async def test_a_damaged_entry_takes_none_of_its_block_with_it(
    tmp_path: Path, wrong: set[int], state: str
) -> None:
    segment, start = await store_of_a_block(tmp_path, state)
    for entry in wrong:
        flip(segment, start + sum(map(len, PAYLOADS[:entry])))
    for _ in range(2):
        store = await Store.open(segment.parent)
        await check_all_reads(store, wrong)
        assert store.engine.is_damaged(7)
        assert await store.engine.list_entries(7, 0, 100) == ([(0, 0, 10, 1)], -1)
        await store.close()


async def test_what_cannot_be_read_takes_none_of_its_block_with_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    segment, start = await store_of_a_block(tmp_path, "ended")
    store = await Store.open(segment.parent, disk=disk)
    disk.fail_reads_of = segment.name
    disk.fail_reads_behind = start + sum(map(len, PAYLOADS[:6])) + 1
    await check_all_reads(store, {6, 7, 8, 9})
    assert not store.engine.is_damaged(7)
    await store.close()


async def test_a_file_that_was_cut_has_the_entries_before(tmp_path: Path) -> None:
    segment, start = await store_of_a_block(tmp_path, "ended")
    os.truncate(segment, start + sum(map(len, PAYLOADS[:6])) + 1)
    store = await Store.open(segment.parent)
    await check_all_reads(store, {6, 7, 8, 9})
    assert store.engine.is_damaged(7)
    await store.close()


@pytest.mark.parametrize("state", ["ended", "killed"])
async def test_nothing_is_served_unmarked_whose_code_is_damaged(tmp_path: Path, state: str) -> None:
    """No bookie can check a code, so what proves it is the checksum of its block's head, and nothing else."""
    digest, running = HmacDigest(7, b"root"), list(accumulate(map(len, PAYLOADS)))
    macs = digest.codes(0)(-1, -1, range(len(PAYLOADS)), running, PAYLOADS)
    data = encode_block(
        ledger_id=7, content_term=0, first_entry=0, stride=1, lac=-1, lafr=-1, payloads=PAYLOADS,
        running=running, macs=macs,
    )  # fmt: skip
    block = Block.parse(memoryview(data))
    segment, start = await store_of_a_block(tmp_path, state, block)

    async def owners(store: Store) -> tuple[set[int], set[int]]:
        """Read each entry; return those that were served, and those of them that their owner refuses."""
        served, refused = set(), set()
        for entry in range(len(PAYLOADS)):
            found = await store.engine.read(7, 0, range(entry, entry + 1), 10**9)
            for part in parse_blocks(memoryview(b"".join(found.buffers))):
                served.add(entry)
                refused |= set(digest.wrong_entries(part))
        return served, refused

    for at in range(start - block.head_bytes, start + block.payload_bytes, 13):
        case = tmp_path / f"{at}"
        shutil.copytree(segment.parent, case)
        flip(case / segment.name, at)
        store = await Store.open(case)
        await store.engine._scrubber.scrub()
        assert store.engine.is_damaged(7), at - start
        served, refused = await owners(store)
        assert (refused, store.engine.is_damaged(7)) == (set(), True), at - start
        assert len(served) == (0 if at < start else len(PAYLOADS) - 1), at - start
        await store_missing(store.engine, block, is_trusted=True)
        assert await owners(store) == (set(range(len(PAYLOADS))), set()), at - start
        await store.close()


async def test_the_scrubber_reads_the_head_of_an_index_that_is_in_memory(tmp_path: Path) -> None:
    """Else it rots unseen, until a start finds neither the index nor, perhaps, all groups of the segment."""
    segment, _ = await store_of_a_block(tmp_path, "ended")
    store, index = await Store.open(segment.parent), segment.with_suffix(".index")
    assert (await store.read(7, 0, 9))[1] is Stop.END
    for at in (5, 40, IndexHead.size(index.read_bytes()) - 1):
        flip(index, at)
        await store.engine._scrubber.scrub()
        IndexHead(index.read_bytes()[: IndexHead.size(index.read_bytes())])  # made again
        assert not store.engine.is_damaged(7)
    await store.close()


async def test_damage_in_the_trimmed_part_of_a_block_marks_nothing(tmp_path: Path) -> None:
    segment, start = await store_of_a_block(tmp_path, "ended")
    flip(segment, start + len(PAYLOADS[0]))
    store = await Store.open(segment.parent)
    await store.wait(lambda done: store.engine.append_trim(7, 2, done))
    await store.engine._scrubber.scrub()
    assert not store.engine.is_damaged(7)
    assert (await store.read(7, 2, 9))[1] is Stop.END
    await store.close()


async def test_an_entry_is_not_denied_whose_ledger_is_marked_while_the_disk_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, _ = await store_of_a_block(tmp_path, "ended")
    store, real = await Store.open(segment.parent), Segment.read
    is_read, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(self: Segment, offset: int, size: int) -> object:
        is_read.set()
        await goes_on.wait()
        return await real(self, offset, size)

    monkeypatch.setattr(Segment, "read", slow)
    reading = asyncio.create_task(store.read(7, 0, 19))
    await is_read.wait()
    await store.wait(lambda done: store.engine.marking.mark_all(1000, done))
    goes_on.set()
    assert (await reading)[1:] == (Stop.UNKNOWN, 10)
    await store.close()


async def test_damage_that_was_repaired_is_not_marked_again(tmp_path: Path) -> None:
    """The block still has it, and its other entries count; the repair has stored a newer copy of this one."""
    segment, start = await store_of_a_block(tmp_path, "ended")
    flip(segment, start + sum(map(len, PAYLOADS[:6])))
    store = await Store.open(segment.parent)
    await store.engine._scrubber.scrub()
    assert store.engine.is_damaged(7)
    assert await store_missing(store.engine, make_block(7, 0, PAYLOADS), is_trusted=True) == 1
    marking = store.engine.marking
    await store.wait(lambda done: marking.lift(7, marking.of(7), 1, done))
    for _ in range(2):
        await store.engine._scrubber.scrub()
        await check_all_reads(store, set())
        assert not store.engine.is_damaged(7)
        await store.close()
        store = await Store.open(segment.parent)
    await store.close()


@pytest.mark.parametrize("state", ["ended", "killed"])
async def test_a_damaged_head_costs_the_entries_that_it_is_wrong_about(tmp_path: Path, state: str) -> None:
    """Where the index tells what the head does not, and each entry proves itself by its own checksum."""
    segment, start = await store_of_a_block(tmp_path, state)
    good = segment.read_bytes()
    head = start - HEADER_BYTES - 16 * len(PAYLOADS)
    running, lengths, checksums = (head + HEADER_BYTES + size * len(PAYLOADS) for size in (0, 8, 12))
    everything = set(range(len(PAYLOADS)))
    wrong_at: dict[int, set[int]] = {
        **{at: set() for at in range(head, head + HEADER_BYTES)},
        **dict.fromkeys(range(head + 48, head + 68), everything),  # the LAC statement seeds all checksums
        **{at: {(at - running) // 8} for at in range(running, lengths)},
        **{at: everything - set(range((at - lengths) // 4)) for at in range(lengths, checksums)},
        **{at: {(at - checksums) // 4} for at in range(checksums, start)},
    }
    for at in (*range(head, start, 7), *range(head, head + HEADER_BYTES, 4)):
        segment.write_bytes(good)
        flip(segment, at)
        store = await Store.open(segment.parent)
        for first in everything:
            found, stop, after = await store.read(7, first, 9)
            while stop is Stop.BUDGET:
                more, stop, after = await store.read(7, after, 9)
                found |= more
            assert found == {entry: PAYLOADS[entry] for entry in range(first, after)}, at - head
            assert after in {10, *wrong_at[at]}, at - head
        found_alone = {entry for entry in everything if (await store.read(7, entry, entry))[0]}
        assert found_alone >= everything - wrong_at[at], at - head
        await store.close()
