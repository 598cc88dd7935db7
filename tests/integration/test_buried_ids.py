"""Bookies with a tombstone of a ledger which exists: only the metadata store knows what is deleted.

Anybody who reaches a bookie can have it write a tombstone of an id that was given out and not used yet
(docs/PROTOCOL.md, 14). A client that makes a ledger asks the bookies that it has chosen. In these tests no
bookie answers that question, as if none had answered in time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Delete, ReadLac, Status
from client_aio import LedgerState
from client_aio.ledger import create, recovery
from metadata.access.bookies import SetBack, SetBacks
from metadata.errors import MetadataUnavailableError, Outcome
from metadata.ids import NO_ENTRY, TERM_FINAL, ledger_key
from tests.support.cluster import Cluster
from tests.support.rawclient import RawClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WAIT_S = 30


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as cluster, asyncio.timeout(WAIT_S):
        yield cluster


@pytest.fixture(autouse=True)
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody_answers(*_: object) -> None:
        return None

    monkeypatch.setattr(create, "_refusal", nobody_answers)


async def draw_ids(client: client_aio.Client) -> None:
    """Make ledger 0, and so draw the ids behind it."""
    async with client.create_ledger() as ledger:
        assert ledger.ledger_id == 0


async def bury(cluster: Cluster, bookie_id: str, *ledger_ids: int) -> None:
    raw = await RawClient.connect(cluster[bookie_id].addresses[0])
    for ledger_id in ledger_ids:
        assert (await raw.call(Delete(ledger_id))).status is Status.OK
    await raw.close()


async def test_a_writer_goes_on_where_one_bookie_has_buried_its_ledger(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        async with client.create_ledger() as ledger:
            assert ledger.ledger_id == 1
            assert await ledger.add_entries([b"0", b"1"]) == (0, 1)
        reader = await client.open_ledger(1)
        assert [entry.data async for entry in reader.read(0, 1)] == [b"0", b"1"]


async def test_a_recovery_closes_a_ledger_that_one_bookie_has_buried(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        ledger = await client.create_ledger()
        assert await ledger.add_entry(b"0") == 0
        await ledger.abort()
        closed = await client.open_ledger(1, recover=True)
        assert [entry.data async for entry in closed.read(0, 0)] == [b"0"]
        assert (await client.ledger_metadata(1)).state is LedgerState.CLOSED


async def test_a_recovery_that_cannot_write_back_says_so_and_not_that_there_is_no_ledger(
    cluster: Cluster,
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        ledger = await client.create_ledger(ack_quorum=3)
        with pytest.raises(client_aio.NotEnoughBookiesError, match="b1"):
            await ledger.add_entry(b"0")
        await ledger.abort()
        with pytest.raises(client_aio.LedgerRecoveryError, match="b1"):
            await client.open_ledger(1, recover=True)


async def test_no_log_goes_on_behind_a_ledger_that_is_not_closed(cluster: Cluster) -> None:
    """At most the last two ledgers listed are not CLOSED, whatever a bookie says of them."""
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        log = await client.open_log("a")
        assert log.ledger_id == 1
        await log.append(b"x")
        await log.abort()
        for data in (b"y", b"z"):
            async with client.open_log("a") as log:
                await log.append(data)
        rows = (await client.log_metadata("a")).rows
        states = [(await client.ledger_metadata(row.ledger_id)).state for row in rows]
        assert states == [LedgerState.CLOSED] * 3
        assert [record.data async for record in client.read_log("a")] == [b"x", b"y", b"z"]


async def test_a_takeover_of_a_ledger_that_one_bookie_has_buried_comes_to_an_end(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1, 2, 3)
        strict = await client.open_unbounded_ledger("strict", ack_quorum=3, append_timeout_s=1)
        with pytest.raises(client_aio.OperationTimeoutError):
            await strict.add_entry(b"x")  # heals, and cannot
        await strict.abort()
        with pytest.raises(client_aio.LedgerRecoveryError, match="b1"):
            await client.open_unbounded_ledger("strict", ack_quorum=3)
        async with client.open_unbounded_ledger("lenient") as ledger:
            await ledger.add_entry(b"0")
        async with client.open_unbounded_ledger("lenient") as ledger:
            await ledger.add_entry(b"1")
            assert ledger.term == 2
        entries = client.read_unbounded_ledger("lenient", follow=False)
        assert [entry.data async for entry in entries] == [b"0", b"1"]


async def test_the_writer_of_a_ledger_that_is_really_gone_hears_of_it(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client, client_aio.connect(cluster.uri) as other:
        ledger = await client.create_ledger()
        await ledger.add_entry(b"0")
        await other.delete_ledger(ledger.ledger_id)
        with pytest.raises(client_aio.NoSuchLedgerError):
            await ledger.add_entry(b"1")
        assert client.quarantined_bookies == []  # they have done nothing wrong


async def fence(cluster: Cluster, ledger_id: int, *bookie_ids: str) -> None:
    for bookie_id in bookie_ids:
        async with await RawClient.connect(cluster[bookie_id].addresses[0]) as raw:
            assert (await raw.call(ReadLac(ledger_id, TERM_FINAL, NO_ENTRY, 0))).status is Status.OK


@pytest.mark.parametrize("tombstoned", [(), ("b1", "b3")])
async def test_the_writer_hears_that_its_ledger_is_gone_though_bookies_are_only_fenced_yet(
    cluster: Cluster, tombstoned: tuple[str, ...]
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(ack_quorum=3)
        await ledger.add_entry(b"0")
        await client._context.ledgers.delete(ledger.ledger_id, None)
        await fence(cluster, ledger.ledger_id, "b1", "b2", "b3")
        for bookie_id in tombstoned:
            await bury(cluster, bookie_id, ledger.ledger_id)
        adds = [ledger.add_entry(b"1"), ledger.add_entry(b"2")]
        for add in adds:
            with pytest.raises(client_aio.NoSuchLedgerError, match=r"deleted|no ledger") as raised:
                await add
            assert raised.value.outcome is Outcome.UNKNOWN


async def test_a_writer_whose_ledger_is_there_hears_that_it_is_fenced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        for is_away in (False, True):
            ledger = await client.create_ledger()
            await ledger.add_entry(b"0")
            await fence(cluster, ledger.ledger_id, "b1", "b2", "b3")
            if is_away:

                async def away(ledger_id: int, *, sync: bool = False) -> object:
                    raise MetadataUnavailableError("away")

                monkeypatch.setattr(client._context.ledgers, "read", away)
            with pytest.raises(client_aio.LedgerFencedError):
                await ledger.add_entry(b"1")
            assert ledger.is_closed


async def test_a_bookie_that_has_buried_a_ledger_gives_its_seat_to_another(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
    ):
        await draw_ids(client)
        await bury(cluster, "b1", 1, 2, 3, 4)
        for _ in range(4):
            async with client.create_ledger(ack_quorum=3) as ledger:
                await ledger.add_entry(b"0")
            assert "b1" not in (await client.ledger_metadata(ledger.ledger_id)).last_fragment.bookies
        assert client.quarantined_bookies == []  # of other ledgers it may well take entries


async def test_a_repair_does_without_a_bookie_that_has_buried_the_ledger(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=5) as cluster,
        client_aio.connect(cluster.uri) as client,
    ):
        await draw_ids(client)
        await bury(cluster, "b5", 1)
        # With all three, or a refusal of b5's that comes late would leave it in the ensemble.
        async with client.create_ledger(ack_quorum=3) as ledger:
            await ledger.add_entry(b"0")
        (fragment,) = (await client.ledger_metadata(1)).fragments
        lost = fragment.bookies[0]
        (spare,) = {"b1", "b2", "b3", "b4"} - set(fragment.bookies)
        with pytest.raises(client_aio.LedgerRepairError, match="b5"):
            await client.repair_ledger(1, replace=lost, by="b5")
        report = await client.repair_ledger(1, replace=lost)
        assert [each.replacement for each in report.fragments] == [spare]


async def test_a_roll_chooses_no_bookie_that_is_known_to_have_buried_the_ledger(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
    ):
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        async with client.open_unbounded_ledger("payments", ack_quorum=3) as ledger:
            assert ledger.ledger_id == 1
            is_known = False
            while not is_known:
                await ledger.roll()
                is_known = "b1" in ledger.metadata.last_fragment.bookies
                await ledger.add_entry(b"x")  # With all three, so that b1 is asked, and loses its seat.
            for _ in range(10):  # Three of four bookies each: b1 would be among them.
                await ledger.roll()
                assert "b1" not in ledger.metadata.last_fragment.bookies
                await ledger.add_entry(b"x")


async def test_a_recovery_ends_though_nobody_can_be_asked_whether_the_ledger_exists(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"replacement_retry_s": 0.1, "ensemble_change_timeout_s": 1.0}
    async with client_aio.connect(cluster.uri, **limits) as client:
        await draw_ids(client)
        await bury(cluster, "b1", 1)
        ledger = await client.create_ledger(ack_quorum=3)
        with pytest.raises(client_aio.NotEnoughBookiesError):
            await ledger.add_entry(b"0")
        await ledger.abort()
        ledgers = client._context.ledgers
        read = ledgers.read

        async def away(ledger_id: int, *, sync: bool = False) -> object:
            if not sync:
                return await read(ledger_id)
            await asyncio.sleep(0.3)  # longer than a bookie counts as just seated
            raise MetadataUnavailableError("away")

        async def is_in_reach(*_: object) -> None:
            """Pass: b1 might bury the ledger right behind the check."""

        monkeypatch.setattr(ledgers, "read", away)
        monkeypatch.setattr(recovery, "_out_of_reach", is_in_reach)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(client_aio.LedgerRecoveryError, match="whether it exists cannot be asked"):
                await client.open_ledger(1, recover=True)


# --- ids that every bookie has buried ---


async def bury_everywhere(cluster: Cluster, *ledger_ids: int) -> None:
    for bookie_id in cluster.bookies:
        await bury(cluster, bookie_id, *ledger_ids)


async def bury_what_is_there(cluster: Cluster, client: client_aio.Client, ledger_id: int, *but: str) -> None:
    """Let bookies bury a ledger as if the metadata had been set back to a copy without it, and came back."""
    store, key = client._context.ledgers.store, ledger_key(ledger_id)
    value = (await store.read(key)).value
    await store.delete(key)
    for bookie_id in cluster.bookies.keys() - set(but):
        await bury(cluster, bookie_id, ledger_id)
    await store.create(key, value)


async def make_stuck_log(client: client_aio.Client) -> int:
    """Make a log whose writer died behind the creation of its first ledger; return the ledger's id."""
    log = await client.open_log("orders")
    await log.abort()
    return log.ledger_id


