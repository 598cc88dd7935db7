"""Crash states: every way in which a recorded sequence of storage writes may have been cut off.

Owns the recording of one bookie's storage engine at work on a simulated disk, and the enumeration of the
states that a power cut may leave at each step. Owns the check as well: the engine is opened on each such
state, and the entries it returns are compared with those acknowledged by then.

The states, at each call of the `Disk` seam:

- *prefixes*: the first n bytes of the write under way are on the medium, for every n. A write longer than
  `PREFIXES_MAX` has so many of them, chosen by chance. One of four tails follows: as it was ("cut"), zeros,
  garbage, or old data, which is bytes of another group.
- *subsets*: any subset of the pages not synced is there. The same goes for the sectors of the write under
  way, and for the changes of names not synced. All subsets are tried up to `SUBSETS_MAX`, else so many chosen
  by chance.
- *chance*: all of these at once, as the simulated disk loses power.

Some recordings go on from a few of the states left by chance. They record the engine as it opens there and
works after that. So a second power cut meets a start under way and files that it has not cleaned up yet.
(Chains of starts of killed processes are in `tests.sim.crash.chains`.)

A state is good if the engine opens, and every acknowledged entry is read as it was. No entry is returned that
was not added, every acknowledged fence holds, deleted ledgers stay deleted, and no damage is claimed. An
entry that was added and not acknowledged may be there or not.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bookie_aio.storage.config import StorageConfig
from bookie_aio.storage.engine import Engine
from bookie_aio.storage.journal import Done, when_durable
from bookie_aio.storage.maintenance.compactor import CompactionConfig
from bookie_aio.storage.segment.allocator import SpaceLimits
from bookie_aio.wire.messages import Stop
from metadata.errors import DiskFullError
from tests.sim.cluster.disk import SimDisk
from tests.sim.cluster.hardware import PAGE, SECTOR, Directory, Hardware, Inode
from tests.sim.cluster.loop import Process, SimLoop
from tests.sim.cluster.quiet import quiet
from tests.support.storage import entries_of, make_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bookie_aio.wire.blocks import Block

PREFIXES_MAX = 400
ZEROS_CUT = 4
SUBSETS_MAX = 64
RESTARTS = 6
TAILS = ("cut", "zeros", "garbage", "old data")
ROOT = "/b"
HOME = "/b/data"
CONFIG = StorageConfig(
    segment_bytes=12 * 1024,
    group_bytes_max=4 * 1024,
    short_sync_s=1.0,
    space=SpaceLimits(reserve_bytes=8 * 1024, retry_s=0.1, floor_free_bytes=0),
    compaction=CompactionConfig(pause_s=0.05, loop_share=1.0),
    live_ledgers_max=1,
)


@dataclass
class Facts:
    """What an engine was asked, and what it acknowledged."""

    issued: dict[tuple[int, int], bytes] = field(default_factory=dict)
    acked: set[tuple[int, int]] = field(default_factory=set)
    terms: dict[int, int] = field(default_factory=dict)
    deleting: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)

    def copy(self) -> Facts:
        """Return them as they are now."""
        return Facts(
            dict(self.issued), set(self.acked), dict(self.terms), set(self.deleting), set(self.deleted)
        )


@dataclass
class Step:
    """One call of the seam: the disk just after it took effect, and what had been acknowledged by then."""

    call: tuple[Any, ...]
    hardware: Hardware
    facts: Facts


def image_of(hardware: Hardware) -> Hardware:
    """Copy a disk, with all that is durable and all that is not."""
    made = Hardware(hardware.loop, random.Random(0), Counter())
    known: dict[int, Inode] = {}

    def copied(inode: Inode | None) -> Inode | None:
        if inode is None:
            return None
        if inode.number not in known:
            twin = known[inode.number] = Inode(inode.number)
            twin.data, twin.durable = bytearray(inode.data), bytearray(inode.durable)
            twin.dirty, twin.written = dict(inode.dirty), dict(inode.written)
            twin.size_is_dirty = inode.size_is_dirty
        return known[inode.number]

    for path, directory in hardware.directories.items():
        twin = made.directories[path] = Directory()
        twin.entries = {name: copied(inode) for name, inode in directory.entries.items()}
        twin.durable = {name: copied(inode) for name, inode in directory.durable.items()}
        twin.changes = [tuple((name, copied(inode)) for name, inode in each) for each in directory.changes]
        twin.is_durable = directory.is_durable
    made._inodes = hardware._inodes
    if hardware.last_group is not None:
        inode, *place = hardware.last_group
        made.last_group = (known[inode.number], *place) if inode.number in known else None
    return made


# --- recording -----------------------------------------------------------------------------------


async def open_engine(loop: SimLoop, hardware: Hardware, process: Process, seed: int) -> Engine:
    """Open an engine on a simulated disk."""
    generations = random.Random(seed)
    return await Engine.open(
        SimDisk(hardware, process), [path for path in hardware.directories if path != ROOT], CONFIG,
        draw_generation=lambda: generations.getrandbits(64),
        on_indexed=lambda _: None, on_failed=lambda _: None, on_writable=lambda _: None,
    )  # fmt: skip


def record(seed: int, *, directories: Sequence[str] = (HOME,), restarts: int = RESTARTS) -> list[Step]:
    """Have an engine work for a while, and again after some power cuts; give every step of its disk."""
    name, rng = f"crash/{seed}", random.Random(f"crash/{seed}/again")
    loop = SimLoop(random.Random(name))
    hardware = Hardware(loop, random.Random(f"{name}/disk"), Counter())
    for path in (ROOT, *directories):
        hardware.directories[path] = Directory()
        hardware.directories[path].is_durable = True  # as the formatting of a bookie has left it
    steps = _record(name, hardware, Facts(), Work(turns=70, deletes_from=36, first_ledger=1), seed)
    for number, step in enumerate(rng.sample(steps, restarts)):
        work = Work(turns=16, deletes_from=0, first_ledger=11)  # what was cut off may leave gaps in others
        left = by_chance(step, f"{name}/left/{number}")
        steps += record_from(f"{name}/{number}", left, step.facts, work, seed + 1)
    return steps


def record_from(name: str, left: Hardware, facts: Facts, work: Work, seed: int) -> list[Step]:
    """Record a start from what is left of an earlier one, and what the engine does then."""
    return _record(name, left, facts.copy(), work, seed, from_start=True)


@dataclass(frozen=True)
class Work:
    """How long an engine works, and on what."""

    turns: int
    deletes_from: int
    first_ledger: int


def _record(
    name: str, hardware: Hardware, facts: Facts, work: Work, seed: int, *, from_start: bool = False
) -> list[Step]:
    loop = SimLoop(random.Random(name))
    hardware.loop = loop
    hardware.faults.cold_reads = 0.0
    steps: list[Step] = []

    def note(*call: Any) -> None:
        steps.append(Step(call, image_of(hardware), facts.copy()))

    async def run() -> None:
        if from_start:
            hardware.record = note
        try:
            engine = await open_engine(loop, hardware, loop.kernel, seed)
        except DiskFullError:
            return
        hardware.record = note
        await _work(engine, random.Random(f"{name}/work"), facts, work)
        await engine.close()
        note("closed")

    loop.run(run(), until=1000.0)
    loop.end()
    return steps


async def _work(engine: Engine, rng: random.Random, facts: Facts, work: Work) -> None:
    """Add, fence, state, delete, roll and let compact, with several requests under way at once."""
    following = Counter[int]()
    waiting: list[Any] = []
    for turn in range(work.turns):
        ledger_id = rng.randrange(5) + work.first_ledger
        kind = rng.random()
        if ledger_id in facts.deleting:
            continue
        if kind < 0.72:
            others = [one + work.first_ledger for one in range(5) if one + work.first_ledger != ledger_id]
            count = rng.choice((0, 0, 1, 3))  # ... and as many other ledgers in the same record
            ledgers = [ledger_id, *(one for one in rng.sample(others, count) if one not in facts.deleting)]
            waiting.append(_add(engine, facts, ledgers, following, rng))
        elif kind < 0.86:
            waiting.append(_fence(engine, facts, ledger_id, rng.randint(1, 9)))
        elif turn >= work.deletes_from:
            waiting.append(_delete(engine, facts, ledger_id))
        if rng.random() < 0.5 and waiting:
            await _settled(waiting.pop(int(rng.random() * len(waiting))))
    for each in waiting:
        await _settled(each)


async def _settled(asked: Any) -> None:
    with suppress(DiskFullError):
        await asked


def _asked(accept: Callable[[Done], None], on_durable: Callable[[], None]) -> Any:
    """Ask for something, and note what follows once it is durable; of what finds no room, nothing does."""
    try:
        durable = when_durable(accept)
    except DiskFullError:
        return _nothing()
    durable.add_done_callback(lambda done: on_durable() if done.exception() is None else None)
    return durable


async def _nothing() -> None:
    """Be what is waited for where nothing is."""


def _add(
    engine: Engine, facts: Facts, ledgers: list[int], following: Counter[int], rng: random.Random
) -> Any:
    """Add a block to each of these ledgers, as one record."""
    blocks: list[Block] = []
    acked: set[tuple[int, int]] = set()
    for ledger_id in ledgers:
        first = following[ledger_id]
        payloads = [
            f"{ledger_id}/{first + index}/".encode() * rng.choice((0, 1, 5, 60))
            for index in range(rng.randint(1, 4))
        ]
        following[ledger_id] += len(payloads)
        for index, payload in enumerate(payloads):
            facts.issued[ledger_id, first + index] = payload
            acked.add((ledger_id, first + index))
        blocks.append(make_block(ledger_id, first, payloads))
    body = b"".join([block.view for block in blocks])

    def accept(done: Done) -> None:
        if len(blocks) == 1:
            engine.append_block(blocks[0], done)
        else:
            engine.append_blocks(blocks, body, done)

    return _asked(accept, lambda: facts.acked.update(acked))


def _fence(engine: Engine, facts: Facts, ledger_id: int, term: int) -> Any:
    def fenced() -> None:
        facts.terms[ledger_id] = max(term, facts.terms.get(ledger_id, 0))

    return _asked(lambda done: engine.append_term(ledger_id, term, done), fenced)


def _delete(engine: Engine, facts: Facts, ledger_id: int) -> Any:
    facts.deleting.add(ledger_id)
    return _asked(lambda done: engine.append_tombstone(ledger_id, done), lambda: facts.deleted.add(ledger_id))


# --- enumerating ---------------------------------------------------------------------------------

Build = Callable[[], Hardware]


def states(step: Step, rng: random.Random) -> Iterator[tuple[str, Build]]:
    """Return what a power cut at this step may leave: a word on each, and how to make it."""
    for number in range(4):
        yield "chance", partial(by_chance, step, f"{rng.random()}/{number}")
    changes = step.hardware.directories[HOME].changes
    for mask in range(1 << min(len(changes), 6)) if changes else ():
        yield f"subset {mask:b} of {len(changes)} changes of names", partial(with_names, step, mask)
    call = step.call
    if call[0] in ("write_and_sync", "write") and not _is_atomic(call):
        yield from _prefixes(step, *call[1:4], rng)
        first, name = call[2] // SECTOR, call[1].rpartition("/")[2]
        for size in sorted({_filled(call[3]), len(call[3])}):  # without the zeros behind it as well
            last = (call[2] + size - 1) // SECTOR
            yield from _subsets(step, name, range(first, last + 1), SECTOR, rng)
    for name, inode in sorted(step.hardware.directories[HOME].entries.items()):
        if inode.dirty:
            yield from _subsets(step, name, sorted(inode.dirty), PAGE, rng)


def _is_atomic(call: tuple[Any, ...]) -> bool:
    """Return whether a write changes one sector: a page of a witness file, or the header of a segment."""
    return call[1].endswith("/witness") or (call[2] == 0 and len(call[3]) <= SECTOR)


def by_chance(step: Step, seed: str) -> Hardware:
    """Return the disk as the fault model has it lose power."""
    state = image_of(step.hardware)
    state.rng = random.Random(seed)
    state.lose_power()
    return state


def with_names(step: Step, mask: int) -> Hardware:
    """Return the disk with some of the changes of names; of files only what is durable."""
    state = image_of(step.hardware)
    directory = state.directories[HOME]
    entries = dict(directory.durable)
    for index, settings in enumerate(directory.changes):
        for name, inode in settings if mask >> index & 1 else ():
            if inode is None:
                entries.pop(name, None)
            else:
                entries[name] = inode
    directory.entries, directory.durable = dict(entries), dict(entries)
    directory.changes.clear()
    for inode in entries.values():
        _freeze(inode, bytes(inode.durable))
    return state


def _with_file(step: Step, name: str, content: bytes) -> Hardware:
    """Return the disk with its names as they are, that content in a file, and what is durable in the
    others."""
    state = image_of(step.hardware)
    directory = state.directories[HOME]
    directory.durable = dict(directory.entries)
    directory.changes.clear()
    for other, inode in directory.entries.items():
        _freeze(inode, content if other == name else bytes(inode.durable))
    return state


def _freeze(inode: Inode, content: bytes) -> None:
    inode.durable, inode.data = bytearray(content), bytearray(content)
    inode.dirty.clear()
    inode.size_is_dirty = False


def _prefixes(
    step: Step, path: str, offset: int, content: bytes, rng: random.Random
) -> Iterator[tuple[str, Build]]:
    name = path.rpartition("/")[2]
    if name not in step.hardware.directories[HOME].entries:
        return  # renamed meanwhile
    filled = _filled(content)
    lengths: Sequence[int] = range(filled + 1)
    if len(lengths) > PREFIXES_MAX:
        lengths = rng.sample(lengths, PREFIXES_MAX)
    behind = range(filled, len(content) + 1)
    lengths = sorted({*lengths, *rng.sample(behind, min(len(behind), ZEROS_CUT)), 0, filled, len(content)})
    for length in lengths:
        for tail in TAILS if length < len(content) else TAILS[:1]:
            seed = rng.random()
            yield (
                f"{length} of {len(content)} bytes, then {tail}",
                partial(_cut_off, step, name, offset, content, length, tail, seed),
            )


def _filled(content: bytes) -> int:
    """Return how much of a write is not the zeros at its end, up to which a group's last page is filled."""
    return max(1, len(content.rstrip(b"\0")))


