"""A mistyped name is told, and is no empty answer. One among several is told before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.cli import Cli


@pytest.mark.parametrize("command", [("ledger", "verify"), ("ledger", "list"), ("ledger", "list", "--ids")])
@pytest.mark.parametrize(
    ("filter_", "told"),
    [
        (("--bookie", "b33"), b"there is no bookie b33; the cluster's are b1, b2, b3"),
        (("--log", "typo"), b"typo"),
    ],
)
def test_a_filter_by_a_name_that_is_not_there_is_told(
    cli: Cli, command: tuple[str, ...], filter_: tuple[str, ...], told: bytes
) -> None:
    assert told in cli.run(*command, *filter_, code=3)


def test_a_filter_by_a_name_that_is_there_may_let_nothing_through(cli: Cli) -> None:
    cli.run("log", "append", "of-a-filter", "-", stdin=b"record\n")
    assert cli.rows("ledger", "list", "--log", "of-a-filter", "--state", "in_recovery") == []


def test_nothing_is_deleted_where_a_name_among_several_is_none(cli: Cli) -> None:
    ledger = cli.run("ledger", "write", "-", stdin=b"kept\n").decode().strip()
    for bad in ("9999999999999999999999", "9223372036854775808", "a/b"):
        cli.run("ledger", "delete", ledger, bad, "--yes", code=2)
    assert cli.run("ledger", "cat", ledger) == b"kept\n"
    cli.run("log", "append", "kept", "-", stdin=b"record\n")
    cli.run("log", "delete", "kept", "a/b", "--yes", code=2)
    assert cli.run("log", "cat", "kept") == b"record\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("bookie", "decommission", "b1", "--dry-run", "--rate", "1e308"),
        ("cluster", "repair", "--dry-run", "--rate", "1e308"),
        ("ledger", "verify", "--rate", "1e308"),
        ("autorecovery", "run", "--worker-rate", "1e308"),
    ],
)
def test_a_rate_that_no_machine_has_is_wrong_usage(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert b"1000000" in cli.run(*arguments, code=2)
