"""Auto recovery on real bookies: copies come back without an operator, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.admin.repair as repair_module
import client_aio.autorecovery.worker as worker_module
import client_aio.bookies.pool as pool_module
from benchmarks.processes import Child
from client_aio.admin.replicas import parts_of, verify_replica
from client_aio.autorecovery.auditor import Auditor
from client_aio.autorecovery.drain import Drain
from client_aio.autorecovery.service import AutoRecovery
from client_aio.autorecovery.survey import auto_recovery_state, survey
from client_aio.autorecovery.worker import Worker
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import Condition, Layout, LedgerIndex, Seats, Ties
from metadata.access.bookies import DRAINING, Order, Orders, SetBack, SetBacks
from metadata.access.repair_tasks import (
    COPIES_MAX,
    REASON_LOST,
    REASON_MISSING,
    REASON_RACKS,
    AuditorRecord,
    RepairTask,
    RepairTasks,
    TaskRef,
)
from metadata.errors import BookieUnavailableError, MetadataUnavailableError
from metadata.ids import KEY_REPAIR_LOCKS
from tests.integration.test_healing import lose_segments, mark_of
from tests.support.cluster import BookieProcess, Cluster
from tests.support.replicas import WAIT_S, every_copy, flip, lose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
    from pathlib import Path

    from client_aio.autorecovery.worker import Outcome
    from client_aio.bookies.connection import BookieConnection

QUICK: dict[str, Any] = {
    "lost_bookie_delay_s": 0.3,
    "look_interval_s": 0.1,
    "pass_interval_s": 0.2,
    "info_interval_s": 0.2,
    "checks_per_s": 100.0,
    "retry_s": 0.2,
    "retry_max_s": 0.5,
}


async def written(client: client_aio.Client, count: int = 200, **shape: int) -> int:
    """Write a ledger, close it, and wait for all copies that can be made; gives its id."""
    async with client.create_ledger(**shape) as ledger:
        await ledger.add_entries(b"entry %d " % entry_id * 20 for entry_id in range(count))
    await every_copy(client, ledger.ledger_id)
    return ledger.ledger_id


async def faults_of(client: client_aio.Client, ledger_ids: Iterable[int]) -> list[Any]:
    """Read every replica of every complete fragment; gives those that are not whole."""
    context, found = client._context, []
    for ledger_id in ledger_ids:
        metadata, _ = await context.ledgers.read(ledger_id, sync=True)
        for part in parts_of(metadata):
            for bookie_id in part.bookies:
                replica = await verify_replica(context, metadata, part, bookie_id)
                if replica.status != "ok":
                    found.append(replica)
    return found


async def until(is_met: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition of many keys and bookies: no one watch tells of all of them."""
    async with asyncio.timeout(WAIT_S):
        while not await is_met():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def until_whole(client: client_aio.Client, ledger_ids: list[int]) -> None:
    """Wait until every replica is whole and no task is left; then read each of them."""

    async def is_whole() -> bool:
        if await RepairTasks(client._context.ledgers.store).refs():
            return False
        replicas = [one for each in ledger_ids for one in await client.ledger_replicas(each)]
        return not any(one.entries_missing for one in replicas if not one.error) and not any(
            one.error for one in replicas if one.entries_owed is not None
        )

    await until(is_whole)
    assert await faults_of(client, ledger_ids) == []


@asynccontextmanager
async def recovering(cluster: Cluster, tmp_path: Path, *arguments: str) -> AsyncIterator[Child]:
    """Run `autorecovery run` as a process of its own."""
    child = await Child.start(
        sys.executable, "-m", "client_aio.cli", "autorecovery", "run", "-o", "jsonl",
        "--metadata", cluster.uri, "--lost-bookie-delay", "0.5", *arguments, log=tmp_path / "recovery.log",
    )  # fmt: skip
    try:
        assert json.loads(await child.line())["name"]
        child.ignore_output()
        yield child
    finally:
        if child.process.returncode is None:
            await child.end()


