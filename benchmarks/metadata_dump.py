"""Restore and dump of many ledgers' metadata, measured: into ZooKeeper, and from there into SQLite.

    python -m benchmarks.metadata_dump --ledgers 100000 --dir /tmp/somewhere

Each step is the command itself, in a process of its own: its time, its peak of resident memory, and the bytes
of the dump. The same with a tenth of the ledgers tells whether memory grows with them. At the end the dumps
of all stores are compared. `--kill` kills each restore once, half way, and runs it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.autorecovery import make
from benchmarks.processes import ROOT
from metadata.access.dump import dump
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from tests.support.zookeeper import ZooKeeperServer


def run(*arguments: str, kill_after_s: float | None = None) -> dict[str, Any]:
    """Run a command to its end; return its seconds, and the peak of its memory in MiB."""
    began = time.monotonic()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "client_aio.cli", *arguments], os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "seconds": round(time.monotonic() - began, 1), "peak_mib": used.ru_maxrss // 1024}


def body(file: Path) -> bytes:
    """Return a dump without its first and last line, which have a time and a checksum."""
    return b"".join(file.read_bytes().splitlines(keepends=True)[1:-1])


async def first_dump(file: Path, count: int) -> None:
    """Write the dump of ledgers that nobody wrote."""
    store = MemoryMetadataStore(MemoryTree())
    await make(argparse.Namespace(ledgers=count, bookies=10), store)
    await store.allocate_ids("ledger", count)
    with file.open("wb") as target:
        async for line in dump(store, now_ms=0):
            target.write(line)


def make_first_dump(file: Path, count: int) -> None:
    """Run `first_dump`."""
    asyncio.run(first_dump(file, count))


def measure(directory: Path, count: int, *, kill: bool) -> bool:
    """Restore and dump, in one store after another; print the figures."""
    dumps = [directory / f"{number}.jsonl" for number in range(3)]
    # In a process of its own: a child's peak of memory is counted from its parent's memory on.
    making = multiprocessing.Process(target=make_first_dump, args=(dumps[0], count))
    making.start()
    making.join()
    is_right = True
    (directory / "zookeeper").mkdir()
    with ZooKeeperServer(directory / "zookeeper") as server:
        uris = [f"zk://{server.address}/restored", f"sqlite://{directory / 'metadata.db'}"]
        for uri, source, target in zip(uris, dumps[:-1], dumps[1:], strict=True):
            kind = uri.partition(":")[0]
            restore = ("metadata", "restore", str(source), "--metadata", uri)
            if kill:
                print(
                    json.dumps({"killed": kind, **run(*restore, kill_after_s=1 + count / 2000)}), flush=True
                )
            for step, found in (
                ("restore", run(*restore)),
                ("dump", run("metadata", "dump", str(target), "--metadata", uri)),
            ):
                is_right &= found["code"] == 0
                print(json.dumps({step: kind, "ledgers": count, **found}), flush=True)
            print(f"{target.stat().st_size / 2**20:.1f} MiB")
    return is_right and body(dumps[0]) == body(dumps[1]) == body(dumps[2])


def main() -> int:
    """Run the benchmark; returns 1 where a step failed, or the dumps differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ledgers", type=int, default=100_000)
    parser.add_argument("--kill", action="store_true", help="kill each restore once, and run it again")
    parser.add_argument("--dir", default=".", help="where the files are made, and removed")
    options = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    is_right = True
    for count in (options.ledgers // 10, options.ledgers):
        with tempfile.TemporaryDirectory(prefix="metadata-dump-", dir=options.dir) as directory:
            is_right &= measure(Path(directory).resolve(), count, kill=options.kill)
    print("the dumps are equal" if is_right else "a step failed, or the dumps differ")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
