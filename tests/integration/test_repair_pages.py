"""Repair of unbounded ledgers whose fragments are mostly in pages, beside all who change them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
from bookie_aio.wire.messages import Op, Stop
from client_aio.core.repair_plan import Part
from client_aio.unbounded.paged_fragments import VersionedFragments, fragment_list
from metadata.errors import MetadataUnavailableError
from metadata.ids import ledger_key
from metadata.model import paged_list
from metadata.model.ledger import Fragment
from tests.support.cluster import Cluster
from tests.support.links import Links
from tests.support.replicas import lose, stop_of
from tests.support.unbounded import FRAGMENT_ENTRIES, NAME, WAIT_S, everything, grow, numbered, pages_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from metadata.store import Version
    from tests.support.links import Sighting

FRAGMENTS = 24
ALL = list(enumerate(numbered(0, FRAGMENTS * FRAGMENT_ENTRIES - 1)))


@pytest.fixture(autouse=True)
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages of some five fragments, and heads of as many."""
    monkeypatch.setattr(paged_list, "HEAD_ROWS_BYTES_MAX", 200)
    monkeypatch.setattr(paged_list, "PAGE_ROWS_BYTES_MAX", 150)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path, bookies=5) as running:
        yield running


async def fragments_of(client: client_aio.Client, ledger_id: int) -> list[Fragment]:
    """Return all fragments, oldest first."""
    listed = fragment_list(client._context, ledger_id)
    head, _ = await listed.read()
    return [Fragment.of_row(row) async for row in listed.walk(head)]


async def bereaved(cluster: Cluster, client: client_aio.Client) -> tuple[int, str]:
    """Write a ledger, lose a bookie of its first fragment for good, and take it over, so that all is settled.

    What was written lies in fragments that are complete then; the last one has nothing in it.
    """
    async with client.open_unbounded_ledger(NAME) as ledger:
        await grow(ledger, FRAGMENTS)
    ledger_id = ledger.ledger_id
    lost = (await fragments_of(client, ledger_id))[0].bookies[0]
    await lose(cluster[lost])
    async with client.open_unbounded_ledger(NAME):
        pass
    named = [lost in fragment.bookies for fragment in await fragments_of(client, ledger_id)]
    head = len((await client.ledger_metadata(ledger_id)).fragments)
    assert sum(named[:-head]) > 3
    assert not named[-1]
    return ledger_id, lost


async def sweep_often(cluster: Cluster) -> None:
    """Have bookies drop at once what is trimmed."""
    for bookie in cluster.bookies.values():
        bookie.arguments += ["--sweep-interval", "0.1"]
    await cluster.end()
    await cluster.start()


async def check_repaired(cluster: Cluster, client: client_aio.Client, ledger_id: int, lost: str) -> None:
    """Check that no fragment names the bookie, and that all is read without yet another one."""
    fragments = await fragments_of(client, ledger_id)
    assert all(lost not in fragment.bookies for fragment in fragments)
    for other in [name for name in fragments[0].bookies if name != lost][:2]:
        await cluster[other].kill()
        async with client_aio.connect(cluster.uri, connect_timeout_s=1) as fresh:
            first = fragments[0].first_entry
            assert await everything(fresh, None) == ALL[first:]
        await cluster[other].start()


async def left_over(cluster: Cluster, client: client_aio.Client, ledger_id: int) -> set[str]:
    """Return the pages that no head refers to."""
    metadata = await client.ledger_metadata(ledger_id)
    assert metadata.unbounded is not None
    return set(await pages_of(cluster, ledger_id)) - {page.name for page in metadata.unbounded.pages}


