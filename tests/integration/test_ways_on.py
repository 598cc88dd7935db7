"""Ways on after a loss, on real bookies: gaps of a log, closing with a loss, repair, owners."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import client_aio
import client_aio.sync
from bookie_aio.wire.messages import Op
from client_aio.bookies.connection import list_entries
from client_aio.core.log_chain import TAG
from client_aio.ledger import accept_loss, recovery_scope
from client_aio.ledger.recovery import recover_ledger
from client_aio.log.ownership import claim
from metadata.ids import ledger_key
from tests.support.cluster import Cluster
from tests.support.following import appended_until_followed
from tests.support.links import Links
from tests.support.replicas import lose, stored
from tests.support.unbounded import NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client_aio.bookies.connection import BookieConnection

WAIT_S = 60.0
IMPATIENT = {"connect_timeout_s": 1.0, "read_timeout_s": 2.0}


async def what_is_read(client: client_aio.Client, name: str) -> list[bytes | tuple[str, str | None]]:
    """Return the records of a log, and the first and last position of each gap."""
    found: list[bytes | tuple[str, str | None]] = []
    async for each in client.read_log(name, on_gap="skip"):
        if isinstance(each, client_aio.LogGap):
            found.append((str(each.first), None if each.last is None else str(each.last)))
        else:
            found.append(bytes(each.data))
    return found


async def closed_ledger(client: client_aio.Client, *records: bytes) -> int:
    """Make a ledger with some entries, and close it."""
    async with client.create_ledger() as ledger:
        await ledger.add_entries(records)
    return ledger.ledger_id


class TestGaps:
    async def test_a_ledger_that_was_deleted_by_force_is_a_gap(self, cluster: Cluster) -> None:
        async with client_aio.connect(cluster.uri) as client:
            for record in (b"one", b"two", b"three"):
                async with client.open_log("orders") as log:
                    await log.append(record)
            rows = (await client.log_metadata("orders")).rows
            with pytest.raises(client_aio.LedgerListedError, match="orders"):
                await client.delete_ledger(rows[1].ledger_id)
            await client.delete_ledger(rows[1].ledger_id, force=True)
            with pytest.raises(client_aio.NoSuchLedgerError):
                _ = [record async for record in client.read_log("orders")]
            assert await what_is_read(client, "orders") == [b"one", (f"{rows[1].id}:0", None), b"three"]

            async def follow() -> list[object]:
                seen: list[object] = []
                async with aclosing(client.read_log("orders", follow=True, on_gap="skip")) as records:
                    async for each in records:
                        seen.append("gap" if isinstance(each, client_aio.LogGap) else bytes(each.data))
                        if seen[-1] == b"four":
                            return seen
                return seen

            following = asyncio.create_task(follow())
            async with client.open_log("orders") as log:
                await log.append(b"four")
            seen = await asyncio.wait_for(following, WAIT_S)
            assert seen == [b"one", "gap", b"three", b"four"]

            def read() -> list[bytes]:
                with client_aio.sync.connect(cluster.uri) as blocking:
                    return [
                        b"gap" if isinstance(each, client_aio.LogGap) else bytes(each.data)
                        for each in blocking.read_log("orders", on_gap="skip")
                    ]

            assert await asyncio.to_thread(read) == [b"one", b"gap", b"three", b"four"]

    @pytest.mark.parametrize("is_reopened", [True, False])
    async def test_a_log_is_truncated_though_one_of_its_last_ledgers_was_deleted_by_force(
        self, cluster: Cluster, is_reopened: bool
    ) -> None:
        async with client_aio.connect(cluster.uri) as client:
            for record in (b"one", b"two"):
                async with client.open_log("orders") as log:
                    await log.append(record)
            first, missing = (await client.log_metadata("orders")).rows
            await client.delete_ledger(missing.ledger_id, force=True)
            if is_reopened:
                log = await client.open_log("orders")
                await cluster.heard(client, await log.append(b"three"))
            last = (await client.log_metadata("orders")).rows[-1]
            dropped = await client.truncate_log("orders", client_aio.Position(last.id, 0))
            assert dropped == ([first, missing] if is_reopened else [first])
            assert [row.id for row in (await client.log_metadata("orders")).rows] == [last.id]
            with pytest.raises(client_aio.NoSuchLedgerError):
                await client.ledger_metadata(first.ledger_id)
            if is_reopened:
                assert await what_is_read(client, "orders") == [b"three"]
                await log.append(b"four")
                await log.close()

    async def test_a_bookie_that_is_away_is_no_gap(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            async with client.open_log("orders", ensemble_size=1, write_quorum=1, ack_quorum=1) as log:
                await log.append(b"one")
            (away,) = (await client.ledger_metadata(log.ledger_id)).last_fragment.bookies
            await cluster[away].kill()
            with pytest.raises(client_aio.BookieUnavailableError):
                await what_is_read(client, "orders")
            await cluster[away].start()
            assert await what_is_read(client, "orders") == [b"one"]

    async def test_entries_that_no_bookie_has_are_a_gap_after_a_repair(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=7) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            shape = {"ensemble_size": 4, "write_quorum": 2, "ack_quorum": 2}
            async with client.open_log("orders", **shape) as log:
                for number in range(12):
                    await log.append(b"%d" % number)
            ledger_id = log.ledger_id
            fragment = (await client.ledger_metadata(ledger_id)).last_fragment
            lost = fragment.bookies[:2]  # entry n is on the seats n % 4 and (n + 1) % 4
            for name in lost:
                await cluster[name].kill()
            reports = [await client.repair_ledger(ledger_id, replace=name) for name in lost]
            # The first repair did not get entries 0, 4, 8 from the other bookie, and neither did the second.
            runs = [report.fragments[0].lost for report in reports]
            assert [[tuple(run) for run in each] for each in runs] == [[(0, 8, 4)], [(0, 8, 4)]]
            metadata = await client.ledger_metadata(ledger_id)
            assert {each.bookie for each in metadata.absent} == set(lost)
            found = await what_is_read(client, "orders")
            gaps = [(f"{ledger_id}:{n}", f"{ledger_id}:{n}") for n in (0, 4, 8)]
            assert [each for each in found if isinstance(each, tuple)] == gaps
            assert [each for each in found if isinstance(each, bytes)] == [
                b"%d" % number for number in range(12) if number % 4
            ]
            # The entries that exist have two copies again.
            copies = [
                await stored(client, name, ledger_id, range(12)) for name in metadata.last_fragment.bookies
            ]
            for number in (1, 2, 3):
                assert sum(number in each for each in copies) == 2
            # The former bookie has kept its copies. When it is back, they are copied, and nothing is absent.
            await cluster[lost[0]].start()
            for report in reports:
                new = report.fragments[0].replacement
                (fragment_report,) = (await client.repair_ledger(ledger_id, replace=new, by=new)).fragments
                assert not fragment_report.lost
            assert not (await client.ledger_metadata(ledger_id)).absent
            assert await what_is_read(client, "orders") == [b"%d" % number for number in range(12)]


class TestAcceptLoss:
    async def test_a_log_goes_on_behind_a_ledger_that_cannot_be_recovered(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=6) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            async with client.open_log("orders") as log:
                await log.append(b"one")
            log = await client.open_log("orders")
            futures = [log.append(b"two-%d" % number) for number in range(3)]
            await asyncio.gather(*futures)
            ledger_id = log.ledger_id
            lost = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[:2]
            await cluster.heard(client, log.last_add_confirmed or client_aio.Position(0, 0))
            for name in lost:
                await cluster[name].kill()
            await log.abort()
            with pytest.raises(client_aio.LedgerRecoveryError):
                await client.open_log("orders")
            with pytest.raises(client_aio.LedgerRecoveryError):
                await client.open_ledger(ledger_id, recover=True)
            async with client.open_ledger(ledger_id, recover=True, accept_loss=True) as reader:
                assert reader.is_closed
                assert reader.last_add_confirmed == 2
                assert reader.length == 15
                given_up = reader.metadata.given_up
            assert given_up is not None
            assert given_up.bookies == lost
            assert (given_up.lac, given_up.missing) == (2, 0)
            assert [record async for record in client.read_log("orders", "end")] == []
            async with client.open_log("orders") as log:
                async with aclosing(client.read_log("orders", "end", follow=True)) as following:
                    assert (await appended_until_followed(log, following)).data.startswith(b"followed")
                await log.append(b"three")
            with pytest.raises(client_aio.RecordsLostError) as caught:
                _ = [record async for record in client.read_log("orders")]
            assert caught.value.ledger_id == ledger_id
            found = await what_is_read(client, "orders")
            assert found[:5] == [b"one", b"two-0", b"two-1", b"two-2", (f"{ledger_id}:3", None)]
            assert found[-1] == b"three"

    async def test_a_ledger_that_can_be_recovered_gives_nothing_up(self, cluster: Cluster) -> None:
        async with client_aio.connect(cluster.uri) as client:
            ledger = await client.create_ledger()
            await ledger.add_entry(b"0")
            await ledger.abort()
            async with client.open_ledger(ledger.ledger_id, recover=True, accept_loss=True) as reader:
                assert reader.last_add_confirmed == 0
                assert reader.metadata.given_up is None
            with pytest.raises(client_aio.InvalidArgumentError, match="recover"):
                client.open_ledger(ledger.ledger_id, accept_loss=True)

    async def test_entries_that_can_be_read_are_kept_around_those_that_cannot(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=4) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            ledger = await client.create_ledger(ensemble_size=4, write_quorum=2, ack_quorum=2)
            for number in range(20):
                await ledger.add_entry(b"%02d" % number)
            lost = ledger.metadata.last_fragment.bookies[:2]
            for name in lost:
                await cluster[name].kill()
            await ledger.abort()
            async with client.open_ledger(ledger.ledger_id, recover=True, accept_loss=True) as reader:
                assert (reader.last_add_confirmed, reader.length) == (19, 40)
                assert reader.metadata.given_up is not None
                assert reader.metadata.given_up.missing == 5  # 0, 4, 8, 12, 16
                assert [bytes(each.data) async for each in reader.read(17, 19)] == [b"17", b"18", b"19"]

    @pytest.mark.parametrize("stays_away", [False, True])
    async def test_a_bookie_that_falls_silent_behind_its_list_is_asked_again_or_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays_away: bool
    ) -> None:
        async with (
            Cluster(tmp_path, bookies=3) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            ledger = await client.create_ledger(ensemble_size=3, write_quorum=1, ack_quorum=1)
            for number in range(9):
                await ledger.add_entry(b"%d" % number)
            lost, _, silent = ledger.metadata.last_fragment.bookies
            await cluster[lost].kill()
            await ledger.abort()
            fell_silent: list[str] = []

            async def list_then_fall_silent(connection: BookieConnection, *which: Any) -> tuple[Any, bool]:
                found = await list_entries(connection, *which)
                if connection.bookie_id == silent and not fell_silent:
                    fell_silent.append(silent)
                    if stays_away:
                        await cluster[silent].kill()
                    connection.close()
                return found

            monkeypatch.setattr(recovery_scope, "list_entries", list_then_fall_silent)
            async with client.open_ledger(ledger.ledger_id, recover=True, accept_loss=True) as reader:
                assert fell_silent
                given_up = reader.metadata.given_up
                assert given_up is not None
                assert given_up.bookies == ((lost, silent) if stays_away else (lost,))
                assert reader.last_add_confirmed == (7 if stays_away else 8)

    async def test_a_bookie_whose_connection_was_forgotten_on_the_way_is_not_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with (
            Cluster(tmp_path) as cluster,
            Links(cluster.uri) as links,
            links.connect("closer", **(IMPATIENT | {"ping_timeout_s": 0.5})) as client,
        ):
            ledger = await client.create_ledger()
            await ledger.add_entry(b"0")
            first, *lost = ledger.metadata.last_fragment.bookies
            for name in lost:
                await cluster[name].kill()
            await ledger.abort()

            async def fail_and_be_forgotten(*which: Any, **options: Any) -> NoReturn:
                with pytest.raises(client_aio.LedgerRecoveryError) as caught:
                    await recover_ledger(*which, **options)
                links["closer", first].forget()
                raise caught.value

            monkeypatch.setattr(accept_loss, "recover_ledger", fail_and_be_forgotten)
            async with client.open_ledger(ledger.ledger_id, recover=True, accept_loss=True) as reader:
                given_up = reader.metadata.given_up
                assert given_up is not None
                assert set(given_up.bookies) == set(lost)
                assert reader.last_add_confirmed == 0


class TestUnbounded:
    async def test_an_unbounded_ledger_that_cannot_be_taken_over_is_sealed_and_its_readers_are_told(
        self, tmp_path: Path
    ) -> None:
        async with (
            Cluster(tmp_path, bookies=5) as cluster,
            client_aio.connect(cluster.uri, **IMPATIENT) as client,
        ):
            ledger = await client.open_unbounded_ledger(NAME)
            assert await ledger.add_entries([b"0", b"1", b"2"]) == (0, 2)
            async with client.open_ledger(NAME) as reader:
                while await reader.read_last_add_confirmed() < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            following = client.read_unbounded_ledger(NAME)
            assert [(await anext(following)).data for _ in range(3)] == [b"0", b"1", b"2"]
            lost = ledger.metadata.last_fragment.bookies[:2]
            for name in lost:
                await cluster[name].kill()
            await ledger.abort()
            with pytest.raises(client_aio.LedgerRecoveryError):
                await client.open_unbounded_ledger(NAME)
            with pytest.raises(client_aio.InvalidArgumentError, match="accept_loss"):
                await client.open_ledger(NAME, recover=True)
            async with client.open_ledger(NAME, recover=True, accept_loss=True) as reader:
                assert (reader.is_closed, reader.last_add_confirmed, reader.length) == (True, 2, 3)
                metadata = reader.metadata
                assert [each.data async for each in reader.read(0, 2)] == [b"0", b"1", b"2"]
            assert metadata.given_up is not None
            assert (set(metadata.given_up.bookies), metadata.given_up.lac) == (set(lost), 2)
            assert metadata.term > ledger.term
            for follow in (False, True):
                entries = client.read_unbounded_ledger(NAME, follow=follow)
                assert [(await anext(entries)).data for _ in range(3)] == [b"0", b"1", b"2"]
                with pytest.raises(client_aio.RecordsLostError) as caught:
                    await anext(entries)
                assert caught.value.entry_id == 3
            with pytest.raises(client_aio.RecordsLostError):
                await asyncio.wait_for(anext(following), WAIT_S)
            with pytest.raises(client_aio.LedgerClosedError, match="with a loss"):
                await client.open_unbounded_ledger(NAME)
            async with client.open_ledger(NAME, recover=True, accept_loss=True) as again:
                assert again.metadata == metadata

    async def test_the_writer_of_a_ledger_that_is_sealed_with_a_loss_is_fenced(
        self, cluster: Cluster
    ) -> None:
        """The bookie that the closer reached says so. Until then the two others acknowledge what it adds."""
        async with (
            Links(cluster.uri) as links,
            links.connect("writer") as client,
            links.connect("closer", **IMPATIENT) as closer,
        ):
            ledger = await client.open_unbounded_ledger(NAME)
            await ledger.add_entry(b"0")
            with pytest.raises(client_aio.InvalidArgumentError, match="taken over"):
                await closer.open_ledger(NAME, recover=True, accept_loss=True)
            await ledger.add_entry(b"1")  # It was left alone.
            unreached = ledger.metadata.last_fragment.bookies[:2]
            for name in unreached:
                await links["closer", name].cut()
            async with closer.open_ledger(NAME, recover=True, accept_loss=True) as reader:
                assert (reader.is_closed, reader.last_add_confirmed) == (True, 1)
            held = [links["writer", name].answers.hold(Op.ADD) for name in unreached]
            with pytest.raises((client_aio.LedgerFencedError, client_aio.LedgerClosedError)):
                await ledger.add_entry(b"2")
            for each in held:
                each.release()
            await ledger.abort()


class TestOwners:
    @pytest.fixture
    async def client(self, cluster: Cluster) -> AsyncIterator[client_aio.Client]:
        async with client_aio.connect(cluster.uri) as client:
            yield client

    async def test_a_ledger_is_added_to_one_log_only(self, client: client_aio.Client) -> None:
        shared = await closed_ledger(client, b"shared")
        await client.add_to_log("a", [shared])
        assert (await client.ledger_metadata(shared)).log == "a"
        with pytest.raises(client_aio.InvalidArgumentError, match="belongs to log 'a'"):
            await client.add_to_log("b", [shared])
        with pytest.raises(client_aio.LedgerListedError):
            await client.delete_ledger(shared)
        await client.add_to_log("a", [await closed_ledger(client, b"later")])
        rows = (await client.log_metadata("a")).rows
        await client.truncate_log("a", (rows[-1].id, 0))
        with pytest.raises(client_aio.NoSuchLedgerError):
            await client.ledger_metadata(shared)

    async def test_of_two_additions_at_once_one_log_gets_the_ledger(self, client: client_aio.Client) -> None:
        shared = await closed_ledger(client, b"shared")
        outcomes = await asyncio.gather(
            *(client.add_to_log(name, [shared]) for name in ("a", "b", "c")), return_exceptions=True
        )
        assert sum(isinstance(each, client_aio.AddedToLog) for each in outcomes) == 1
        assert sum(isinstance(each, client_aio.InvalidArgumentError) for each in outcomes) == 2

    async def test_what_was_claimed_and_never_listed_is_freed_and_kept(
        self, client: client_aio.Client
    ) -> None:
        ledger_id = await closed_ledger(client, b"precious")
        await client.create_log("a")
        await claim(client._context, [ledger_id], "a", lambda _: None)  # and its client dies
        with pytest.raises(client_aio.InvalidArgumentError, match="sweep"):
            await client.add_to_log("b", [ledger_id])
        assert (await client.sweep_log_orphans(older_than_s=0)).ledgers == ()
        await client.add_to_log("b", [ledger_id])
        assert await what_is_read(client, "b") == [b"precious"]

    async def test_a_claim_without_a_listing_is_no_hindrance_for_its_own_log_or_a_deletion(
        self, client: client_aio.Client
    ) -> None:
        first, second = await closed_ledger(client, b"1"), await closed_ledger(client, b"2")
        await claim(client._context, [first, second], "a", lambda _: None)
        await client.add_to_log("a", [first])
        await client.delete_ledger(second)
        assert await what_is_read(client, "a") == [b"1"]

    async def test_a_log_leaves_alone_what_it_lists_and_does_not_own(self, client: client_aio.Client) -> None:
        """The second guard: as an operator's hand, or metadata of an older time, could have it."""
        shared = await closed_ledger(client, b"shared")
        await client.add_to_log("a", [shared])
        ledgers = client._context.ledgers
        metadata, version = await ledgers.read(shared)
        await ledgers.compare_and_set(metadata.owned_by("b"), version)
        await client.add_to_log("a", [await closed_ledger(client, b"later")])
        rows = (await client.log_metadata("a")).rows
        await client.truncate_log("a", (rows[-1].id, 0))
        assert (await client.ledger_metadata(shared)).log == "b"


