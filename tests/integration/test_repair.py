"""Repair, end to end: real bookies that are lost for good, repaired beside those who write and recover."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from benchmarks.processes import start_module
from bookie_aio.wire.blocks import MAGIC as BLOCK_MAGIC
from bookie_aio.wire.messages import Op, Read, Stop
from client_aio import LedgerState
from client_aio.admin.repair import _AWAY_S, Repair, _Copier
from client_aio.bookies.pool import BookiePool
from client_aio.core.repair_plan import EntryRun
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from client_aio.ledger.recovery import recover_ledger
from metadata.ids import TERM_FINAL
from tests.support.cluster import BookieProcess, Cluster
from tests.support.links import Links
from tests.support.replicas import WAIT_S, every_copy, everything, flip, lose, stop_of, stored

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from bookie_aio.wire.blocks import Block
    from bookie_aio.wire.listing import Row
    from client_aio.core.read_plan import ClassRange
    from tests.support.links import Frame

COUNT = 3000


def payload(entry_id: int) -> bytes:
    return f"entry {entry_id} of a ledger ".encode() * (entry_id % 5)


def expected(count: int) -> list[tuple[int, bytes]]:
    return [(entry_id, payload(entry_id)) for entry_id in range(count)]


def payloads(first: int, stop: int) -> Iterable[bytes]:
    return (payload(entry_id) for entry_id in range(first, stop))


async def written(client: client_aio.Client, *shape: int, count: int = COUNT) -> int:
    """Write a ledger, some entries alone and some many at once, close it, and wait for all copies."""
    async with client.create_ledger(
        ensemble_size=shape[0], write_quorum=shape[1], ack_quorum=shape[2]
    ) as ledger:
        for entry_id in range(10):
            await ledger.add_entry(payload(entry_id))
        await ledger.add_entries(payloads(10, count))
    await every_copy(client, ledger.ledger_id)
    return ledger.ledger_id


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2), (2, 2, 1)])
async def test_after_a_repair_another_bookie_may_be_lost(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    async with Cluster(tmp_path, bookies=shape[0] + 1) as cluster:
        async with client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, *shape)
            before = await client.ledger_metadata(ledger_id)
            lost, *others = before.last_fragment.bookies
            (spare,) = cluster.bookies.keys() - {lost, *others}
            originals = await stored(client, lost, ledger_id, range(0, COUNT, 3 if shape == (3, 2, 2) else 1))
            await lose(cluster[lost])
            report = await client.repair_ledger(ledger_id, replace=lost)
            after = await client.ledger_metadata(ledger_id)
            (fragment,) = report.fragments
            assert after.last_fragment.bookies == (spare, *others)
            assert (fragment.replacement, fragment.first_entry, fragment.last_entry) == (spare, 0, COUNT - 1)
            assert fragment.entries_copied == (2 * COUNT // 3 if shape == (3, 2, 2) else COUNT)
            # Verbatim: each entry with the LAC and the checksum that its writer gave it.
            ids = range(0, COUNT, 3 if shape == (3, 2, 2) else 1)
            assert await stored(client, spare, ledger_id, ids) == originals
            assert len({one.statement.lac for one in originals.values()}) > 3
        for other in others:
            await cluster[other].kill()
            async with client_aio.connect(cluster.uri, connect_timeout_s=1) as client:
                assert await everything(client, ledger_id) == expected(COUNT)
            await cluster[other].start()


async def test_every_fragment_is_repaired_and_one_that_holds_nothing_too(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=6) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer") as writer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger = await writer.create_ledger(ack_quorum=3)
        seats = ledger.metadata.last_fragment.bookies
        await ledger.add_entries(payloads(0, 1000))
        await links["writer", seats[2]].cut()
        await ledger.add_entries(payloads(1000, 2000))
        metadata = ledger.metadata
        assert [fragment.first_entry for fragment in metadata.fragments] == [0, 1000]
        # A last fragment that holds nothing: its writer got as far as the compare-and-set and no further.
        _, version = await client._context.ledgers.read(ledger.ledger_id)
        empty = metadata.change_ensemble(2000, metadata.last_fragment.bookies)
        await client._context.ledgers.compare_and_set(empty.begin_recovery(), version)
        await ledger.abort()
        async with client.open_ledger(ledger.ledger_id, recover=True) as reader:
            assert reader.last_add_confirmed == 1999
        await lose(cluster[seats[0]])
        report = await client.repair_ledger(ledger.ledger_id, replace=seats[0])
        assert [(one.first_entry, one.last_entry) for one in report.fragments] == [
            (0, 999), (1000, 1999), (2000, 1999),
        ]  # fmt: skip
        after = await client.ledger_metadata(ledger.ledger_id)
        assert all(seats[0] not in fragment.bookies for fragment in after.fragments)
        assert await everything(client, ledger.ledger_id) == expected(2000)


class TestBesideALiveWriter:
    """The writer is neither fenced nor confused; only fragments that are complete are touched."""

    async def test_onto_a_bookie_that_also_serves_the_current_fragment(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=4) as cluster,
            Links(cluster.uri) as links,
            links.connect("writer") as writer,
            client_aio.connect(cluster.uri) as client,
        ):
            ledger = await writer.create_ledger(ack_quorum=3)
            lost = ledger.metadata.last_fragment.bookies[0]
            await ledger.add_entries(payloads(0, 1000))
            await lose(cluster[lost])
            await ledger.add_entries(payloads(1000, 1100))
            (newcomer,) = set(ledger.metadata.last_fragment.bookies) - set(
                ledger.metadata.fragments[0].bookies
            )
            report = await client.repair_ledger(ledger.ledger_id, replace=lost, by=newcomer)
            assert [one.first_entry for one in report.fragments] == [0]
            assert not report.is_last_fragment_left
            # All three must go on acknowledging: a repair with the final term would have fenced one.
            connections = {name: link.connections for name, link in links.of("writer").items()}
            await ledger.add_entries(payloads(1100, 1200))
            for bookie_id in ledger.metadata.last_fragment.bookies:
                async with asyncio.timeout(WAIT_S):
                    while await stop_of(client, bookie_id, ledger.ledger_id, 1199) is not Stop.END:
                        pass
            assert ledger.failed_bookies == []
            assert {name: link.connections for name, link in links.of("writer").items()} == connections
            await ledger.close()
            assert await everything(client, ledger.ledger_id) == expected(1200)
            metadata = await client.ledger_metadata(ledger.ledger_id)
            assert newcomer in metadata.fragments[0].bookies

    async def test_an_ensemble_change_between_the_plan_and_the_compare_and_set(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=7) as cluster,
            Links(cluster.uri) as links,
            links.connect("writer") as writer,
            links.connect("repairer") as repairer,
        ):
            ledger = await writer.create_ledger(ack_quorum=3)
            lost, second, _ = ledger.metadata.last_fragment.bookies
            await ledger.add_entries(payloads(0, 500))
            await lose(cluster[lost])
            await ledger.add_entries(payloads(500, 1000))
            changed = asyncio.Event()

            async def meet(key: str) -> None:
                if not changed.is_set():
                    await links["writer", second].cut()
                    await asyncio.wait_for(ledger.add_entries(payloads(1000, 1500)), WAIT_S)
                    assert len(ledger.metadata.fragments) == 3
                    changed.set()

            links.store("repairer").before_compare_and_set = meet
            report = await repairer.repair_ledger(ledger.ledger_id, replace=lost)
            assert changed.is_set()
            assert [one.first_entry for one in report.fragments] == [0]
            await ledger.close()
            metadata = await repairer.ledger_metadata(ledger.ledger_id)
            assert [fragment.first_entry for fragment in metadata.fragments] == [0, 500, 1000]
            assert lost not in {name for fragment in metadata.fragments for name in fragment.bookies}
            assert second not in metadata.last_fragment.bookies
            assert await everything(repairer, ledger.ledger_id) == expected(1500)

    async def test_a_repair_between_an_ensemble_changes_read_and_its_compare_and_set(
        self, tmp_path: Path
    ) -> None:
        async with (
            Cluster(tmp_path, bookies=7) as cluster,
            Links(cluster.uri) as links,
            links.connect("writer") as writer,
            client_aio.connect(cluster.uri) as client,
        ):
            ledger = await writer.create_ledger(ack_quorum=3)
            lost, second, _ = ledger.metadata.last_fragment.bookies
            await ledger.add_entries(payloads(0, 500))
            await lose(cluster[lost])
            await ledger.add_entries(payloads(500, 1000))
            reports: list[client_aio.RepairReport] = []

            async def meet(key: str) -> None:
                if not reports:
                    reports.append(await client.repair_ledger(ledger.ledger_id, replace=lost))

            links.store("writer").before_compare_and_set = meet
            await links["writer", second].cut()
            await asyncio.wait_for(ledger.add_entries(payloads(1000, 1500)), WAIT_S)
            assert [one.first_entry for one in reports[0].fragments] == [0]
            await ledger.close()
            metadata = await client.ledger_metadata(ledger.ledger_id)
            assert [fragment.first_entry for fragment in metadata.fragments] == [0, 500, 1000]
            assert lost not in metadata.fragments[0].bookies
            assert second not in metadata.last_fragment.bookies
            assert await everything(client, ledger.ledger_id) == expected(1500)

    async def test_the_last_fragment_is_left_to_its_writer(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
            ledger = await client.create_ledger()
            await ledger.add_entries(payloads(0, 100))
            before = ledger.metadata
            report = await client.repair_ledger(ledger.ledger_id, replace=before.last_fragment.bookies[0])
            assert report.fragments == ()
            assert report.is_last_fragment_left
            assert await client.ledger_metadata(ledger.ledger_id) == before
            await ledger.add_entries(payloads(100, 200))
            await ledger.close()
            assert await everything(client, ledger.ledger_id) == expected(200)

    async def test_when_told_so_it_takes_the_ledger_over_and_repairs_all_of_it(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
            ledger = await client.create_ledger()
            await ledger.add_entries(payloads(0, 100))
            lost = ledger.metadata.last_fragment.bookies[1]
            report = await client.repair_ledger(ledger.ledger_id, replace=lost, recover_after_s=0.01)
            assert report.was_recovered
            assert not report.is_last_fragment_left
            metadata = await client.ledger_metadata(ledger.ledger_id)
            assert (metadata.state, metadata.last_entry) == (LedgerState.CLOSED, 99)
            assert lost not in metadata.last_fragment.bookies
            with pytest.raises(client_aio.LedgerFencedError):
                await ledger.add_entry(b"late")
            await cluster[metadata.last_fragment.bookies[0]].kill()
            assert await everything(client, ledger.ledger_id) == expected(100)


def is_recovery_read(frame: Frame) -> bool:
    return isinstance(frame.message, Read) and frame.message.term == TERM_FINAL


async def test_the_last_fragment_is_not_touched_while_somebody_recovers(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=6) as cluster,
        Links(cluster.uri) as links,
        links.connect("recoverer") as recoverer,
        client_aio.connect(cluster.uri) as client,
    ):
        writer = await client.create_ledger(ack_quorum=3)
        lost, *others = writer.metadata.last_fragment.bookies
        await writer.add_entries(payloads(0, 400))
        await cluster[others[0]].kill()
        await writer.add_entries(payloads(400, 800))
        assert lost in writer.metadata.last_fragment.bookies
        ensemble = writer.metadata.last_fragment.bookies
        await writer.abort()
        reads = [
            links["recoverer", bookie_id].requests.hold(Op.READ, is_recovery_read) for bookie_id in ensemble
        ]
        recovering = asyncio.create_task(open_recovered(recoverer, writer.ledger_id))
        for read in reads:
            await read.reached()
        report = await client.repair_ledger(writer.ledger_id, replace=lost)
        assert [one.first_entry for one in report.fragments] == [0]
        assert report.is_last_fragment_left
        metadata = await client.ledger_metadata(writer.ledger_id)
        assert (metadata.state, metadata.last_fragment.bookies) == (LedgerState.IN_RECOVERY, ensemble)
        for read in reads:
            read.release()
        assert await asyncio.wait_for(recovering, WAIT_S) == 799
        # The recovery kept what the repair had done to the fragment before.
        metadata = await client.ledger_metadata(writer.ledger_id)
        assert lost not in metadata.fragments[0].bookies
        report = await client.repair_ledger(writer.ledger_id, replace=lost)
        assert [one.first_entry for one in report.fragments] == [400]
        await lose(cluster[lost])
        assert await everything(client, writer.ledger_id) == expected(800)


async def test_two_repairs_at_once_agree(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=5) as cluster,
        Links(cluster.uri) as links,
        links.connect("x") as x,
        links.connect("y") as y,
    ):
        ledger_id = await written(x, 3, 3, 2)
        lost, *others = (await x.ledger_metadata(ledger_id)).last_fragment.bookies
        await lose(cluster[lost])
        both_have_copied = asyncio.Barrier(2)
        met: list[str] = []

        async def meet(key: str) -> None:
            met.append(key)
            if len(met) <= 2:
                await asyncio.wait_for(both_have_copied.wait(), WAIT_S)

        links.store("x").before_compare_and_set = links.store("y").before_compare_and_set = meet
        spares = sorted(cluster.bookies.keys() - {lost, *others})
        reports = await asyncio.gather(
            x.repair_ledger(ledger_id, replace=lost, by=spares[0]),
            y.repair_ledger(ledger_id, replace=lost, by=spares[1]),
        )
        (winner,) = (report for report in reports if report.fragments)
        after = await x.ledger_metadata(ledger_id)
        assert after.last_fragment.bookies == (winner.fragments[0].replacement, *others)
        assert await everything(x, ledger_id) == expected(COUNT)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_ledger_with_a_password_is_repaired_without_it(tmp_path: Path, is_closed: bool) -> None:
    """Codes are copied as they are. To take the ledger over, which fences, needs the password."""
    secret = b"known to the writer and to readers"
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(digest="hmac-sha256", password=secret, ack_quorum=3)
        await ledger.add_entries(payloads(0, 500))
        lost, *others = ledger.metadata.last_fragment.bookies
        if is_closed:
            await ledger.close()
            await client.repair_ledger(ledger.ledger_id, replace=lost)
        else:
            await ledger.abort()
            with pytest.raises(client_aio.UnauthorizedAccessError):
                await client.repair_ledger(ledger.ledger_id, replace=lost, recover_after_s=0.01)
            metadata = await client.ledger_metadata(ledger.ledger_id)
            assert metadata.state is LedgerState.OPEN
            await client.repair_ledger(ledger.ledger_id, replace=lost, recover_after_s=0.01, password=secret)
        for other in (lost, *others):
            await cluster[other].kill()
        async with (
            client_aio.connect(cluster.uri) as fresh,
            fresh.open_ledger(ledger.ledger_id, password=secret) as reader,
        ):
            assert [tuple(entry) async for entry in reader.read(0, 499)] == expected(500)
            assert reader.digest_mismatches == 0


async def open_recovered(client: client_aio.Client, ledger_id: int) -> int:
    async with client.open_ledger(ledger_id, recover=True) as reader:
        return reader.last_add_confirmed


@pytest.mark.parametrize("step", [1, 3, 4, 6])
async def test_a_repair_that_is_killed_leaves_the_ledger_whole_and_is_run_again(
    tmp_path: Path, step: int
) -> None:
    count = 10_000  # three pieces to copy, and three to verify
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client, 3, 3, 2, count=count)
        lost, *others = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        (spare,) = cluster.bookies.keys() - {lost, *others}
        await lose(cluster[lost])
        child = await start_module(
            "tests.support.repairer", cluster.uri, str(ledger_id), lost, spare, str(step),
            log=tmp_path / "repairer.log",
        )  # fmt: skip
        async with child:
            await child.line()
            child.kill()
            await child.wait()
        assert await everything(client, ledger_id) == expected(count)
        is_named = spare in (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        assert is_named == (step > 3)
        report = await client.repair_ledger(ledger_id, replace=lost, by=spare)
        if is_named:
            assert report.fragments == ()
        else:  # what was copied before is not copied again
            assert 0 <= report.fragments[0].entries_copied <= count - 1000
        for other in others:
            await cluster[other].kill()
        async with client_aio.connect(cluster.uri) as fresh:
            assert await everything(fresh, ledger_id) == expected(count)


class TestDamage:
    """A replica with damage on its disk, and sources and targets that fail."""

    async def damaged(self, cluster: Cluster, client: client_aio.Client) -> tuple[int, str]:
        ledger_id = await written(client, 3, 3, 3)
        bookie_id = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[0]
        await cluster[bookie_id].end()
        flip(cluster[bookie_id].directory, payload(1234))
        await cluster[bookie_id].start()
        assert await stop_of(client, bookie_id, ledger_id, 1234) is Stop.UNKNOWN
        assert await everything(client, ledger_id) == expected(COUNT)
        return ledger_id, bookie_id

    async def test_a_damaged_replica_is_replaced(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id, bookie_id = await self.damaged(cluster, client)
            (fragment,) = (await client.repair_ledger(ledger_id, replace=bookie_id)).fragments
            assert len(await stored(client, fragment.replacement, ledger_id, range(COUNT))) == COUNT
            assert bookie_id not in (await client.ledger_metadata(ledger_id)).last_fragment.bookies

    async def test_a_damaged_replica_is_repaired_in_its_place(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id, bookie_id = await self.damaged(cluster, client)
            before = await client.ledger_metadata(ledger_id)
            originals = await stored(client, before.last_fragment.bookies[1], ledger_id, range(COUNT))
            (fragment,) = (await client.repair_ledger(ledger_id, replace=bookie_id, by=bookie_id)).fragments
            assert await client.ledger_metadata(ledger_id) == before
            assert await stored(client, bookie_id, ledger_id, range(COUNT)) == originals
            # Run again, there is nothing left to copy.
            (fragment,) = (await client.repair_ledger(ledger_id, replace=bookie_id, by=bookie_id)).fragments
            assert fragment.entries_copied == 0
            for other in before.last_fragment.bookies[1:]:
                await cluster[other].kill()
            assert await everything(client, ledger_id) == expected(COUNT)

    async def test_an_entry_that_nobody_has_is_named_and_the_others_are_copied(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            lost, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            await lose(cluster[lost])
            await cluster[other].end()
            flip(cluster[other].directory, payload(2222))
            await cluster[other].start()
            (fragment,) = (await client.repair_ledger(ledger_id, replace=lost)).fragments
            assert fragment.lost == (EntryRun(2222, 2222, 1),)
            assert fragment.entries_copied == COUNT - 1
            assert fragment.unanswered == (lost,)
            after = await client.ledger_metadata(ledger_id)
            assert after.last_fragment.bookies == (fragment.replacement, other)
            assert [(each.seat, each.bookie) for each in after.absent] == [(0, lost)]
            copies = await stored(client, fragment.replacement, ledger_id, range(COUNT))
            assert len(copies) == fragment.entries_copied

    async def test_a_bookie_that_is_away_is_not_asked_anew_for_each_entry(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        attempts = Counter[str]()
        connect = BookiePool._connect

        def counted(self: BookiePool, bookie_id: str) -> Any:
            attempts[bookie_id] += 1
            return connect(self, bookie_id)

        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2, count=500)
            lost, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            await lose(cluster[lost])
            await cluster[other].end()
            flip(
                cluster[other].directory, BLOCK_MAGIC, behind=64
            )  # the checksum of each block's LAC statement
            await cluster[other].start()
            monkeypatch.setattr(BookiePool, "_connect", counted)
            began = asyncio.get_running_loop().time()
            (fragment,) = (await client.repair_ledger(ledger_id, replace=lost)).fragments
            assert fragment.lost == (EntryRun(0, 499, 1),)
            seconds = asyncio.get_running_loop().time() - began
            assert attempts[lost] <= 10 + 4 * seconds / _AWAY_S
            assert len([one for one in caplog.records if "from no bookie" in one.message]) == 1

    async def test_a_bookie_that_comes_back_during_a_repair_is_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            away, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            await cluster[away].kill()
            await cluster[other].end()
            flip(cluster[other].directory, payload(2222))
            await cluster[other].start()
            list_sources, is_back = _Copier._list_sources, False

            async def back_before_it(self: _Copier, rest: ClassRange) -> list[list[Row]]:
                nonlocal is_back
                if not is_back:
                    is_back = True
                    await cluster[away].start()
                    while away not in client.bookies:
                        await client._context.pool.directory.wait_for_change(WAIT_S)
                return await list_sources(self, rest)

            monkeypatch.setattr(_Copier, "_list_sources", back_before_it)
            (fragment,) = (await client.repair_ledger(ledger_id, replace=away)).fragments
            assert (fragment.lost, fragment.entries_copied) == ((), COUNT)

    async def test_a_bookie_that_did_not_answer_for_a_while_is_asked_again_in_the_end(
        self, tmp_path: Path
    ) -> None:
        """It has the only copies, and stands still for longer than a read may take."""
        config = client_aio.ClientConfig(read_timeout_s=1.5)
        async with (
            Cluster(tmp_path) as cluster,
            client_aio.connect(cluster.uri) as writer,
            client_aio.connect(cluster.uri, config=config) as client,
        ):
            ledger_id = await written(writer, 2, 2, 2)
            lost, other = (await writer.ledger_metadata(ledger_id)).last_fragment.bookies
            await client.ledger_replicas(ledger_id)  # connects to all of them
            await lose(cluster[lost])
            cluster[other].stop()
            asyncio.get_running_loop().call_later(2.5, cluster[other].resume)
            (fragment,) = (await client.repair_ledger(ledger_id, replace=lost)).fragments
            assert (fragment.lost, fragment.entries_copied) == ((), COUNT)

    @pytest.mark.parametrize("other", ["damaged", "down"])
    async def test_a_fragment_that_cannot_be_repaired_keeps_no_other_one_from_it(
        self, tmp_path: Path, other: str
    ) -> None:
        async with Cluster(tmp_path, bookies=5) as cluster, client_aio.connect(cluster.uri) as client:
            writer = await client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2)
            await writer.add_entry(payload(1001))
            lost, failing = writer.metadata.last_fragment.bookies
            await cluster[failing].kill()
            while len(writer.metadata.fragments) == 1:
                await writer.add_entry(payload(1002))
            await writer.add_entries(payloads(1003, 1100))
            await writer.close()
            if other == "damaged":
                flip(cluster[failing].directory, payload(1001))
                await cluster[failing].start()
            await lose(cluster[lost])
            _, *rest = (await client.ledger_metadata(writer.ledger_id)).fragments
            assert all(lost in each.bookies for each in rest)
            if other == "damaged":
                report = await client.repair_ledger(writer.ledger_id, replace=lost)
                assert report.fragments[0].lost
            else:
                with pytest.raises(client_aio.LedgerRepairError, match="can be had"):
                    await client.repair_ledger(writer.ledger_id, replace=lost)
            after = (await client.ledger_metadata(writer.ledger_id)).fragments
            assert (lost in after[0].bookies) is (other == "down")
            assert not any(lost in each.bookies for each in after[1:])

    @pytest.mark.parametrize("is_down", [False, True])
    async def test_a_bookie_that_denies_what_is_found_nowhere_is_not_kept_for_it(
        self, tmp_path: Path, is_down: bool
    ) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            before, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            (empty,) = cluster.bookies.keys() - {before, other}
            held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger_id))
            await held.update(lambda now: now.replace_bookie(0, before, empty))
            await cluster[before].kill()
            await cluster[other].end()
            flip(cluster[other].directory, payload(2222))
            await cluster[other].start()
            cluster.bookies["b4"] = BookieProcess("b4", tmp_path, cluster.uri)
            await cluster["b4"].start()
            if is_down:
                await cluster[empty].kill()
            (fragment,) = (await client.repair_ledger(ledger_id, replace=empty, by="b4")).fragments
            assert fragment.lost
            absent = (await client.ledger_metadata(ledger_id)).absent
            assert [each.bookie for each in absent] == ([empty] if is_down else [])
            if is_down:
                await cluster[empty].start()
            (fragment,) = (await client.repair_ledger(ledger_id, replace="b4", by="b4")).fragments
            assert fragment.lost
            assert (await client.ledger_metadata(ledger_id)).absent == ()

    async def test_a_repair_that_stood_still_leaves_the_records_of_the_next_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own bookie has lost the seat meanwhile, and may hold what the next repair found nowhere."""
        reached, released = asyncio.Event(), asyncio.Event()
        forget = Repair._forget_absent

        async def stand_still(self: Repair, *args: Any) -> None:
            if not reached.is_set():
                reached.set()
                await released.wait()
            await forget(self, *args)

        monkeypatch.setattr(Repair, "_forget_absent", stand_still)
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            kept, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            first = asyncio.create_task(client.repair_ledger(ledger_id, replace=kept, by=kept))
            await asyncio.wait_for(reached.wait(), WAIT_S)
            await cluster[kept].kill()
            await cluster[other].end()
            flip(cluster[other].directory, payload(2222))
            await cluster[other].start()
            (fragment,) = (await client.repair_ledger(ledger_id, replace=kept)).fragments
            assert fragment.lost
            released.set()
            await asyncio.wait_for(first, WAIT_S)
            absent = (await client.ledger_metadata(ledger_id)).absent
            assert [(each.seat, each.bookie) for each in absent] == [(0, kept)]

    async def test_a_mark_stays_where_an_entry_is_found_nowhere(self, tmp_path: Path) -> None:
        """Rule 4: else the bookie would deny an entry that it has lost."""
        async with Cluster(tmp_path, bookies=2) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            repaired, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            for name in (repaired, other):
                await cluster[name].end()
                flip(cluster[name].directory, payload(2222))
                await cluster[name].start()
                # The bookie finds the damage, and has its mark before the repair begins.
                assert len(await stored(client, name, ledger_id, range(COUNT))) < COUNT
            report = await client.repair_ledger(ledger_id, replace=repaired, by=repaired)
            assert report.fragments[0].lost
            assert not report.is_mark_lifted
            assert "can be had from no bookie" in report.mark_left
            states = {each.bookie_id: each.is_damaged for each in await client.ledger_replicas(ledger_id)}
            assert states[repaired]

    async def test_a_lost_bookie_that_still_answers_is_a_source_too(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            moved, other = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            await lose(cluster[other])
            (fragment,) = (await client.repair_ledger(ledger_id, replace=moved)).fragments
            await cluster[moved].kill()
            assert len(await stored(client, fragment.replacement, ledger_id, range(COUNT))) == COUNT

    async def test_an_entry_whose_bookie_gave_no_answer_for_a_moment_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from_source, asked = _Copier._from_source, list[int]()

        async def silent_at_first(self: _Copier, wanted: ClassRange) -> tuple[list[Block], list[str]]:
            asked.append(wanted.first)
            return ([], []) if len(asked) == 1 else await from_source(self, wanted)

        monkeypatch.setattr(_Copier, "_from_source", silent_at_first)
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 2, 2, 2)
            lost = (await client.ledger_metadata(ledger_id)).last_fragment.bookies[0]
            (fragment,) = (await client.repair_ledger(ledger_id, replace=lost)).fragments
        assert asked[:2] == [0, 0]
        assert (fragment.entries_copied, fragment.lost) == (COUNT, ())

    async def test_a_bookie_that_fails_while_it_is_copied_to_is_given_up(self, tmp_path: Path) -> None:
        async with (
            Cluster(tmp_path, bookies=5) as cluster,
            Links(cluster.uri) as links,
            links.connect("repairer") as repairer,
        ):
            ledger_id = await written(repairer, 3, 3, 2)
            lost, *others = (await repairer.ledger_metadata(ledger_id)).last_fragment.bookies
            spares = cluster.bookies.keys() - {lost, *others}
            adds = {spare: links["repairer", spare].requests.hold(Op.ADD) for spare in spares}
            repairing = asyncio.create_task(repairer.repair_ledger(ledger_id, replace=lost))
            waiting = {asyncio.create_task(add.reached()): spare for spare, add in adds.items()}
            done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            first = waiting[done.pop()]
            for task in rest:
                task.cancel()
            (second,) = spares - {first}
            adds[second].release()
            await links["repairer", first].cut()
            (fragment,) = (await asyncio.wait_for(repairing, WAIT_S)).fragments
            assert fragment.replacement == second
            assert await everything(repairer, ledger_id) == expected(COUNT)

    async def test_what_cannot_be_is_refused(self, tmp_path: Path) -> None:
        async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
            ledger_id = await written(client, 3, 3, 2, count=20)
            first, second, _ = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
            with pytest.raises(client_aio.InvalidArgumentError, match=f"{second} is in the fragment"):
                await client.repair_ledger(ledger_id, replace=first, by=second)
            with pytest.raises(client_aio.NotEnoughBookiesError):
                await client.repair_ledger(ledger_id, replace=first)
            with pytest.raises(client_aio.BookieUnavailableError, match="b9"):
                await client.repair_ledger(ledger_id, replace=first, by="b9")
            with pytest.raises(client_aio.NoSuchLedgerError):
                await client.repair_ledger(999, replace=first)
            report = await client.repair_ledger(ledger_id, replace="b9")
            assert report.fragments == ()