async def test_a_log_goes_on_behind_ledgers_that_all_bookies_have_buried(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury_everywhere(cluster, 1, 2, 3)
        assert await make_stuck_log(client) == 1
        for data in (b"x", b"y"):  # the first one draws the other buried ids, too
            async with client.open_log("orders") as log:
                await log.append(data)
        rows = (await client.log_metadata("orders")).rows
        buried = [await client.ledger_metadata(row.ledger_id) for row in rows[:3]]
        assert [(each.ledger_id, each.state, each.last_entry) for each in buried] == [
            (ledger_id, LedgerState.CLOSED, NO_ENTRY) for ledger_id in (1, 2, 3)
        ]
        assert [record.data async for record in client.read_log("orders")] == [b"x", b"y"]


@pytest.mark.parametrize("create", [True, False])
async def test_an_unbounded_ledger_whose_id_all_bookies_have_buried_gets_another_one(
    cluster: Cluster, create: bool
) -> None:
    sizes = {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2}
    async with client_aio.connect(cluster.uri) as client:
        await draw_ids(client)
        await bury_everywhere(cluster, 1)
        custom = {"app": b"demo"}
        assert await client.create_unbounded_ledger("payments", custom_metadata=custom, **sizes) == 1
        with pytest.raises(client_aio.LedgerRecoveryError, match="stay missing"):
            await client.open_unbounded_ledger(1)  # by its id there is no other one
        for data in (b"0", b"1"):
            async with client.open_unbounded_ledger("payments", create=create) as ledger:
                assert ledger.ledger_id > 1
                assert (ledger.metadata.ensemble_size, ledger.metadata.custom) == (2, custom)
                await ledger.add_entry(data)
        entries = client.read_unbounded_ledger("payments", follow=False)
        assert [entry.data async for entry in entries] == [b"0", b"1"]
        assert [one async for one in client.list_ledgers()] == [0, ledger.ledger_id]


async def test_an_unbounded_ledger_that_had_a_writer_is_not_replaced_where_its_bookies_have_buried_it(
    cluster: Cluster,
) -> None:
    """What it acknowledged is gone. Whoever wants the name again deletes the ledger."""
    async with client_aio.connect(cluster.uri) as client:
        async with client.open_unbounded_ledger("payments") as ledger:
            await ledger.add_entry(b"0")
        await bury_what_is_there(cluster, client, ledger.ledger_id)
        with pytest.raises(client_aio.LedgerRecoveryError, match="stay missing"):
            await client.open_unbounded_ledger("payments")
        assert (await client.ledger_metadata(ledger.ledger_id)).last_fragment.content_term == 1
        await client.delete_ledger(ledger.ledger_id)
        async with client.open_unbounded_ledger("payments") as ledger:
            assert await ledger.add_entry(b"0") == 0


async def test_a_recovery_closes_what_all_bookies_have_buried_and_says_so(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        await ledger.add_entry(b"0")
        await ledger.abort()
        await bury_what_is_there(cluster, client, ledger.ledger_id)
        closed = await client.open_ledger(ledger.ledger_id, recover=True)
        assert closed.last_add_confirmed == NO_ENTRY
        assert "its bookies buried it" in caplog.text


@pytest.mark.parametrize("is_down", [False, True])
async def test_a_ledger_that_only_some_bookies_have_buried_is_closed_by_accepting_the_loss(
    cluster: Cluster, is_down: bool
) -> None:
    """The last bookie may hold, or holds, what was acknowledged: only an operator gives that up."""
    async with client_aio.connect(cluster.uri, connect_timeout_s=1) as client:
        log = await client.open_log("orders")
        await log.append(b"x")
        await log.abort()
        await bury_what_is_there(cluster, client, log.ledger_id, "b3")
        if is_down:
            await cluster["b3"].kill()
        with pytest.raises(client_aio.LedgerRecoveryError, match="accept_loss"):
            await client.open_log("orders")
        assert not (await client.ledger_metadata(log.ledger_id)).is_closed
        closed = await client.open_ledger(log.ledger_id, recover=True, accept_loss=True)
        given_up = closed.metadata.given_up
        assert given_up is not None
        assert given_up.bookies == (("b3",) if is_down else ())
        assert closed.last_add_confirmed == (NO_ENTRY if is_down else 0)
        if is_down:
            await cluster["b3"].start()
        async with client.open_log("orders") as log:
            await log.append(b"y")
        records = client.read_log("orders", on_gap="skip")
        found = [one.data async for one in records if isinstance(one, client_aio.LogRecord)]
        assert found == ([b"y"] if is_down else [b"x", b"y"])


@pytest.mark.parametrize("is_held", [False, True])
async def test_after_a_set_back_no_other_bookie_may_hold_anything_of_a_buried_ledger(
    tmp_path: Path, is_held: bool
) -> None:
    """The writer may have replaced the bookies that the older metadata name."""
    async with (
        asyncio.timeout(WAIT_S),
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
    ):
        log = await client.open_log("orders")
        await log.abort()
        (other,) = (
            cluster.bookies.keys() - (await client.ledger_metadata(log.ledger_id)).last_fragment.bookies
        )
        await bury_what_is_there(cluster, client, log.ledger_id, other)
        if is_held:
            async with await RawClient.connect(cluster[other].addresses[0]) as raw:
                assert (await raw.add(log.ledger_id, 0, [b"acknowledged"])).status is Status.OK
        event = SetBack("an event", "b1", 0, log.ledger_id + 100, [])
        store = client._context.ledgers.store
        await (await SetBacks.read(store)).replace(store, [event])
        if is_held:
            with pytest.raises(client_aio.LedgerRecoveryError, match="accept_loss"):
                await client.open_log("orders")
            assert not (await client.ledger_metadata(log.ledger_id)).is_closed
            return
        async with client.open_log("orders") as log:
            await log.append(b"x")
        assert [record.data async for record in client.read_log("orders")] == [b"x"]
