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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_write_says_how_to_recover_its_ledger(
    cli: Cli, number: signal.Signals, code: int
) -> None:
    process = cli.start("ledger", "write", "-")
    try:
        assert process.stderr is not None
        ledger = process.stderr.readline().decode().split()[-1]
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
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


async def test_handles_show_what_they_are_and_no_secret(cluster: RunningCluster) -> None:
    password = b"secret-of-the-ledger"
    async with client_aio.connect(cluster.document["metadata"]) as client:
        assert repr(client) == "<Client: open, 3 bookies>"
        async with client.create_ledger(digest="hmac-sha256", password=password) as writer:
            await writer.add_entry(b"data-of-the-entry")
            texts = [repr(writer)]
        assert texts[0] == f"<LedgerWriter of ledger {writer.ledger_id}: LAC 0, 0 bytes in flight>"
        assert repr(writer).endswith(", closed>")
        async with client.open_ledger(writer.ledger_id, password=password) as reader:
            assert repr(reader) == f"<LedgerReader of ledger {writer.ledger_id}: CLOSED, LAC 0>"
        async with client.open_log("shown", digest="hmac-sha256", password=password) as log:
            assert repr(log) == "<LogWriter of log 'shown': last position None, writing>"
        assert repr(log) == "<LogWriter of log 'shown': last position None, closed>"
    assert repr(client).startswith("<Client: closed")
    assert "secret" not in f"{writer!r} {log!r} {client!r} {reader!r}"


def test_spares_come_on_top_of_the_bookies_that_a_directory_has(tmp_path: Path) -> None:
    assert RunningCluster(tmp_path, "-n", "4").end()[0] == 0
    running = RunningCluster(tmp_path, "--spares", "1")
    assert len(running.pids()) == 5
    assert running.end()[0] == 0
    error = Cli().run("cluster", "up", "-n", "3", "--dir", str(tmp_path), code=2).decode()
    assert "-n 3 is refused" in error
