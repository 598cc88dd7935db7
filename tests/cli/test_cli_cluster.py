"""`cluster up`: the same cluster comes back, whatever stopped it, and nothing is left running."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from client_aio.cli.cluster import BookieProcess, LocalCluster
from client_aio.cli.exit_codes import BookieStartError
from client_aio.cli.local_control import read_record, record_of, supervisor_of
from metadata.errors import BookieUnavailableError, InvalidArgumentError
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Clusters:
    """Starts clusters, and ends those that a test has left running."""

    def __init__(self) -> None:
        self._started: list[RunningCluster] = []

    def start(self, directory: Path, *arguments: str) -> RunningCluster:
        """Start a cluster."""
        running = RunningCluster(directory, *arguments)
        self._started.append(running)
        return running

    def end(self) -> None:
        """End all."""
        for running in self._started:
            running.end(signal.SIGTERM)


@pytest.fixture
def clusters() -> Iterator[Clusters]:
    found = Clusters()
    yield found
    found.end()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _ids(running: RunningCluster) -> list[str]:
    return [row["bookie_id"] for row in running.document["bookies"]]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stops_cleanly_and_comes_back(clusters: Clusters, tmp_path: Path, how: signal.Signals) -> None:
    first = clusters.start(tmp_path, "-n", "3", "--spares", "1")
    assert _ids(first) == ["b1", "b2", "b3", "b4"]
    pids = first.pids()
    ledger = first.cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
    code, error = first.end(how)
    assert code == 0, error.decode()
    assert not any(map(_is_running, pids.values()))

    again = clusters.start(tmp_path, "-n", "3")
    assert _ids(again) == _ids(first)
    assert again.document["metadata"] == first.document["metadata"]
    assert again.cli.run("ledger", "cat", ledger, "--newline") == b"kept\n"


def test_comes_back_after_everything_was_killed(clusters: Clusters, tmp_path: Path) -> None:
    first = clusters.start(tmp_path)
    ledger = first.cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
    for pid in (*first.pids().values(), first.process.pid):
        os.kill(pid, signal.SIGKILL)
    first.end()
    again = clusters.start(tmp_path)
    assert _ids(again) == _ids(first)
    assert again.cli.run("ledger", "cat", ledger, "--newline") == b"kept\n"


def test_bookies_do_not_outlive_the_one_who_started_them(clusters: Clusters, tmp_path: Path) -> None:
    first = clusters.start(tmp_path, "-n", "1")
    first.end(signal.SIGKILL)
    # The lock that the bookies hold is free only when they are gone; the next start waits for that.
    again = clusters.start(tmp_path, "-n", "1")
    assert not set(first.pids().values()) - set(again.pids().values())
    assert again.end()[0] == 0


def test_second_start_on_the_same_directory_is_refused(clusters: Clusters, tmp_path: Path) -> None:
    running = clusters.start(tmp_path, "-n", "1")
    error = Cli().run("cluster", "up", "--dir", str(tmp_path), code=1).decode()
    assert str(tmp_path) in error
    assert running.cli.rows("bookie", "list")[0]["state"] == "writable"


def test_bookie_that_dies_is_reported_and_the_rest_goes_on(clusters: Clusters, tmp_path: Path) -> None:
    running = clusters.start(tmp_path, "-n", "2")
    assert running.process.stderr is not None
    os.kill(running.pids()["b2"], signal.SIGKILL)
    while b"b2" not in (line := running.process.stderr.readline()) or b"SIGKILL" not in line:
        assert line, "the end of standard error, and no report"
    assert running.cli.run("ledger", "create", "-e", "1").strip().isdigit()
    assert running.end()[0] == 0


def test_bookie_that_dies_is_started_again_when_asked_for(clusters: Clusters, tmp_path: Path) -> None:
    running = clusters.start(tmp_path, "-n", "1", "--restart")
    before = running.pids()["b1"]
    os.kill(before, signal.SIGKILL)
    assert running.process.stderr is not None
    while b"serves again" not in (line := running.process.stderr.readline()):
        assert line, "the end of standard error, and no restart"
    assert running.pids()["b1"] != before
    assert running.cli.run("ledger", "create", "-e", "1").strip().isdigit()


def test_bookie_that_fails_to_start_again_is_tried_until_it_can(clusters: Clusters, tmp_path: Path) -> None:
    running = clusters.start(tmp_path, "-n", "1", "--restart", "--no-autorecovery")
    assert running.process.stderr is not None
    with (tmp_path / "b1" / "lock").open("rb") as lock:
        os.kill(running.pids()["b1"], signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)  # once the process is gone
        while b"could not be started again" not in (line := running.process.stderr.readline()):
            assert line, "the end of standard error, and no failure"
        assert running.pids()["b1"] is None
    while b"serves again" not in (line := running.process.stderr.readline()):
        assert line, "the end of standard error, and no restart"


def test_what_waits_for_an_earlier_start_is_told_so_and_stops_when_asked(tmp_path: Path) -> None:
    with (tmp_path / "processes.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = Cli().start("cluster", "up", "-n", "1", "--dir", str(tmp_path))
        give_up = time.monotonic() + TIMEOUT_S
        while supervisor_of(tmp_path) is None:
            assert time.monotonic() < give_up
            time.sleep(0.01)  # the end of a process that is not ours is no event
        error = Cli().run("cluster", "status", "--dir", str(tmp_path), code=4).decode()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert "is starting" in error
    assert process.returncode == 0


def test_a_record_that_is_damaged_says_what_to_do(tmp_path: Path) -> None:
    for damaged in ("", "[]", '{"format": 1}', '{"format": 1, "metadata": 5, "bookies": []}'):
        (tmp_path / "cluster.json").write_text(damaged)
        error = Cli().run("cluster", "up", "--dir", str(tmp_path), code=2).decode()
        assert f"{tmp_path / 'cluster.json'}" in error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spares", "x"), ("pid", "x"), ("bookies", {}), ("spares", None),
        ("bookies.directory", 5), ("bookies.addresses", [5]), ("bookies.log", None), ("bookies.http", 7),
    ],
)  # fmt: skip
def test_a_damaged_record_is_told_with_the_field(tmp_path: Path, field: str, value: object) -> None:
    row = {"bookie_id": "b1", "pid": None, "addresses": [], "http": None, "directory": "/x", "log": "/x.log"}
    document = {"format": 1, "metadata": "sqlite:///x", "pid": None, "spares": 0, "bookies": [row]}
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    read_record(tmp_path)
    within, _, name = field.rpartition(".")
    (row if within else document)[name] = value
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    with pytest.raises(InvalidArgumentError, match=rf"cluster\.json is damaged .*\b{name} is "):
        read_record(tmp_path)


def test_start_that_fails_says_why_and_leaves_nothing_running(clusters: Clusters, tmp_path: Path) -> None:
    running = clusters.start(tmp_path, "-n", "2")
    assert running.end()[0] == 0
    (tmp_path / "b2" / "cookie.json").write_bytes(b"garbage")
    process = Cli().start("cluster", "up", "--dir", str(tmp_path))
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (5, b"")  # what the bookie ended with
    assert "bookie b2 did not start" in error.decode().splitlines()[-1]
    # Free again: nobody holds its locks.
    (tmp_path / "b2").rename(tmp_path / "aside")
    assert "b2" in Cli().run("cluster", "up", "--dir", str(tmp_path), code=1).decode()


def test_environment_does_not_lend_a_cluster_another_ones_metadata(
    clusters: Clusters, tmp_path: Path
) -> None:
    first = clusters.start(tmp_path / "first", "-n", "1")
    process = first.cli.start("cluster", "up", "-n", "1", "--dir", str(tmp_path / "second"))
    assert process.stdout is not None
    assert process.stdout.readline().decode().strip() == f"sqlite://{tmp_path / 'second' / 'metadata.db'}"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


def test_bookie_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = Cli(f"sqlite://{tmp_path / 'metadata.db'}").start(
        "bookie", "serve", "--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "-o", "jsonl",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        found = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, found) == (0, (hard, hard))


@pytest.mark.parametrize("umask", [0, 0o022])
def test_nothing_of_a_cluster_is_open_to_other_users(clusters: Clusters, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        running = clusters.start(tmp_path / "cluster", "-n", "1")
    finally:
        os.umask(before)
    running.cli.run("ledger", "write", "-", "-e", "1", "-w", "1", "-a", "1", stdin=b"secret\n")
    directory = tmp_path / "cluster"
    modes = {path: path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")]}
    assert {path.name for path in modes} >= {
        "metadata.db",
        "metadata.db-wal",
        "cookie.json",
        "lock",
        "b1.log",
    }
    wrong = {
        path.name: oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)
    }
    assert not wrong


def test_peers_that_take_all_connections_leave_descriptors_for_the_storage(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    process = cli.start(
        "bookie", "serve", "--id", "b1", "--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "-o",
        "jsonl", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)),
    )  # fmt: skip
    with contextlib.ExitStack() as strangers:
        try:
            assert process.stdout is not None
            (address,) = json.loads(process.stdout.readline())["addresses"]
            host, port = address.split(":")
            connections_max = cli.rows("bookie", "info", "b1")["connections_max"]
            assert connections_max == 128 - 128 // 4 - 64
            connections = [
                strangers.enter_context(socket.create_connection((host, int(port)))) for _ in range(150)
            ]
            # The last one has been accepted, and closed with all above the limit: the storage goes on.
            assert connections[-1].recv(1) == b""
            for connection in connections[:8]:
                connection.close()
            one = ("-e", "1", "-w", "1", "-a", "1")
            for _ in range(3):
                cli.run("ledger", "write", "-", *one, stdin=b"a\n")
            assert cli.rows("bookie", "list")[0]["state"] == "writable"
        finally:
            process.terminate()
            _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert b"too many connections" in log
    assert b"no space left" not in log
    assert b"oo many open files" not in log


def test_its_own_metadata_store_needs_to_be_named_once_and_the_embedded_one_moves_along(
    clusters: Clusters, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    own = f"sqlite://{tmp_path / 'elsewhere' / 'metadata.db'}"
    assert clusters.start(tmp_path / "own", "-n", "1", "--metadata", own).end()[0] == 0
    again = clusters.start(tmp_path / "own")
    assert (_ids(again)[0], again.document["metadata"]) == ("b1", own)
    assert clusters.start(tmp_path / "embedded", "-n", "1").end()[0] == 0
    (tmp_path / "embedded").rename(tmp_path / "moved")
    moved = clusters.start(tmp_path / "moved")
    assert moved.document["metadata"] == f"sqlite://{tmp_path / 'moved' / 'metadata.db'}"


async def test_a_start_that_ends_before_all_serve_has_recorded_which_bookies_there_are(
    tmp_path: Path,
) -> None:
    """A bookie takes entries as soon as it serves, so the next start must be of all of them."""
    cluster = _cluster(tmp_path)
    await cluster.prepare()
    recorded: list[list[str]] = []

    async def look(bookie: BookieProcess) -> None:
        recorded.append([row["bookie_id"] for row in read_record(tmp_path)["bookies"]])
        with pytest.raises(BookieUnavailableError, match="is starting"):
            record_of(os.getpid(), tmp_path)
        raise BookieStartError("not in this test", bookie_id=bookie.bookie_id)

    cluster._start = look  # type: ignore[method-assign]
    with pytest.raises(BookieStartError):
        await cluster.start()
    assert recorded[0] == ["b1", "b2", "b3", "b4"]
    for descriptor in cluster._locks:
        os.close(descriptor)
    # No bookie has made a cluster, so there is none in the store; the next start makes it.
    again = _cluster(tmp_path)
    await again.prepare()
    assert [bookie.bookie_id for bookie in again.bookies] == recorded[0]
    for descriptor in again._locks:
        os.close(descriptor)


def _cluster(directory: Path) -> LocalCluster:
    return LocalCluster(
        directory,
        metadata=None,
        bookies=4 if not (directory / "cluster.json").exists() else None,
        spares=0,
        base_port=0,
        racks=0,
        restart=False,
        arguments=[],
        has_page=False,
        report=lambda _: None,
    )


def test_a_cluster_whose_metadata_are_lost_does_not_start_as_another_one(
    clusters: Clusters, tmp_path: Path
) -> None:
    assert clusters.start(tmp_path, "-n", "1").end()[0] == 0
    for path in tmp_path.glob("metadata.db*"):
        path.rename(tmp_path / f"kept-{path.name}")
    error = Cli().run("cluster", "up", "-n", "3", "--dir", str(tmp_path), code=3)
    assert b"there is no cluster" in error
    assert not (tmp_path / "metadata.db").exists()
