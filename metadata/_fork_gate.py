"""Keeps a fork of this process away from calls that must not be forked through.

A fork copies the mutexes of all threads and only the thread that forks. One of SQLite's global mutexes that
another thread holds at that moment stays locked in the child for ever, and the child's first call into
SQLite never returns, on however fresh a connection. So calls into SQLite pass through the gate, and
`os.fork` (not `subprocess`, which runs nothing of this process in its child) waits until none is inside.

Python's own `logging` deals with its locks in the same way.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class ForkGate:
    """Threads pass through, many at a time; while one forks, nobody is inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shutting = False

    @contextmanager
    def passing(self) -> Generator[None, None, None]:
        """Be inside. What is done there must be short, and must not fork: a fork waits for its end."""
        with self._changed:
            while self._shutting:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    def shut(self) -> None:
        """Wait until nobody is inside, and let nobody in."""
        self._changed.acquire()
        self._shutting = True
        while self._inside:
            self._changed.wait()

    def open(self) -> None:
        """Let threads in again, in the process that forked."""
        self._shutting = False
        self._changed.notify_all()
        self._changed.release()

    def renew(self) -> None:
        """Begin anew in the child, which has none of the threads that may wait here."""
        self._changed = threading.Condition()
        self._inside = 0
        self._shutting = False


gate = ForkGate()
"""This process's."""

os.register_at_fork(before=gate.shut, after_in_parent=gate.open, after_in_child=gate.renew)
