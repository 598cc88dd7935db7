"""What a survey says of tasks and of bookies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import client_aio
import client_aio.autorecovery.survey as survey_module
from client_aio.autorecovery.survey import LedgerFilter, auto_recovery_state, select_ledgers, survey
from client_aio.cli.text import recovery_text, survey_text
from metadata.access.repair_tasks import (
    COPIES_MAX,
    REASON_LEAVING,
    REASON_LOST,
    REASON_MISSING,
    REASON_RACKS,
    RepairTask,
    RepairTasks,
    TaskRef,
)
from tests.integration.test_autorecovery import written

if TYPE_CHECKING:
    import pytest

    from client_aio.context import ClientContext
    from tests.support.cluster import Cluster


async def test_every_task_that_failed_is_told_with_its_bookies(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        waiting, failed = RepairTask({REASON_LOST: ["b9"]}, 0), RepairTask({REASON_MISSING: ["b2"]}, 0)
        for number in range(250):
            task = waiting if number < 190 else failed.failed("no bookie", 0, ["b2", "b3"])
            await tasks.create(TaskRef(1 if number < 190 else 2, number, "t"), task)
        state = await auto_recovery_state(client._context)
        assert [row["ledger_id"] for row in state.to_document()["failed"]] == list(range(190, 250))
        text = recovery_text(state)
        assert "  ledger 190 (missing, b2, b3), 1 attempts: no bookie\n" in text
        assert "10 ledgers more that failed" in text


async def test_ledgers_that_lack_nothing_are_not_listed_as_under_replicated(cluster: Cluster) -> None:
    async with client_aio.connect(cluster.uri) as client:
        tasks = RepairTasks(client._context.ledgers.store)
        ids = [await written(client, count=1) for _ in range(4)]
        reasons: list[dict[str, list[str]]] = [
            {REASON_RACKS: []}, {REASON_LEAVING: ["b1"]}, {REASON_MISSING: ["b2"], REASON_LEAVING: ["b1"]}
        ]  # fmt: skip
        for ledger_id, why, copies in zip(ids, reasons, (COPIES_MAX, 3, 2), strict=False):
            await tasks.create(TaskRef(copies, ledger_id, "t"), RepairTask(why, 0))

        async def selected(**wanted: Any) -> dict[int, tuple[int | None, list[str]]]:
            async with aclosing(select_ledgers(client._context, LedgerFilter(**wanted))) as found:
                return {one.ledger_id: (one.good_copies, one.reasons) async for one in found}

        lacking = (2, ["b2 lacks entries", "b1 is to leave the cluster"])
        assert await selected(under_replicated=True) == {ids[2]: lacking}
        assert await selected(bookie="b1") == {
            ids[0]: (3, ["a write set is on one rack"]),
            ids[1]: (3, ["b1 is to leave the cluster"]),
            ids[2]: lacking,
            ids[3]: (3, []),
        }


async def test_a_survey_tells_what_bookies_run_and_how_full_they_are(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures_of = survey_module.figures_of

    async def hangs(context: ClientContext, bookie_id: str, timeout_s: float) -> dict[str, Any]:
        if bookie_id == "b3":
            await asyncio.Event().wait()
        return await figures_of(context, bookie_id, timeout_s)

    monkeypatch.setattr(survey_module, "figures_of", hangs)
    monkeypatch.setattr(survey_module, "_INFO_TIMEOUT_S", 1.0)
    async with client_aio.connect(cluster.uri) as client:
        await written(client)
        found = await survey(client._context)
    rows = {row["bookie_id"]: row for row in found.to_document()["bookies"]}
    assert [rows[name]["state"] for name in ("b1", "b2", "b3")] == ["writable", "writable", "silent"]
    one, text = rows["b1"], survey_text(found)
    release = client.bookies["b1"].properties["version"]
    assert one["disk_used_bytes"] == one["disk_bytes"] - one["disk_free_bytes"] > one["segment_bytes"] > 0
    assert (one["version"], one["last_seen_s"]) == (release, 0.0)
    assert f"weight 1, version {release}" in text
    assert " GiB free" in text
