"""`cluster status --dir`, `down` and `restart`: a cluster on this machine, by its directory."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    # A long path: a socket's own path may have a hundred bytes at most.
    cluster = RunningCluster(tmp_path_factory.mktemp("l" * 100), "-n", "2", "--no-autorecovery")
    yield cluster
    if cluster.process.poll() is None:
        cluster.end()


def here(running: RunningCluster) -> tuple[str, str]:
    return "--dir", str(running.directory)


def rows(running: RunningCluster) -> list[dict[str, Any]]:
    document = json.loads((running.directory / "cluster.json").read_text())
    found: list[dict[str, Any]] = document["bookies"]
    return found


def test_status_of_a_directory_has_its_processes_and_needs_no_metadata_option(
    running: RunningCluster,
) -> None:
    process = Cli().start("cluster", "status", *here(running), "-o", "json")
    document = json.loads(process.communicate(timeout=TIMEOUT_S)[0])
    assert document["pid"] == running.process.pid
    assert document["processes"] == rows(running)
    assert [one["state"] for one in document["bookies"]] == ["writable"] * 2
    text = Cli().start("cluster", "status", *here(running)).communicate(timeout=TIMEOUT_S)[0].decode()
    assert f"b1: pid {running.pids()['b1']}, 127.0.0.1:" in text


def test_a_restarted_bookie_is_a_new_process_with_its_data(running: RunningCluster) -> None:
    two = ("-e", "2", "-w", "2", "-a", "2")
    ledger = running.cli.run("ledger", "write", "-", *two, stdin=b"kept\n").decode().strip()
    before = running.pids()
    (row,) = Cli().rows("cluster", "restart", "b1", *here(running))
    after = running.pids()
    assert row == rows(running)[0]
    assert (after["b1"], after["b2"]) == (row["pid"], before["b2"])
    assert after["b1"] != before["b1"]
    with pytest.raises(ProcessLookupError):
        os.kill(before["b1"], 0)
    assert running.cli.run("ledger", "cat", ledger, "--newline") == b"kept\n"


def test_a_bookie_that_died_is_started_and_several_take_turns(running: RunningCluster) -> None:
    os.kill(running.pids()["b2"], signal.SIGKILL)
    found = Cli().rows("cluster", "restart", "b2", "b1", *here(running))
    assert [row["bookie_id"] for row in found] == ["b2", "b1"]
    assert all(row["pid"] for row in rows(running))
    assert [row["state"] for row in running.cli.rows("bookie", "list")] == ["writable"] * 2


def test_a_bookie_that_is_not_there_or_does_not_start_is_told(running: RunningCluster) -> None:
    before = running.pids()
    error = Cli().run("cluster", "restart", "b1", "b9", *here(running), code=2).decode()
    assert running.pids() == before, "nothing was done for the first one"
    assert error == "bookie-aio: there is no bookie b9 here; the bookies are: b1, b2\n"
    cookies = {path: path.read_bytes() for path in Path(running.directory / "b1").glob("*cookie*")}
    assert cookies
    for path in cookies:
        path.write_bytes(b"damaged")
    error = Cli().start("cluster", "restart", "b1", *here(running)).communicate(timeout=TIMEOUT_S)[1].decode()
    assert error.startswith("bookie-aio: bookie b1 did not start: ")
    assert rows(running)[0]["pid"] is None
    for path, content in cookies.items():
        path.write_bytes(content)
    (row,) = Cli().rows("cluster", "restart", "b1", *here(running))
    assert row["pid"] == running.pids()["b1"]


def test_what_is_not_understood_is_refused_and_disturbs_nobody(running: RunningCluster) -> None:

    descriptor = os.open(running.directory, os.O_RDONLY)
    for line in (b"nonsense\n", b"{}\n", b"[]\n", b'{"restart": 5}\n', b""):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(TIMEOUT_S)
            asking.connect(f"/proc/self/fd/{descriptor}/control.sock")
            asking.sendall(line)
            asking.shutdown(socket.SHUT_WR)
            assert b"error" in asking.recv(4096)
    os.close(descriptor)
    assert (running.directory / "control.sock").stat().st_mode & 0o777 == 0o600
    assert running.process.poll() is None


def test_down_stops_all_and_a_second_one_does_nothing(running: RunningCluster) -> None:
    pids = [*running.pids().values(), running.process.pid]
    assert Cli().rows("cluster", "down", *here(running)) == {
        "directory": str(running.directory), "stopped": True,
    }  # fmt: skip
    assert running.end()[0] == 0
    for pid in pids[:-1]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (running.directory / "control.sock").exists()
    assert Cli().rows("cluster", "down", *here(running))["stopped"] is False
    for command in (("status",), ("restart", "b1")):
        error = Cli().run("cluster", *command, *here(running), code=4).decode()
        assert f"no cluster runs in {running.directory}" in error
        assert "cluster up --dir" in error


def test_a_directory_that_is_none_is_told(tmp_path: Path) -> None:
    assert Cli().rows("cluster", "down", "--dir", str(tmp_path / "no"))["stopped"] is False
    assert b"no cluster runs in" in Cli().run("cluster", "restart", "b1", "--dir", str(tmp_path), code=4)


def test_a_process_that_got_the_id_of_a_killed_starter_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "supervisor.lock").write_text(f"{os.getpid()}\n")
    assert Cli().rows("cluster", "down", "--dir", str(tmp_path))["stopped"] is False
