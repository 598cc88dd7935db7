"""The bounds of workers: how much all of them read in a second, and how many work at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import client_aio
import client_aio.autorecovery.worker as worker_module
from client_aio.autorecovery.survey import auto_recovery_state
from client_aio.autorecovery.worker import Worker
from client_aio.config import MIB, AutoRecoveryConfig
from metadata.access.repair_tasks import (
    BY_HAND,
    REASON_MISSING,
    RepairTask,
    RepairTasks,
    TaskRef,
    WorkerRecord,
)
from tests.integration.test_autorecovery import QUICK, written

if TYPE_CHECKING:
    from client_aio.autorecovery.worker import Outcome
    from client_aio.core.courtesy import Step
    from tests.support.cluster import Cluster


async def test_workers_share_the_rate_of_the_cluster_whoever_works(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Urgent tasks are done by all workers of a host at once, and `cluster repair` reads beside them."""
    rates = list[float]()
    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        ledger_id = await written(client)
        ref = TaskRef(1, ledger_id, "t")
        await tasks.create(ref, RepairTask({REASON_MISSING: ["b1"]}, 0))
        others = [await tasks.announce(WorkerRecord(f"w{number}")) for number in range(9)]
        others += [await tasks.lock(1000 + number, f"w{number}") for number in range(9)]
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w9")
        registration = await tasks.announce(worker.record)
        throttle = worker._throttle

        async def looked(step: Step) -> None:
            await throttle(step)
            rates.append(worker._bucket.rate)
            if len(rates) == 1:
                others.append(await tasks.announce(WorkerRecord(f"{BY_HAND}x", bytes_per_s=32 * MIB)))

        monkeypatch.setattr(worker_module, "_LOOK_S", 0.0)
        monkeypatch.setattr(worker, "_throttle", looked)
        await worker._do(ref, registration)
        assert len(rates) > 1
        assert rates == [pytest.approx(6.4 * MIB), *[pytest.approx(3.2 * MIB)] * (len(rates) - 1)]
        for other in (*others, registration):
            await other.close()


async def test_a_worker_copies_on_while_the_metadata_store_does_not_say_who_works(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def hangs() -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        ref = TaskRef(1, await written(client), "t")
        await tasks.create(ref, RepairTask({REASON_MISSING: ["b1"]}, 0))
        worker = Worker(client._context, AutoRecoveryConfig(**QUICK), "w")
        registration = await tasks.announce(worker.record)
        attempt = worker.attempt

        async def attempt_alone(*arguments: Any) -> Outcome:
            monkeypatch.setattr(worker, "_set_rate", hangs)
            return await attempt(*arguments)

        monkeypatch.setattr(worker_module, "_LOOK_S", 0.0)
        monkeypatch.setattr(worker_module, "_LOOK_TIMEOUT_S", 0.02)
        monkeypatch.setattr(worker, "attempt", attempt_alone)
        await worker._do(ref, registration)
        assert asked
        assert (await tasks.refs(), worker.record.repaired) == ([], 1)
        await registration.close()


async def test_the_estimate_counts_the_workers_that_work_at_once(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        for number in range(10):
            await tasks.create(TaskRef(1 if number < 4 else 2, number, "t"), RepairTask({}, 0))
        registrations = [
            await tasks.announce(WorkerRecord(name, repaired=repaired, busy_s=3.0))
            for name, repaired in (("w1", 3), ("w2", 3), (f"{BY_HAND}x", 9))
        ]
        state = await auto_recovery_state(client._context)
        assert state.estimate_s == pytest.approx(4 / 2 + 6 / 1)
        for registration in registrations:
            await registration.close()
