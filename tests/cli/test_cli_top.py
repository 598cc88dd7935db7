"""`top`: rates between two looks, a terminal that is given back, and plain output elsewhere."""

from __future__ import annotations

import asyncio
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

from client_aio.autorecovery.survey import AutoRecoveryState, BookieReport, ClusterSurvey
from client_aio.cli import top
from client_aio.cli.options import Invocation, Loop
from client_aio.cli.output import Format, Output
from client_aio.cli.top import Row, Sample, Screen, rows_of
from client_aio.core.audit import Condition, Problem
from metadata.backends.uri import open_store
from metadata.ids import KEY_REPAIR_PAUSED
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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
    first, *more, last = Screen([], found, age_s=75.4).heading()
    assert first == "degraded; surveyed 75 s ago"
    assert more[-1] == "  and 3 more: `cluster status`"
    assert last == "ledgers: 2 OPEN; 0 wait for a repair, 0 workers"
    assert Screen([], found, "gone").heading() == ["no answer: gone"]


def surveyed(*states: str) -> ClusterSurvey:
    """Return a survey in which nothing is wrong, of b1, b2 and so on."""
    bookies = [BookieReport(f"b{number}", state) for number, state in enumerate(states, 1)]
    return ClusterSurvey(bookies, {"OPEN": 2}, {}, 0, 0, 0, 0, AutoRecoveryState(), [])


@pytest.mark.parametrize("state", ["down", "silent"])
@pytest.mark.parametrize("before", ["writable", "down", "silent"])
def test_no_cluster_is_healthy_while_a_bookie_is_gone(before: str, state: str) -> None:
    rows = [Row("b1", "writable"), Row("b2", state)]
    for screen in (
        Screen(rows, surveyed("writable", before), age_s=3.0), Screen(rows, None),
        Screen(rows, surveyed("writable", before), age_s=3.0, survey_error="it broke"),
    ):  # fmt: skip
        assert screen.document()["condition"] == "degraded"
        assert screen.heading()[0].startswith("degraded; ")
        is_known = screen.cluster is not None and before == state
        assert screen.problems() == ([] if is_known else [f"bookie b2 is {state}, and no survey has seen it"])


def test_a_cluster_is_healthy_only_by_a_survey_that_succeeded_last() -> None:
    rows = [Row("b1", "writable")]
    well = Screen(rows, surveyed("writable"), age_s=2.04)
    assert well.heading()[0] == "healthy; surveyed 2 s ago"
    shown = well.document()
    assert (shown["condition"], shown["survey_age_s"], shown["survey_error"]) == ("healthy", 2.0, None)
    failed = Screen(rows, surveyed("writable"), age_s=90.0, survey_error="it broke")
    assert failed.heading()[0] == "unknown; the survey failed: it broke (surveyed 90 s ago)"
    shown = failed.document()
    assert (shown["condition"], shown["survey_age_s"], shown["survey_error"]) == (None, 90.0, "it broke")
    assert Screen(rows, None, survey_error="it broke").heading() == ["unknown; the survey failed: it broke"]
    assert Screen(rows, None).heading() == ["looking; the survey of all ledgers is under way"]
    assert Screen(rows, surveyed("writable"), "gone", 2.0).document()["condition"] is None


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


async def test_a_survey_that_fails_or_is_older_than_a_loss_calls_nothing_healthy(tmp_path: Path) -> None:
    running = RunningCluster(tmp_path / "cluster", "-n", "3", "--no-autorecovery")
    process = running.cli.start("top", "-o", "jsonl", "--interval", "0.2")
    assert process.stdout is not None
    lines = process.stdout

    async def shown_until(is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            document: dict[str, Any] = json.loads(await asyncio.to_thread(lines.readline))
            is_gone = {row["state"] for row in document["bookies"]} & {"down", "silent"}
            if is_gone or document["survey_error"]:
                assert document["condition"] != "healthy"
            if is_wanted(document):
                return document

    try:
        first = await shown_until(lambda shown: shown["condition"] == "healthy")
        assert first["survey_age_s"] >= 0
        os.kill(running.pids()["b2"], signal.SIGKILL)
        await shown_until(lambda shown: shown["bookies"][1]["state"] == "down")
        async with await open_store(str(running.cli.metadata)) as store:
            await store.create(KEY_REPAIR_PAUSED, b"{}")
            failed = await shown_until(lambda shown: shown["survey_error"] is not None)
            assert KEY_REPAIR_PAUSED in failed["survey_error"]
            later = await shown_until(lambda shown: shown["survey_age_s"] > failed["survey_age_s"])
            assert later["survey_error"]
            await store.delete(KEY_REPAIR_PAUSED)
        again = await shown_until(lambda shown: shown["survey_error"] is None)
        assert again["survey_age_s"] < failed["survey_age_s"]
        assert any("b2 is down" in problem for problem in again["problems"])
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, error) == (0, b"")
    finally:
        process.kill()
        process.communicate()
        code, told = running.end()
    assert code == 0, told.decode()


async def test_a_bug_of_the_survey_ends_it_aloud(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object) -> ClusterSurvey:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(top, "survey", broken)
    invocation = Invocation(cluster.cli.metadata, Output(Format.JSONL), Loop.ASYNCIO, debug=False)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await top.top(invocation, interval=0.1)


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
