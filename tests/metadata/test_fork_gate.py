"""A fork beside threads that are inside SQLite: the child can still use it."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

from metadata.backends.sqlite.store import ForkGate, gate

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # as Python 3.12 has it

FORKS = 60
DEADLINE_S = 20.0


def fork_and_do(work: Callable[[], object]) -> bool:
    """Fork; in the child, do the work. Give whether the child came to its end in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    os.close(writing)
    try:
        ended, _, _ = select.select([reading], [], [], DEADLINE_S)  # the child's end closes the pipe
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finally:
        os.close(reading)
    return bool(ended)


def test_children_of_forks_beside_busy_threads_open_databases() -> None:
    """SQLite counts its memory under one mutex: a copy that is locked stops the child's first allocation."""
    done = threading.Event()

    def be_busy() -> None:
        while not done.is_set():
            with gate.no_fork():
                sqlite3.connect(":memory:").execute("SELECT 1").connection.close()

    threads = [threading.Thread(target=be_busy, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        ended = all(fork_and_do(lambda: sqlite3.connect(":memory:").close()) for _ in range(FORKS))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert ended


def test_a_fork_waits_for_who_is_inside() -> None:
    gate = ForkGate()
    inside, leave, shut = threading.Event(), threading.Event(), threading.Event()

    def stay() -> None:
        with gate.no_fork():
            inside.set()
            assert leave.wait(DEADLINE_S)
            assert not shut.is_set()

    def fork() -> None:
        gate.shut()
        shut.set()
        gate.open()

    staying, forking = threading.Thread(target=stay), threading.Thread(target=fork)
    staying.start()
    assert inside.wait(DEADLINE_S)
    forking.start()
    assert not shut.wait(0.1)
    leave.set()
    assert shut.wait(DEADLINE_S)
    staying.join()
    forking.join()
    with gate.no_fork():
        pass


def test_a_child_passes_although_its_parent_had_shut_it() -> None:
    def pass_through() -> None:
        with gate.no_fork():
            pass

    assert fork_and_do(pass_through)
    pass_through()
