"""ADDS and WRITE_LACS: each request in them is judged, refused and acknowledged as if it had come alone."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.config import Limits
from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.frames import encode_frame
from bookie_aio.wire.many import ADD_ROW, encode_adds, encode_write_lacs
from bookie_aio.wire.messages import (
    MANY_MAX,
    NO_TERM,
    Add,
    AddFlag,
    Adds,
    Failure,
    Force,
    Op,
    Ping,
    Read,
    ReadLac,
    ReadLacAnswer,
    Status,
    WriteLac,
    encode_request,
)
from metadata.ids import TERM_FINAL
from tests.bookie_aio.server.conftest import LEDGERS_GIVEN_OUT, engine_of
from tests.support.rawclient import Answer, RawClient, block, hello, lac_statement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.server.bookie import Bookie
    from bookie_aio.wire.blocks import Block
    from tests.bookie_aio.server.conftest import Bookies

MIB = 1024 * 1024
TOKEN, OTHER = b"t" * 32, b"o" * 32
RECOVERY, REPAIR, DEFERRED = int(AddFlag.RECOVERY), int(AddFlag.REPAIR), int(AddFlag.DEFERRED_SYNC)
PROTECTED, PLAIN, DELETED, DAMAGED, FENCED, UNBOUNDED = range(7, 13)
NOT_GIVEN_OUT = LEDGERS_GIVEN_OUT + 7

Given = tuple[Add, bytes | None, bytes]


def plain(ledger_id: int, first: int = 0, *payloads: bytes) -> Given:
    return Add(ledger_id, 0, 0), None, block(ledger_id, first, payloads or [b"x"])


async def outcomes(futures: Sequence[asyncio.Future[Answer]]) -> list[tuple[Status, int]]:
    """Return status and value of each answer."""
    answers = await asyncio.wait_for(asyncio.gather(*futures), 10)
    return [
        (one.message.status, one.message.value) if isinstance(one.message, Failure) else (Status.OK, 0)
        for one in answers
    ]


async def statuses(futures: Sequence[asyncio.Future[Answer]]) -> list[Status]:
    return [status for status, _ in await outcomes(futures)]


async def settle(client: RawClient) -> None:
    for _ in range(3):
        assert (await client.call(Ping())).status is Status.OK


async def prepare(bookies: Bookies, bookie: Bookie) -> RawClient:
    """Bring ledgers into every state that an add may meet."""
    client = await bookies.connect(bookie)
    assert (
        await client.call(Add(PROTECTED, 0, 0), block(PROTECTED, 0, [b"p"]), auth=TOKEN)
    ).status is Status.OK
    engine = engine_of(bookie)
    await when_durable(lambda done: engine.append_tombstone(DELETED, done))
    await when_durable(lambda done: engine.append_mark(DAMAGED, done))
    assert (await client.call(ReadLac(FENCED, TERM_FINAL, -1, 0))).status is Status.OK
    assert (await client.call(ReadLac(UNBOUNDED, 5, -1, 0))).status is Status.OK
    high = Add(UNBOUNDED, 5, 0)
    assert (await client.call(high, block(UNBOUNDED, 90, [b"5"], content_term=5))).status is Status.OK
    return client


def a_mix(rng: random.Random) -> list[Given]:
    """Draw the adds of one frame: of all ledgers, terms, tokens and flags."""
    ledgers = [PROTECTED, PLAIN, PLAIN + 100, DELETED, DAMAGED, FENCED, UNBOUNDED, NOT_GIVEN_OUT]
    mix: list[Given] = []
    for _ in range(rng.randint(2, 12)):
        ledger_id = rng.choice(ledgers)
        flags = rng.choice([0, 0, 0, RECOVERY, REPAIR, DEFERRED, 3])
        term = rng.choice([0, 0, 0, 4, 5, 6, TERM_FINAL]) if ledger_id in (UNBOUNDED, FENCED) else 0
        content_term = rng.choice([0, term]) if term < TERM_FINAL else 0
        token = rng.choice([TOKEN, OTHER, b"short", None]) if ledger_id == PROTECTED else None
        if not rng.randrange(12):
            token = OTHER  # of a ledger without a password
        sizes = [3000] if not rng.randrange(10) else [rng.randrange(50)] * rng.randint(1, 3)
        payloads = [rng.randbytes(size) for size in sizes]
        first = rng.choice([0, 1, 2, 90])
        mix.append(
            (Add(ledger_id, term, flags), token, block(ledger_id, first, payloads, content_term=content_term))
        )
    return mix


@pytest.mark.parametrize("seed", range(6))
async def test_many_adds_in_a_frame_end_as_they_would_one_after_another(bookies: Bookies, seed: int) -> None:
    await bookies.protect(PROTECTED)
    limits = Limits(entry_bytes_max=2000)
    one, other = [await bookies.start(name, limits=limits) for name in ("b1", "b2")]
    together, alone = await prepare(bookies, one), await prepare(bookies, other)
    rng, seen = random.Random(seed), set()
    for _ in range(15):
        mix = a_mix(rng)
        many = await outcomes(together.send_adds(mix))
        each = await outcomes([alone.send(add, body, auth=token) for add, token, body in mix])
        assert many == each
        seen |= {status for status, _ in many}
    assert {Status.OK, Status.INVALID_TERM, Status.UNAUTHORIZED, Status.NO_SUCH_LEDGER} < seen
    for ledger_id in (PROTECTED, PLAIN, PLAIN + 100, DAMAGED, FENCED, UNBOUNDED):
        for content_term in (0, 4, 5, 6):
            for first in range(3):
                read = Read(ledger_id, NO_TERM, content_term, first, 100, 1, MIB)
                found, expected = await together.call(read), await alone.call(read)
                assert (found.message, found.entries) == (expected.message, expected.entries)
        assert engine_of(one).term(ledger_id) == engine_of(other).term(ledger_id)
        assert engine_of(one).lock(ledger_id) == engine_of(other).lock(ledger_id)


async def test_one_answer_names_the_adds_that_are_durable_and_no_others(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client = await bookies.connect(bookie)
    assert (await client.call(ReadLac(FENCED, TERM_FINAL, -1, 0))).status is Status.OK
    disk.hold()
    futures = client.send_adds([plain(1), plain(FENCED), plain(2), plain(3)])
    await settle(client)
    assert not any(future.done() for future in futures)  # rule 3: the refusal waits for the fence, too
    disk.release()
    assert await statuses(futures) == [Status.OK, Status.INVALID_TERM, Status.OK, Status.OK]
    (named,) = [answer for answer in client.arrived if answer.op == Op.ADDS]
    assert len(named.request_ids) == 2  # and the first one by itself, in the record before the refusal


async def test_a_refusal_that_waits_for_nothing_leaves_before_the_blocks_beside_it_are_durable(
    bookies: Bookies,
) -> None:
    disk = bookies.disk()
    client = await bookies.connect(await bookies.start(disk=disk, limits=Limits(entry_bytes_max=100)))
    disk.hold()
    small, large = client.send_adds([plain(1), plain(2, 0, b"x" * 101)])
    assert (await asyncio.wait_for(large, 10)).status is Status.BAD_REQUEST
    assert not small.done()
    disk.release()
    assert (await small).status is Status.OK


async def test_the_blocks_of_a_frame_are_one_record_of_the_journal(client: RawClient, bookie: Bookie) -> None:
    counts = engine_of(bookie).counts
    before = counts.groups
    assert set(await statuses(client.send_adds([plain(n) for n in range(1, MANY_MAX + 1)]))) == {Status.OK}
    assert counts.groups == before + 1
    assert counts.group_records.highest >= MANY_MAX
    for ledger_id in range(1, MANY_MAX + 1):
        assert (await client.call(Read(ledger_id, NO_TERM, 0, 0, 0, 1, MIB))).entries == [(0, b"x")]


async def test_blocks_of_one_ledger_in_a_frame_keep_their_order(client: RawClient) -> None:
    twice = [plain(7, 0, b"old"), plain(8), plain(7, 0, b"new"), plain(7, 1, b"next")]
    assert set(await statuses(client.send_adds(twice))) == {Status.OK}
    assert (await client.call(Read(7, NO_TERM, 0, 0, 1, 1, MIB))).entries == [(0, b"new"), (1, b"next")]


async def test_a_higher_term_in_a_frame_shuts_out_what_is_behind_it_and_nothing_before(
    client: RawClient, bookie: Bookie
) -> None:
    def under(term: int, first: int) -> Given:
        return Add(7, term, 0), None, block(7, first, [b"x"])

    found = await outcomes(client.send_adds([under(0, 0), under(3, 1), plain(8), under(2, 2), under(3, 2)]))
    assert found == [(Status.OK, 0)] * 3 + [(Status.INVALID_TERM, 3), (Status.OK, 0)]
    assert engine_of(bookie).term(8) == 0
    assert (await client.call(Read(7, NO_TERM, 0, 0, 9, 1, MIB))).entries == [(n, b"x") for n in range(3)]


async def test_received_and_durable_are_told_apart_in_one_frame(bookies: Bookies) -> None:
    disk = bookies.disk()
    client = await bookies.connect(await bookies.start(disk=disk))
    disk.hold()
    deferred: Given = (Add(8, 0, DEFERRED), None, block(8, 0, [b"x"]))
    futures = client.send_adds([plain(7), deferred, plain(9)])
    assert (await asyncio.wait_for(futures[1], 10)).status is Status.OK
    force = client.send(Force(8, 0))
    await settle(client)
    assert [one.done() for one in (*futures, force)] == [False, True, False, False]
    disk.release()
    assert await statuses([*futures, force]) == [Status.OK] * 4


async def test_a_block_that_is_not_intact_ends_the_connection_and_what_is_behind_it(
    bookies: Bookies, client: RawClient
) -> None:
    adds = [plain(n) for n in (1, 2, 3)]
    broken = bytearray(adds[1][2])
    broken[-1] ^= 1
    first, second, third = client.send_adds([adds[0], (adds[1][0], None, bytes(broken)), adds[2]])
    assert (await asyncio.wait_for(second, 10)).status is Status.BAD_REQUEST
    await client.gone()
    assert first.exception() is not None  # accepted, and its answer could not be delivered
    assert third.exception() is not None
    another = await bookies.connect(running(bookies))
    found = [await another.call(Read(n, NO_TERM, 0, 0, 0, 1, MIB)) for n in (1, 2, 3)]
    assert [one.entries for one in found] == [[(0, b"x")], [], []]


def running(bookies: Bookies) -> Bookie:
    return bookies._running[0][0]


async def test_a_block_of_another_ledger_than_its_row_ends_the_connection(client: RawClient) -> None:
    wrong = (Add(8, 0, 0), None, block(7, 0, [b"x"]))
    assert (await asyncio.wait_for(client.send_adds([wrong])[0], 10)).status is Status.BAD_REQUEST
    await client.gone()


@pytest.mark.parametrize("lie", ["count", "size", "token", "flags", "cut"])
async def test_rows_that_lie_end_the_connection_and_nothing_is_stored(
    bookies: Bookies, client: RawClient, lie: str
) -> None:
    parts = encode_adds(1, [plain(1), plain(2)])
    body = bytearray(b"".join(parts[1:]))
    count = 2
    if lie == "count":
        count = 3
    elif lie == "size":  # the first block reaches into the second
        struct.pack_into("<I", body, 16, len(parts[3]) + 8)
        struct.pack_into("<I", body, ADD_ROW.size + 16, len(parts[4]))
    elif lie == "token":
        struct.pack_into("<H", body, 22, 32)
    elif lie == "flags":
        struct.pack_into("<H", body, 20, 8)
    else:
        del body[-1]
    client.send_bytes(encode_frame(encode_request(Adds(count), 1), len(body)) + body)
    await client.gone()
    other = await bookies.connect(running(bookies))
    for ledger_id in (1, 2):
        assert (await other.call(Read(ledger_id, NO_TERM, 0, 0, 0, 1, MIB))).entries == []


@pytest.mark.parametrize("version", [3, 4])
async def test_a_connection_of_an_older_version_has_no_frames_of_many(
    bookies: Bookies, bookie: Bookie, version: int
) -> None:
    for frame in (
        b"".join(encode_adds(7, [plain(1), plain(2)])),
        encode_write_lacs(7, [(WriteLac(1, 0, lac_statement(1, 0)), None)]),
    ):
        older = await bookies.connect(bookie, greet=False)
        assert (await older.call(hello(version_max=version))).status is Status.OK
        assert (await older.add(7, 0, [b"x"])).status is Status.OK
        older.send_bytes(frame)
        await older.gone()


async def test_a_token_beside_the_rows_is_refused(client: RawClient) -> None:
    parts = encode_adds(7, [plain(1)])
    header = encode_request(Adds(1), 7, TOKEN)
    client.send_bytes(encode_frame(header, sum(map(len, parts[1:]))) + b"".join(parts[1:]))
    await client.gone()


async def test_a_frame_waits_for_the_metadata_store_at_one_ledger_and_then_goes_on(bookies: Bookies) -> None:
    await bookies.protect(PROTECTED)
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    locked = (Add(PROTECTED, 0, 0), TOKEN, block(PROTECTED, 0, [b"p"]))
    forged = (Add(PROTECTED, 0, 0), OTHER, block(PROTECTED, 0, [b"q"]))
    unknown = (Add(PLAIN, 0, 0), TOKEN, block(PLAIN, 1, [b"q"]))
    futures = client.send_adds(
        [plain(1), locked, plain(2), forged, unknown, plain(PLAIN), plain(NOT_GIVEN_OUT), plain(3)]
    )
    last = client.send(Add(PLAIN, 0, 0), block(PLAIN, 1, [b"x"]))
    bad, ok = Status.UNAUTHORIZED, Status.OK
    assert await statuses([*futures, last]) == [ok, ok, ok, bad, bad, ok, Status.ID_TAKEN, ok, ok]
    assert (await client.call(Read(PROTECTED, NO_TERM, 0, 0, 0, 1, MIB))).entries == [(0, b"p")]


async def test_what_a_frame_holds_counts_until_it_is_durable_and_is_given_back(bookies: Bookies) -> None:
    disk = bookies.disk()
    limits = Limits(connection_bytes_pending_max=MIB)
    bookie = await bookies.start(disk=disk, limits=limits)
    client = await bookies.connect(bookie)
    assert (await client.add(1, 0, [b"a writer"])).status is Status.OK
    disk.hold()
    frames = [client.send_adds([plain(n, 1, bytes(300_000)) for n in (1, 2, 3)]) for _ in range(3)]
    behind = client.send(Ping())
    other = await bookies.connect(bookie)
    (connection,) = [one for one in bookie._connections if one.is_writer]
    async with asyncio.timeout(10):
        while not connection._is_blocked:
            await settle(other)
    assert MIB <= connection._bytes_pending < 3 * MIB
    assert not behind.done()
    disk.release()
    for futures in frames:
        assert set(await statuses(futures)) == {Status.OK}
    assert (await behind).status is Status.OK
    assert connection._bytes_pending == bookie._backpressure.adds.used == 0


@pytest.mark.pure
async def test_an_accepted_block_does_not_keep_the_refused_ones_of_its_frame_in_memory(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await bookies.start(limits=Limits(entry_bytes_max=100_000))
    client = await bookies.connect(bookie)
    kept: list[int] = []
    engine = engine_of(bookie)
    append = engine.append_blocks

    def note(blocks: list[Block], body: bytes | memoryview, done: object) -> None:
        kept.extend(len(memoryview(one.view.obj)) for one in blocks)
        append(blocks, body, done)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "append_blocks", note)
    adds = [plain(1), plain(2, 0, bytes(200_000)), plain(3)]
    assert await statuses(client.send_adds(adds)) == [Status.OK, Status.BAD_REQUEST, Status.OK]
    assert kept == [sum(len(adds[n][2]) for n in (0, 2))] * 2
    for ledger_id in (1, 3):
        assert (await client.call(Read(ledger_id, NO_TERM, 0, 0, 0, 1, MIB))).entries == [(0, b"x")]


@pytest.mark.pure
@pytest.mark.parametrize("flags", [0, RECOVERY])
async def test_an_accepted_block_keeps_no_more_than_a_few_times_its_size_of_a_receive_buffer(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    bookie = await bookies.start(limits=Limits(entry_bytes_max=100_000))
    client = await bookies.connect(bookie)
    kept: list[float] = []
    engine = engine_of(bookie)
    one, many = engine.append_block, engine.append_blocks

    def note(found: Block, *args: Any, **options: Any) -> None:
        kept.append(len(memoryview(found.view.obj)) / found.total_bytes)
        one(found, *args, **options)

    def note_all(found: list[Block], *args: Any) -> None:
        kept.append(len(memoryview(found[0].view.obj)) / sum(block.total_bytes for block in found))
        many(found, *args)

    monkeypatch.setattr(engine, "append_block", note)
    monkeypatch.setattr(engine, "append_blocks", note_all)
    # Many frames without a pause: the bookie's receive buffers grow to several times the size of a frame.
    adds = [(Add(1, 0, flags), None, block(1, 0, [bytes(90_000)])), plain(2, 0, bytes(600_000))]
    frames = [client.send_adds(adds) for _ in range(30)]
    for futures in frames:
        assert await statuses(futures) == [Status.OK, Status.BAD_REQUEST]
    assert len(kept) == len(frames)
    assert max(kept) <= 8.1


@pytest.mark.pure
async def test_a_block_that_waited_for_the_metadata_store_keeps_no_frame_in_memory(
    bookies: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bookies.protect(PROTECTED)
    bookie = await bookies.start()
    client = await bookies.connect(bookie)
    kept: list[int] = []
    engine = engine_of(bookie)
    append = engine.append_block

    def note(found: Block, *args: Any, **options: Any) -> None:
        kept.append(len(memoryview(found.view.obj)))
        append(found, *args, **options)

    monkeypatch.setattr(engine, "append_block", note)
    small = block(PROTECTED, 0, [b"p"])
    adds = [(Add(PROTECTED, 0, 0), TOKEN, small), plain(2, 0, bytes(MIB))]
    assert await statuses(client.send_adds(adds)) == [Status.OK, Status.OK]
    assert kept == [len(small)]


async def test_write_lacs_are_judged_each_and_acknowledged_together(bookies: Bookies) -> None:
    disk = bookies.disk()
    bookie = await bookies.start(disk=disk)
    client = await prepare_lacs(bookies, bookie)
    disk.hold()
    futures = client.send_write_lacs(
        [
            (WriteLac(1, 0, lac_statement(1, 4)), None),
            (WriteLac(FENCED, 0, lac_statement(FENCED, 4)), None),
            (WriteLac(PROTECTED, 0, lac_statement(PROTECTED, 4)), None),
            (WriteLac(2, 3, lac_statement(2, 4, content_term=4)), None),
            (WriteLac(PROTECTED, 0, lac_statement(PROTECTED, 5)), TOKEN),
            (WriteLac(3, 2, lac_statement(3, 6, content_term=1)), None),
        ]
    )
    await settle(client)
    assert [one.done() for one in futures] == [False, False, True, True, False, False]
    disk.release()
    bad = Status.BAD_REQUEST
    expected = [Status.OK, Status.INVALID_TERM, Status.UNAUTHORIZED, bad, Status.OK, Status.OK]
    assert await statuses(futures) == expected
    (named,) = [answer for answer in client.arrived if answer.op == Op.WRITE_LACS]
    assert len(named.request_ids) == 3
    for ledger_id, lac in ((1, 4), (PROTECTED, 5), (3, 6)):
        answer = (await client.call(ReadLac(ledger_id, NO_TERM, -1, 0))).message
        assert isinstance(answer, ReadLacAnswer)
        assert answer.statement is not None
        assert answer.statement.lac == lac
    assert engine_of(bookie).term(3) == 2


async def prepare_lacs(bookies: Bookies, bookie: Bookie) -> RawClient:
    await bookies.protect(PROTECTED)
    client = await bookies.connect(bookie)
    assert (
        await client.call(Add(PROTECTED, 0, 0), block(PROTECTED, 0, [b"p"]), auth=TOKEN)
    ).status is Status.OK
    assert (await client.call(ReadLac(FENCED, TERM_FINAL, -1, 0))).status is Status.OK
    return client


async def test_a_statement_that_is_not_intact_ends_the_connection(
    bookies: Bookies, client: RawClient
) -> None:
    wrong = lac_statement(2, 4)._replace(lac=5)
    futures = client.send_write_lacs(
        [
            (WriteLac(1, 0, lac_statement(1, 4)), None),
            (WriteLac(2, 0, wrong), None),
            (WriteLac(3, 0, lac_statement(3, 4)), None),
        ]
    )
    assert (await asyncio.wait_for(futures[1], 10)).status is Status.BAD_REQUEST
    await client.gone()
    other = await bookies.connect(running(bookies))
    answer = (await other.call(ReadLac(3, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    assert answer.statement is None


@pytest.mark.parametrize("size", [1, 33, 5_000, 60_000])
async def test_a_statement_with_a_code_of_another_length_is_never_stated_to_a_reader(
    bookies: Bookies, client: RawClient, size: int
) -> None:
    statement = lac_statement(1, 4)._replace(mac=b"m" * size)
    (future,) = client.send_write_lacs([(WriteLac(1, 0, statement), None)])
    assert (await asyncio.wait_for(future, 10)).status is Status.BAD_REQUEST
    await client.gone()
    other = await bookies.connect(running(bookies))
    answer = (await other.call(ReadLac(1, NO_TERM, -1, 0))).message
    assert isinstance(answer, ReadLacAnswer)
    assert answer.statement is None
