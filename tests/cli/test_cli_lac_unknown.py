"""`ledger cat` and `ledger tail` of a ledger whose end too few bookies can tell."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.cli import RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

UNAVAILABLE = 4


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Three bookies, which the test kills."""
    running = RunningCluster(tmp_path_factory.mktemp("three"), "-n", "3")
    yield running
    running.end()


@pytest.mark.parametrize("killed", [2, 3])
def test_where_a_ledger_ends_is_not_made_up(three: RunningCluster, killed: int) -> None:
    cli = three.cli
    cli.run("ledger", "create", "--unbounded", "payments")
    cli.run("ledger", "takeover", "payments", "-", stdin=b"a\nb\n")
    assert cli.run("ledger", "cat", "payments", "--newline") == b"a\nb\n"
    for pid in list(three.pids().values())[:killed]:
        os.kill(pid, signal.SIGKILL)
    assert b"too few bookies" in cli.run("ledger", "cat", "payments", code=UNAVAILABLE)
    assert b"too few bookies" in cli.run("ledger", "tail", "payments", code=UNAVAILABLE)