async def test_a_lost_bookie_is_replaced_everywhere_beside_a_live_writer(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri) as client,
        client.create_ledger() as writer,
        AutoRecovery(client, AutoRecoveryConfig(**QUICK)),
    ):
        ledger_ids = [await written(client) for _ in range(4)]
        ledger_ids.append(await written(client, ensemble_size=3, write_quorum=2, ack_quorum=1))
        await writer.add_entries(b"before" for _ in range(50))
        lost = writer.metadata.last_fragment.bookies[0]
        await lose(cluster[lost])
        before = await survey(client._context)
        assert before.condition is Condition.DEGRADED or before.under_replicated.get(1)
        await writer.add_entries(b"after" for _ in range(50))
        await until_whole(client, [*ledger_ids, writer.ledger_id])
        for ledger_id in (*ledger_ids, writer.ledger_id):
            metadata = await client.ledger_metadata(ledger_id)
            assert all(lost not in fragment.bookies for fragment in metadata.fragments)
        assert len(writer.metadata.fragments) == 2, "the writer itself has changed its ensemble once"
        await writer.add_entry(b"it goes on")
        after = await survey(client._context)
        assert after.condition is Condition.HEALTHY, after.problems


async def test_a_worker_and_auditor_killed_in_the_middle_leave_their_work_to_others(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client, count=2000) for _ in range(3)]
        lost = (await client.ledger_metadata(ledger_ids[0])).last_fragment.bookies[0]
        async with recovering(cluster, tmp_path, "--worker-rate", "0.05") as slow:
            await lose(cluster[lost])
            store = client._context.ledgers.store
            async with asyncio.timeout(WAIT_S), aclosing(store.watch(KEY_REPAIR_LOCKS)) as changes:
                async for _ in changes:
                    if await store.children(KEY_REPAIR_LOCKS):
                        break
            slow.kill()
            await slow.wait()
        assert await faults_of(client, ledger_ids)
        async with recovering(cluster, tmp_path):
            await until_whole(client, ledger_ids)
        assert (await auto_recovery_state(client._context)).workers == []


async def test_write_sets_on_one_rack_are_spread_when_another_rack_comes(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, placement=client_aio.RackAware()) as client,
    ):
        ledger_ids = [await written(client), await written(client, write_quorum=2, ack_quorum=2)]
        async with AutoRecovery(client, AutoRecoveryConfig(**QUICK)) as recovery:
            assert recovery.auditor is not None
            await until(lambda: _has_passed(recovery, 2))
            assert await RepairTasks(client._context.ledgers.store).refs() == [], "no rack would help"
            for number in (4, 5):
                bookie = BookieProcess(f"b{number}", tmp_path, cluster.uri)
                cluster.bookies[bookie.bookie_id] = bookie
                await bookie.start("--rack", "r2")

            async def is_spread() -> bool:
                ensembles = [(await client.ledger_metadata(one)).last_fragment.bookies for one in ledger_ids]
                return all({"b4", "b5"}.intersection(one) for one in ensembles)

            await until(is_spread)
            await until_whole(client, ledger_ids)


async def _has_passed(recovery: AutoRecovery, passes: int) -> bool:
    assert recovery.auditor is not None
    return recovery.auditor.record.passes >= passes


