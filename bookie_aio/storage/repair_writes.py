"""Repair at the bookie that receives it: storing what it lacks of a block, and nothing else (rule 14).

Owns the question which of a block's entries are missing: those that the index does not know, and those whose
stored bytes fail their checksum (rule 4: an add over such a copy is no duplicate). A good copy is never
written over. The bytes that repair brings were checked by checksums only, so a copy whose authentication
code is the writer's could otherwise give way to one whose code is not. And the question whether what is held
is of a later term than the block.

Invariant: between the last look at what is there and the append nothing that concerns these entries is
accepted; what comes in between is noticed, and the look is repeated.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.listing import Row, listed, runs_of
from bookie_aio.wire.messages import Stop
from metadata.errors import LedgerFencedError, StaleMetadataError, UnauthorizedAccessError

if TYPE_CHECKING:
    from bookie_aio.storage.engine import Engine

_READ_BYTES = 1024 * 1024
_ROWS_AT_ONCE = 16_384


class OutdatedBlockError(StaleMetadataError):
    """One of the entries is held here under a higher content term."""

    def __init__(self, block: Block, content_term: int) -> None:
        super().__init__(
            f"entries of those from {block.first_entry} to {block.last_entry} are held under content term "
            f"{content_term}, above {block.content_term}"
        )
        self.content_term = content_term


class _Watch:
    """Notices adds to the entries of a block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.is_touched = False

    def note(self, block: Block) -> None:
        """Take note of an add."""
        mine = self._block
        if block.ledger_id == mine.ledger_id and not (
            block.last_entry < mine.first_entry or mine.last_entry < block.first_entry
        ):
            self.is_touched = True


async def store_missing(engine: Engine, block: Block, *, is_trusted: bool) -> int:
    """Store those entries of a whole, checked block that are missing here; returns how many.

    All of the block's entries are durable here on return. Cancelled, some may be stored. The LAC in it is not
    one that the bookie states from then on: it is not from the writer.

    Args:
        is_trusted: whoever sent it may supersede what is here, or is yet to come, under a lower content term.
            Of a ledger with a password only those who have it may: nobody could have that copy any more.

    Raises:
        OutdatedBlockError: the block is of an older content term than what is held. Nothing was stored.
        UnauthorizedAccessError: it is of a newer one than that, or than the ledger's term here, and not to be
            trusted. Nothing was stored.
        DiskFullError: no space.
        DiskFailedError: the disk failed.
    """
    engine.eviction_candidates.discard(block.ledger_id)  # at once: see `Engine.eviction_candidates`
    watch = _Watch(block)
    engine.add_watches.add(watch)
    try:
        while True:
            watch.is_touched = False
            await when_durable(engine.barrier)
            missing = await _missing(engine, block, is_trusted=is_trusted)
            if not watch.is_touched:
                break
    finally:
        engine.add_watches.discard(watch)
    ids = block.entry_ids
    # No await since the look: see the invariant.
    waiting = []
    for run in missing:
        start = ids.index(run[0])
        part = Block.parse(block.whole(start, start + len(run)))
        waiting.append(when_durable(partial(engine.append_block, part, states_lac=False)))
    await asyncio.gather(*waiting)
    return sum(map(len, missing))


async def store_unless_outdated(engine: Engine, block: Block, term: int) -> int:
    """Store what a takeover writes back under a term; returns how many entries. Durable on return.

    Every id has one content term by the metadata, and that never falls: who asks for an entry to be stored
    under a lower one than is held here has metadata of the past.

    Raises:
        OutdatedBlockError: so it is. Nothing was stored.
        LedgerFencedError: a higher term came meanwhile. Nothing was stored.
        DiskFullError: no space.
        DiskFailedError: the disk failed.
    """
    await when_durable(engine.barrier)
    marks, content_term = await _held(engine, block, block.content_term + 1)
    if any(marks):
        raise OutdatedBlockError(block, content_term)
    # No await from here to the append (rule 7). What came in between under this term is the same client's.
    if engine.term(block.ledger_id) > term:
        raise LedgerFencedError(f"a term above {term} came meanwhile", ledger_id=block.ledger_id)
    await when_durable(partial(engine.append_block, block, from_reserve=True))
    return block.count


async def _missing(engine: Engine, block: Block, *, is_trusted: bool) -> list[range]:
    ids = block.entry_ids
    marks, _ = await _held(engine, block, block.content_term)
    term = engine.term(block.ledger_id)
    if not is_trusted and block.content_term > term:
        raise UnauthorizedAccessError(
            f"entries of content term {block.content_term}, and the ledger has none above {term} here: "
            "a repair puts them there with the ledger's password only",
            ledger_id=block.ledger_id,
        )
    if not is_trusted and (await _held(engine, block, 0))[0] != marks:
        raise UnauthorizedAccessError(
            f"entries of those from {block.first_entry} to {block.last_entry} are held under a content term "
            f"below {block.content_term}; a repair puts others above them with the ledger's password only",
            ledger_id=block.ledger_id,
        )
    for run in runs_of(ids, marks, 1):
        for entry_id in await _failing(engine, block, run):
            marks[ids.index(entry_id)] = 0
    return runs_of(ids, marks, 0)


async def _held(engine: Engine, block: Block, content_term: int) -> tuple[bytearray, int]:
    """Tell which of a block's entries the index knows under a content term or a higher one: a 1 or a 0 each.

    And the highest content term of what it knows there. No more than a page of rows is in memory at a time.
    """
    ids = block.entry_ids
    marks = bytearray()
    highest = 0
    while len(marks) < len(ids):
        rest = ids[len(marks) :]
        rows_max = min(_ROWS_AT_ONCE, rest[-1] - rest[0] + 1)  # where each entry there is a row of its own
        found, following = await engine.list_entries(block.ledger_id, rest[0], rows_max, to_entry=rest[-1])
        rows = [Row(*row) for row in found]
        # All that is known below where the list goes on is in these rows, and not all that is from there on.
        known = rest if following < 0 else rest[: -(-(following - rest[0]) // rest.step)]
        marks += listed(known, rows, content_term)
        highest = max(highest, max((row.content_term for row in rows), default=0))
    return marks, highest


async def _failing(engine: Engine, block: Block, entry_ids: range) -> list[int]:
    """Return those of the entries that the index knows and that cannot be read.

    A read stops at the first block that has damage anywhere in what was asked for, so the range is halved
    until the entries concerned are alone.
    """
    failing: list[int] = []
    waiting = [entry_ids]
    while waiting:
        part = waiting.pop()
        found = await engine.read(block.ledger_id, block.content_term, part, _READ_BYTES)
        if found.stop is Stop.END:
            continue
        rest = part[part.index(found.stop_entry) :]
        if found.stop is Stop.STALE_METADATA:
            _, content_term = await _held(engine, block, 0)
            raise OutdatedBlockError(block, content_term)
        if found.stop is Stop.BUDGET:
            waiting.append(rest)
        elif len(rest) == 1:
            failing.append(rest[0])
        else:
            half = len(rest) // 2
            waiting += [rest[half:], rest[:half]]
    return failing
