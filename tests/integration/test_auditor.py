"""The auditor's checks and its record, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.autorecovery.auditor as auditor_module
from client_aio.autorecovery.auditor import Auditor
from client_aio.autorecovery.worker import Worker, _Lost
from client_aio.config import AutoRecoveryConfig
from client_aio.core.repair_plan import EntryRun
from client_aio.ledger.metadata_update import VersionedLedgerMetadata
from metadata.access.repair_tasks import (
    COPIES_MAX,
    REASON_LEAVING,
    REASON_MISSING,
    REASON_RACKS,
    AuditorRecord,
    RepairTask,
    RepairTasks,
    TaskRef,
)
from metadata.errors import BookieUnavailableError
from metadata.ids import ledger_key
from tests.integration.test_autorecovery import QUICK, until, written

if TYPE_CHECKING:
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from tests.support.cluster import Cluster


async def begun(client: client_aio.Client, **config: float) -> Auditor:
    """Give an auditor that has read all ledgers, and whose bookies have all just come back."""
    auditor = Auditor(client._context, AutoRecoveryConfig(**{**QUICK, **config}), "a")
    await auditor._pass(0.0)
    for _ in range(3):
        await auditor._look(0.2)
    assert sorted(auditor._settling) == ["b1", "b2", "b3"]
    return auditor


async def test_a_ledger_whose_metadata_do_not_parse_holds_up_no_other_check(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        store = client._context.ledgers.store
        ledger_ids = [await written(client, count=1) for _ in range(3)]
        auditor = await begun(client)
        key = ledger_key(ledger_ids[0])
        intact, version = await store.read(key)
        version = await store.compare_and_set(key, b"{}", version)
        await auditor._check_due(0.0)
        assert auditor.record.checked == 2
        assert sorted(auditor.record.settled) == ["b1", "b2", "b3"]
        await auditor._pass(0.0)
        assert auditor.record.ledgers_unreadable == 1
        await store.compare_and_set(key, intact, version)
        await auditor._pass(0.0)
        assert auditor.record.ledgers_unreadable == 0
        assert len(auditor._checks) == 1, "it has its check now"


async def test_a_check_that_met_silence_is_made_again_when_the_bookie_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        pool = client._context.pool
        get_briefly = pool.get_briefly
        await written(client, count=1, ensemble_size=3, write_quorum=3)
        auditor = await begun(client, lost_bookie_delay_s=0.001)

        async def hangs(bookie_id: str) -> BookieConnection:
            if bookie_id == "b3":
                raise BookieUnavailableError("it hangs", bookie_id=bookie_id)
            return await get_briefly(bookie_id)

        with monkeypatch.context() as patched:
            patched.setattr(pool, "get_briefly", hangs)
            await auditor._check_due(0.0)
        await auditor._check_due(0.0)
        assert (auditor.record.checked, len(auditor._checks)) == (1, 0), "no check is spent on its silence"
        assert sorted(auditor.record.settled) == ["b1", "b2"]
        await auditor._ask_bookies(0.0)
        await auditor._look(0.2)

        async def are_settled() -> bool:
            await auditor._check_due(0.0)
            return sorted(auditor.record.settled) == ["b1", "b2", "b3"]

        await until(are_settled)
        assert auditor.record.checked == 2


async def test_a_change_of_the_record_while_it_is_written_is_written_next(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        tasks, write = auditor._tasks, auditor._tasks.write_auditor
        auditor._begin(AuditorRecord(settled={"b1": "start"}))

        async def write_beside_a_change(record: AuditorRecord) -> bool:
            is_written = await write(record)
            auditor._unsettle(["b1"])
            return is_written

        with monkeypatch.context() as patched:
            patched.setattr(tasks, "write_auditor", write_beside_a_change)
            assert await auditor._write()
        assert (await tasks.auditor())[0].settled == {"b1": "start"}
        assert await auditor._write()
        assert (await tasks.auditor())[0].settled == {}


async def test_a_task_that_a_drain_makes_of_a_ledger_set_aside_gets_the_reasons_of_its_former_task(
    cluster: Cluster,
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        context = client._context
        tasks = RepairTasks(context.ledgers.store)
        auditor = Auditor(context, AutoRecoveryConfig(**QUICK), "a")
        former = TaskRef(1, 7, context.draw_token())
        auditor._failed.set_aside(former, RepairTask({REASON_MISSING: ["b2"]}, 0, attempts=3))
        made = TaskRef(2, 7, context.draw_token())
        await tasks.create(made, RepairTask({REASON_LEAVING: ["b3"]}, 0))
        for _ in range(2):
            await auditor._make_tasks([])
        (ref,) = await tasks.refs()
        assert (ref.copies, ref.ledger_id) == (1, 7)
        assert (await tasks.read(ref))[0].reasons == {REASON_LEAVING: ["b3"], REASON_MISSING: ["b2"]}
        assert not auditor._failed.aside
        assert not auditor._found


async def test_a_mark_that_was_made_while_another_one_was_lifted_is_new_damage(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        first = await written(client, count=1)
        auditor = Auditor(client._context, AutoRecoveryConfig(), "a")
        await auditor._pass(0.0)
        figures_of = auditor_module.figures_of
        marks = {"damaged": 1}

        async def with_a_mark(context: ClientContext, bookie_id: str, timeout_s: float) -> dict[str, Any]:
            figures = await figures_of(context, bookie_id, timeout_s)
            assert isinstance(figures["storage"]["ledgers"]["last_mark"], int)
            figures["storage"]["ledgers"].update(marks if bookie_id == "b1" else {})
            return figures

        monkeypatch.setattr(auditor_module, "figures_of", with_a_mark)
        for last_mark, is_new in ((7, True), (7, False), (8, True)):
            marks["last_mark"] = last_mark
            await auditor._ask_bookies(0.0)
            assert auditor._checks.take(auditor._loop.time(), 10) == ({first: True} if is_new else {})


async def test_an_open_ledger_is_checked_when_it_has_begun_another_fragment(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger()
        auditor = Auditor(client._context, AutoRecoveryConfig(**QUICK), "a")
        for _ in range(2):
            await auditor._pass(0.1)
        assert not len(auditor._checks)
        held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger.ledger_id))
        await held.update(lambda now: now.change_ensemble(1, now.last_fragment.bookies))
        for is_new in (True, False):
            await auditor._pass(0.1)
            due = auditor._checks.take(auditor._loop.time() + 1.0, 10)
            assert due == ({ledger.ledger_id: False} if is_new else {})
        await ledger.abort()


async def lacking_at(client: client_aio.Client) -> tuple[int, str]:
    """Write a ledger whose metadata name a bookie that holds nothing; give both."""
    ledger_id = await written(client, ensemble_size=2, write_quorum=2, ack_quorum=2)
    held = VersionedLedgerMetadata(client._context, *await client._context.ledgers.read(ledger_id))
    before, other = held.current.last_fragment.bookies
    (empty,) = {"b1", "b2", "b3"} - {before, other}
    await held.update(lambda now: now.replace_bookie(0, before, empty))
    return ledger_id, empty


@pytest.mark.parametrize("reasons", [{REASON_RACKS: []}, {REASON_LEAVING: ["b9"]}])
async def test_a_check_adds_to_a_task_that_there_is_and_makes_it_as_urgent_as_it_is(
    cluster: Cluster, reasons: dict[str, list[str]]
) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id, empty = await lacking_at(client)
        tasks = RepairTasks(client._context.ledgers.store)
        ref = TaskRef(COPIES_MAX if REASON_RACKS in reasons else 2, ledger_id, "t")
        task = RepairTask(reasons, 0)
        await tasks.create(ref, task)
        _, version = await tasks.read(ref)
        auditor = await begun(client)
        auditor._waiting = 1  # The table of tasks is full.
        auditor._config = replace(auditor._config, tasks_max=1)
        await auditor._check_due(0.0)
        assert empty not in auditor.record.settled
        lock = await tasks.lock(ledger_id, "w")  # A worker begins between the check and its task.
        await auditor._look(0.2)
        (now,) = await tasks.refs()
        assert (now.copies, now.ledger_id) == (1, ledger_id)
        assert (await tasks.read(now))[0].reasons == {**reasons, REASON_MISSING: [empty]}
        assert await tasks.locked() == {ledger_id}
        assert await tasks.done(ref, version), "its worker ends it, and the other one stays"
        assert await tasks.refs() == [now]
        await auditor._check_due(0.0)
        assert empty in auditor.record.settled
        await lock.close()


async def test_a_ledger_that_is_being_repaired_is_checked_behind_that(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id, empty = await lacking_at(client)
        tasks = RepairTasks(client._context.ledgers.store)
        auditor = await begun(client)
        auditor._config = replace(auditor._config, look_interval_s=1e-9)
        # A drain makes a task, and the auditor has not looked since.
        await tasks.create(TaskRef(1, ledger_id, "t"), RepairTask({REASON_LEAVING: ["b9"]}, 0))
        lock = await tasks.lock(ledger_id, "w")
        for _ in range(2):
            await auditor._check_due(0.0)
            assert not auditor._found, "the repair under way may be about to make that untrue"
            assert empty not in auditor.record.settled
        await lock.close()
        await auditor._check_due(0.0)
        assert auditor._found == {ledger_id: (1, {REASON_MISSING: [empty]})}


async def test_a_repair_keeps_only_the_bookies_of_its_ledger_from_being_settled(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id, empty = await lacking_at(client)
        async with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1) as other:
            await other.add_entry(b"x")
        (alone,) = other.metadata.last_fragment.bookies
        auditor = await begun(client)
        named = (await client.ledger_metadata(ledger_id)).last_fragment.bookies
        unnamed = sorted(set(client.bookies) - {*named, alone})
        auditor._settling |= dict.fromkeys((*unnamed, "b9"), (0.0, "start"))
        lock = await RepairTasks(client._context.ledgers.store).lock(ledger_id, "w")
        await auditor._check_due(0.0)
        assert {*unnamed, "b9"} <= {*auditor.record.settled}
        assert empty not in auditor.record.settled
        await lock.close()


async def test_a_check_brings_a_ledger_back_that_was_set_aside_for_less(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        ledger_id, empty = await lacking_at(client)
        auditor = await begun(client)
        auditor._failed.set_aside(TaskRef(2, ledger_id, "t"), RepairTask({REASON_MISSING: ["b9"]}, 0))
        await auditor._check(ledger_id)
        assert not auditor._failed.aside
        assert auditor._found == {ledger_id: (1, {REASON_MISSING: [empty]})}
        auditor._found.clear()
        auditor._failed.set_aside(TaskRef(1, ledger_id, "t"), RepairTask({REASON_MISSING: [empty]}, 0))
        await auditor._check(ledger_id)
        assert list(auditor._failed.aside) == [ledger_id]
        assert not auditor._found


async def test_an_entry_that_is_found_nowhere_keeps_a_task_of_racks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_aio.connect(cluster.uri, placement=client_aio.RackAware()) as client:
        ledger_id = await written(client, write_quorum=2, ack_quorum=2)
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")

        async def spread(_: int) -> _Lost:
            return _Lost({"b9": [EntryRun(4, 6, 1)]})

        monkeypatch.setattr(worker, "_spread", spread)
        task = RepairTask({REASON_RACKS: []}, 0)
        outcome = await worker.attempt(ledger_id, (), task)
        assert (outcome.is_done, outcome.entries_lost, outcome.doubted) == (False, 3, ("b9",))
        failed = task.failed(outcome.error, outcome.entries_lost, outcome.doubted)
        assert failed.reasons == {REASON_RACKS: [], REASON_MISSING: ["b9"]}