async def test_a_seat_that_was_never_filled_is_found_by_the_checks(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        await cluster["b3"].kill()
        ledger_id = await written(client)
        await cluster["b3"].start()
        tasks = RepairTasks(client._context.ledgers.store)
        await tasks.pause(True)
        config = AutoRecoveryConfig(**{**QUICK, "check_interval_s": 1.0})
        async with AutoRecovery(client, config) as recovery:
            await until(lambda: _has_task(client, ledger_id, REASON_MISSING))
            assert (await survey(client._context)).condition is Condition.DEGRADED
            assert await tasks.refs() == [ref for ref in await tasks.refs() if ref.copies == 2]
            await tasks.pause(False)
            await until_whole(client, [ledger_id])
            assert recovery.auditor is not None
            assert recovery.auditor.record.lost == []
        assert sorted((await client.ledger_metadata(ledger_id)).fragments[0].bookies) == ["b1", "b2", "b3"]


async def _has_task(client: client_aio.Client, ledger_id: int, reason: str) -> bool:
    state = await auto_recovery_state(client._context)
    return any(ref.ledger_id == ledger_id and reason in task.reasons for ref, task in state.tasks)


async def test_a_ledger_that_cannot_be_repaired_stops_nobody_and_is_tried_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster:
        await cluster["b4"].end()
        async with client_aio.connect(cluster.uri) as client:
            wide = await written(client)
            narrow = await _on(client, "b3", ensemble_size=2, write_quorum=2, ack_quorum=1)
            async with AutoRecovery(client, AutoRecoveryConfig(**QUICK)):
                await lose(cluster["b3"])
                await until(lambda: _has_failed(client, wide))
                await until(lambda: _is_off(client, narrow, "b3"))
                state = await auto_recovery_state(client._context)
                assert [ref.ledger_id for ref in state.refs] == [wide]
                await cluster["b4"].start()
                await until_whole(client, [wide, narrow])


async def _on(client: client_aio.Client, bookie_id: str, **shape: int) -> int:
    """Write ledgers until one names a bookie."""
    while True:
        ledger_id = await written(client, **shape)
        if bookie_id in (await client.ledger_metadata(ledger_id)).last_fragment.bookies:
            return ledger_id
        await client.delete_ledger(ledger_id)


async def _has_failed(client: client_aio.Client, ledger_id: int) -> bool:
    state = await auto_recovery_state(client._context)
    failed = [task for ref, task in state.tasks if ref.ledger_id == ledger_id and task.attempts]
    return any("1 bookie is needed" in task.error for task in failed)


async def _is_off(client: client_aio.Client, ledger_id: int, bookie_id: str) -> bool:
    return bookie_id not in (await client.ledger_metadata(ledger_id)).last_fragment.bookies


async def test_a_task_of_a_ledger_that_is_deleted_ends_and_a_pause_holds_all(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client) for _ in range(4)]
        lost = (await client.ledger_metadata(ledger_ids[0])).last_fragment.bookies[0]
        tasks = RepairTasks(client._context.ledgers.store)
        await tasks.pause(True)
        async with AutoRecovery(client, AutoRecoveryConfig(**QUICK)) as recovery:
            assert recovery.worker is not None
            await lose(cluster[lost])
            await until(lambda: _has_task(client, ledger_ids[0], "lost"))
            await client.delete_ledger(ledger_ids[0])
            assert recovery.worker.record.repaired == 0
            found = await survey(client._context)
            assert found.condition is not Condition.HEALTHY
            assert "auto recovery is paused" in [problem.text for problem in found.problems]
            await tasks.pause(False)
            await until_whole(client, ledger_ids[1:])


