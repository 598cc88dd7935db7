"""A test and a command see the same of each other, whether the command is forked or executed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import forkserver
from tests.support.cli import TIMEOUT_S, Cli
from tests.support.cluster import BookieProcess
from tests.support.forkserver import ForkedProcess

if TYPE_CHECKING:
    from pathlib import Path

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(params=["forked", "executed"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts commands in one way."""
    is_forked = request.param == "forked"
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str | bytes, **options: Any) -> subprocess.Popen[bytes]:
        # A set option has it executed; of an environment that is new to the server, the second is forked.
        cli = Cli()
        if not is_forked:
            options |= {"close_fds": True}
        elif forkserver._server_for(options.get("env") or cli.environment()) is None:
            forkserver._server_for(options.get("env") or cli.environment())
        process = cli.start(*arguments, **options)
        started.append(process)
        assert isinstance(process, ForkedProcess) == is_forked
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def bookie(directory: Path, *arguments: str) -> list[str]:
    uri = f"sqlite://{directory / 'metadata.db'}"
    return [
        "bookie", "serve", "--dir", str(directory / "b"), "--metadata", uri, "--listen", "127.0.0.1:0",
        "-o", "jsonl", *arguments,
    ]  # fmt: skip


def test_arguments_environment_streams_and_exit_code_arrive(start: Start, tmp_path: Path) -> None:
    for command, code, printed, said in (
        (["--version"], 0, b"bookie-aio ", b""),
        (["ledger", "show", "7"], 2, b"", b"no metadata store is named"),
        (["bookie", b"\xff"], 2, b"", b"\\udcff"),
    ):
        process = start(*command)
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == process.wait() == process.poll() == code
        assert printed in out
        assert said in error
    named = {**Cli().environment(), "BOOKIE_AIO_METADATA": f"sqlite://{tmp_path}/none.db"}
    with (tmp_path / "error").open("wb") as file:
        process = start("ledger", "list", env=named, stderr=file)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert f"{tmp_path}/none.db" in (tmp_path / "error").read_text()


def test_standard_input_is_read_to_its_end(start: Start, tmp_path: Path) -> None:
    process = start(*bookie(tmp_path, "--stop-with-parent"))
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["pid"] == process.pid
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_a_signal_ends_it(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(*bookie(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == code
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def _signals(proc: str) -> dict[str, int]:
    """Return which signals a process blocks, ignores and catches, without those of the C library."""
    with open(f"{proc}/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    return {key: int(status[key], 16) & (1 << 31) - 1 for key in ("SigBlk", "SigIgn", "SigCgt")}


def test_it_has_what_an_executed_process_has(start: Start, tmp_path: Path) -> None:
    process = start(*bookie(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    proc = f"/proc/{process.pid}"
    assert os.readlink(f"{proc}/cwd") == os.getcwd()
    assert os.readlink(f"{proc}/exe") == os.path.realpath(sys.executable)
    assert os.getpgid(process.pid) == os.getpgid(0)
    assert os.getsid(process.pid) == os.getsid(0)
    caught = sum(1 << one - 1 for one in (signal.SIGINT, signal.SIGTERM))
    by_python = sum(1 << one - 1 for one in (signal.SIGPIPE, signal.SIGXFSZ))
    # A process inherits what is ignored: nohup ignores SIGHUP, and a shell's `&` SIGINT and SIGQUIT.
    inherited_ignored = _signals("/proc/self")["SigIgn"]
    assert _signals(proc) == {
        "SigBlk": 0,
        "SigIgn": (inherited_ignored | by_python) & ~caught,
        "SigCgt": caught,
    }
    inherited = [os.readlink(f"{proc}/fd/{one}") for one in (0, 1, 2)]
    assert all(one.startswith("pipe:") for one in inherited)


async def test_a_bookie_is_forked_stopped_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests before this one may have started as many servers as there may be.
    monkeypatch.setattr(forkserver, "SERVERS_MAX", 2 * forkserver.SERVERS_MAX)
    bookie = BookieProcess("b1", tmp_path, f"sqlite://{tmp_path / 'metadata.db'}")
    await bookie.start()
    await bookie.kill()
    await bookie.start()
    assert bookie.child is not None
    assert isinstance(bookie.child.process, forkserver.AwaitedProcess)
    bookie.stop()
    assert bookie.child.process.returncode is None
    await bookie.kill()
    assert bookie.child.process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        bookie.child.process.kill()
    await bookie.start()
    await bookie.end()
    assert bookie.child.process.returncode == 0


def test_the_server_ends_with_the_process_that_started_it() -> None:
    program = (
        "from tests.support import forkserver; import os, signal\n"
        "server = forkserver.ForkServer(os.environ); print(server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=forkserver.ROOT, capture_output=True, timeout=TIMEOUT_S
    )
    # It returned, so standard error has ended, which the server holds as well.
    assert done.returncode == -signal.SIGKILL
    assert done.stdout