async def test_a_writer_reads_what_was_repaired_beneath_it(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, connect_timeout_s=2) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger(ensemble_size=2, write_quorum=1, ack_quorum=1)
        await ledger.add_entries([b"x"] * 6)
        lost = ledger.metadata.last_fragment.bookies[0]
        await cluster[lost].kill()
        await ledger.add_entries([b"y"] * 6)
        assert len(ledger.metadata.fragments) == 2
        await cluster[lost].start()
        async with asyncio.timeout(WAIT_S):
            while lost not in other.bookies:
                await other._context.pool.directory.refresh()
        await other.repair_ledger(ledger.ledger_id, replace=lost)
        await cluster[lost].kill()
        assert [entry.data async for entry in ledger.read(0, 5)] == [b"x"] * 6
        await ledger.close()


async def test_a_recovery_for_a_repair_leaves_a_writer_alone_that_has_replaced_the_bookie(
    tmp_path: Path,
) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entries([b"x"] * 6)
        former = ledger.metadata.last_fragment
        await cluster[former.bookies[0]].kill()
        async with asyncio.timeout(WAIT_S):
            while len(ledger.metadata.fragments) == 1:
                await ledger.add_entry(b"y")
        metadata = await other.ledger_metadata(ledger.ledger_id)
        digest = await other._context.unlock(metadata, b"")
        found, _ = await recover_ledger(other._context, ledger.ledger_id, digest, only=former)
        assert found.state is LedgerState.OPEN
        await ledger.add_entry(b"z")
        assert (await ledger.close()).is_closed


async def test_what_a_repair_has_stored_counts_for_no_later_add(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entries([b"x"] * 6)
        (spare,) = set(cluster.bookies) - set(ledger.metadata.last_fragment.bookies)
        await client.repair_ledger(ledger.ledger_id, replace=ledger.metadata.last_fragment.bookies[0])
        assert (await client._context.pool.get(spare))._adds_sent == 0
