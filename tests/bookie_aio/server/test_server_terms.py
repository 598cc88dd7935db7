"""Counting terms and content terms at a bookie: what an unbounded ledger needs of it (rules 3, 7 and 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    Delete,
    Failure,
    ListEntries,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
    WriteLac,
)
from metadata.ids import TERM_FINAL
from tests.support.rawclient import Answer, RawClient, lac_statement
from tests.support.storage import copy_as_a_crash_leaves_it

if TYPE_CHECKING:
    from pathlib import Path

    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.helddisk import HeldDisk

MIB = 1024 * 1024
WRITE_BACK = int(AddFlag.RECOVERY)


async def add(
    client: RawClient,
    first: int,
    *payloads: bytes,
    term: int,
    content_term: int | None = None,
    flags: int = 0,
) -> Status:
    content_term = term if content_term is None else content_term
    answer = await client.add(7, first, payloads, term=term, content_term=content_term, flags=flags)
    return answer.status


async def read(
    client: RawClient, content_term: int, *, first: int = 0, term: int = NO_TERM
) -> tuple[list[tuple[int, bytes]], Stop, int]:
    """Read from `first` on; gives entries, and why and where it ended."""
    answer = await client.call(Read(7, term, content_term, first, 100, 1, MIB))
    assert isinstance(answer.message, ReadAnswer), answer
    return answer.entries, Stop(answer.message.stop), answer.message.stop_entry


def held_term(answer: Answer) -> int:
    assert isinstance(answer.message, Failure)
    assert answer.message.status is Status.INVALID_TERM
    return answer.message.value


async def test_terms_count_upwards_and_each_shuts_out_those_below(client: RawClient) -> None:
    for term in (1, 2, 5):
        assert await add(client, 0, b"of %d" % term, term=term) is Status.OK
    for term in (0, 1, 4):
        assert held_term(await client.add(7, 1, [b"late"], term=term, content_term=term)) == 5
        assert held_term(await client.call(ReadLac(7, term, -1, 0))) == 5
        assert held_term(await client.call(Read(7, term, term, 0, 0, 1, MIB))) == 5
        statement = lac_statement(7, 0, content_term=term)
        assert held_term(await client.call(WriteLac(7, term, statement))) == 5
    assert (await client.call(ReadLac(7, 6, -1, 0))).status is Status.OK
    assert held_term(await client.add(7, 1, [b"late"], term=5, content_term=5)) == 6


async def test_an_entry_is_of_no_higher_content_term_than_its_request(client: RawClient) -> None:
    assert await add(client, 0, b"x", term=1, content_term=2) is Status.BAD_REQUEST


async def test_a_copy_of_a_lower_content_term_is_no_such_entry(client: RawClient) -> None:
    await add(client, 0, b"0", b"1 of term 1", term=1)
    assert await read(client, 1) == ([(0, b"0"), (1, b"1 of term 1")], Stop.NO_SUCH_ENTRY, 2)
    assert await read(client, 2, first=1) == ([], Stop.NO_SUCH_ENTRY, 1)
    # Also to a recovery read, which fences as well.
    assert await read(client, 2, first=1, term=2) == ([], Stop.NO_SUCH_ENTRY, 1)


async def test_an_add_of_a_higher_content_term_replaces_a_copy_and_the_lower_one_is_stale(
    client: RawClient,
) -> None:
    await add(client, 0, b"0", b"1 of term 1", b"2 of term 1", term=1)
    assert await add(client, 1, b"1 of term 3", term=3) is Status.OK
    assert await read(client, 3, first=1) == ([(1, b"1 of term 3")], Stop.NO_SUCH_ENTRY, 2)
    assert await read(client, 1) == ([(0, b"0")], Stop.STALE_METADATA, 1)
    assert await read(client, 1, first=2) == ([(2, b"2 of term 1")], Stop.NO_SUCH_ENTRY, 3)
    # A term in between never had the entry.
    assert await read(client, 2, first=1) == ([], Stop.STALE_METADATA, 1)


@pytest.fixture(params=["clean", "crash", "crash after sealing"])
async def restarted(request: pytest.FixtureRequest, bookies: Bookies, tmp_path: Path) -> RawClient:
    """A bookie with copies under two content terms, stopped in one of three ways and started again."""
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client = await bookies.connect(bookie)
    await add(client, 0, b"0", b"1 of term 1", b"2 of term 1", term=1)
    if request.param == "crash after sealing":
        await bookie.close()
        bookie = await bookies.start(disk=disk)
        client = await bookies.connect(bookie)
    await add(client, 1, b"1 of term 3", term=3)
    statement = lac_statement(7, 1, content_term=3)
    assert (await client.call(WriteLac(7, 3, statement))).status is Status.OK
    assert (await client.call(ReadLac(7, 4, -1, 0))).status is Status.OK
    if request.param == "clean":
        await bookie.close()
        folder = "b1"
    else:
        folder = "copy"
        copy_as_a_crash_leaves_it(tmp_path / "b1", tmp_path / folder)
        await bookie.close()
        await bookies.take_for_newest(folder)
    again = await bookies.start(folder=folder)
    return await bookies.connect(again)


async def test_content_terms_terms_and_statements_survive_restarts(restarted: RawClient) -> None:
    client = restarted
    assert await read(client, 3, first=1) == ([(1, b"1 of term 3")], Stop.NO_SUCH_ENTRY, 2)
    assert await read(client, 1) == ([(0, b"0")], Stop.STALE_METADATA, 1)
    assert await read(client, 3, first=2) == ([], Stop.NO_SUCH_ENTRY, 2)
    assert held_term(await client.add(7, 5, [b"late"], term=3, content_term=3)) == 4
    answer = (await client.call(ReadLac(7, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    assert answer.statement == lac_statement(7, 1, content_term=3)


async def test_a_lac_stated_under_a_newer_term_is_told_with_that_term(client: RawClient) -> None:
    await client.add(7, 0, [b"0", b"1"], term=1, content_term=1)
    await client.add(7, 2, [b"2"], term=2, content_term=2, lac=1)
    answer = (await client.call(ReadLac(7, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    assert answer.statement is not None
    assert (answer.statement.content_term, answer.statement.lac) == (2, 1)
    # What a lower LAC says is true as well, and says less.
    await client.add(7, 3, [b"3"], term=3, content_term=3, lac=0)
    again = (await client.call(ReadLac(7, NO_TERM, -1, 0))).message
    assert isinstance(again, ReadLacAnswer)
    assert again.statement == answer.statement


# --- what a takeover writes back ---


async def test_what_is_written_back_keeps_its_content_term(client: RawClient) -> None:
    await add(client, 0, b"0", term=1)
    assert await add(client, 0, b"0", b"1", term=4, content_term=1, flags=WRITE_BACK) is Status.OK
    assert await read(client, 1) == ([(0, b"0"), (1, b"1")], Stop.NO_SUCH_ENTRY, 2)
    assert held_term(await client.add(7, 2, [b"late"], term=1, content_term=1)) == 4


async def test_a_write_back_under_a_lower_content_term_than_is_held_is_stale(client: RawClient) -> None:
    await add(client, 0, b"0", b"1 of term 1", b"2 of term 1", term=1)
    await add(client, 1, b"1 of term 3", term=3)
    answer = await client.add(7, 0, [b"0", b"1 again"], term=4, content_term=1, flags=WRITE_BACK)
    assert isinstance(answer.message, Failure)
    assert (answer.message.status, answer.message.value) == (Status.STALE_METADATA, 3)
    # Nothing of it was stored, and the term was taken all the same.
    listing = await client.call(ListEntries(7, 0))
    assert len(listing.body) == 24 * 2
    assert held_term(await client.call(ReadLac(7, 3, -1, 0))) == 4
    # Beside it there is nothing newer.
    assert await add(client, 2, b"2 again", term=4, content_term=1, flags=WRITE_BACK) is Status.OK
    assert await read(client, 1, first=2) == ([(2, b"2 again")], Stop.NO_SUCH_ENTRY, 3)


async def test_a_write_back_sees_the_adds_accepted_before_it(bookies: Bookies) -> None:
    disk: HeldDisk = bookies.disk()
    bookie: Bookie = await bookies.start(disk=disk)
    client, other = await bookies.connect(bookie), await bookies.connect(bookie)
    await add(client, 0, b"0", term=1)
    disk.hold()
    newer = client.add(7, 1, [b"1 of term 2"], term=2, content_term=2)
    await client.call(Ping())  # it has been accepted
    older = other.add(7, 1, [b"1 of term 1"], term=3, content_term=1, flags=WRITE_BACK)
    await other.call(Ping())
    disk.release()
    assert (await newer).status is Status.OK
    assert (await older).status is Status.STALE_METADATA


async def test_a_write_back_that_a_higher_term_overtakes_is_refused(bookies: Bookies) -> None:
    disk: HeldDisk = bookies.disk()
    bookie: Bookie = await bookies.start(disk=disk)
    client, other = await bookies.connect(bookie), await bookies.connect(bookie)
    await add(client, 0, b"0", term=1)
    disk.hold()
    # Its look waits for the disk; the higher term does not wait for it.
    overtaken = client.add(7, 0, [b"0 again"], term=2, content_term=1, flags=WRITE_BACK)
    await client.call(Ping())
    fence = other.send(ReadLac(7, 3, -1, 0))
    await other.call(Ping())
    disk.release()
    assert (await fence).status is Status.OK
    assert held_term(await overtaken) == 3


async def test_a_bounded_ledgers_recovery_adds_are_not_looked_at(client: RawClient) -> None:
    await add(client, 0, b"0", term=0)
    assert await add(client, 0, b"0", term=TERM_FINAL, content_term=0, flags=WRITE_BACK) is Status.OK


async def test_a_deletion_refuses_every_term(bookies: Bookies, client: RawClient) -> None:
    await add(client, 0, b"0", term=3)
    assert (await client.call(Delete(7))).status is Status.OK
    for term in (3, 9):
        assert await add(client, 1, b"late", term=term) is Status.NO_SUCH_LEDGER