def _cut_off(
    step: Step, name: str, offset: int, content: bytes, length: int, tail: str, seed: float
) -> Hardware:
    durable = step.hardware.directories[HOME].entries[name].durable
    image = bytearray(durable)
    image.extend(bytes(max(0, offset + length - len(image))))
    image[offset : offset + length] = content[:length]
    rest = min(offset + len(content), len(image)) - (offset + length)
    if rest > 0 and tail != "cut":
        garbage = random.Random(seed).randbytes(rest)
        fill = {"zeros": bytes(rest), "garbage": garbage, "old data": (content * 2)[:rest]}[tail]
        image[offset + length : offset + length + rest] = fill
    return _with_file(step, name, bytes(image))


def _subsets(
    step: Step, name: str, units: Sequence[int], size: int, rng: random.Random
) -> Iterator[tuple[str, Build]]:
    count = len(units)
    masks: Sequence[int] = range(1 << count)
    if len(masks) > SUBSETS_MAX:
        masks = [rng.getrandbits(count) for _ in range(SUBSETS_MAX)]
    if name not in step.hardware.directories[HOME].entries:
        return
    for mask in masks:
        what = f"subset {mask:b} of {count} × {size} bytes of {name}"
        yield what, partial(_partly, step, name, units, size, mask)


def _partly(step: Step, name: str, units: Sequence[int], size: int, mask: int) -> Hardware:
    inode = step.hardware.directories[HOME].entries[name]
    image = bytearray(inode.durable)
    image.extend(bytes(max(0, len(inode.data) - len(image))))
    for index, unit in enumerate(units):
        if mask >> index & 1:
            part = inode.data[unit * size : (unit + 1) * size]
            image[unit * size : unit * size + len(part)] = part
    return _with_file(step, name, bytes(image))