class TestFreeing:
    """A sweep frees a ledger at the very moment at which its log lists it."""

    async def test_a_ledger_is_not_freed_while_it_is_being_listed(self, cluster: Cluster) -> None:
        async with (
            Links(cluster.uri) as links,
            links.connect("adder") as adder,
            client_aio.connect(cluster.uri) as sweeper,
        ):
            ledger_id = await closed_ledger(adder, b"0")
            await adder.create_log("a")
            at_the_list, goes_on = asyncio.Event(), asyncio.Event()

            async def pause(key: str) -> None:
                if key == "logs/a" and not at_the_list.is_set():
                    at_the_list.set()
                    await goes_on.wait()

            links.store("adder").before_compare_and_set = pause
            adding = asyncio.create_task(adder.add_to_log("a", [ledger_id]))
            await asyncio.wait_for(at_the_list.wait(), WAIT_S)  # claimed, and not listed
            await sweeper.sweep_log_orphans(older_than_s=0)
            assert (await sweeper.ledger_metadata(ledger_id)).log == ""
            goes_on.set()
            await asyncio.wait_for(adding, WAIT_S)
            assert (await sweeper.ledger_metadata(ledger_id)).log == "a"
            assert await what_is_read(sweeper, "a") == [b"0"]

    async def test_a_ledger_that_is_listed_meanwhile_is_not_freed(self, cluster: Cluster) -> None:
        async with (
            Links(cluster.uri) as links,
            links.connect("sweeper") as sweeper,
            client_aio.connect(cluster.uri) as adder,
        ):
            ledger_id = await closed_ledger(adder, b"0")
            await adder.create_log("a")
            await claim(adder._context, [ledger_id], "a", lambda _: None)  # by an earlier addition, cut off
            at_the_ledger, goes_on = asyncio.Event(), asyncio.Event()

            async def pause(key: str) -> None:
                if key == ledger_key(ledger_id):
                    at_the_ledger.set()
                    await goes_on.wait()

            links.store("sweeper").before_compare_and_set = pause
            sweeping = asyncio.create_task(sweeper.sweep_log_orphans(older_than_s=0))
            await asyncio.wait_for(at_the_ledger.wait(), WAIT_S)  # the version of the list is raised
            await adder.add_to_log("a", [ledger_id])
            goes_on.set()
            await asyncio.wait_for(sweeping, WAIT_S)
            assert (await adder.ledger_metadata(ledger_id)).log == "a"


