"""Stopping a process at a moment at which it holds no lock that others need."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import ExitStack, closing
from pathlib import Path

from metadata.backends.sqlite.leases import boot_id

WAIT_S = 30
"""For a write lock of the embedded metadata store."""


def stop(pid: int, uri: str) -> None:
    """SIGSTOP: it keeps its connections, and answers nothing from the return on.

    A process that stands still in a transaction of the embedded metadata store keeps the write lock, and
    nobody else can write. So both of the store's write locks are taken first, until it stands still.

    Args:
        uri: the metadata store's.
    """
    with ExitStack() as locks:
        scheme, _, path = uri.partition("://")
        for file in (path, f"{path}-leases-{boot_id()}") if scheme == "sqlite" else ():
            lock = sqlite3.connect(f"file:{file}?mode=rw", WAIT_S, isolation_level=None, uri=True)
            locks.enter_context(closing(lock)).execute("BEGIN IMMEDIATE")
        os.kill(pid, signal.SIGSTOP)
        # A thread on the other processor may answer an add that is sent now. No event says when it stops.
        while not all(_stands_still(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
            time.sleep(0)


def _stands_still(thread: Path) -> bool:
    return (thread / "stat").read_bytes().rpartition(b") ")[2][:1] in b"TZ"
