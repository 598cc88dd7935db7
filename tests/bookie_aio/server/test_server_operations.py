"""What each operation answers, one client at a time."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from bookie_aio.config import Limits
from bookie_aio.wire.frames import FRAME_BYTES_MAX
from bookie_aio.wire.messages import (
    NO_TERM,
    Add,
    AddFlag,
    Failure,
    HelloAnswer,
    Info,
    ListEntries,
    ListEntriesAnswer,
    ListLedgers,
    ListLedgersAnswer,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
    WriteLac,
)
from tests.support.rawclient import RawClient, block, hello, lac_statement

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from bookie_aio.wire.blocks import LacStatement
    from tests.bookie_aio.server.conftest import Bookies

MIB = 1024 * 1024


def read(ledger_id: int, first: int, last: int, *, bytes_max: int = MIB, stride: int = 1) -> Read:
    return Read(ledger_id, NO_TERM, 0, first, last, stride, bytes_max)


async def test_the_handshake_names_the_bookie_and_its_limits(bookies: Bookies, bookie: Bookie) -> None:
    client = await bookies.connect(bookie, greet=False)
    answer = await client.call(hello())
    message = answer.message
    assert isinstance(message, HelloAnswer)
    assert (message.version, message.bookie_id, message.nonce) == (5, "b1", bookie.nonce)
    assert (message.frame_bytes_max, message.entry_bytes_max) == (FRAME_BYTES_MAX, 4 * MIB)
    again = await bookies.connect(bookie, greet=False)
    greeting = hello(instance_id=message.instance_id, bookie_id="b1", version_max=3)
    older = (await again.call(greeting)).message
    assert isinstance(older, HelloAnswer)
    assert older.version == 3  # the highest that both speak


async def test_a_ping_is_answered(client: RawClient) -> None:
    assert (await client.call(Ping())).status is Status.OK


async def test_entries_that_were_acknowledged_are_read_back(client: RawClient) -> None:
    first = client.add(7, 0, [b"zero", b"", b"two"])
    second = client.add(7, 3, [b"three"], lac=2)
    assert (await first).status is Status.OK
    assert (await second).status is Status.OK
    answer = await client.call(read(7, 0, 3))
    assert answer.entries == [(0, b"zero"), (1, b""), (2, b"two"), (3, b"three")]
    assert isinstance(answer.message, ReadAnswer)
    assert answer.message.stop == Stop.END
    assert answer.message.statement == lac_statement(7, 2)


async def test_a_read_cuts_out_what_was_asked_for(client: RawClient) -> None:
    await client.add(7, 0, [b"%d" % i for i in range(10)])
    assert (await client.call(read(7, 3, 5))).entries == [(3, b"3"), (4, b"4"), (5, b"5")]


async def test_a_read_ends_at_the_first_entry_that_is_not_there(client: RawClient) -> None:
    await client.add(7, 0, [b"a", b"b"])
    answer = await client.call(read(7, 0, 9))
    assert answer.entries == [(0, b"a"), (1, b"b")]
    assert isinstance(answer.message, ReadAnswer)
    assert (answer.message.stop, answer.message.stop_entry) == (Stop.NO_SUCH_ENTRY, 2)
    nothing = await client.call(read(8, 0, 0))
    assert isinstance(nothing.message, ReadAnswer)
    assert (nothing.message.stop, nothing.message.stop_entry, nothing.body) == (Stop.NO_SUCH_ENTRY, 0, b"")
    assert nothing.message.statement is None


async def test_a_read_keeps_to_the_lower_of_two_budgets(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(read_bytes_max=3000))
    client = await bookies.connect(bookie)
    await client.add(7, 0, [bytes([i]) * 1000 for i in range(8)])
    for asked, expected in ((MIB, 2), (1500, 1), (10, 1)):
        answer = await client.call(read(7, 0, 7, bytes_max=asked))
        assert isinstance(answer.message, ReadAnswer)
        assert len(answer.entries) == answer.message.stop_entry == expected
        assert answer.message.stop == Stop.BUDGET


async def test_a_read_of_nothing_is_a_bad_request_that_harms_nobody(client: RawClient) -> None:
    assert (await client.call(read(7, 5, 4))).status is Status.BAD_REQUEST
    assert (await client.call(Ping())).status is Status.OK


async def test_striped_entries_are_read_by_their_stride(client: RawClient) -> None:
    body = block(7, 1, [b"one", b"four", b"seven"], stride=3)
    assert (await client.call(Add(7, 0, 0), body)).status is Status.OK
    assert (await client.call(read(7, 1, 7, stride=3))).entries == [(1, b"one"), (4, b"four"), (7, b"seven")]


async def test_the_lac_is_the_highest_one_stated(client: RawClient) -> None:
    nothing = await client.call(ReadLac(7, NO_TERM, -1, 0))
    assert nothing.message == ReadLacAnswer(None, -1, False)
    await client.add(7, 0, [b"a"])
    await client.add(7, 1, [b"b"], lac=0)
    assert (await client.call(ReadLac(7, NO_TERM, -1, 0))).message == ReadLacAnswer(
        lac_statement(7, 0), 1, False
    )
    assert (await client.call(WriteLac(7, 0, lac_statement(7, 1)))).status is Status.OK
    assert (await client.call(ReadLac(7, NO_TERM, -1, 0))).message == ReadLacAnswer(
        lac_statement(7, 1), 1, False
    )
    assert (await client.call(WriteLac(7, 0, lac_statement(7, 0)))).status is Status.OK
    assert (await client.call(ReadLac(7, NO_TERM, -1, 0))).message == ReadLacAnswer(
        lac_statement(7, 1), 1, False
    )


@pytest.mark.parametrize("statement", [None, lac_statement(8, 1)])
async def test_a_lac_statement_without_proof_is_refused(
    client: RawClient, statement: LacStatement | None
) -> None:
    answer = await client.call(WriteLac(7, 0, statement))
    assert answer.status is Status.BAD_REQUEST
    await client.gone()


async def test_entries_and_ledgers_are_listed_page_by_page(bookies: Bookies) -> None:
    bookie = await bookies.start(limits=Limits(list_rows_max=2, list_ledgers_max=2))
    client = await bookies.connect(bookie)
    for ledger_id in (7, 9, 8):
        await client.add(ledger_id, 0, [b"a", b"b"])
    for first in (4, 8):
        await client.add(7, first, [b"x"] * 3)
    rows: list[tuple[int, ...]] = []
    start, pages = 0, 0
    while start >= 0:
        answer = await client.call(ListEntries(7, start))
        assert isinstance(answer.message, ListEntriesAnswer)
        assert not answer.message.is_damaged
        rows += struct.iter_unpack("<QQII", answer.body)
        start, pages = answer.message.next_entry, pages + 1
    assert rows == [(0, 0, 2, 1), (4, 0, 3, 1), (8, 0, 3, 1)]
    assert pages == 2
    ledgers: list[int] = []
    start = 0
    while start >= 0:
        answer = await client.call(ListLedgers(start))
        assert isinstance(answer.message, ListLedgersAnswer)
        ledgers += [ledger_id for (ledger_id,) in struct.iter_unpack("<Q", answer.body)]
        start = answer.message.next_ledger
    assert ledgers == [7, 8, 9]


async def test_info_shows_the_bookies_figures(client: RawClient, bookie: Bookie) -> None:
    await client.add(7, 0, [b"a", b"b"])
    await client.call(read(7, 0, 1))
    info = json.loads((await client.call(Info())).body)
    assert (info["bookie_id"], info["nonce"], info["connections"]) == ("b1", bookie.nonce, 1)
    assert info["bytes_pending"] == 0
    assert info["counters"]["entries_added"] == 2
    assert info["counters"]["requests"]["add"] == 1
    assert info["counters"]["requests"]["read"] == 1
    assert info["storage"]


async def test_the_largest_entry_fits_and_one_byte_more_does_not(client: RawClient) -> None:
    payload = bytes(4 * MIB)
    assert (await client.add(7, 0, [payload])).status is Status.OK
    answer = await client.call(read(7, 0, 0, bytes_max=1))
    assert answer.entries == [(0, payload)]
    refused = await client.add(7, 1, [payload + b"x"])
    assert refused.status is Status.BAD_REQUEST
    assert isinstance(refused.message, Failure)
    assert "above the limit" in refused.message.message
    assert (await client.call(Ping())).status is Status.OK


@pytest.mark.parametrize("other", [AddFlag.REPAIR, AddFlag.DEFERRED_SYNC])
async def test_flags_that_do_not_go_together_are_refused(client: RawClient, other: AddFlag) -> None:
    assert (await client.add(7, 0, [b"a"], flags=other | AddFlag.RECOVERY)).status is Status.BAD_REQUEST
    assert (await client.call(Ping())).status is Status.OK


def damaged(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


BODY = block(7, 0, [b"payload"])


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (Add(7, 0, 0), damaged(BODY, len(BODY) - 1)),
        (Add(7, 0, 0), damaged(BODY, 40)),
        (Add(7, 0, 0), BODY[:-1]),
        (Add(7, 0, 0), BODY + b"x"),
        (Add(7, 0, 0), BODY + BODY),
        (Add(7, 0, 0), b""),
        (Add(8, 0, 0), BODY),
        (Add(7, 0, 0), block(7, 0, [b"payload"], content_term=1)),
    ],
    ids=["payload", "head", "short", "long", "two", "none", "other ledger", "content term above term"],
)
async def test_a_bad_block_is_refused_and_closes_that_connection_only(
    bookies: Bookies, bookie: Bookie, client: RawClient, request_: Add, body: bytes
) -> None:
    other = await bookies.connect(bookie)
    assert (await client.call(request_, body)).status is Status.BAD_REQUEST
    await client.gone()
    answer = await other.call(read(7, 0, 0))
    assert isinstance(answer.message, ReadAnswer)
    assert answer.message.stop == Stop.NO_SUCH_ENTRY