async def test_a_bookie_that_lost_its_segments_is_healed_and_its_marks_are_lifted(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_ids = [await written(client) for _ in range(2)]
        await lose_segments(cluster["b1"], with_indexes=False)
        config = AutoRecoveryConfig(**{**QUICK, "check_interval_s": 1000.0, "lost_bookie_delay_s": 60.0})
        async with AutoRecovery(client, config):

            async def are_lifted() -> bool:
                return not any([await mark_of(client, "b1", ledger_id) for ledger_id in ledger_ids])

            assert not await are_lifted()
            await until(are_lifted)
            await until_whole(client, ledger_ids)
            assert [one.ledgers_damaged for one in (await survey(client._context)).bookies] == [0, 0, 0]


async def test_no_ledger_is_read_for_a_mark_that_stays_until_an_operator_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        store = client._context.ledgers.store
        worker = Worker(client._context, AutoRecoveryConfig(), "w")
        repaired: list[str] = []

        async def look(*arguments: object) -> tuple[Seats, int]:
            in_place = tuple({"b1", "b2"}.difference(repaired))
            return Seats(in_place, (), (), tuple({"b1"}.intersection(in_place))), 1

        async def repair(ledger_id: int, bookie_id: str, *, in_place: bool) -> dict[str, int]:
            repaired.append(bookie_id)
            return {}

        monkeypatch.setattr(worker, "look", look)
        monkeypatch.setattr(worker, "_repair", repair)
        event = SetBack("an event", "b3", 0, 8, [])
        await (await SetBacks.read(store)).replace(store, [event])
        outcome = await worker.attempt(7, ())
        assert repaired == ["b2"]
        assert (outcome.is_done, outcome.doubted) == (False, ())
        assert "accept-metadata" in outcome.error
        assert (await worker.attempt(8, ())).is_done  # it is of after the set-back
        repaired.clear()
        await (await SetBacks.read(store)).replace(store, [event.answer_for(["b1"])])
        assert (await worker.attempt(7, ())).is_done
        assert sorted(repaired) == ["b1", "b2"]


async def test_a_bookie_that_answers_before_it_is_registered_keeps_its_seat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client)
        before = (await client.ledger_metadata(ledger_id)).fragments
        bookie = before[0].bookies[0]
        await lose_segments(cluster[bookie], with_indexes=False)
        directory = client._context.pool.directory
        refresh = directory.refresh

        async def refresh_before_it_registers() -> None:
            await refresh()
            directory._available.pop(bookie, None)

        monkeypatch.setattr(directory, "refresh", refresh_before_it_registers)
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        assert (await worker.attempt(ledger_id, ())).is_done
        assert (await client.ledger_metadata(ledger_id)).fragments == before
        assert await faults_of(client, [ledger_id]) == []


async def test_a_task_is_not_done_while_the_bookie_that_it_names_does_not_answer(tmp_path: Path) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, config=impatient) as client,
    ):
        ledger_id = await written(client)
        bookie = (await client.ledger_metadata(ledger_id)).fragments[0].bookies[0]
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        cluster[bookie].stop()
        try:
            assert (await worker.attempt(ledger_id, ())).is_done
            outcome = await worker.attempt(ledger_id, (), RepairTask({REASON_MISSING: [bookie]}, 0))
        finally:
            cluster[bookie].resume()
        assert (outcome.is_done, outcome.error) == (False, f"{bookie} does not answer")


async def test_a_bookie_that_hangs_is_waited_for_once_and_asked_in_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    serves, connect = asyncio.Event(), pool_module.connect

    async def connect_once_it_serves(address: str, **settings: Any) -> BookieConnection:
        await serves.wait()
        return await connect(address, **settings)

    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, config=impatient) as client,
    ):
        ledger_id = await written(client)

        async def silent() -> list[str]:
            return [one.bookie_id for one in await client.ledger_replicas(ledger_id) if one.error]

        cluster["b2"].stop()
        try:
            # The first look loses the connection, the second one waits for another one.
            assert [await silent() for _ in range(2)] == [["b2"], ["b2"]]
            monkeypatch.setattr(pool_module, "connect", connect_once_it_serves)
            async with asyncio.timeout(WAIT_S):
                assert await silent() == ["b2"], "the attempt does not end, and nobody waits for its end"
        finally:
            cluster["b2"].resume()
        serves.set()
        assert await silent() == []


