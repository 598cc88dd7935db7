"""The standard streams as a user leaves them: closed, full, or in an encoding that has ASCII only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.cli import TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.cli import Cli

ROOT = Path(__file__).parent.parent.parent


def run_with(cli: Cli, redirection: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a command in a shell, which closes streams; gives exit code, output and errors."""
    command = [sys.executable, "-m", "client_aio.cli", *arguments]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *command],
        env=cli.environment() | variables, input="a\n", capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("ledger", "list"),
        ("bookie", "list"),
        ("log", "list"),
        ("ledger", "create"),
    ],
)
def test_closed_streams_end_no_command_badly(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert run_with(cli, "<&-", *arguments)[0] == 0
    code, _, error = run_with(cli, ">&-", *arguments)
    assert (code, error.count("\n")) == (1, 1)
    assert "closed" in error
    code, out, _ = run_with(cli, "2>&-", *arguments)
    assert code == 0
    assert out
    assert run_with(cli, "<&- >&- 2>&-", *arguments)[0] == 1


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_wrong_usage_and_missing_ledgers_keep_their_codes(cli: Cli, redirection: str) -> None:
    assert run_with(cli, redirection, "nosuch")[0] == 2
    assert run_with(cli, redirection, "ledger", "show", "999999")[0] == 3


def test_closed_streams_of_what_needs_them_are_failures(cli: Cli) -> None:
    code, out, error = run_with(cli, "<&-", "ledger", "write", "-")
    assert (code, out) == (1, "")
    assert "closed" in error
    code, out, error = run_with(cli, "2>&-", "ledger", "write", "-")
    assert (code, error) == (0, "")
    ledger = out.strip()
    assert run_with(cli, ">&-", "ledger", "cat", ledger)[0] == 1
    assert run_with(cli, "2>&-", "ledger", "cat", ledger)[0] == 0
    assert run_with(cli, ">/dev/full", "ledger", "cat", ledger)[0] == 1


def test_closed_streams_of_a_bookie_leave_its_files_alone(cli: Cli, tmp_path: Path) -> None:
    serve = ("bookie", "serve", "--listen", "127.0.0.1:0", "--dir", str(tmp_path / "new"))
    store = ("--metadata", f"sqlite://{tmp_path / 'metadata.db'}")
    code, _, error = run_with(cli, ">&-", *serve, *store)
    assert code == 1
    assert "closed" in error.splitlines()[-1]
    assert json.loads(run_with(cli, "<&-", "bookie", "list", *store, "-o", "json")[1])[0]["state"] == "down"


INTERRUPTED = {
    "while modules are imported": "main._add_groups = interrupt",
    "before the coroutine begins": "asyncio.Runner.run = interrupt",
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_before_a_command_begins_says_nothing(cli: Cli, when: str) -> None:
    program = (
        "import asyncio, sys\nfrom client_aio.cli import main\n"
        "def interrupt(*_): raise KeyboardInterrupt\n"
        f"{INTERRUPTED[when]}\nsys.argv[1:] = ['ledger', 'list']\nmain.main()\n"
    )
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(command, env=cli.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


INTERRUPTED_IMPORTS = ("client_aio.cli.main", "typer", "asyncio.events", "client_aio.cli.ledger")


@pytest.mark.parametrize("module", INTERRUPTED_IMPORTS)
def test_ctrl_c_while_a_module_is_looked_for_says_nothing(cli: Cli, module: str) -> None:
    """The signal itself, at each of several points of the start."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["bookie-aio"]
    entry, _, function = script.partition(":")
    program = (
        "import os, signal, sys\n"
        "class Interrupter:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        f"from {entry} import {function} as run\n"
        "sys.meta_path.insert(0, Interrupter)\nsys.argv[1:] = ['ledger', 'list']\nrun()\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=cli.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_applications_keep_their_handler_of_ctrl_c() -> None:
    program = (
        "import signal\nbefore = signal.getsignal(signal.SIGINT)\nimport client_aio.cli.entry\n"
        "from client_aio import *\nassert signal.getsignal(signal.SIGINT) is before"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "arguments", [(), ("ledger",), ("--help",), ("ledger", "list", "--help"), ("--version",)]
)
def test_a_reader_of_help_that_goes_away_ends_a_command_in_the_same_way(
    cli: Cli, arguments: tuple[str, ...]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = cli.start(*arguments, stdout=writing)
    os.close(writing)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (141, b"")


@pytest.mark.parametrize("form", ["table", "json", "jsonl"])
def test_a_reader_that_goes_away_ends_a_command_as_it_ends_a_filter(cli: Cli, form: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = cli.start("bookie", "list", "-o", form, stdout=writing)
    os.close(writing)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (141, b"")


def test_output_in_ascii_is_complete(cli: Cli) -> None:
    ledger = (
        cli.run("ledger", "write", "-", "--custom", "name=Zoë", stdin="naïve\n".encode()).decode().strip()
    )
    for arguments in (("ledger", "list"), ("ledger", "show", ledger), ("bookie", "list"), ("--help",)):
        code, out, _ = run_with(cli, "", *arguments, PYTHONIOENCODING="ascii")
        assert code == 0
        assert out.isascii()
        assert "\\u" not in out
    show = ("ledger", "show", ledger, "-o", "json")
    code, out, _ = run_with(cli, "", *show, PYTHONIOENCODING="ascii")
    assert json.loads(out) == json.loads(cli.run(*show))
    assert run_with(cli, "", "ledger", "cat", ledger, "-o", "jsonl", PYTHONIOENCODING="ascii")[0] == 0
