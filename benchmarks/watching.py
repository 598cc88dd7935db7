"""Processes and devices as the kernel sees them: time, memory, bytes."""

from __future__ import annotations

import os
from pathlib import Path

_KIB = 1024
_SECTOR_BYTES = 512


def device_bytes(directory: Path) -> int:
    """Return the bytes written so far to the device under a directory, by whomever."""
    number = directory.stat().st_dev
    fields = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").read_text().split()
    return int(fields[6]) * _SECTOR_BYTES


def written_bytes(pid: int) -> int:
    """Return the bytes a process caused to be written to devices so far.

    The kernel counts them as pages become dirty, whole large pages where a file's cache is made of such. So
    this may be more than the device sees, never less.
    """
    return _value(pid, "io", "write_bytes:")


def read_bytes(pid: int) -> int:
    """Return the bytes a process caused to be read from devices so far."""
    return _value(pid, "io", "read_bytes:")


def evict(directory: Path) -> None:
    """Write all files under a directory out, and drop their pages from memory."""
    os.sync()
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def cpu_seconds(pid: int) -> float:
    """Return the processor time a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Return the most memory a process had resident so far."""
    return _value(pid, "status", "VmHWM:") / _KIB


def resident_mib(pid: int) -> float:
    """Return the memory a process has resident."""
    return _value(pid, "status", "VmRSS:") / _KIB


def _value(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def disk_usage_bytes(directory: Path) -> int:
    """Return the blocks that the files under a directory take up."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * _SECTOR_BYTES
            except FileNotFoundError:  # removed meanwhile
                continue
    return total
