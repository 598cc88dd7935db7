"""Terms and the order of answers: rules 3 and 7, with group commits that wait for the test."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from bookie_aio.wire.messages import (
    NO_TERM,
    AddFlag,
    Failure,
    Force,
    ListEntries,
    Message,
    Ping,
    Read,
    ReadAnswer,
    ReadLac,
    Status,
    Stop,
    WriteLac,
)
from metadata.ids import TERM_FINAL
from tests.support.rawclient import Answer, RawClient, lac_statement
from tests.support.storage import copy_as_a_crash_leaves_it

if TYPE_CHECKING:
    from bookie_aio.server.bookie import Bookie
    from tests.bookie_aio.server.conftest import Bookies
    from tests.support.helddisk import HeldDisk

MIB = 1024 * 1024


@pytest.fixture
def disk(bookies: Bookies) -> HeldDisk:
    return bookies.disk()


@pytest.fixture
async def bookie(bookies: Bookies, disk: HeldDisk) -> Bookie:
    return await bookies.start(disk=disk)


def recovery_read(first: int, last: int, term: int = TERM_FINAL) -> Read:
    return Read(7, term, 0, first, last, 1, MIB)


def plain_read(first: int, last: int) -> Read:
    return Read(7, NO_TERM, 0, first, last, 1, MIB)


def fencing_lac_read(term: int = TERM_FINAL) -> ReadLac:
    return ReadLac(7, term, -1, 0)


async def settle(client: RawClient) -> None:
    """Return once the bookie has handled all frames sent so far, and had turns to answer them."""
    for _ in range(3):
        assert (await client.call(Ping())).status is Status.OK


def refused_with(answer: Answer, term: int) -> bool:
    return isinstance(answer.message, Failure) and (answer.message.status, answer.message.value) == (
        Status.INVALID_TERM,
        term,
    )


@pytest.mark.parametrize("fence", [recovery_read(0, 0), fencing_lac_read()], ids=["READ", "READ_LAC"])
async def test_a_fence_shuts_the_writer_out_and_lets_recovery_go_on(
    client: RawClient, fence: Message
) -> None:
    assert (await client.add(7, 0, [b"a"])).status is Status.OK
    assert (await client.call(fence)).status is Status.OK
    assert refused_with(await client.add(7, 1, [b"b"]), TERM_FINAL)
    assert refused_with(await client.call(WriteLac(7, 0, lac_statement(7, 0))), TERM_FINAL)
    again = await client.add(7, 0, [b"a"], term=TERM_FINAL, flags=AddFlag.RECOVERY)
    assert again.status is Status.OK
    assert (await client.add(8, 0, [b"another ledger"])).status is Status.OK


async def test_a_fence_of_a_ledger_never_heard_of_is_kept(client: RawClient) -> None:
    assert (await client.call(fencing_lac_read())).status is Status.OK
    assert refused_with(await client.add(7, 0, [b"a"]), TERM_FINAL)


async def test_a_fencing_request_below_the_term_is_refused(client: RawClient) -> None:
    assert (await client.call(fencing_lac_read(5))).status is Status.OK
    assert refused_with(await client.call(fencing_lac_read(4)), 5)
    assert refused_with(await client.call(recovery_read(0, 0, 4)), 5)
    assert (await client.call(recovery_read(0, 0, 5))).status is Status.OK
    assert (await client.call(plain_read(0, 0))).status is Status.OK


async def test_an_add_with_a_higher_term_raises_it(client: RawClient) -> None:
    assert (await client.add(7, 0, [b"a"], term=3)).status is Status.OK
    assert refused_with(await client.add(7, 1, [b"b"], term=2), 3)


async def test_an_add_accepted_before_the_fence_is_in_the_recovery_reads_answer(
    client: RawClient, disk: HeldDisk
) -> None:
    # Rule 3. Otherwise: the read finds nothing and says so, and then the group acknowledges the add.
    disk.hold()
    add = client.add(7, 0, [b"a"])
    read = client.send(recovery_read(0, 0))
    await settle(client)
    assert not add.done()
    assert not read.done()
    disk.release()
    assert (await add).status is Status.OK
    answer = await read
    assert answer.entries == [(0, b"a")]


async def test_an_add_behind_the_fence_is_refused_though_both_came_in_one_turn(
    client: RawClient, disk: HeldDisk
) -> None:
    # Rule 7: the fence holds from the moment it is accepted, not from when it is durable.
    disk.hold()
    before = client.add(7, 0, [b"before"])
    read = client.send(recovery_read(0, 1))
    behind = client.add(7, 1, [b"behind"])
    await settle(client)
    disk.release()
    assert (await before).status is Status.OK
    assert refused_with(await behind, TERM_FINAL)
    answer = await read
    assert answer.entries == [(0, b"before")]
    assert isinstance(answer.message, ReadAnswer)
    assert (answer.message.stop, answer.message.stop_entry) == (Stop.NO_SUCH_ENTRY, 1)


@pytest.mark.parametrize("fence", [recovery_read(0, 0), fencing_lac_read()], ids=["READ", "READ_LAC"])
async def test_a_fence_is_durable_before_its_answer_leaves_also_when_repeated(
    bookies: Bookies, bookie: Bookie, client: RawClient, disk: HeldDisk, fence: Message
) -> None:
    other = await bookies.connect(bookie)
    disk.hold()
    first = client.send(fence)
    await settle(client)
    repeated = other.send(fence)
    await settle(other)
    assert not first.done()
    assert not repeated.done()
    disk.release()
    assert (await first).status is Status.OK
    assert (await repeated).status is Status.OK


async def test_a_refusal_waits_until_the_term_it_names_is_durable(client: RawClient, disk: HeldDisk) -> None:
    disk.hold()
    fence = client.send(fencing_lac_read())
    add = client.add(7, 0, [b"a"])
    lac = client.send(WriteLac(7, 0, lac_statement(7, -1)))
    lower = client.send(fencing_lac_read(5))
    await settle(client)
    assert not any(waiting.done() for waiting in (fence, add, lac, lower))
    disk.release()
    assert (await fence).status is Status.OK
    for refused in (add, lac, lower):
        assert refused_with(await refused, TERM_FINAL)


async def test_a_duplicate_add_waits_for_its_own_copy(
    bookies: Bookies, bookie: Bookie, client: RawClient, disk: HeldDisk
) -> None:
    # Rule 3: acknowledged as "already there", a copy that sits in a group in flight is lost by a power cut.
    other = await bookies.connect(bookie)
    disk.hold()
    first = client.add(7, 0, [b"a"])
    await settle(client)
    again = other.add(7, 0, [b"a"])
    await settle(other)
    assert not first.done()
    assert not again.done()
    disk.release()
    assert (await first).status is Status.OK
    assert (await again).status is Status.OK


async def test_a_miss_beside_an_add_in_flight_waits_and_looks_again(
    bookies: Bookies, bookie: Bookie, client: RawClient, disk: HeldDisk
) -> None:
    other = await bookies.connect(bookie)
    disk.hold()
    add = client.add(7, 0, [b"a"])
    await settle(client)
    miss = other.send(plain_read(0, 0))
    listing = other.send(ListEntries(7, 0))
    elsewhere = await other.call(Read(8, NO_TERM, 0, 0, 0, 1, MIB))
    assert isinstance(elsewhere.message, ReadAnswer)
    assert elsewhere.message.stop == Stop.NO_SUCH_ENTRY
    await settle(other)
    assert not miss.done()
    assert not listing.done()
    disk.release()
    assert (await add).status is Status.OK
    assert (await miss).entries == [(0, b"a")]
    assert len((await listing).body) == 24


async def test_a_hit_does_not_wait_for_an_add_in_flight(client: RawClient, disk: HeldDisk) -> None:
    await client.add(7, 0, [b"a"])
    disk.hold()
    add = client.add(7, 1, [b"b"])
    assert (await client.call(plain_read(0, 0))).entries == [(0, b"a")]
    assert not add.done()
    disk.release()
    await add


async def test_each_add_of_a_group_gets_an_acknowledgement_of_its_own(
    client: RawClient, disk: HeldDisk
) -> None:
    disk.hold()
    adds = [client.add(7, i, [b"%d" % i]) for i in range(50)]
    await settle(client)
    client.arrived.clear()
    disk.release()
    answers = await asyncio.gather(*adds)
    assert {answer.status for answer in answers} == {Status.OK}
    assert [answer.request_id for answer in client.arrived] == [answer.request_id for answer in answers]


async def test_fences_survive_a_clean_restart(bookies: Bookies, bookie: Bookie, client: RawClient) -> None:
    assert (await client.call(fencing_lac_read())).status is Status.OK
    assert (await client.call(recovery_read(0, 0, TERM_FINAL))).status is Status.OK
    await bookie.close()
    again = await bookies.connect(await bookies.start())
    assert refused_with(await again.add(7, 0, [b"a"]), TERM_FINAL)
    assert (await again.add(8, 0, [b"another ledger"])).status is Status.OK


async def test_what_was_answered_is_on_the_disk_as_it_is_at_that_moment(
    bookies: Bookies, bookie: Bookie, client: RawClient
) -> None:
    # The directory is copied while the bookie runs: what `kill -9` right after the answer would leave.
    assert (await client.add(7, 0, [b"a", b"b"])).status is Status.OK
    assert (await client.call(fencing_lac_read())).status is Status.OK
    copy_as_a_crash_leaves_it(bookies.folder / "b1", bookies.folder / "copy")
    await bookie.close()
    await bookies.take_for_newest("copy")
    again = await bookies.connect(await bookies.start(folder="copy"))
    assert refused_with(await again.add(7, 2, [b"c"]), TERM_FINAL)
    assert (await again.call(plain_read(0, 1))).entries == [(0, b"a"), (1, b"b")]


# --- deferred sync: received is not durable, and a force says when it is ---


async def test_a_deferred_add_is_answered_before_it_is_durable_and_a_force_after(
    client: RawClient, disk: HeldDisk
) -> None:
    disk.hold()
    assert (await client.add(7, 0, [b"a"], flags=AddFlag.DEFERRED_SYNC)).status is Status.OK
    force = client.send(Force(7, 0))
    await settle(client)
    assert not force.done()
    disk.release()
    assert (await force).status is Status.OK
    assert (await client.call(plain_read(0, 0))).entries == [(0, b"a")]


async def test_a_force_of_a_displaced_writer_is_refused(client: RawClient) -> None:
    assert (await client.add(7, 0, [b"a"], flags=AddFlag.DEFERRED_SYNC)).status is Status.OK
    assert (await client.call(fencing_lac_read())).status is Status.OK
    assert refused_with(await client.call(Force(7, 0)), TERM_FINAL)
    assert refused_with(await client.add(7, 1, [b"b"], flags=AddFlag.DEFERRED_SYNC), TERM_FINAL)


async def test_a_force_raises_no_term(client: RawClient) -> None:
    assert (await client.call(Force(7, 5))).status is Status.OK
    assert (await client.add(7, 0, [b"a"])).status is Status.OK


async def test_no_force_covers_an_add_that_was_received_and_lost(
    bookie: Bookie, client: RawClient, disk: HeldDisk
) -> None:
    # The disk fails under what was answered as received: the connection ends without an answer to the force.
    disk.hold()
    assert (await client.add(7, 0, [b"a"], flags=AddFlag.DEFERRED_SYNC)).status is Status.OK
    force = client.send(Force(7, 0))
    await settle(client)
    disk.is_failing = True
    disk.release()
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        assert (await force).status is not Status.OK
