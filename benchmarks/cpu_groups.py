"""Limit processes to a share of a processor, and count their processor time: Linux control groups (v1)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CPU, _COUNTS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpuacct")
_PERIOD_US = 100_000
_WEIGHT = 1024
_END_S = 10.0


class CpuGroup:
    """A group of processes and what they start; leaving the context removes it, once it is empty."""

    def __init__(self, name: str) -> None:
        self._folders = [root / f"bookie-aio-{os.getpid()}-{name}" for root in (_CPU, _COUNTS)]

    @staticmethod
    def why_not() -> str | None:
        """Return why there can be no groups here; None if there can."""
        for root in (_CPU, _COUNTS):
            if not (root / "cgroup.procs").exists():
                return f"{root} is not there: this asks for control groups of version 1"
            if not os.access(root, os.W_OK):
                return f"{root} is not writable for this user"
        return None

    def __enter__(self) -> Self:
        for folder in self._folders:
            folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _END_S
        for folder in self._folders:
            while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def take(self, pid: int) -> None:
        """Put a process into the group."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def limit(self, share: float | None) -> None:
        """Limit the whole group to that share of one processor, and give it precedence over others.

        None: no limit, and the weight of any process.
        """
        cpu, _ = self._folders
        (cpu / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (cpu / "cpu.shares").write_text(str(_WEIGHT if share is None else 16 * _WEIGHT))
        (cpu / "cpu.cfs_quota_us").write_text(str(-1 if share is None else int(share * _PERIOD_US)))

    def seconds(self) -> float:
        """Return the processor time that the group has used, also that of processes that have ended."""
        _, counts = self._folders
        return int((counts / "cpuacct.usage").read_text()) / 1e9
