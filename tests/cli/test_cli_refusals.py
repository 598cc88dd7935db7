"""What is refused or interrupted leaves nothing behind unsaid."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

import pytest

import client_aio
from bookie_aio.wire.messages import Failure, Status
from client_aio.bookies.connection import error_of
from metadata.errors import InvalidArgumentError
from metadata.ids import TERM_FINAL
from tests.support.cli import TIMEOUT_S, Cli, RunningCluster

if TYPE_CHECKING:
    from pathlib import Path


def test_an_interrupted_write_says_how_to_recover_its_ledger(cli: Cli) -> None:
    process = cli.start("ledger", "write", "-")
    try:
        assert process.stderr is not None
        ledger = process.stderr.readline().decode().split()[-1]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert f"ledger {ledger} stays OPEN" in error.decode()
    assert f"bookie-aio ledger recover {ledger}" in error.decode()
    assert cli.rows("ledger", "show", ledger)["state"] == "OPEN"


def test_fewer_bookies_than_the_directory_has_are_refused(tmp_path: Path) -> None:
    running = RunningCluster(tmp_path, "-n", "2")
    assert running.end()[0] == 0
    (line,) = Cli().run("cluster", "up", "-n", "1", "--dir", str(tmp_path), code=2).decode().splitlines()
    assert "has 2 bookies" in line
    assert "-n 1 is refused" in line


def test_a_bookie_on_a_taken_port_is_not_made_known(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    directory = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = cli.run("bookie", "serve", "--listen", address, "--dir", str(directory), code=1).decode()
    (line,) = error.splitlines()
    assert f"cannot listen on {address}" in line
    assert "in use" in line
    assert list(tmp_path.iterdir()) == []  # neither a data directory nor a metadata store


def test_the_final_term_is_told_in_words() -> None:
    failure = Failure(Status.INVALID_TERM, f"this bookie holds term {TERM_FINAL} for the ledger", TERM_FINAL)
    text = str(error_of(failure, bookie_id="b1", ledger_id=7))
    assert "the ledger is closed or was recovered by another client" in text
    assert str(TERM_FINAL) not in text
    assert "INVALID_TERM" not in text


@pytest.mark.parametrize("uri", ["http://x", "sqlite://relative", "zk://"])
def test_a_wrong_uri_is_refused_at_the_call(uri: str) -> None:
    with pytest.raises(InvalidArgumentError, match="sqlite:///absolute/path"):
        client_aio.connect(uri)