async def test_tasks_that_never_end_leave_room_for_ledgers_that_can_be_repaired(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        context = client._context
        tasks = RepairTasks(context.ledgers.store)
        auditor = Auditor(context, AutoRecoveryConfig(**{**QUICK, "tasks_max": 10}), "a")
        hopeless, others = range(100, 120), range(200, 230)
        for ledger_id in hopeless:
            auditor.index.note(ledger_id, Layout(1, (("b9",),), ()))
        for ledger_id in others:
            auditor.index.note(ledger_id, Layout(2, (("b1", "b9"),), ()))
        failed, done, before = set[int](), set[int](), set[TaskRef]()

        async def step() -> list[TaskRef]:
            auditor._round_at = 0.0
            await auditor._make_tasks(["b9"])
            await auditor._write()
            refs = await tasks.refs()
            assert len(refs) <= 10
            assert auditor.record.waiting == 50 - len(done) - len(refs), "each of them is counted"
            for ref in refs:
                task, version = await tasks.read(ref)
                if ref.ledger_id in hopeless:
                    await tasks.update(ref, task.failed("no copy is left", 1, ()), version)
                    failed.add(ref.ledger_id)
                else:
                    await tasks.done(ref, version)  # The auditor finds no such ledger.
                    done.add(ref.ledger_id)
            return refs

        async with asyncio.timeout(WAIT_S):
            while not (done.issuperset(others) and failed.issuperset(hopeless)):
                await step()
            failed.clear()
            before = set(await step())
            while not failed.issuperset(hopeless):
                now = set(await step())
                assert len(before - now) <= 1, "they take turns slowly"
                before = now
        assert (await auto_recovery_state(context)).lacking == {0: 20}


async def test_a_task_that_only_a_check_can_make_again_is_not_lost_with_an_auditor(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        context = client._context
        tasks = RepairTasks(context.ledgers.store)
        for ledger_id in range(10):
            task = RepairTask({REASON_MISSING: ["b1"]}, 0, attempts=3)
            await tasks.create(TaskRef(1, ledger_id, context.draw_token()), task)
        nonces = {name: one.nonce for name, one in context.pool.directory.available.items()}
        auditor = Auditor(context, AutoRecoveryConfig(**{**QUICK, "tasks_max": 10}), "a")
        auditor._begin(AuditorRecord(settled=nonces))
        await auditor._make_tasks([])
        assert len(await tasks.refs()) == 5
        record, _ = await tasks.auditor()
        assert (record.aside, sorted(record.settled)) == ({"1": 5}, ["b2", "b3"])
        auditor._begin(record)
        await auditor._look(0.0)
        await auditor._look(0.2)
        await auditor._look(0.2)
        assert auditor._back == {"b1": nonces["b1"]}, "the next auditor checks its ledgers"


async def test_a_bookie_that_is_away_during_its_checks_is_not_settled_by_them(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        directory = client._context.pool.directory
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        auditor.record = AuditorRecord(passes=1)
        for _ in range(3):
            await auditor._look(0.2)
        assert sorted(auditor._settling) == ["b1", "b2", "b3"]
        away = directory._available.pop("b3")
        await auditor._look(0.2)
        directory._available["b3"] = away
        await auditor._check_due(0.0)
        assert sorted(auditor.record.settled) == ["b1", "b2"]


async def test_a_drain_leaves_places_to_ledgers_that_lack_copies(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        orders = Orders({name: Order(DRAINING) for name in ("b1", "b2")})
        ledger_ids = [await written(client, count=1) for _ in range(8)]
        drains = {
            name: Drain(client._context, name, config=AutoRecoveryConfig(tasks_max=16))
            for name in orders.by_bookie
        }
        ties = dict.fromkeys(ledger_ids[:4], Ties.COPIES), dict.fromkeys(ledger_ids[4:], Ties.COPIES)
        for _ in range(2):
            for drain, each in zip(drains.values(), ties, strict=True):
                await drain._make_tasks(each, await tasks.refs(), orders)
            made = [ref.ledger_id for ref in await tasks.refs()]
            assert made == [*ledger_ids[:2], *ledger_ids[4:6]], "all drains together fill a quarter"


async def test_a_bookie_that_came_back_while_nobody_audited_is_checked_by_the_next_auditor(
    tmp_path: Path,
) -> None:
    config = AutoRecoveryConfig(**{**QUICK, "check_interval_s": 100_000.0})
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        whole = await written(client)

        async def are_settled() -> bool:
            running = {name: one.nonce for name, one in client._context.pool.directory.available.items()}
            return (await tasks.auditor())[0].settled == running

        async with AutoRecovery(client, config):
            await until(are_settled)
        await cluster["b3"].kill()
        lacking = await written(client)
        await cluster["b3"].start()
        async with AutoRecovery(client, config):
            await until(are_settled)
            await until_whole(client, [whole, lacking])


async def test_tasks_that_fail_take_every_second_turn(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        context = client._context
        tasks = RepairTasks(context.ledgers.store)
        refs = [TaskRef(copies, copies, context.draw_token()) for copies in (0, 1, 2)]
        for ref in refs:
            await tasks.create(ref, RepairTask({REASON_MISSING: ["b1"]}, 0))
        worker = Worker(context, AutoRecoveryConfig(**QUICK), "w")
        assert await worker._next() == refs[0]
        worker._queue = []
        await worker._next()  # lists them
        worker._queue, worker._rests = [*refs], {refs[0].name: (1, 0.0)}
        turns = []
        for _ in range(4):
            turns.append(await worker._next())
            worker._queue = [*refs]
        assert turns == [refs[1], refs[0], refs[1], refs[0]]


async def test_an_auditor_goes_on_with_what_was_seen_before_it_has_an_index(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        auditor._begin(AuditorRecord(gone_s={"b9": 0.2}))
        await auditor._look(0.2)
        assert auditor.states.lost == ["b9"]


async def test_a_check_that_failed_is_made_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_aio.connect(cluster.uri) as client:
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        for ledger_id in range(8):
            auditor._checks.add(ledger_id, 0.0)
        checked: list[int] = []

        async def check(ledger_id: int) -> None:
            if ledger_id == 3:
                raise MetadataUnavailableError("away")
            checked.append(ledger_id)

        monkeypatch.setattr(auditor, "_check", check)
        with pytest.raises(MetadataUnavailableError):
            await auditor._check_due(0.0)
        assert len(auditor._checks) + len(checked) == 8
        assert 3 not in checked


async def test_workers_on_one_host_work_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: list[int] = []
    at_once: list[int] = []
    attempt = Worker.attempt

    async def counted(worker: Worker, ledger_id: int, lost: Collection[str], task: RepairTask) -> Outcome:
        working.append(ledger_id)
        at_once.append(len(working))
        try:
            return await attempt(worker, ledger_id, lost, task)
        finally:
            working.remove(ledger_id)

    monkeypatch.setattr(Worker, "attempt", counted)
    monkeypatch.setattr(worker_module, "_CROWDED_S", 0.05)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(tmp_path, bookies=4))
        clients = [await stack.enter_async_context(client_aio.connect(cluster.uri)) for _ in range(3)]
        ledger_ids = [await written(clients[0], write_quorum=3) for _ in range(8)]
        for client in clients:
            await stack.enter_async_context(AutoRecovery(client, AutoRecoveryConfig(**QUICK)))
        await lose(cluster["b1"])
        await until_whole(clients[0], ledger_ids)
    assert len(at_once) > 1
    assert set(at_once) == {1}


async def test_what_a_sample_found_is_mended_though_the_bookie_lists_everything(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client)
        await cluster["b3"].end()
        flip(cluster["b3"].directory, b"entry 7 " * 20)
        await cluster["b3"].start()
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        assert (await worker.look(ledger_id, ()))[0] == Seats((), (), ())
        task = RepairTask({REASON_MISSING: ["b3"]}, 0)
        outcome = await worker.attempt(ledger_id, (), task)
        assert outcome.doubted == ("b3",), "it has a mark since this read"
        task = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
        assert (await worker.attempt(ledger_id, (), task)).is_done
        assert await faults_of(client, [ledger_id]) == []


async def test_a_task_stays_until_the_new_bookie_of_a_seat_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    verify, verified = repair_module._Copier.verify, list[str]()

    async def fail_once(copier: repair_module._Copier) -> None:
        verified.append(copier._target.bookie_id)
        if len(verified) == 1:
            error = BookieUnavailableError("cut off", bookie_id=verified[0])
            raise repair_module._TargetFailed(error)
        await verify(copier)

    monkeypatch.setattr(repair_module._Copier, "verify", fail_once)
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        client_aio.connect(cluster.uri, config=impatient) as client,
    ):
        ledger_id = await written(client)
        bookies = (await client.ledger_metadata(ledger_id)).fragments[0].bookies
        (new,) = {"b1", "b2", "b3", "b4"}.difference(bookies)
        await lose(cluster[bookies[0]])
        await until_gone(client, bookies[0])
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        task = RepairTask({REASON_LOST: [bookies[0]]}, 0)
        outcome = await worker.attempt(ledger_id, task.lost, task)
        assert (outcome.is_done, outcome.doubted) == (False, (new,)), "it lists everything"
        task = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
        cluster[new].stop()
        try:
            outcome = await worker.attempt(ledger_id, task.lost, task)
        finally:
            cluster[new].resume()
        assert (outcome.is_done, outcome.error) == (False, f"{new} does not answer")
        task = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
        assert task.reasons == {REASON_LOST: [bookies[0]], REASON_MISSING: [new]}
        assert (await worker.attempt(ledger_id, task.lost, task)).is_done
        assert verified == [new, new]
        assert await faults_of(client, [ledger_id]) == []


async def until_gone(client: client_aio.Client, bookie_id: str) -> None:
    """Wait until the registration of a bookie has ended."""
    directory = client._context.pool.directory
    async with asyncio.timeout(WAIT_S):
        while bookie_id in directory.available:
            await directory.wait_for_change(0.1)
            await directory.refresh()


async def test_a_task_that_failed_names_the_bookies_that_lack_entries_now(tmp_path: Path) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    async with (
        Cluster(tmp_path, bookies=5) as cluster,
        client_aio.connect(cluster.uri, config=impatient) as client,
    ):
        tasks = RepairTasks(client._context.ledgers.store)
        ledger_id = await written(client, ensemble_size=3, write_quorum=2, ack_quorum=2)
        *lost, good = (await client.ledger_metadata(ledger_id)).fragments[0].bookies
        new = sorted({"b1", "b2", "b3", "b4", "b5"}.difference([*lost, good]))
        for bookie_id in lost:
            await lose(cluster[bookie_id])
            await until_gone(client, bookie_id)
        await tasks.write_auditor(AuditorRecord(lost=lost))
        ref = TaskRef(0, ledger_id, "t")
        await tasks.create(ref, RepairTask({REASON_LOST: lost, REASON_MISSING: [good]}, 0))
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        registration = await tasks.announce(worker.record)
        await worker._do(ref, registration)
        task, _ = await tasks.read(ref)
        assert (task.attempts, task.entries_lost > 0) == (1, True)
        assert task.reasons == {REASON_LOST: lost, REASON_MISSING: new}, "the good one was verified"
        cluster[new[0]].stop()
        try:
            await worker._do(ref, registration)
        finally:
            cluster[new[0]].resume()
        task, _ = await tasks.read(ref)
        assert task.reasons == {REASON_LOST: lost, REASON_MISSING: new}, "also the one that is silent"


async def test_a_task_whose_repair_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise MetadataUnavailableError("away")

    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        ledger_id = await written(client)
        lost = (await client.ledger_metadata(ledger_id)).fragments[0].bookies[0]
        await lose(cluster[lost])
        await until_gone(client, lost)
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        with monkeypatch.context() as patched:
            patched.setattr(repair_module._Copier, "verify", fail)
            outcome = await worker.attempt(ledger_id, [lost])
        assert (outcome.is_done, outcome.error) == (False, f"{lost}: away")
        assert (await worker.look(ledger_id, [lost]))[0] == Seats((), (), ())
        assert (await worker.attempt(ledger_id, [lost])).is_done


async def test_a_seat_moves_to_another_rack_or_stays(tmp_path: Path) -> None:
    impatient = client_aio.ClientConfig(connect_timeout_s=0.5, read_timeout_s=0.5)
    async with (
        Cluster(tmp_path) as cluster,
        client_aio.connect(cluster.uri, config=impatient, placement=client_aio.RackAware()) as client,
    ):
        ledger_id = await written(client)
        before = (await client.ledger_metadata(ledger_id)).fragments
        for name, *rack in (("b4",), ("b5", "--rack", "r2")):
            bookie = BookieProcess(name, tmp_path, cluster.uri)
            cluster.bookies[name] = bookie
            await bookie.start(*rack)
        await client._context.pool.directory.refresh()
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        cluster["b5"].stop()
        try:
            outcome = await worker.attempt(ledger_id, ())
        finally:
            cluster["b5"].resume()
        assert (outcome.is_done, outcome.doubted) == (False, ("b5",))
        assert (await client.ledger_metadata(ledger_id)).fragments == before, "not to b4"
        task = RepairTask({REASON_RACKS: []}, 0).failed(outcome.error, 0, outcome.doubted)
        assert (await worker.attempt(ledger_id, (), task)).is_done
        assert "b5" in (await client.ledger_metadata(ledger_id)).fragments[0].bookies


async def test_a_worker_without_racks_leaves_their_tasks_to_others(cluster: Cluster) -> None:
    async with (
        client_aio.connect(cluster.uri) as client,
        client_aio.connect(cluster.uri, placement=client_aio.RackAware()) as other,
    ):
        ref = TaskRef(COPIES_MAX, 7, "t")
        await RepairTasks(client._context.ledgers.store).create(ref, RepairTask({REASON_RACKS: []}, 0))
        turns = [
            await Worker(each._context, AutoRecoveryConfig(**QUICK), "w")._next() for each in (client, other)
        ]
        assert turns == [None, ref]


async def test_ledgers_to_spread_over_racks_get_half_of_the_places(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LedgerIndex, "on_one_rack", lambda *_: list(range(10)))
    async with client_aio.connect(cluster.uri, placement=client_aio.RackAware()) as client:
        auditor = Auditor(client._context, AutoRecoveryConfig(tasks_max=4), "a")
        auditor._note_racks()
        await auditor._make_tasks([])
        auditor._note_racks()
        await auditor._make_tasks([])
        refs = await RepairTasks(client._context.ledgers.store).refs()
        assert [(ref.copies, ref.ledger_id) for ref in refs] == [(COPIES_MAX, 0), (COPIES_MAX, 1)]


async def test_a_bookie_that_is_lost_no_more_keeps_its_seat_during_a_restart(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        tasks, ledger_id = RepairTasks(client._context.ledgers.store), await written(client)
        bookies = (await client.ledger_metadata(ledger_id)).fragments[0].bookies
        ref, worker = TaskRef(2, ledger_id, "t"), Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        await tasks.create(ref, RepairTask({REASON_LOST: [bookies[0]]}, 0))
        registration = await tasks.announce(worker.record)
        await tasks.write_auditor(AuditorRecord())
        await cluster[bookies[0]].kill()
        await until_gone(client, bookies[0])
        await worker._do(ref, registration)
        assert (await tasks.read(ref))[0].error == f"{bookies[0]} does not answer"
        assert not await _is_off(client, ledger_id, bookies[0])
        await cluster[bookies[0]].start()
        await worker._do(ref, registration)
        assert await tasks.refs() == []


async def test_workers_hear_of_a_lost_bookie_before_its_tasks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        auditor._begin(AuditorRecord(gone_s={"b9": 0.2}))
        told: list[list[str]] = []

        async def make_tasks(_: list[str]) -> None:
            record, _ = await RepairTasks(client._context.ledgers.store).auditor()
            told.append(record.lost)

        monkeypatch.setattr(auditor, "_make_tasks", make_tasks)
        await auditor._look(0.2)
        assert told == [["b9"]]
