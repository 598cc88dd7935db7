"""The tasks of docs/OPERATING.md, run as they are written there, on real bookies.

    python -m benchmarks.operating
    python -m benchmarks.operating --task "Lose a bookie" --dir /tmp/somewhere

Each task has one block of shell commands. It is run by bash, behind the functions `start` and `stop` of the
page, on a cluster of its own with three ledgers. A command that fails ends the task. Afterwards every entry
is read again, and every copy of every entry is verified. `tests/integration/test_operating.py` does the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import client_aio
from benchmarks.processes import ROOT
from client_aio.autorecovery.survey import all_metadata
from client_aio.autorecovery.verification import Verification
from client_aio.core.audit import Condition
from metadata.access.dump import dump
from metadata.backends.uri import open_store
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = ROOT / "docs" / "OPERATING.md"
PRELUDE = "How to read the blocks"
LEDGERS = 3
ENTRIES = 20
_BLOCK = re.compile(r"^## (.*?)$|^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Task:
    """The beginning of a task."""

    bookies: int = 4
    lost: str = ""
    """A bookie that is killed, with its directory."""
    has_dump: bool = False
    """Whether there is a dump in $BACKUP."""
    metadata: str = "metadata.db"
    """The metadata store at the end of the task."""


TASKS: Mapping[str, Task] = {
    "Lose a bookie": Task(lost="b3"),
    "Replace a disk": Task(bookies=3),
    "Grow": Task(),
    "Shrink": Task(),
    "Upgrade one by one": Task(bookies=3),
    "Back up": Task(bookies=3),
    "Restore": Task(bookies=3, has_dump=True, metadata="restored.db"),
    "Find out why": Task(bookies=3),
}


def blocks() -> dict[str, str]:
    """Return the shell block of each heading that has one; a second one is added to the first."""
    found: dict[str, str] = {}
    heading = ""
    for match in _BLOCK.finditer(PAGE.read_text()):
        if match[1] is not None:
            heading = match[1]
        else:
            found[heading] = found.get(heading, "") + match[2]
    return found


def entry(ledger_id: int, entry_id: int) -> bytes:
    """Return the payload of an entry."""
    return f"ledger {ledger_id}, entry {entry_id}".encode()


async def _prepare(task: Task, cluster: Cluster, directory: Path) -> None:
    """Write the ledgers, and bring about what the task begins with."""
    (directory / "backup").mkdir()
    for name, bookie in cluster.bookies.items():
        (directory / f"{name}.pid").write_text(f"{bookie.pid}\n")
    async with client_aio.connect(cluster.uri) as client:
        for ledger_id in range(LEDGERS):
            async with client.create_ledger() as writer:
                assert writer.ledger_id == ledger_id
                await writer.add_entries([entry(ledger_id, number) for number in range(ENTRIES)])
        if task.lost:
            await cluster[task.lost].kill()
            shutil.rmtree(cluster[task.lost].directory)
            while task.lost in client.bookies:
                await client._context.pool.directory.wait_for_change(0.1)
                await client._context.pool.directory.refresh()
    if task.has_dump:
        async with await open_store(cluster.uri) as store:
            lines = [line async for line in dump(store, now_ms=0)]
        (directory / "backup" / "metadata.jsonl").write_bytes(b"".join(lines))


async def _check(uri: str) -> list[str]:
    """Read every entry, and every copy of it; return what is wrong."""
    wrong = []
    async with client_aio.connect(uri) as client:
        for ledger_id in range(LEDGERS):
            async with client.open_ledger(ledger_id) as reader:
                found = [bytes(one.data) async for one in reader.read(0, reader.last_add_confirmed)]
            if found != [entry(ledger_id, number) for number in range(ENTRIES)]:
                wrong.append(f"ledger {ledger_id} reads {found}")
        verification = Verification(client._context)
        verified = [one async for one in verification.run(all_metadata(client._context))]
    return wrong + [f"{one}" for one in verified if one.condition is not Condition.HEALTHY]


async def run(name: str, directory: Path, timeout_s: float = 120.0) -> tuple[list[str], str]:
    """Run one task in an empty directory; return what is wrong after it, and the output of its commands."""
    task, texts = TASKS[name], blocks()
    cluster = Cluster(directory, bookies=task.bookies)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("BOOKIE_AIO")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BOOKIE_AIO_METADATA": cluster.uri,
        "DATA": str(directory),
        "BACKUP": str(directory / "backup"),
    }
    async with cluster:
        await _prepare(task, cluster, directory)
        script = await asyncio.create_subprocess_exec(
            "bash", "-xeuo", "pipefail", "-c", texts[PRELUDE] + texts[name],
            env=environment, cwd=directory, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert script.stdout is not None
        output, code = b"", None
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while part := await script.stdout.read(65536):
                        output += part
                    code = await script.wait()
            if code is None:
                wrong = [f"the block did not end within {timeout_s:g} s"]
            else:
                wrong = [f"the block ended with {code}"] if code else []
                wrong += await _check(f"sqlite://{directory / task.metadata}")
        finally:
            await _end(script.pid, directory)
    return wrong, output.decode(errors="replace")


async def _end(group: int, directory: Path) -> None:
    """End the bookies that a block has started: they are in the process group of its shell."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    async with asyncio.timeout(60.0):
        while any(_is_running(pid, group) for pid in _pids(directory)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _pids(directory: Path) -> list[int]:
    return [int(file.read_text()) for file in directory.glob("*.pid")]


def _is_running(pid: int, group: int) -> bool:
    """Return whether a process of the group runs; one that ended, and nobody has waited for, does not."""
    try:
        state, _, its_group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(its_group) == group and state != "Z"


def main() -> int:
    """Run the benchmark; returns 1 where a task fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--dir", default=".", help="where the files are made, and removed")
    options = parser.parse_args()
    failed = 0
    for name in [options.task] if options.task else TASKS:
        with tempfile.TemporaryDirectory(prefix="operating-", dir=options.dir) as directory:
            began = time.monotonic()
            wrong, output = asyncio.run(run(name, Path(directory).resolve()))
        print(f"{name}: {'; '.join(wrong) or 'done'}, {time.monotonic() - began:.1f} s", flush=True)
        if wrong or options.task:
            print(output)
        failed += bool(wrong)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
