"""`cluster status`, `autorecovery` and the filters of `ledger list`, around the loss of a bookie."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest

import client_aio
from client_aio.autorecovery.survey import survey
from client_aio.cli import bookie
from client_aio.cli.options import Placement
from client_aio.config import AutoRecoveryConfig
from client_aio.core.audit import Condition
from metadata.access.bookies import DRAINING, REMOVED, Order, Orders, change_order, is_retired
from metadata.backends.uri import open_store
from metadata.ids import KEY_COOKIES
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from pathlib import Path

HEALTHY, DEGRADED = 0, 1


def status(cli: Cli, code: int) -> Any:
    """Run `cluster status`, expect its exit code, and parse its JSON."""
    process = cli.start("cluster", "status", "-o", "json")
    out, error = process.communicate(b"", TIMEOUT_S)
    assert process.returncode == code, (process.returncode, out, error)
    return json.loads(out)


async def until(uri: str, *, tasks: bool) -> None:
    """Wait until there are tasks, or until the cluster is healthy: in this process, which is faster."""
    async with asyncio.timeout(TIMEOUT_S), client_aio.connect(uri) as client:
        while True:
            found = await survey(client._context)
            if found.auto_recovery.refs if tasks else found.condition is Condition.HEALTHY:
                return


async def test_a_cluster_says_what_is_wrong_heals_and_says_that_nothing_is(tmp_path: Path) -> None:
    cluster = RunningCluster(tmp_path, "-n", "4", "--lost-bookie-delay", "1")
    try:
        cli, uri = cluster.cli, cluster.document["metadata"]
        ledger = cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
        async with client_aio.connect(uri) as client:
            lost, kept, *_ = (await client.ledger_metadata(int(ledger))).last_fragment.bookies
        assert b"paused" in cli.run("autorecovery", "pause")
        os.kill(cluster.pids()[lost], signal.SIGKILL)
        (tmp_path / lost).rename(tmp_path / "aside")
        await until(uri, tasks=True)
        found = status(cli, DEGRADED)
        assert (found["ledgers"], found["under_replicated"]) == ({"CLOSED": 1}, {"2": 1})
        assert f"bookie {lost} is down, and 1 ledgers name it" in [each["text"] for each in found["problems"]]
        assert found["autorecovery"]["paused"]
        (row,) = cli.rows("ledger", "list", "--under-replicated", "--bookie", lost, "--state", "closed")
        assert (row["good_copies"], row["reasons"]) == (2, [f"{lost} is down"])
        assert f"1 ledgers name bookie {lost}".encode() in cli.run("bookie", "forget", lost, code=1)
        async with await open_store(uri) as store:
            assert not (await Orders.read(store)).by_bookie  # what is refused has changed nothing
            # A forget, or a drain, that was killed has left its order. It goes on unless it is taken back.
            await change_order(store, lost, lambda _: Order(DRAINING))
            refused = cli.run("bookie", "forget", lost, code=1)
            assert f"stays draining; `bookie decommission --cancel {lost}`".encode() in refused
            cli.run("bookie", "decommission", "--cancel", lost)
            assert not (await Orders.read(store)).by_bookie

        assert b"goes on" in cli.run("autorecovery", "resume")
        await until(uri, tasks=False)
        assert cli.run("ledger", "list", "--ids", "--bookie", lost) == b""
        assert b"runs: stop it" in cli.run("bookie", "forget", kept, code=1)
        async with await open_store(uri) as store:
            # Another forget, or a drain, was killed when it was about to remove the cookie.
            await change_order(store, lost, lambda _: Order(REMOVED))
            assert b"is forgotten" in cli.run("bookie", "forget", lost)
            assert not (await Orders.read(store)).by_bookie
            assert await is_retired(store, lost)
            assert lost not in await store.children(KEY_COOKIES)
        assert status(cli, HEALTHY)["problems"] == []
        assert lost not in [each["bookie_id"] for each in cli.rows("bookie", "list")]
        for directory in ("new", "aside"):
            where = ("--dir", str(tmp_path / directory), "--listen", "127.0.0.1:0")
            error = cli.run("bookie", "serve", "--id", lost, *where, code=1)
            assert b"was decommissioned, and its id is never used again" in error
    finally:
        cluster.end()


async def test_a_cluster_starts_again_without_a_bookie_that_has_left(tmp_path: Path) -> None:
    cluster = RunningCluster(tmp_path, "-n", "2")
    try:
        assert b"bookie b1 has left the cluster" in cluster.cli.run("bookie", "decommission", "b1")
        assert [each["bookie_id"] for each in cluster.cli.rows("bookie", "list")] == ["b2"]
    finally:
        cluster.end()
    cluster = RunningCluster(tmp_path, "-n", "2")
    try:
        assert sorted(cluster.pids()) == ["b2", "b3"]
    finally:
        cluster.end()


async def test_no_error_ends_auto_recovery_beside_a_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookie, "_RECOVERY_RETRY_S", 0.0)
    outcomes: list[BaseException] = [asyncio.CancelledError(), OSError("no descriptor")]

    class Failing:
        def connect(self, *_: object, **__: object) -> NoReturn:
            raise outcomes.pop()

    with pytest.raises(asyncio.CancelledError):
        await bookie._recover(
            cast("Any", Failing()), cast("Any", None), AutoRecoveryConfig(), Placement.WEIGHTED, "b1", {}
        )
    assert not outcomes