async def test_after_a_repair_of_head_and_pages_another_bookie_may_be_lost(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id, lost = await bereaved(cluster, client)
        before = await fragments_of(client, ledger_id)
        replicas = await client.ledger_replicas(ledger_id)
        assert [(one.first_entry, one.bookie_id) for one in replicas] == [
            (fragment.first_entry, name) for fragment in before for name in fragment.bookies
        ]
        assert [one.bookie_id == lost for one in replicas] == [bool(one.error) for one in replicas]
        assert {one.entries_owed for one in replicas} == {FRAGMENT_ENTRIES, None}

        progress: list[client_aio.RepairProgress] = []
        report = await client.repair_ledger(ledger_id, replace=lost, on_progress=progress.append)

        owed = [fragment.first_entry for fragment in before if lost in fragment.bookies]
        assert [one.first_entry for one in report.fragments] == owed
        assert all(one.entries_copied == FRAGMENT_ENTRIES for one in report.fragments)
        assert not report.is_last_fragment_left
        assert [one.first_entry for one in progress if not one.is_verifying] == owed
        # One id was changed in each of them, and nothing else.
        by = {one.first_entry: one.replacement for one in report.fragments}
        assert [(one.first_entry, one.content_term, one.bookies) for one in before] == [
            (
                one.first_entry,
                one.content_term,
                tuple(lost if name == by.get(one.first_entry) else name for name in one.bookies),
            )
            for one in await fragments_of(client, ledger_id)
        ]
        assert not await left_over(cluster, client, ledger_id)
        replicas = await client.ledger_replicas(ledger_id)
        assert {one.entries_missing for one in replicas} == {0, None}
        assert (await client.repair_ledger(ledger_id, replace=lost)).fragments == ()
        with pytest.raises(client_aio.InvalidArgumentError, match="unbounded"):
            await client.repair_ledger(ledger_id, replace=lost, recover_after_s=0.1)
        await check_repaired(cluster, client, ledger_id, lost)


async def test_beside_a_writer_that_rolls_and_trims_all_the_time(cluster: Cluster) -> None:
    await sweep_often(cluster)
    async with Links(cluster.uri) as links, links.connect("repairer") as repairer:
        async with client_aio.connect(cluster.uri) as one:
            ledger_id, lost = await bereaved(cluster, one)
            ledger = await one.open_unbounded_ledger(NAME)
            turns, firsts = count(), set()

            async def interfere(_: str) -> None:
                # Every other compare-and-set meets a head that the writer has changed since.
                if next(turns) % 2 == 0:
                    firsts.add(await ledger.trim(ledger.first_entry + FRAGMENT_ENTRIES))
                    await grow(ledger, 1)

            links.store("repairer").before_compare_and_set = interfere
            report = await asyncio.wait_for(repairer.repair_ledger(ledger_id, replace=lost), WAIT_S)
            assert report.fragments
            assert len(firsts) > 3
            fragments = await fragments_of(one, ledger_id)
            assert fragments[0].first_entry == max(firsts)
            assert all(lost not in fragment.bookies for fragment in fragments)
            await grow(ledger, 2)
            await ledger.trim(ledger.first_entry + FRAGMENT_ENTRIES)
            assert not await left_over(cluster, one, ledger_id)
            await ledger.close()
            first, last = ledger.first_entry, ledger.last_add_confirmed
        other = next(name for name in fragments[4].bookies if name != lost)
        await cluster[other].kill()
        async with client_aio.connect(cluster.uri, connect_timeout_s=1) as fresh:
            assert await everything(fresh, None) == list(enumerate(numbered(first, last), first))


@pytest.mark.parametrize("is_named", [False, True])
async def test_what_is_trimmed_while_it_is_copied_or_verified_is_left(
    cluster: Cluster, is_named: bool
) -> None:
    await sweep_often(cluster)
    async with (
        Links(cluster.uri) as links,
        links.connect("repairer") as repairer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger_id, lost = await bereaved(cluster, client)
        owed = [one.first_entry for one in await fragments_of(client, ledger_id) if lost in one.bookies]
        living = sorted(cluster.bookies.keys() - {lost})
        held: list[Sighting] = []

        async def hold_reads(_: str = "") -> None:
            links.store("repairer").before_compare_and_set = None
            held.extend(links["repairer", name].requests.hold(Op.READ) for name in living)

        if is_named:
            links.store("repairer").before_compare_and_set = hold_reads
        else:
            await hold_reads()
        repairing = asyncio.create_task(repairer.repair_ledger(ledger_id, replace=lost))
        async with asyncio.timeout(WAIT_S):
            while not any(one.is_reached for one in held):
                await client.ledger_metadata(ledger_id)
            async with client.open_unbounded_ledger(NAME) as ledger:
                await ledger.trim(FRAGMENT_ENTRIES)
            for name in living:
                while await stop_of(client, name, ledger_id, 0) is not Stop.NO_SUCH_ENTRY:
                    pass
            for one in held:
                one.release()
            report = await repairing
        assert [one.first_entry for one in report.fragments] == owed[1:]
        await check_repaired(cluster, client, ledger_id, lost)


async def test_what_is_trimmed_is_not_said_to_be_missing_where_the_metadata_server_lags(
    cluster: Cluster,
) -> None:
    await sweep_often(cluster)
    async with (
        Links(cluster.uri) as links,
        links.connect("reader") as reader,
        client_aio.connect(cluster.uri) as client,
        client.open_unbounded_ledger(NAME) as ledger,
    ):
        await grow(ledger, 2)
        holders = ledger.metadata.fragments[0].bookies
        await links.store("reader").lag(ledger_key(ledger.ledger_id))
        assert await ledger.trim(FRAGMENT_ENTRIES) == FRAGMENT_ENTRIES
        async with asyncio.timeout(WAIT_S):
            for name in holders:
                while await stop_of(client, name, ledger.ledger_id, 0) is not Stop.NO_SUCH_ENTRY:
                    pass
        replicas = await reader.ledger_replicas(ledger.ledger_id)
        assert {one.first_entry for one in replicas} == {FRAGMENT_ENTRIES}


@pytest.mark.parametrize("moment", ["before the head", "before the old page goes"])
async def test_a_repair_that_dies_at_a_page_leaves_the_ledger_whole(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("repairer") as repairer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger_id, lost = await bereaved(cluster, client)
        before = await fragments_of(client, ledger_id)
        reached = asyncio.Event()

        async def stand_still(*_: object, **__: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        store = links.store("repairer")
        if moment == "before the head":
            store.before_compare_and_set = stand_still
        else:
            monkeypatch.setattr(store, "delete", stand_still)
        repairing = asyncio.create_task(repairer.repair_ledger(ledger_id, replace=lost))
        await asyncio.wait_for(reached.wait(), WAIT_S)
        repairing.cancel()
        await asyncio.gather(repairing, return_exceptions=True)

        (orphan,) = await left_over(cluster, client, ledger_id)
        after = await fragments_of(client, ledger_id)
        assert after[1:] == before[1:]
        assert (after[0] == before[0]) == (moment == "before the head")
        assert await everything(client) == ALL
        report = await client.repair_ledger(ledger_id, replace=lost)
        assert len(report.fragments) == sum(lost in fragment.bookies for fragment in after)
        assert await left_over(cluster, client, ledger_id) == {orphan}
        async with client.open_unbounded_ledger(NAME) as ledger:
            assert await ledger.trim(FRAGMENT_ENTRIES) == FRAGMENT_ENTRIES
        assert not await left_over(cluster, client, ledger_id)
        await check_repaired(cluster, client, ledger_id, lost)


async def test_two_repairs_at_once_share_the_work(cluster: Cluster) -> None:
    async with Links(cluster.uri) as links, links.connect("x") as x, links.connect("y") as y:
        ledger_id, lost = await bereaved(cluster, x)
        owed = [one.first_entry for one in await fragments_of(x, ledger_id) if lost in one.bookies]
        both_have_copied, met = asyncio.Barrier(2), count()

        async def meet(_: str) -> None:
            if next(met) < 2:
                await asyncio.wait_for(both_have_copied.wait(), WAIT_S)

        links.store("x").before_compare_and_set = links.store("y").before_compare_and_set = meet
        reports = await asyncio.gather(*(one.repair_ledger(ledger_id, replace=lost) for one in (x, y)))
        assert sorted(one.first_entry for report in reports for one in report.fragments) == owed
        assert not await left_over(cluster, x, ledger_id)
        await check_repaired(cluster, x, ledger_id, lost)


async def test_a_fragment_that_others_make_name_the_bookie_meanwhile_is_repaired_too(
    cluster: Cluster,
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("repairer") as repairer,
        client_aio.connect(cluster.uri) as client,
    ):
        async with client.open_unbounded_ledger(NAME) as ledger:
            await grow(ledger, FRAGMENTS)
        ledger_id = ledger.ledger_id
        *parts, last = await fragments_of(client, ledger_id)
        moved = next(name for name in cluster.bookies if name not in last.bookies)
        behind = next(one for one in parts if moved not in one.bookies)
        others = count()

        async def name_it(_: str) -> None:
            # Before the last fragment there is to repair.
            if next(others) == sum(moved in one.bookies for one in parts) - 1:
                held = VersionedFragments(client._context, *await client._context.ledgers.read(ledger_id))
                end = behind.first_entry + FRAGMENT_ENTRIES - 1
                part = Part(behind.first_entry, end, behind.content_term, behind.bookies)
                assert await held.replace_bookie(part, behind.bookies[0], moved)

        links.store("repairer").before_compare_and_set = name_it
        report = await repairer.repair_ledger(ledger_id, replace=moved)
        repaired = [one.first_entry for one in report.fragments]
        assert repaired == sorted([behind.first_entry, *(p.first_entry for p in parts if moved in p.bookies)])
        assert all(moved not in one.bookies for one in await fragments_of(client, ledger_id))
        assert await everything(client) == ALL


async def test_a_lost_answer_of_the_compare_and_set_is_settled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("repairer") as repairer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger_id, lost = await bereaved(cluster, client)
        owed = [one.first_entry for one in await fragments_of(client, ledger_id) if lost in one.bookies]
        store = links.store("repairer")
        made, lost_answers = store.compare_and_set, count()

        async def lose_each_first_answer(key: str, value: bytes, version: Version, **given: Any) -> Version:
            done = await made(key, value, version, **given)
            if next(lost_answers) % 2 == 0:
                raise MetadataUnavailableError("the answer was lost")
            return done

        monkeypatch.setattr(store, "compare_and_set", lose_each_first_answer)
        report = await asyncio.wait_for(repairer.repair_ledger(ledger_id, replace=lost), WAIT_S)
        assert [one.first_entry for one in report.fragments] == owed
        assert next(lost_answers) == 2 * len(owed)
        assert not await left_over(cluster, client, ledger_id)
        assert await everything(client) == ALL


async def test_who_knows_the_old_pages_only_goes_on(cluster: Cluster) -> None:
    """A reader, one that has begun, and the writer itself: they read beyond it, and the writer writes."""
    async with (
        client_aio.connect(cluster.uri, connect_timeout_s=1) as one,
        client_aio.connect(cluster.uri) as other,
    ):
        ledger_id, lost = await bereaved(cluster, other)
        ledger = await one.open_unbounded_ledger(NAME)
        reader, stale = await one.open_ledger(NAME), await one.open_ledger(NAME)
        async with aclosing(reader.read(0, len(ALL) - 1)) as entries:
            found = [tuple(await anext(entries)) for _ in range(4)]
            before = await pages_of(cluster, ledger_id)
            await other.repair_ledger(ledger_id, replace=lost)
            assert before[0] not in await pages_of(cluster, ledger_id)
            killed = next(name for name in ledger.metadata.fragments[-1].bookies if name != lost)
            await cluster[killed].kill()
            found += [tuple(entry) async for entry in entries]
        assert found == ALL
        assert [tuple(entry) async for entry in stale.read(0, len(ALL) - 1)] == ALL
        assert [tuple(entry) async for entry in ledger.read(0, len(ALL) - 1)] == ALL
        await cluster[killed].start()
        await grow(ledger, 3)
        await ledger.close()
        fragments = await fragments_of(other, ledger_id)
        assert all(lost not in fragment.bookies for fragment in fragments)
        end = len(ALL) + 3 * FRAGMENT_ENTRIES
        assert await everything(other) == list(enumerate(numbered(0, end - 1)))


async def test_a_deletion_beside_a_repair_leaves_no_pages(cluster: Cluster) -> None:
    async with (
        Links(cluster.uri) as links,
        links.connect("repairer") as repairer,
        client_aio.connect(cluster.uri) as client,
    ):
        ledger_id, lost = await bereaved(cluster, client)

        async def delete(_: str) -> None:
            links.store("repairer").before_compare_and_set = None
            await client.delete_ledger(ledger_id)

        links.store("repairer").before_compare_and_set = delete
        with pytest.raises(client_aio.NoSuchLedgerError):
            await repairer.repair_ledger(ledger_id, replace=lost)
        assert await pages_of(cluster, ledger_id) == []
