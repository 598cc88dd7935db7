"""A bookie under a service manager: the messages that come over NOTIFY_SOCKET, from real processes."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Manager:
    """The end of NOTIFY_SOCKET that systemd has."""

    def __init__(self, address: str) -> None:
        self.variable = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(TIMEOUT_S)

    def message(self) -> dict[str, str]:
        """Return the next message, by its keys."""
        return dict(line.split("=", 1) for line in self.socket.recv(4096).decode().split("\n"))

    def until(self, key: str) -> list[dict[str, str]]:
        """Return the messages up to the first one with a key."""
        messages = [self.message()]
        while key not in messages[-1]:
            messages.append(self.message())
        return messages


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@bookie-aio-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    one = Manager(name)
    with one.socket:
        yield one


def serve(
    tmp_path: Path, manager: Manager, *arguments: str, **variables: str
) -> tuple[Cli, list[str], dict[str, str]]:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    words = [
        "bookie",
        "serve",
        "--id",
        "b1",
        "--dir",
        str(tmp_path / "b1"),
        "--listen",
        "127.0.0.1:0",
        *arguments,
    ]
    return cli, words, cli.environment() | {"NOTIFY_SOCKET": manager.variable} | variables


def test_a_bookie_tells_when_it_serves_that_it_lives_and_when_it_stops(
    tmp_path: Path, manager: Manager
) -> None:
    cli, words, environment = serve(tmp_path, manager, WATCHDOG_USEC="200000")
    process = cli.start(*words, env=environment)
    starting = manager.until("READY")
    assert starting[0] == {"EXTEND_TIMEOUT_USEC": "60000000"}
    assert starting[-1]["READY"] == "1"
    assert starting[-1]["STATUS"].startswith("bookie b1 serves on 127.0.0.1:")
    alive = [manager.message() for _ in range(3)]
    assert alive == [{"WATCHDOG": "1"}] * 3
    process.send_signal(signal.SIGTERM)
    assert manager.until("STOPPING")[-1] == {"STOPPING": "1"}
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, error.decode()


def test_a_bookie_whose_event_loop_hangs_sends_no_watchdog(tmp_path: Path, manager: Manager) -> None:
    cli, words, environment = serve(tmp_path, manager, WATCHDOG_USEC="200000")
    process = cli.start(*words, env=environment)
    manager.until("WATCHDOG")
    manager.until("READY")
    process.send_signal(signal.SIGSTOP)
    manager.socket.settimeout(0.5)
    sent_before = 0
    with suppress(TimeoutError):
        while sent_before < 100:
            manager.message()
            sent_before += 1
    assert sent_before < 100
    process.kill()
    process.communicate(timeout=TIMEOUT_S)


def test_a_watchdog_of_another_process_is_not_served(tmp_path: Path, manager: Manager) -> None:
    cli, words, environment = serve(tmp_path, manager, WATCHDOG_USEC="1000", WATCHDOG_PID="1")
    process = cli.start(*words, env=environment)
    assert not any("WATCHDOG" in message for message in manager.until("READY"))
    process.send_signal(signal.SIGTERM)
    assert manager.message() == {"STOPPING": "1"}
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


def test_a_bookie_that_does_not_start_is_never_ready(tmp_path: Path, manager: Manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cli, words, environment = serve(tmp_path, manager, "--listen", f"127.0.0.1:{port}")
        process = cli.start(*words, env=environment)
        messages = manager.until("STOPPING")
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert not any("READY" in message for message in messages)


def test_a_manager_that_went_away_disturbs_nobody(tmp_path: Path) -> None:
    cli = Cli(f"sqlite://{tmp_path / 'metadata.db'}")
    environment = cli.environment() | {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "1000"}
    process = cli.start(
        "bookie",
        "serve",
        "--id",
        "b1",
        "--dir",
        str(tmp_path / "b1"),
        "--listen",
        "127.0.0.1:0",
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
