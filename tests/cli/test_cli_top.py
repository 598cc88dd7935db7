"""`top`: rates between two looks, a terminal that is given back, and plain output elsewhere."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from typing import TYPE_CHECKING, Any

import pytest

from client_aio.autorecovery.survey import AutoRecoveryState, ClusterSurvey
from client_aio.cli.top import Sample, Screen, rows_of
from client_aio.core.audit import Condition, Problem
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIGURES: dict[str, Any] = {
    "nonce": "n1",
    "connections": 3,
    "counters": {"entries_added": 100, "bytes_added": 2**20, "bytes_read": 0},
    "storage": {
        "fsync_us": {"p99": 2_500},
        "queue": {"bytes": 2048},
        "disk": {"free_bytes": 3 * 2**30},
        "ledgers": {"count": 7},
    },
}


def later(**counters: int) -> dict[str, Any]:
    figures = copy.deepcopy(FIGURES)
    figures["counters"] |= counters
    return figures


def test_rates_are_those_between_two_looks_at_the_same_run_of_a_bookie() -> None:
    states = {"b1": "writable", "b2": "down", "b3": "writable"}
    first = Sample(10.0, {"b1": FIGURES, "b3": FIGURES}, states)
    again = {**later(entries_added=5), "nonce": "n2"}
    second = Sample(12.0, {"b1": later(entries_added=300, bytes_added=5 * 2**20), "b3": again}, states)
    one, down, restarted = rows_of(first, second)
    assert (one.bookie, one.adds_s, one.mib_in_s, one.mib_out_s) == ("b1", 100.0, 2.0, 0.0)
    assert (one.fsync_p99_ms, one.queue_kib, one.free_gib, one.ledgers) == (2.5, 2.0, 3.0, 7)
    assert (down.state, down.adds_s, down.connections) == ("down", None, None)
    assert (restarted.adds_s, restarted.connections) == (None, 3)
    assert rows_of(None, first)[0].adds_s is None
    assert rows_of(first, first)[0].adds_s is None


def test_the_heading_tells_the_worst_and_how_much_is_left_out() -> None:
    problems = [Problem(Condition.DEGRADED, f"b{number} is down") for number in range(9)]
    found = ClusterSurvey([], {"OPEN": 2}, {}, 0, 0, 0, 0, AutoRecoveryState(), problems)
    first, *more, last = Screen([], found).heading()
    assert first == found.condition.label
    assert more[-1] == "  and 3 more: `cluster status`"
    assert last == "ledgers: 2 OPEN; 0 wait for a repair, 0 workers"
    assert Screen([], found, "gone").heading() == ["no answer: gone"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    cluster = RunningCluster(tmp_path_factory.mktemp("top"), "-n", "3")
    yield cluster
    code, error = cluster.end()
    assert code == 0, error.decode()


def test_json_lines_tell_what_is_written_between_them_and_which_bookie_dies(running: RunningCluster) -> None:
    process = running.cli.start("top", "-o", "jsonl", "--interval", "0.2")
    assert process.stdout is not None

    def shown() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
        assert document["error"] is None
        return document

    assert [row["bookie"] for row in shown()["bookies"]] == ["b1", "b2", "b3"]
    running.cli.run("ledger", "write", "-", stdin=b"a\n" * 500)
    rates = [0.0]
    while max(rates) == 0.0:
        rates = [row["adds_s"] for row in shown()["bookies"]]
    os.kill(running.pids()["b2"], signal.SIGKILL)
    while {row["bookie"]: row["state"] for row in shown()["bookies"]}["b2"] != "down":
        pass
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (0, b"")


def test_a_table_is_printed_where_there_is_no_terminal(cluster: RunningCluster) -> None:
    text = cluster.cli.run("top", "--count", "2", "--interval", "0.1").decode()
    assert text.count("adds s") == text.count(" b1 ") == 2
    assert "\x1b" not in text


def read_until(terminal: int, wanted: bytes) -> bytes:
    """Read from a terminal up to a text, or to its end."""
    seen = b""
    while wanted not in seen:
        try:
            more = os.read(terminal, 65_536)
        except OSError:  # the process has closed it
            break
        if not more:
            break
        seen += more
    return seen


@pytest.mark.parametrize(("columns", "has_all"), [(40, False), (120, True)])
def test_a_terminal_is_taken_and_given_back_at_ctrl_c(
    cluster: RunningCluster, columns: int, has_all: bool
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "client_aio.cli", "top", "--interval", "0.2"],
        env=cluster.cli.environment() | {"TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    assert process.stderr is not None
    try:
        seen = read_until(ours, b" b3 ")
        assert b"\x1b[?1049h" in seen
        assert (b"free gib" in seen) == has_all
        assert b"fsync p99" in seen
        os.write(ours, b"\x03")
        rest = read_until(ours, b"\x1b[?1049l") + read_until(ours, b"never")
        assert b"\x1b[?25h" in rest
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(ours)


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert b"typo.db" in Cli(f"sqlite://{tmp_path}/typo.db").run("top", "--count", "1", code=3)
