"""System calls of a running bookie that fail, or that it dies at: strace's fault injection.

    async with injecting(cluster["b1"], "fdatasync:error=EIO:when=3") as calls:
        …                                   # its third fdatasync of a segment from now on fails
    calls.lines()                           # what was recorded, one call a line

It is the kernel that answers the production code here, and no seam of ours: a call that was made to fail
never happened, as for a real EIO, and a signal comes at the call's entry. Only calls on the files in the
bookie's directory count; the embedded metadata store, which makes the same calls, is left alone.
`starting_under` has a bookie traced from its first instruction on instead.

Needs strace, and a machine that lets one trace other processes; a test that comes to it elsewhere is skipped.
"""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import subprocess
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.cluster import BookieProcess

WAIT_S = 30
_SEGMENTS_MAX = 400


@functools.cache
def _obstacle() -> str:
    """Tell why nothing can be injected here; empty where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(
        ["strace", "-f", "-o", "/dev/null", "-e", "inject=getcwd:error=EIO", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if probe.returncode == 0 else f"strace cannot inject faults here: {probe.stderr.strip()}"


def _needs_strace() -> None:
    """Skip the test where faults cannot be injected."""
    if reason := _obstacle():
        pytest.skip(reason)


class Calls:
    """What strace recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        """Return the calls so far, oldest first."""
        return self.path.read_text(errors="replace").splitlines() if self.path.exists() else []

    def behind_first_fault(self, call: str) -> list[str]:
        """Return what was recorded behind the first call of that name that was made to fail."""
        lines = self.lines()
        faults = (
            n for n, line in enumerate(lines) if "(INJECTED)" in line and re.search(rf"\b{call}\b", line)
        )
        return lines[next(faults) + 1 :]


def _arguments(directory: Path, record: Path, faults: tuple[str, ...], watched: str = "") -> list[str]:
    names = [f"{number:016x}{kind}" for number in range(1, _SEGMENTS_MAX) for kind in (".segment", ".index")]
    paths = [directory, *(directory / name for name in ["checkpoint.new", "checkpoint", *names])]
    calls = ",".join([*(fault.partition(":")[0] for fault in faults), *watched.split()])
    arguments = ["-f", "-y", "-o", str(record), "-e", f"trace={calls}"]
    arguments += [word for path in paths for word in ("-P", str(path))]
    return arguments + [word for fault in faults for word in ("-e", f"inject={fault}")]


@asynccontextmanager
async def injecting(bookie: BookieProcess, *faults: str, watched: str = "") -> AsyncIterator[Calls]:
    """Have calls of a running bookie fail, as strace's `-e inject=` says, until the block is left.

    Args:
        bookie: the one that suffers them.
        faults: each for one call, or for several with commas between them.
        watched: names of further calls that are recorded only.
    """
    _needs_strace()
    record = bookie.log.with_suffix(".strace")
    record.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        "strace", "-p", str(bookie.pid), *_arguments(bookie.directory, record, faults, watched),
        stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    draining = None
    try:
        async with asyncio.timeout(WAIT_S):
            said = b""
            while f"Process {bookie.pid} attached".encode() not in said:
                line = await process.stderr.readline()
                if not line and b"Operation not permitted" in said:
                    pytest.skip(f"strace may not attach to a process here: {said.decode().strip()}")
                assert line, f"strace ended: {said.decode()}"
                said += line
        draining = asyncio.create_task(process.stderr.read())
        yield Calls(record)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # which detaches it
        await process.wait()
        if draining is not None:
            await draining


def starting_under(bookie: BookieProcess, *faults: str) -> list[str]:
    """Return the command to put before a bookie's own, so that calls fail, or kill it, from its start on."""
    _needs_strace()
    record = bookie.log.with_suffix(".strace")
    return ["strace", "-D", *_arguments(bookie.directory, record, faults)]
