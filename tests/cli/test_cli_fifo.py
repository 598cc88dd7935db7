"""A named pipe that nobody writes to yet holds up neither the loop nor the end of the process."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.cli import TIMEOUT_S

if TYPE_CHECKING:
    from tests.support.cli import Cli


def test_one_interrupt_ends_what_waits_for_a_named_pipe(cli: Cli, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    process = cli.start("ledger", "write", str(fifo))
    try:
        assert process.stderr is not None
        assert b"writing ledger" in process.stderr.readline()
        give_up = time.monotonic() + TIMEOUT_S
        while not waits_for_a_writer(process.pid):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


def waits_for_a_writer(pid: int) -> bool:
    """Return whether a thread of the process is in the opening of a named pipe."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            if (thread / "wchan").read_text() == "wait_for_partner":
                return True
    return False
