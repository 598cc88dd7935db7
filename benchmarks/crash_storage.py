"""Kill a storage engine at every kind of step that it takes on the disk, and verify that nothing is lost.

    python -m benchmarks.crash_storage [--kills 50] [--seed 1]

A process writes, deletes and trims ledgers in small segments. Sealing, checkpoints, compaction and the
removal of segments therefore go on all the time. The process kills itself with SIGKILL before or after its
n-th step on the disk. Then the directory is opened again. Acknowledged entries are there, deleted ledgers are
gone, and every file is accounted for. The next process goes on in the same directory. The first failure ends
the program with exit code 1, and the directory is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import start_module
from benchmarks.running import Workplace, run
from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.disk.disk import RealDisk, RealFile
from bookie_aio.storage.journal import when_durable
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from tests.support.storage import Store, entries_of, make_block, unaccounted_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.wire.blocks import Buffer

CONFIG = StorageConfig(
    segment_bytes=128 * 1024,
    group_bytes_max=32 * 1024,
    space=SpaceLimits(reserve_bytes=64 * 1024, retry_s=1.0, spare_bytes_max=4 * 128 * 1024),
    compaction=CompactionConfig(pause_s=0.0, bytes_per_s=10**9, loop_share=0.9),
)
# The steps that one run counts, and how often at most each is done before the process dies.
KINDS = {"group": 300, "writing": 25, "syncing": 50, "renaming": 25, "removing": 12, "reserving": 3}
LEDGERS_AT_ONCE = 12
TIMEOUT_S = 60.0


class Violation(Exception):
    """An acknowledged record was lost, a deleted one came back, or a file is unaccounted for."""


def content(ledger_id: int, entry: int) -> bytes:
    """Return an entry's bytes."""
    return b"%d/%d " % (ledger_id, entry) * (20 + entry % 60)


# --- the process that dies -----------------------------------------------------------------------


class DeadlyDisk(RealDisk):
    """A disk that kills the process at its n-th step."""

    def __init__(self, kind: str, last_step: int) -> None:
        super().__init__()
        self._kind = kind
        self._left = last_step

    def step(self, what: str, path: str) -> None:
        """Count a step that was done, or is about to be done."""
        self._left -= what.endswith(self._kind)
        if self._left == 0:
            name = os.path.basename(path).removesuffix(".new")
            os.write(1, f"killed {what}-{os.path.splitext(name)[1] or name}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    async def call_until(self, ended: Any, what: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind, path = what.split()[0], what.rsplit(" ", 1)[-1]
        is_change = kind in KINDS
        if is_change:
            path = what.split()[1] if kind == "writing" else path
            self.step(f"before-{kind}", path)
        result = await super().call_until(ended, what, function, *args, **kwargs)
        if is_change:
            self.step(f"after-{kind}", path)
        return result

    async def _open(self, path: str, flags: int) -> RealFile:
        file = await super()._open(path, flags)
        return _DeadlyFile(self, file._descriptor, path)


class _DeadlyFile(RealFile):
    def __init__(self, disk: DeadlyDisk, descriptor: int, path: str) -> None:
        super().__init__(disk, descriptor, path)
        self._deadly = disk

    def _write_and_sync(self, buffers: Sequence[Buffer], offset: int) -> None:
        self._deadly.step("before-group", self._path)
        super()._write_and_sync(buffers, offset)
        self._deadly.step("after-group", self._path)


async def act(directory: str, seed: int, kind: str, last_step: int) -> None:
    """Write, delete and trim until the end; print a line for each step tried and each step done."""
    rng = random.Random(seed)
    store = await Store.open(Path(directory), CONFIG, DeadlyDisk(kind, last_step))
    alive, following = list[int](), dict[int, int]()
    newest = seed * 1_000_000
    while True:
        if len(alive) < LEDGERS_AT_ONCE:
            newest += 1
            alive.append(newest)
        ledger_id = rng.choice(alive)
        chance = rng.random()
        if chance < 0.01 and len(alive) == LEDGERS_AT_ONCE:
            alive.remove(ledger_id)
            print("try", "delete", ledger_id, 0, flush=True)
            await store.wait(partial(store.engine.append_tombstone, ledger_id))
            print("done", "delete", ledger_id, 0, flush=True)
        elif chance < 0.02:
            first = rng.randrange(following.get(ledger_id, 0) + 1)
            print("try", "trim", ledger_id, first, flush=True)
            await when_durable(partial(store.engine.append_trim, ledger_id, first))
        else:
            entry = following.get(ledger_id, 0)
            following[ledger_id] = entry + 1
            await store.add(make_block(ledger_id, entry, [content(ledger_id, entry)]))
            print("done", "add", ledger_id, entry, flush=True)


# --- the checking process ------------------------------------------------------------------------


@dataclass
class Known:
    """The processes' reports."""

    entries: dict[int, int] = field(default_factory=dict)  # the last one acknowledged
    trims: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)

    def learn(self, line: str) -> None:
        """Take in a line."""
        state, what, ledger_id, value = (int(x) if x.isdigit() else x for x in line.split())
        if what == "add":
            self.entries[ledger_id] = value
        elif what == "trim":
            self.trims[ledger_id] = max(value, self.trims.get(ledger_id, 0))
        elif state == "done":
            self.deleted.add(ledger_id)
        else:
            self.deleting.add(ledger_id)


