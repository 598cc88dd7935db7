"""Passwords on the command line: by file or environment, in no argument and no output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.cli import Cli

PASSWORD = "an open secret"


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    return str(file)


def test_a_ledger_written_with_a_password_needs_it_from_then_on(
    cli: Cli, password_file: str, tmp_path: Path
) -> None:
    given = ("--password-file", password_file)
    ledger = cli.run("ledger", "write", "-", *given, stdin=b"one\ntwo\n").decode().strip()
    assert cli.rows("ledger", "show", ledger)["digest"] == "hmac-sha256"
    assert cli.run("ledger", "cat", ledger, "--newline", *given) == b"one\ntwo\n"
    assert cli.run("ledger", "tail", ledger, "-n", "1", *given) == b"two\n"
    assert cli.run("ledger", "recover", ledger, *given)
    assert cli.rows("bench", "read", ledger, "--seconds", "1", *given)["entries"] > 0
    assert b"needs a password" in cli.run("bench", "read", ledger, "--seconds", "0.1", code=1)
    # A ledger written for the measurement has no password, whatever is given.
    assert cli.rows("bench", "read", "--entries", "10", "--seconds", "1", *given)["entries"] > 0
    wrong = tmp_path / "wrong"
    wrong.write_text("a guess")
    for command in ("cat", "tail", "recover", "delete"):
        for arguments, says in (
            ((), "needs a password"),
            (("--password-file", str(wrong)), "wrong password"),
        ):
            error = cli.run("ledger", command, ledger, *arguments, code=1).decode()
            assert says in error
            assert "--password-file" in error
            assert len(error.splitlines()) == 1
    assert cli.run("ledger", "delete", ledger, *given).decode() == f"deleted {ledger}\n"
    cli.run("ledger", "show", ledger, code=3)


def test_the_environment_gives_the_password_too(
    cli: Cli, password_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = cli.environment()
    monkeypatch.setattr(cli, "environment", lambda: environment)
    environment["BOOKIE_AIO_PASSWORD"] = PASSWORD
    ledger = cli.run("ledger", "write", "-", stdin=b"one\n").decode().strip()
    environment["BOOKIE_AIO_PASSWORD"] = "a guess"
    assert b"wrong password" in cli.run("ledger", "cat", ledger, code=1)
    environment["BOOKIE_AIO_PASSWORD_FILE"] = password_file
    assert cli.run("ledger", "cat", ledger, "--no-newline") == b"one"


def test_a_password_for_a_ledger_that_has_none_is_not_passed_over(cli: Cli, password_file: str) -> None:
    ledger = cli.run("ledger", "write", "-", stdin=b"one\n").decode().strip()
    error = cli.run("ledger", "cat", ledger, "--password-file", password_file, code=1)
    assert b"has no password" in error


def test_what_cannot_be_meant_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    empty, large = tmp_path / "empty", tmp_path / "large"
    empty.write_text("\n")
    large.write_bytes(bytes(2000))
    for file, says in ((empty, "1 to 1,024"), (large, "1 to 1,024"), (tmp_path / "none", "No such file")):
        error = cli.run("ledger", "create", "--password-file", str(file), code=2).decode()
        assert says in error
    assert b"password" in cli.run("ledger", "create", "--digest", "hmac-sha256", code=2)
    assert b"No such option" in cli.run("ledger", "create", "--password", PASSWORD, code=2)
    assert PASSWORD.encode() not in cli.run("ledger", "create", "--help")
