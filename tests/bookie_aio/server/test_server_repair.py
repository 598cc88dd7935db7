"""Repair adds at a bookie (rule 14): they leave the term alone, and never write over a good copy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie_aio.wire.blocks import parse_blocks
from bookie_aio.wire.messages import (
    NO_TERM,
    Add,
    AddFlag,
    Read,
    ReadAnswer,
    ReadLac,
    Status,
    Stop,
)
from metadata.ids import TERM_FINAL
from tests.bookie_aio.server.conftest import engine_of
from tests.support.rawclient import RawClient, block

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies

MARKED = b"a payload that the test finds on the disk"


async def repair(client: RawClient, first: int, payloads: list[bytes], **values: int) -> Status:
    term = values.pop("term", 0)
    body = block(7, first, payloads, **values)
    return (await client.call(Add(7, term, AddFlag.REPAIR), body)).status


async def held(client: RawClient, last: int = 99) -> dict[int, tuple[bytes, int]]:
    """Return payload and stated LAC of each entry from 0 up to the first that is not there."""
    answer = await client.call(Read(7, NO_TERM, 0, 0, last, 1, 1 << 20))
    return {
        entry_id: (bytes(payload), one.lac)
        for one in parse_blocks(memoryview(answer.body))
        for entry_id, payload in zip(one.entry_ids, one.payloads(), strict=True)
    }


def flip(directory: Path, payload: bytes) -> None:
    """Turn a bit of each copy of a payload in the directory's segments."""
    flipped = 0
    for path in directory.glob("*.segment"):
        data = bytearray(path.read_bytes())
        at = data.find(payload)
        while at >= 0:
            data[at] ^= 1
            flipped += 1
            at = data.find(payload, at + 1)
        path.write_bytes(data)
    assert flipped


async def test_a_repair_is_stored_at_a_fenced_bookie_where_the_writers_add_is_not(client: RawClient) -> None:
    assert (await client.call(ReadLac(7, TERM_FINAL, -1, 0))).status is Status.OK
    assert (await client.add(7, 0, [b"late"])).status is Status.INVALID_TERM
    assert await repair(client, 0, [b"a", b"b"], lac=-1) is Status.OK
    assert await held(client) == {0: (b"a", -1), 1: (b"b", -1)}


async def test_a_repair_does_not_fence_the_writer(client: RawClient) -> None:
    assert await repair(client, 0, [b"a"]) is Status.OK
    assert (await client.add(7, 1, [b"b"])).status is Status.OK


async def test_a_repair_of_a_closed_ledger_fences(client: RawClient) -> None:
    assert await repair(client, 0, [b"a"], term=TERM_FINAL) is Status.OK
    assert (await client.add(7, 1, [b"late"])).status is Status.INVALID_TERM


async def test_a_repair_may_be_of_a_higher_content_term_than_its_own_term(client: RawClient) -> None:
    assert await repair(client, 0, [b"a"], content_term=5) is Status.OK
    answer = (await client.call(Read(7, NO_TERM, 5, 0, 0, 1, 1024))).message
    assert isinstance(answer, ReadAnswer)
    assert answer.stop == Stop.END


async def test_a_good_copy_is_kept_and_only_what_is_missing_is_stored(client: RawClient) -> None:
    for entry_id in (1, 2, 5):
        assert (await client.add(7, entry_id, [b"first"], lac=entry_id - 1)).status is Status.OK
    assert await repair(client, 0, [b"other"] * 8, lac=-1) is Status.OK
    expected = dict.fromkeys(range(8), (b"other", -1))
    expected |= {entry_id: (b"first", entry_id - 1) for entry_id in (1, 2, 5)}
    assert await held(client) == expected
    assert await repair(client, 0, [b"third"] * 8, lac=-1) is Status.OK
    assert await held(client) == expected


async def test_a_damaged_copy_is_replaced_and_its_good_neighbours_are_kept(
    bookie: Bookie, client: RawClient, tmp_path: Path
) -> None:
    payloads = [b"zero", b"one", MARKED, b"three", b"four"]
    assert (await client.add(7, 0, payloads, lac=-1)).status is Status.OK
    assert (await client.add(7, 5, [b"five"], lac=4)).status is Status.OK
    flip(tmp_path / "b1", MARKED)
    other = [b"other"] * 7
    assert await repair(client, 0, other, lac=-1) is Status.OK
    expected = {number: (payload, -1) for number, payload in enumerate(payloads)}
    expected |= {2: (b"other", -1), 5: (b"five", 4), 6: (b"other", -1)}
    found: dict[int, tuple[bytes, int]] = {}
    for entry_id in range(7):  # one by one: a read of many stops at the old block
        answer = await client.call(Read(7, NO_TERM, 0, entry_id, entry_id, 1, 1024))
        (one,) = parse_blocks(memoryview(answer.body))
        found[entry_id] = (bytes(one.payload), one.lac)
    assert found == expected
    # That something was lost is still known, until a lift. It was listed, so nothing else is in doubt.
    assert engine_of(bookie).is_damaged(7)
    answer = (await client.call(Read(7, NO_TERM, 0, 50, 50, 1, 1024))).message
    assert isinstance(answer, ReadAnswer)
    assert answer.stop == Stop.NO_SUCH_ENTRY


async def test_what_is_held_under_a_higher_content_term_is_not_repaired(client: RawClient) -> None:
    assert (await client.add(7, 1, [b"new"], term=4, content_term=4)).status is Status.OK
    assert await repair(client, 0, [b"old"] * 3) is Status.STALE_METADATA
    answer = (await client.call(Read(7, NO_TERM, 0, 0, 0, 1, 1024))).message
    assert isinstance(answer, ReadAnswer)
    assert answer.stop == Stop.NO_SUCH_ENTRY


async def test_an_add_that_comes_while_a_repair_looks_is_not_written_over(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client, writer = await bookies.connect(bookie), await bookies.connect(bookie)
    assert (await writer.add(7, 10, [b"x"])).status is Status.OK
    disk.hold()
    # Before the repair looks, it waits for what is in flight; meanwhile the writer's own entry comes.
    blocking = writer.add(7, 11, [b"y"])
    await disk.arrived.wait()
    repairing = asyncio.ensure_future(repair(client, 0, [b"other", b"other"], lac=-1))
    await client.call(Read(7, NO_TERM, 0, 10, 10, 1, 1024))  # the repair has been taken
    adding = writer.add(7, 1, [b"mine"], lac=0)
    await writer.call(Read(7, NO_TERM, 0, 10, 10, 1, 1024))
    disk.release()
    assert await repairing is Status.OK
    assert (await blocking).status is (await adding).status is Status.OK
    assert await held(client, 1) == {0: (b"other", -1), 1: (b"mine", 0)}


async def test_a_repair_is_checked_like_any_add(client: RawClient) -> None:
    body = bytearray(block(7, 0, [b"payload"]))
    body[-1] ^= 1
    assert (await client.call(Add(7, 0, AddFlag.REPAIR), bytes(body))).status is Status.BAD_REQUEST
    await client.gone()
