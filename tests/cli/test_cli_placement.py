"""Racks from the command line: a cluster with labels, and ledgers placed by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cli import RunningCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def racked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Four bookies on two racks, in turn."""
    directory: Path = tmp_path_factory.mktemp("racked")
    running = RunningCluster(directory, "-n", "4", "--racks", "2")
    yield running
    code, error = running.end()
    assert code == 0, error.decode()


def test_bookies_are_labelled_in_turn(racked: RunningCluster) -> None:
    rows = racked.cli.rows("bookie", "list")
    assert [row["rack"] for row in rows] == ["r1", "r2", "r1", "r2"]


@pytest.mark.parametrize("command", ["create", "write"])
def test_ledgers_are_placed_over_racks_when_asked_for(racked: RunningCluster, command: str) -> None:
    """By chance alone, two of four bookies would stand on one rack once in three times."""
    rack_of = {row["bookie_id"]: row["rack"] for row in racked.cli.rows("bookie", "list")}
    for _ in range(5):
        ledger_id = racked.cli.run("ledger", command, "-e", "2", "--placement", "rack-aware").decode().strip()
        fragment = racked.cli.rows("ledger", "show", ledger_id)["fragments"][-1]
        assert {rack_of[bookie_id] for bookie_id in fragment["bookies"]} == {"r1", "r2"}


def _racks_of(running: RunningCluster, ledger_id: str) -> set[str]:
    rack_of = {row["bookie_id"]: row["rack"] for row in running.cli.rows("bookie", "list")}
    fragments = running.cli.rows("ledger", "show", ledger_id)["fragments"]
    return {rack_of[bookie_id] for bookie_id in fragments[-1]["bookies"]}


def test_copies_of_commands_are_placed_over_racks_when_asked_for(tmp_path: Path) -> None:
    """By chance alone, every second ledger would stand on one rack."""
    running = RunningCluster(tmp_path, "-n", "4", "--racks", "2", "--no-autorecovery")
    cli, over_racks = running.cli, ("--placement", "rack-aware")
    try:
        ledgers = []
        for _ in range(8):
            written = cli.run("ledger", "write", "-e", "2", "-w", "2", "-", *over_racks, stdin=b"x\n")
            ledgers.append(written.decode().strip())
        for ledger_id in ledgers:
            cli.run("ledger", "repair", ledger_id, "--replace", "b2", *over_racks)
            assert _racks_of(running, ledger_id) == {"r1", "r2"}
        cli.run("bookie", "decommission", "b1", *over_racks)
        for ledger_id in ledgers:
            assert _racks_of(running, ledger_id) == {"r1", "r2"}
    finally:
        running.end()


def test_a_write_set_on_one_rack_is_said_on_standard_error(tmp_path: Path) -> None:
    running = RunningCluster(tmp_path, "-n", "2", "--racks", "1")
    try:
        process = running.cli.start("ledger", "create", "-e", "2", "--placement", "rack-aware")
        _, error = process.communicate(b"", 60)
        assert process.returncode == 0
        assert "2 of 2 write sets are on one rack only" in error.decode()
    finally:
        running.end()


def test_an_unknown_policy_is_refused(racked: RunningCluster) -> None:
    error = racked.cli.run("ledger", "create", "--placement", "anywhere", code=2)
    assert b"rack-aware" in error
