"""What a command loads before it begins: bookies and calls in scripts start without what they do not use."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(program: str) -> set[str]:
    """Return the modules a fresh interpreter has loaded after a program."""
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("program", "needed", "not_needed"),
    [
        (
            "import client_aio.cli.bookie",
            {"bookie_aio.server.bookie"},
            {
                "client_aio.client",
                "client_aio.ledger.writer",
                "rich",
                "sqlite3",
                "aiozk",
                "aiohttp",
                "prometheus_client",
            },
        ),
        ("import client_aio.cli.ledger", {"client_aio"}, {"bookie_aio.server.bookie", "rich", "pyspark"}),
        (
            "from client_aio.cli import main; main._add_groups(['log', 'list'])",
            {"client_aio.cli.log"},
            {"client_aio.cli.bookie", "client_aio.cli.bench"},
        ),
        (
            "import sys; sys.argv[1:] = ['bookie', 'info', '127.0.0.1:1']\n"
            "try: from client_aio.cli import __main__\n"
            "except SystemExit as ended: assert ended.code == 4",
            {"client_aio.cli.bookie", "uvloop"},
            {"client_aio.client", "pydantic", "rich", "sqlite3", "aiozk"},
        ),
        ("import client_aio", {"metadata.errors"}, {"client_aio.client", "metadata.model.ledger", "asyncio"}),
        ("import client_aio.cli.entry", set(), {"client_aio.cli.main", "metadata.model.ledger", "typer"}),
        ("from client_aio import *", {"client_aio.client", "client_aio.log.writer"}, {"rich"}),
    ],
)
def test_only_what_is_used_is_loaded(program: str, needed: set[str], not_needed: set[str]) -> None:
    modules = loaded(program)
    assert needed <= modules
    assert not not_needed & modules


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import client_aio

    assert set(client_aio.__all__) <= set(dir(client_aio))
    with pytest.raises(AttributeError, match="nosuch"):
        client_aio.__getattr__("nosuch")
