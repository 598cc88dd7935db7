"""Commands that read all metadata show how far they are, on a terminal only."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from metadata.access.ledgers import LedgerStore
from metadata.backends.uri import open_store
from metadata.model.ledger import LedgerMetadata
from tests.support.cli import TIMEOUT_S, Cli

if TYPE_CHECKING:
    from pathlib import Path

LEDGERS = 100


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command, against metadata without bookies."""
    folder: Path = tmp_path_factory.mktemp("metadata")
    cli = Cli(f"sqlite://{folder / 'metadata.db'}")
    cli.run("bookie", "format", "--new-cluster", "--id", "gone", "--dir", str(folder / "b"))

    async def fill() -> None:
        async with await open_store(str(cli.metadata)) as store:
            for ledger_id in range(LEDGERS):
                made = LedgerMetadata.new(
                    ledger_id, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"]
                )
                await LedgerStore(store).create_ledger(made)

    asyncio.run(fill())
    return cli


def _read_all(terminal: int, into: list[bytes]) -> None:
    try:
        while data := os.read(terminal, 65536):
            into.append(data)
    except OSError:  # The process has closed it.
        pass


@pytest.mark.parametrize(
    "command", [("cluster", "status"), ("ledger", "list"), ("bookie", "forget", "gone"), ("log", "sweep")]
)
def test_how_many_ledgers_were_read_is_shown_on_a_terminal_only(cli: Cli, command: tuple[str, ...]) -> None:
    process = cli.start(*command, *(["--dry-run"] if "forget" in command else []))
    assert process.communicate(timeout=TIMEOUT_S)[1] == b""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    reading = threading.Thread(target=_read_all, args=(ours, shown))
    process = subprocess.Popen(
        [sys.executable, "-m", "client_aio.cli", *command],
        env=cli.environment() | {"TERM": "xterm", "COLUMNS": "200"},
        stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    reading.start()
    process.wait(TIMEOUT_S)
    reading.join(TIMEOUT_S)
    os.close(ours)
    assert b"96 ledgers" in b"".join(shown)  # It is told now and then.