async def check(directory: Path, known: Known) -> None:
    """Open the directory, and raise Violation if its contents are wrong."""
    store = await Store.open(directory, CONFIG)
    try:
        for _ in range(2):  # as it was found, and when all is sealed and reclaimed again
            if store.engine.notes:
                raise Violation(f"the start found damage: {store.engine.notes}")
            for ledger_id, last in known.entries.items():
                if ledger_id in known.deleting:
                    if ledger_id in known.deleted and not store.engine.is_deleted(ledger_id):
                        raise Violation(f"ledger {ledger_id} was deleted and is back")
                    continue
                first = known.trims.get(ledger_id, 0)
                found = await store.engine.read(ledger_id, 0, range(first, last + 1), 10**9)
                expected = {entry: content(ledger_id, entry) for entry in range(first, last + 1)}
                if entries_of(found.buffers) != expected:
                    raise Violation(f"ledger {ledger_id}: {found.stop!r} at {found.stop_entry} of {last}")
            await store.settled()
        strangers = unaccounted_files(store)
        if strangers:
            raise Violation(f"files that are nobody's, or missing: {strangers}")
    finally:
        await store.close()


async def kill_and_check(directory: Path, kills: int, seed: int) -> Counter[str]:
    """Kill and check that many times; returns how often each step was interrupted."""
    rng, known, steps = random.Random(seed), Known(), Counter[str]()
    for number in range(kills):
        kind = rng.choice(sorted(KINDS))
        last_step = str(rng.randrange(1, KINDS[kind]))
        child = await start_module(
            "benchmarks.crash_storage", "--act", str(directory), str(seed * 1000 + number), kind, last_step,
            log=directory.with_name("child.log"),
        )  # fmt: skip
        async with child:
            with contextlib.suppress(RuntimeError):  # its end
                while True:
                    line = await child.line(timeout_s=TIMEOUT_S)
                    if line.startswith("killed "):
                        steps[line.split()[1]] += 1
                    elif len(line.split()) == 4:
                        known.learn(line)
            await child.wait()
        await check(directory, known)
        for ledger_id in known.deleted:
            known.entries.pop(ledger_id, None)
    return steps


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--act", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.act:
        directory, seed, kind, step = arguments.act
        run(act(directory, int(seed), kind, int(step)))
        return
    with Workplace(Path(tempfile.mkdtemp(prefix="crash.")), "crash.") as place:
        try:
            steps = run(kill_and_check(place.path / "bookie", arguments.kills, arguments.seed))
        except Violation as error:
            print(f"VIOLATION: {error}; the directory is kept: {place.path}")
            sys.exit(1)
        print(f"{arguments.kills} kills, nothing lost, no file left over")
        for step, count in sorted(steps.items()):
            print(f"  {count:3} {step}")


if __name__ == "__main__":
    main()
