"""Repair at the bookie that receives it: storing the missing entries of a block, and nothing else (rule 14).

Owns two decisions:

- Which of a block's entries are missing: entries that the index does not list, and entries whose stored bytes
  fail their checksum. Rule 4: an add over such a damaged copy is no duplicate.
- Whether a stored entry is of a later content term than the block.

An intact copy is never written over. The bytes of a repair were checked by checksums only, so they may have a
wrong authentication code where the intact copy has the writer's.

Invariant: between the last look at the stored entries and the append no add to these entries is accepted. An
add in between is noticed, and the look is repeated.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from bookie_aio.storage.journal import when_durable
from bookie_aio.wire.blocks import Block
from bookie_aio.wire.listing import Row, index_from, listed, runs_of
from bookie_aio.wire.messages import Stop
from metadata.errors import LedgerFencedError, StaleMetadataError, UnauthorizedAccessError

if TYPE_CHECKING:
    from bookie_aio.storage.engine import Engine

_READ_BYTES = 1024 * 1024
_ROWS_AT_ONCE = 16_384


class OutdatedBlockError(StaleMetadataError):
    """One of the entries is stored here under a higher content term."""

    def __init__(self, block: Block, content_term: int) -> None:
        super().__init__(
            f"entries of those from {block.first_entry} to {block.last_entry} are held under content term "
            f"{content_term}, above {block.content_term}"
        )
        self.content_term = content_term


class _Watch:
    """Notices adds to the entries of a block, and that their ledger is forgotten."""

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

    def note_forget(self, ledger_id: int) -> None:
        """Take note that the ledger is forgotten."""
        self.is_touched |= ledger_id == self._block.ledger_id


async def store_missing(engine: Engine, block: Block, *, is_trusted: bool) -> int:
    """Store the entries of a whole, checked block that are missing here; returns how many.

    All of the block's entries are durable here on return. Cancelled, some may be stored. The bookie does not
    state the block's LAC, which is not from the writer.

    Args:
        engine: the storage.
        block: the entries.
        is_trusted: the sender may supersede entries of a lower content term, stored or yet to come. For a
            ledger with a password only its holders may: a superseded copy could not be read any more.

    Raises:
        OutdatedBlockError: a stored entry is of a higher content term than the block. Nothing was stored.
        UnauthorizedAccessError: the block is of a higher content term than a stored entry, or than the
            ledger's term here, and the sender is not trusted. Nothing was stored.
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
    """Store a block that a takeover writes back under a term; returns how many entries. Durable on return.

    Every entry has one content term by the metadata, and that never falls. So a client that sends an entry
    under a lower content term than is stored here has outdated metadata.

    Raises:
        OutdatedBlockError: a stored entry is of a higher content term. Nothing was stored.
        LedgerFencedError: a higher term was accepted meanwhile. Nothing was stored.
        DiskFullError: no space.
        DiskFailedError: the disk failed.
    """
    await when_durable(engine.barrier)
    marks, content_term = await _held(engine, block, block.content_term + 1)
    if any(marks):
        raise OutdatedBlockError(block, content_term)
    # Rule 7: no await from here to the append. Adds in between under this term are the same client's.
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
    """Return a mark for each entry of a block, and the highest content term that the index lists there.

    A mark is 1 if the index lists the entry under `content_term` or a higher one, else 0. At most one page of
    rows is in memory at a time.
    """
    ids = block.entry_ids
    marks = bytearray()
    highest = 0
    while len(marks) < len(ids):
        rest = ids[len(marks) :]
        rows_max = min(_ROWS_AT_ONCE, rest[-1] - rest[0] + 1)  # if each entry is a row of its own
        found, following = await engine.list_entries(block.ledger_id, rest[0], rows_max, to_entry=rest[-1])
        rows = [Row(*row) for row in found]
        # These rows are complete below `following`, and may be incomplete from there on.
        known = rest if following < 0 else rest[: index_from(rest, following)]
        marks += listed(known, rows, content_term)
        highest = max(highest, max((row.content_term for row in rows), default=0))
    return marks, highest


async def _failing(engine: Engine, block: Block, entry_ids: range) -> list[int]:
    """Return those of the entries that the index lists and that cannot be read.

    A read stops at the first block with damage in the range asked for. So the range is halved until the
    damaged entries are alone.
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