# --- checking ------------------------------------------------------------------------------------


def check_state(facts: Facts, hardware: Hardware, *, is_whole: bool = True) -> str:
    """Open an engine on a state; gives what is wrong, or nothing.

    Where the disk is not whole, what is said to be damaged need not be there.
    """
    loop = SimLoop(random.Random(0))
    hardware.loop = loop
    hardware.faults.cold_reads = 0.0
    try:
        found = loop.run(_inspect(loop, hardware, facts, is_whole=is_whole), until=1000.0)
    except Exception as error:
        found = f"the engine does not open: {error!r}"
    loop.end()
    return str(found)


async def _inspect(loop: SimLoop, state: Hardware, facts: Facts, *, is_whole: bool) -> str:
    engine = await open_engine(loop, state, loop.kernel, 1)
    if is_whole and engine.notes:
        return f"damage is seen where there is none: {list(engine.notes)}"
    ledgers = sorted({ledger_id for ledger_id, _ in facts.issued})
    for ledger_id in ledgers:
        if is_whole and engine.is_damaged(ledger_id):
            return f"ledger {ledger_id} is marked as damaged"
        wrong = await _wrong_with(engine, facts, ledger_id)
        if wrong:
            return wrong
    return ""


async def _wrong_with(engine: Engine, facts: Facts, ledger_id: int) -> str:
    """Return what is wrong with a ledger. Nothing that is missing, if the bookie says that it is damaged."""
    term, is_damaged = facts.terms.get(ledger_id, 0), engine.is_damaged(ledger_id)
    if ledger_id in facts.deleting:
        is_back = ledger_id in facts.deleted and not engine.is_deleted(ledger_id) and not is_damaged
        return f"ledger {ledger_id} was deleted and is back" if is_back else ""
    if engine.term(ledger_id) < term and not is_damaged:
        return f"ledger {ledger_id} was fenced at {term} and holds {engine.term(ledger_id)}"
    entries = [entry_id for ledger, entry_id in facts.issued if ledger == ledger_id]
    found = await engine.read(ledger_id, 0, range(len(entries)), 10**9)
    given = entries_of(found.buffers)
    for entry_id in entries:
        is_missing = entry_id not in given and not engine.is_damaged(ledger_id)
        if (ledger_id, entry_id) in facts.acked and is_missing:
            return f"entry {entry_id} of ledger {ledger_id} is lost: {Stop(found.stop).name}"
        if given.get(entry_id, facts.issued[ledger_id, entry_id]) != facts.issued[ledger_id, entry_id]:
            return f"entry {entry_id} of ledger {ledger_id} is given wrong"
    return ""


