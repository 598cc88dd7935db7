"""The storage engine: what the server sees of a bookie's disk.

Owns the order of things: what is accepted is written in the order of the calls, in groups, each with one
fdatasync; a `Done` is called when its record is durable and indexed, and never before (rules 2 and 3).

All methods are called on the loop's thread. Accepting never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.errors import StorageError

if TYPE_CHECKING:
    from bookie_aio.storage.disk import Disk
    from bookie_aio.wire.blocks import Block, Buffer, LacStatement
    from bookie_aio.wire.messages import Stop

Done = Callable[[StorageError | None], None]
"""Called on the loop's thread, exactly once, with None when the record is durable and indexed."""


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The engine's limits."""

    segment_bytes: int = 256 * 1024 * 1024
    group_bytes_max: int = 4 * 1024 * 1024
    reserve_bytes: int = 32 * 1024 * 1024
    space_retry_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a read found: blocks one after another, and why and where it ends.

    `stop_entry` is the first entry asked for that is not in the buffers; with `Stop.END` the one behind
    the last asked for.
    """

    buffers: list[Buffer]
    stop: Stop
    stop_entry: int


class Engine:
    """A bookie's storage. Open it with `Engine.open`."""

    @classmethod
    async def open(
        cls,
        disk: Disk,
        directory: str,
        config: StorageConfig,
        *,
        draw_generation: Callable[[], int],
        on_indexed: Callable[[Collection[int]], None],
        on_failed: Callable[[StorageError], None],
        on_writable: Callable[[bool], None],
    ) -> Engine:
        """Lock the directory, replay what a crash left, and be ready to serve.

        Args:
            draw_generation: gives a random number of 64 bits.
            on_indexed: called after each group, before its `Done`s, with the ledgers that it touched.
            on_failed: called once, when a write or a sync failed: nothing is acknowledged any more.
            on_writable: called with False when space ran out, with True when it came back.

        Raises:
            DirectoryInUseError: another process has it open.
            CorruptRecordError: something there is not of this format version.
            DiskFullError: there is not even room for the first segment and the reserve.
            DiskFailedError: the disk fails.
        """
        raise NotImplementedError

    def append_block(self, block: Block, done: Done, *, from_reserve: bool = False) -> None:
        """Accept a block; its view is kept until it is durable, and written as it is.

        Raises:
            DiskFullError: not accepted: no space (with `from_reserve`: the reserve is used up as well).
        """
        raise NotImplementedError

    def append_term(self, ledger_id: int, term: int, done: Done) -> None:
        """Accept a fence: the ledger's term is at least `term` from now on. Raises DiskFullError."""
        raise NotImplementedError

    def append_statement(self, ledger_id: int, statement: LacStatement, done: Done) -> None:
        """Accept an explicit LAC. Raises DiskFullError when the engine is not writable."""
        raise NotImplementedError

    def append_mark(self, ledger_id: int, done: Done) -> None:
        """Accept the mark that data of this ledger was lost (rule 4). Raises DiskFullError."""
        raise NotImplementedError

    def barrier(self, done: Done) -> None:
        """Call back once everything accepted so far is durable and indexed: in this call if it is now."""
        raise NotImplementedError

    def term(self, ledger_id: int) -> int:
        """Give the highest term accepted, perhaps not durable yet; 0 for a ledger never heard of."""
        raise NotImplementedError

    def is_damaged(self, ledger_id: int) -> bool:
        """Tell whether data of this ledger was lost, or may have been (rule 4)."""
        raise NotImplementedError

    def last_entry(self, ledger_id: int) -> int:
        """Give the highest entry that is durable and indexed, or −1."""
        raise NotImplementedError

    def statement(self, ledger_id: int) -> LacStatement | None:
        """Give the highest LAC stated by anything that is durable and indexed."""
        raise NotImplementedError

    def is_pending(self, ledger_id: int) -> bool:
        """Tell whether something accepted for the ledger is not yet durable and indexed."""
        raise NotImplementedError

    async def read(self, ledger_id: int, content_term: int, entry_ids: range, bytes_max: int) -> ReadResult:
        """Read durable and indexed entries, up to the first that is not there or the end of the budget.

        Whole blocks come verbatim, parts of one as partial blocks, each part as two buffers. One entry
        comes in any case. All that is read is checked; bytes that fail are marked lost (rule 4).
        """
        raise NotImplementedError

    async def list_entries(
        self, ledger_id: int, from_entry: int, rows_max: int
    ) -> tuple[list[tuple[int, int, int, int]], int]:
        """Give runs (first entry, content term, count, stride) by first entry, and where to go on or −1.

        Runs may overlap where entries were stored more than once.
        """
        raise NotImplementedError

    def list_ledgers(self, from_ledger: int, count_max: int) -> tuple[list[int], int]:
        """Give ids, ascending, of ledgers of which anything is held, and where to go on or −1."""
        raise NotImplementedError

    @property
    def bytes_pending(self) -> int:
        """Give the bytes accepted that are not durable and indexed yet."""
        raise NotImplementedError

    @property
    def is_writable(self) -> bool:
        """Tell whether ordinary adds are accepted."""
        raise NotImplementedError

    def figures(self) -> dict[str, object]:
        """Give the figures that `bookie info` shows."""
        raise NotImplementedError

    async def close(self) -> None:
        """Finish what is accepted, seal the segment for a quick start, and let go of the directory."""
        raise NotImplementedError
