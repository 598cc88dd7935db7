"""A small file system of its own for a bookie: a tmpfs, mounted where only that bookie can see it.

    async with small_disk(cluster["b1"].directory, megabytes=14) as prefix:
        cluster["b1"].prefix = prefix       # its process lives in the mount namespace, at every start

A process that does nothing else holds the namespace. It ends with this one, however that ends, and with it
the mount goes. Needs root: `needs_mounts` skips a test elsewhere.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import subprocess
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@functools.cache
def _obstacle() -> str:
    """Tell why nothing can be mounted here; empty where it can."""
    for tool in ("unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return "" if probe.returncode == 0 else f"nothing can be mounted here: {probe.stderr.strip()}"


def needs_mounts() -> None:
    """Skip the test where a tmpfs cannot be mounted."""
    if reason := _obstacle():
        pytest.skip(reason)


@asynccontextmanager
async def small_disk(directory: Path, *, megabytes: int) -> AsyncIterator[list[str]]:
    """Mount it on a directory, and give the command to put before those that shall see it."""
    script = 'mkdir "$2" && mount -t tmpfs -o "size=$1" none "$2" && echo mounted && exec cat'
    holder = await asyncio.create_subprocess_exec(
        "unshare", "-m", "sh", "-c", script, "sh", f"{megabytes}m", str(directory),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"mounted\n"
        yield ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--", "env", "-C", str(ROOT)]
    finally:
        holder.stdin.close()
        await holder.wait()
