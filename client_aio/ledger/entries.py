"""What a read gives: entries, and batches of them."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bookie_aio.wire.blocks import Block


class Entry(NamedTuple):
    """An entry of a ledger."""

    entry_id: int
    data: bytes


_new_entry: Callable[[tuple[int, bytes]], Entry] = partial(tuple.__new__, Entry)


class EntryBatch:
    """A run of entries with contiguous ids, without an object per entry.

    Entry number i has the id `first_entry_id + i` and the bytes `buffer[offsets[i]:offsets[i + 1]]`. The
    buffer is read-only and stays valid for as long as it is held; holding a part of it holds all of it.
    """

    __slots__ = ("buffer", "first_entry_id", "offsets")

    def __init__(self, first_entry_id: int, offsets: Sequence[int], buffer: memoryview) -> None:
        self.first_entry_id = first_entry_id
        self.offsets = offsets
        self.buffer = buffer

    @classmethod
    def of_block(cls, block: Block) -> EntryBatch:
        """View a block of stride 1."""
        assert block.count == 1 or block.stride == 1
        offsets = list(accumulate(block.lengths, initial=0))
        return cls(block.first_entry, offsets, block.payload.toreadonly())

    @classmethod
    def of_payloads(cls, first_entry_id: int, payloads: Sequence[memoryview]) -> EntryBatch:
        """Join payloads of contiguous entries."""
        offsets = list(accumulate(map(len, payloads), initial=0))
        return cls(first_entry_id, offsets, memoryview(b"".join(payloads)))

    @property
    def last_entry_id(self) -> int:
        """Give the id of the last entry."""
        return self.first_entry_id + len(self) - 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Entry]:
        # One copy of the whole buffer, then slices of bytes: cheaper than a view per entry. And no call of a
        # Python function per entry, as a named tuple's constructor is one.
        whole = bytes(self.buffer)
        parts = [whole[start:end] for start, end in pairwise(self.offsets)]
        return map(_new_entry, zip(count(self.first_entry_id), parts, strict=False))

    def __repr__(self) -> str:
        return f"EntryBatch(entries {self.first_entry_id} to {self.last_entry_id}, {len(self.buffer)} bytes)"
