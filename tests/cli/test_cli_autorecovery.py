"""`cluster status`, `autorecovery` and the filters of `ledger list`, around the loss of a bookie."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

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


def until_healthy(cli: Cli) -> Any:
    """Run `cluster status` until it ends with 0."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        process = cli.start("cluster", "status", "-o", "json")
        out, _ = process.communicate(b"", TIMEOUT_S)
        if process.returncode == HEALTHY:
            return json.loads(out)
        assert time.monotonic() < deadline, out


def ids(cli: Cli, *filters: str) -> list[str]:
    return cli.run("ledger", "list", "--ids", *filters).decode().split()


def test_a_cluster_says_what_is_wrong_heals_and_says_that_nothing_is(tmp_path: Path) -> None:
    cluster = RunningCluster(tmp_path, "-n", "4", "--lost-bookie-delay", "1")
    try:
        cli = cluster.cli
        ledgers = [cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip() for _ in range(2)]
        found = status(cli, HEALTHY)
        assert (found["condition"], found["ledgers"], found["problems"]) == ("healthy", {"CLOSED": 2}, [])
        assert found["autorecovery"]["auditor"] in {"b1", "b2", "b3", "b4"}
        assert ids(cli, "--state", "closed") == ledgers
        shown = cli.rows("ledger", "show", ledgers[0])
        lost = shown["fragments"][0]["bookies"][0]

        assert b"paused" in cli.run("autorecovery", "pause")
        os.kill(cluster.pids()[lost], signal.SIGKILL)
        shutil.rmtree(tmp_path / lost)
        deadline = time.monotonic() + TIMEOUT_S
        while not (state := cli.rows("autorecovery", "status"))["tasks"]:
            assert time.monotonic() < deadline, state
        assert state["paused"]
        found = status(cli, DEGRADED)
        assert found["under_replicated"]["2"] >= 1
        assert any(f"bookie {lost} is down" in each["text"] for each in found["problems"])
        (row,) = [one for one in found["bookies"] if one["bookie_id"] == lost]
        assert row["state"] == "down"
        (row,) = [
            one
            for one in cli.rows("ledger", "list", "--under-replicated")
            if str(one["ledger_id"]) == ledgers[0]
        ]
        assert (row["good_copies"], row["reasons"]) == (2, [f"{lost} is down"])

        assert b"goes on" in cli.run("autorecovery", "resume")
        found = until_healthy(cli)
        assert found["under_replicated"] == {}
        assert ids(cli, "--bookie", lost) == []
        assert f"bookie {lost} is down, and no ledger names it" in [
            each["text"] for each in found["problems"]
        ]

        kept = next(each for each in ("b1", "b2") if each != lost)
        assert b"runs: stop it" in cli.run("bookie", "forget", kept, code=1)
        assert b"there is no bookie b9" in cli.run("bookie", "forget", "b9", code=3)
        cli.run("bookie", "forget", lost)
        assert lost not in [each["bookie_id"] for each in cli.rows("bookie", "list")]
        assert status(cli, HEALTHY)["problems"] == []
        refused = cli.run("bookie", "serve", "--id", lost, "--dir", str(tmp_path / "new"), "--listen",
                          "127.0.0.1:0", code=1)  # fmt: skip
        assert b"empty" in refused
    finally:
        cluster.end()