class TestSweeps:
    @pytest.mark.parametrize("days", [2, -2])
    async def test_a_sweeper_whose_clock_is_off_leaves_alone_what_is_being_written(
        self, cluster: Cluster, days: int
    ) -> None:
        async with (
            client_aio.connect(cluster.uri) as client,
            client_aio.connect(cluster.uri) as sweeper,
        ):
            right = sweeper._context.now_ms
            sweeper._context.now_ms = lambda: right() + days * 86_400_000
            async with client.open_log("orders") as log:
                await log.append(b"0")
            writer = await client.create_ledger(custom_metadata={TAG: b"orders"})
            await writer.add_entry(b"1")
            report = await sweeper.sweep_log_orphans()
            assert (report.ledgers, report.failures) == ((), ())
            assert await writer.add_entry(b"2") == 1
            assert (await sweeper.sweep_log_orphans(older_than_s=0)).ledgers == (writer.ledger_id,)


class TestWaiting:
    async def test_a_log_is_created_without_a_writer(self, cluster: Cluster) -> None:
        async with client_aio.connect(cluster.uri) as client:
            await client.create_log("orders", custom_metadata={"app": b"demo"})
            with pytest.raises(client_aio.LogExistsError):
                await client.create_log("orders")
            await client.create_log("orders", exist_ok=True)
            metadata = await client.log_metadata("orders")
            assert (metadata.rows, dict(metadata.custom)) == ((), {"app": b"demo"})
            async with client.open_log("orders", create=False) as log:
                await log.append(b"0")
            assert await what_is_read(client, "orders") == [b"0"]

    @pytest.mark.parametrize("start", [None, "end"])
    async def test_a_follower_waits_for_a_log(self, cluster: Cluster, start: str | None) -> None:
        async with client_aio.connect(cluster.uri) as client:
            with pytest.raises(client_aio.InvalidArgumentError, match="follow"):
                client.read_log("orders", wait=True)
            with pytest.raises(client_aio.NoSuchLogError):
                await anext(client.read_log("orders", follow=True))

            async def first() -> bytes:
                async with aclosing(client.read_log("orders", start, follow=True, wait=True)) as records:
                    return bytes((await anext(records)).data)

            following = asyncio.create_task(first())
            await asyncio.sleep(0)
            async with client.open_log("orders") as log:
                await log.append(b"0")
                assert await asyncio.wait_for(following, WAIT_S) == b"0"


async def test_concurrent_creations_share_a_draw_of_ids(cluster: Cluster) -> None:
    one = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
    async with client_aio.connect(cluster.uri) as client:

        async def make() -> int:
            async with client.create_ledger(**one) as ledger:
                return ledger.ledger_id

        ids = await asyncio.gather(*(make() for _ in range(40)))
    assert sorted(ids) == list(range(40))


async def test_a_repair_is_refused_where_nothing_at_all_answers(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, **IMPATIENT) as client,
    ):
        async with client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2) as ledger:
            await ledger.add_entry(b"0")
        before = await client.ledger_metadata(ledger.ledger_id)
        lost, other = before.last_fragment.bookies
        await lose(cluster[lost])
        await cluster[other].kill()
        with pytest.raises(client_aio.LedgerRepairError, match=other):
            await client.repair_ledger(ledger.ledger_id, replace=lost)
        assert await client.ledger_metadata(ledger.ledger_id) == before
