"""`ledger repair` and `ledger show --replicas`, as an operator types them after a bookie is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.cli import TIMEOUT_S, RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

LINES = b"".join(b"line %d\n" % number for number in range(1000))


@pytest.fixture
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Four bookies, one of which the test kills."""
    running = RunningCluster(tmp_path_factory.mktemp("four"), "-n", "4")
    yield running
    running.end()


def bookies(cluster: RunningCluster, ledger: str) -> list[str]:
    fragments = cluster.cli.rows("ledger", "show", ledger)["fragments"]
    return [name for fragment in fragments for name in fragment["bookies"]]


def test_a_ledger_is_repaired_after_a_bookie_was_killed(four: RunningCluster) -> None:
    cli = four.cli
    ledger = cli.run("ledger", "write", "-", stdin=LINES).decode().strip()
    lost, *others = bookies(four, ledger)
    shown = cli.rows("ledger", "show", ledger, "--replicas")["replicas"]
    assert [(one["bookie_id"], one["entries_owed"], one["is_damaged"]) for one in shown] == [
        (name, 1000, False) for name in (lost, *others)
    ]
    os.kill(four.pids()[lost], signal.SIGKILL)
    (spare,) = four.pids().keys() - {lost, *others}
    rows = [line.split(maxsplit=3) for line in cli.run("ledger", "show", ledger, "--replicas").splitlines()]
    holds = {bookie.decode(): text.decode() for _, _, bookie, text in rows[-3:]}
    assert holds[lost].startswith("not known: ")
    assert [holds[name] for name in others] == ["all 1,000 entries"] * 2
    assert cli.run("ledger", "repair", ledger, "--replace", lost).decode() == (
        f"ledger {ledger}: entries 0–999: {lost} replaced by {spare}, 1,000 entries (7,890 bytes) copied\n"
    )
    assert bookies(four, ledger) == [spare, *others]
    assert cli.run("ledger", "cat", ledger, "--newline") == LINES
    report = cli.rows("ledger", "repair", ledger, "--replace", lost)
    assert (report["fragments"], report["is_last_fragment_left"]) == ([], False)
    assert cli.run("ledger", "repair", ledger, "--replace", lost).decode() == (
        f"ledger {ledger}: {lost} is in no fragment\n"
    )


def test_a_ledger_that_is_not_closed_is_taken_over_only_when_asked(four: RunningCluster) -> None:
    cli = four.cli
    process = cli.start("ledger", "write", "-")
    assert process.stdin is not None
    process.stdin.write(LINES)
    process.stdin.flush()
    while not (rows := cli.rows("ledger", "list")):
        pass
    ledger = str(rows[0]["ledger_id"])
    lost = bookies(four, ledger)[0]
    text = cli.run("ledger", "repair", ledger, "--replace", lost).decode()
    assert "not closed" in text
    assert lost in bookies(four, ledger)
    report = json.loads(
        cli.run("ledger", "repair", ledger, "--replace", lost, "--recover-after", "0.1", "-o", "jsonl")
    )
    assert report["was_recovered"]
    assert lost not in bookies(four, ledger)
    assert cli.rows("ledger", "show", ledger)["state"] == "CLOSED"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    _, error = process.communicate(LINES, TIMEOUT_S)
    assert process.returncode == 1
    assert b"took the ledger over" in error


def test_what_is_asked_wrongly_says_so(four: RunningCluster) -> None:
    cli = four.cli
    ledger = cli.run("ledger", "write", "-", stdin=b"a\n").decode().strip()
    first, second, _ = bookies(four, ledger)
    assert b"already" in cli.run("ledger", "repair", ledger, "--replace", first, "--with", second, code=2)
    assert b"not registered" in cli.run(
        "ledger", "repair", ledger, "--replace", first, "--with", "b9", code=4
    )
    assert b"no ledger 999" in cli.run("ledger", "repair", "999", "--replace", first, code=3)
    assert b"--replace" in cli.run("ledger", "repair", ledger, code=2)


def test_a_bookie_that_nobody_knows_is_told_from_one_that_owes_nothing(four: RunningCluster) -> None:
    cli = four.cli
    ledger = cli.run("ledger", "write", "-", stdin=b"a\n").decode().strip()
    (idle,) = four.pids().keys() - set(bookies(four, ledger))
    assert cli.run("ledger", "repair", ledger, "--replace", idle).decode() == (
        f"ledger {ledger}: {idle} is in no fragment\n"
    )
    error = cli.run("ledger", "repair", ledger, "--replace", "nosuch", code=3).decode()
    assert error == "bookie-aio: there is no bookie nosuch; the cluster's are b1, b2, b3, b4\n"
    assert all(name in error for name in four.pids())


def test_an_unbounded_ledger_is_repaired_by_its_name(four: RunningCluster) -> None:
    cli = four.cli
    cli.run("ledger", "create", "--unbounded", "payments")
    for lines in (b"a\nb\n", b"c\n"):
        cli.run("ledger", "takeover", "payments", "-", stdin=lines)
    ensembles = bookies(four, "payments")
    lost = min({*ensembles[:3]} & {*ensembles[-3:]})  # in the last fragment, too, which is left to its writer
    text = cli.run("ledger", "repair", "payments", "--replace", lost).decode()
    assert text.startswith(f"ledger 0: entries 0–1: {lost} replaced by ")
    assert "ledger takeover" in text
    assert lost not in bookies(four, "payments")[:3]
    assert cli.run("ledger", "cat", "payments", "--newline") == b"a\nb\nc\n"
    assert b"nothere" in cli.run("ledger", "repair", "nothere", "--replace", lost, code=3)