@dataclass
class Sweep:
    """What a number of states came to."""

    states: int = 0
    steps: int = 0
    entries: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    damaged: int = 0
    """Chains in which damage was done."""

    def note(self, step: Step, where: str, wrong: str) -> None:
        """Count a state, and what is wrong with it."""
        self.states += 1
        self.entries += len(step.facts.acked)
        self.by_kind[step.call[0]] += 1
        if wrong:
            self.failures.append(f"{where} {step.call[:3]!r:.90}: {wrong}")

    def add(self, other: Sweep) -> None:
        """Count what others came to as well."""
        self.states += other.states
        self.steps += other.steps
        self.entries += other.entries
        self.by_kind += other.by_kind
        self.failures += other.failures
        self.damaged += other.damaged


def sweep(seed: int, *, part: float = 1.0, until_failure: bool = False) -> Sweep:
    """Try the crash states of one recording, or a part of them chosen by chance.

    `until_failure` ends the sweep at the first state that is bad.
    """
    rng, result = random.Random(f"sweep/{seed}"), Sweep()
    with quiet() as collect:
        steps = record(seed)
        collect()
        gc.freeze()  # a collection that looks through the recording takes longer than a check
        for number, step in enumerate(steps):
            result.steps += 1
            for what, build in states(step, rng):
                if rng.random() >= part:
                    continue
                result.note(step, f"seed {seed} step {number}, {what}", check_state(step.facts, build()))
                if result.states % 100 == 0:
                    collect()
                if until_failure and result.failures:
                    return result
    return result
