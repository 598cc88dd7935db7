"""The records of auto recovery, on each kind of store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from metadata.access.repair_tasks import (
    REASON_LOST,
    REASON_MARKED,
    REASON_MISSING,
    AuditorRecord,
    RepairTask,
    RepairTasks,
    TaskRef,
    WorkerRecord,
)
from metadata.errors import KeyExistsError, MetadataCorruptError, NoSuchKeyError, VersionConflictError
from metadata.ids import KEY_AUDITOR, KEY_REPAIR_TASKS

if TYPE_CHECKING:
    from metadata.store import MetadataStore
    from tests.metadata.conftest import Backend

TASK = RepairTask({REASON_LOST: ["b3"]}, since_ms=1_790_000_000_000)


async def test_tasks_are_listed_with_the_fewest_copies_first(store: MetadataStore) -> None:
    tasks = RepairTasks(store)
    refs = [TaskRef(2, 7, "t1"), TaskRef(0, 900, "t2"), TaskRef(1, 2**63 - 1, "t3"), TaskRef(1, 3, "t4")]
    for ref in refs:
        await tasks.create(ref, TASK)
    await store.create(f"{KEY_REPAIR_TASKS}/foreign", b"{}")
    assert await tasks.refs() == [refs[1], refs[3], refs[2], refs[0]]
    await tasks.create(refs[0], replace(TASK, attempts=9))
    assert (await tasks.read(refs[0]))[0] == TASK, "a task that exists is left as it is"


async def test_a_task_that_was_changed_meanwhile_is_not_done(store: MetadataStore) -> None:
    tasks, ref = RepairTasks(store), TaskRef(2, 7, "t1")
    await tasks.create(ref, TASK)
    task, version = await tasks.read(ref)
    more = task.merged({REASON_LOST: ["b1", "b3"], REASON_MARKED: ["b2"]})
    assert more.reasons == {REASON_LOST: ["b1", "b3"], REASON_MARKED: ["b2"]}
    assert more.lost == ("b1", "b3")
    assert more.merged({REASON_LOST: ["b1"]}) is more
    await tasks.update(ref, more, version)
    assert not await tasks.done(ref, version)
    with pytest.raises(VersionConflictError):
        await tasks.update(ref, task.failed("no bookie", 0, ()), version)
    _, now = await tasks.read(ref)
    await tasks.update(ref, more.failed("x" * 10_000, 3, ()), now)
    failed, now = await tasks.read(ref)
    assert (failed.attempts, failed.entries_lost, len(failed.error)) == (1, 3, 500)
    assert await tasks.done(ref, now)
    assert await tasks.done(ref, now), "it is done, whoever did it"
    assert await tasks.refs() == []
    with pytest.raises(NoSuchKeyError):
        await tasks.read(ref)


async def test_what_is_added_to_a_task_stays_though_a_worker_ends_it(store: MetadataStore) -> None:
    tasks, ref = RepairTasks(store), TaskRef(2, 7, "t")
    await tasks.create(ref, TASK)
    _, before = await tasks.read(ref)
    same, more = await tasks.add(ref, 2, {REASON_MARKED: ["b2"]}, "u")
    assert (same, more.reasons) == (ref, {REASON_LOST: ["b3"], REASON_MARKED: ["b2"]})
    assert not await tasks.done(ref, before)
    assert (await tasks.read(ref))[0] == more
    urgent, again = await tasks.add(ref, 1, {REASON_MARKED: ["b2"]}, "u")
    assert (urgent, again) == (TaskRef(1, 7, "u"), more)
    assert await tasks.done(ref, before)
    assert await tasks.refs() == [urgent]


async def test_a_task_that_changes_while_its_key_does_stays_beside_the_new_one(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, ref, create = RepairTasks(store), TaskRef(2, 7, "t"), RepairTasks.create

    async def beside_a_worker(self: RepairTasks, urgent: TaskRef, task: RepairTask) -> None:
        await create(self, urgent, task)
        before, version = await self.read(ref)
        await self.update(ref, before.failed("no", 0, ["b9"]), version)

    await tasks.create(ref, TASK)
    monkeypatch.setattr(RepairTasks, "create", beside_a_worker)
    await tasks.add(ref, 1, {REASON_MARKED: ["b2"]}, "u")
    assert await tasks.refs() == [TaskRef(1, 7, "u"), ref]
    assert (await tasks.read(ref))[0].reasons[REASON_MISSING] == ["b9"]


@pytest.mark.parametrize("copies", [1, 2])
async def test_a_failure_is_noted_with_what_was_added_meanwhile(store: MetadataStore, copies: int) -> None:
    tasks, ref = RepairTasks(store), TaskRef(2, 7, "t")
    await tasks.create(ref, TASK)
    _, before = await tasks.read(ref)
    now, _ = await tasks.add(ref, copies, {REASON_MARKED: ["b2"]}, "u")
    await tasks.note_failure(ref, TASK, before, TASK.failed("no bookie", 0, ["b4"]))
    found = (await tasks.read(now))[0]
    assert found.reasons == {REASON_LOST: ["b3"], REASON_MARKED: ["b2"], REASON_MISSING: ["b4"]}
    assert (found.attempts, found.error) == (1, "no bookie")
    await tasks.done(now, None)
    await tasks.note_failure(ref, TASK, before, TASK.failed("no bookie", 0, ["b4"]))
    assert await tasks.refs() == []


async def test_a_lock_ends_with_its_worker(backend: Backend) -> None:
    first, second = await backend.open(), await backend.open()
    tasks, others = RepairTasks(first), RepairTasks(second)
    await tasks.lock(7, "w1")
    assert await others.locked() == {7}
    with pytest.raises(KeyExistsError):
        await others.lock(7, "w2")
    backend.crash(first)
    lock = await others.lock(7, "w2")
    assert await others.locked() == {7}
    await lock.close()
    assert await others.locked() == set()


async def test_workers_are_listed_while_they_live(backend: Backend) -> None:
    first, second = await backend.open(), await backend.open()
    tasks = RepairTasks(first)
    record = WorkerRecord("w1", ledger_id=7, repaired=2, bytes_read=100)
    registration = await tasks.announce(record)
    assert await RepairTasks(second).workers() == [record]
    await registration.update(replace(record, ledger_id=None).to_json())
    assert [one.ledger_id for one in await tasks.workers()] == [None]
    await registration.close()
    assert await tasks.workers() == []


async def test_the_pause_is_seen_by_all(backend: Backend) -> None:
    tasks, others = RepairTasks(await backend.open()), RepairTasks(await backend.open())
    assert not await others.is_paused()
    for is_paused in (True, True, False, True):
        await tasks.pause(is_paused)
        await others.store.sync("autorecovery/paused")
        assert await others.is_paused() is is_paused


async def test_the_auditors_record_is_replaced_and_a_damaged_one_is_none(store: MetadataStore) -> None:
    tasks = RepairTasks(store)
    assert (await tasks.auditor())[0] == AuditorRecord()
    for number in range(2):
        record = AuditorRecord("a", gone_s={"b3": 12.0}, lost=["b3"], passes=number)
        await tasks.write_auditor(record)
        assert (await tasks.auditor())[0] == record
    _, version = await store.read(KEY_AUDITOR)
    await store.compare_and_set(KEY_AUDITOR, b'{"format": 1, "gone_s": {"b3": "long"}}', version)
    assert (await tasks.auditor())[0] == AuditorRecord()
    await tasks.write_auditor(record)
    assert (await tasks.auditor())[0] == record


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[]",
        b'{"format": 2, "reasons": {}, "since_ms": 0}',
        b'{"format": 1, "reasons": {"bored": ["b1"]}, "since_ms": 0}',
        b'{"format": 1, "reasons": {"lost": ["/"]}, "since_ms": 0}',
        b'{"format": 1, "reasons": {"lost": ["b1"]}, "since_ms": -1}',
        b'{"format": 1, "reasons": {"lost": ["b1"]}, "since_ms": 0, "error": 7}',
        b'{"format": 1, "reasons": {"lost": ["b1"]}, "since_ms": 0, "more": 7}',
    ],
)
def test_a_damaged_task_is_refused(text: bytes) -> None:
    with pytest.raises(MetadataCorruptError):
        RepairTask.from_json(text)


@pytest.mark.parametrize(
    "name", ["", "02", "02-7-t", "2-0000000000000000007-t", "02-0000000000000000007", "x"]
)
def test_a_foreign_name_is_no_task(name: str) -> None:
    with pytest.raises(MetadataCorruptError):
        TaskRef.of_name(name)
    ref = TaskRef(2, 7, "t-1")
    assert TaskRef.of_name(ref.name) == ref
    assert {REASON_LOST, REASON_MARKED, REASON_MISSING} == set(RepairTask.from_json(
        replace(TASK, reasons={REASON_LOST: [], REASON_MARKED: [], REASON_MISSING: ["b1"]}).to_json()
    ).reasons)  # fmt: skip
