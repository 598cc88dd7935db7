"""Reading entries from bookies: the shell around `client_aio.core.read_plan`, and the entries it returns.

The plan decides which ranges to ask for, of which bookie, and what a failed read means. `EntryReader` sends
the reads, arms the timer of the speculative read and hands answers to the plan. It asks for several chunks
ahead of the consumer. `read_ahead_requests` answers bound the memory that a scan holds.

The callers decide what may be read (the LAC): `client_aio.ledger.reader` and the writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bookie_aio.wire.messages import ReadAnswer
from client_aio.core.read_plan import (
    ClassRange,
    RangeRead,
    ReadPlan,
    Scan,
    check_limit,
    check_range,
    checked_blocks,
    refusal,
)
from client_aio.tails import SharedRead
from metadata.errors import (
    BookKeeperError,
    DigestMismatchError,
    MetadataUnavailableError,
    NoSuchEntryError,
    ProtocolError,
)
from metadata.owned_task import failure_of, is_cancelled_alone

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from bookie_aio.wire.blocks import Block, LacStatement
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata


class Entry(NamedTuple):
    """An entry of a ledger."""

    entry_id: int
    data: bytes


_new_entry: Callable[[tuple[int, bytes]], Entry] = partial(tuple.__new__, Entry)


class EntryBatch:
    """A run of entries with contiguous ids, without an object per entry.

    Entry number i has the id `first_entry_id + i` and the bytes `buffer[offsets[i]:offsets[i + 1]]`. The
    buffer is read-only and stays valid while a reference to it exists. A reference to a slice keeps all of
    its memory.
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
        """Return the id of the last entry."""
        return self.first_entry_id + len(self) - 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Entry]:
        # One copy of the whole buffer and slices of it cost less than a view per entry. `_new_entry` avoids
        # the call of a Python function per entry: the constructor of a named tuple is one.
        whole = bytes(self.buffer)
        parts = [whole[start:end] for start, end in pairwise(self.offsets)]
        return map(_new_entry, zip(count(self.first_entry_id), parts, strict=False))

    def __repr__(self) -> str:
        return f"EntryBatch(entries {self.first_entry_id} to {self.last_entry_id}, {len(self.buffer)} bytes)"


logger = logging.getLogger(__name__)

EntryStream = AsyncGenerator[Entry, None]
BatchStream = AsyncGenerator[EntryBatch, None]


_Read = Callable[[ClassRange], Coroutine[object, object, "list[Block]"]]


class EntrySource(Protocol):
    """The source of a ledger's entries for a handle; `EntryReader` documents the members."""

    @property
    def digest_mismatches(self) -> int: ...

    def stream(self, first: int, last: int, limit: int) -> EntryStream: ...

    def batches(self, first: int, last: int, limit: int, *, is_tail: bool = False) -> BatchStream: ...

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream: ...


class EntryReader:
    """Reads entries of one ledger.

    Args:
        metadata: returns the ledger's metadata as its owner knows them now.
        digest: checks entries.
        on_statement: called with every LAC statement that an answer carries; the statement is not verified.
        refresh: reads the metadata again; called when no bookie of the present metadata returns an entry.
            None: the metadata never change, and a failed read ends at once.
        turn: the rotation at which the first read starts; see `ReadPlan`.
        absent_at: how many bookies of a write set must deny an entry to prove it absent; by default all.
        asked_last: bookies that the caller asks after the others, beside those that the pool knows.
    """

    def __init__(
        self,
        context: ClientContext,
        metadata: Callable[[], LedgerMetadata],
        digest: Digest,
        *,
        on_statement: Callable[[LacStatement], object],
        refresh: Callable[[], Awaitable[None]] | None,
        turn: int = 0,
        absent_at: int | None = None,
        asked_last: Collection[str] = (),
    ) -> None:
        self._context = context
        self._asked_last = asked_last
        self._config = context.config
        self._metadata = metadata
        self._digest = digest
        self._on_statement = on_statement
        self._refresh = refresh
        self._plan = ReadPlan(
            context.config.read_ahead_bytes,
            can_refresh=refresh is not None,
            turn=turn,
            absent_at=absent_at,
        )
        self.digest_mismatches = 0

    def stream(self, first: int, last: int, limit: int) -> EntryStream:
        """Return the entries first to last, one by one; see `batches`."""
        return entries_of(self.batches(first, last, limit))

    def batches(self, first: int, last: int, limit: int, *, is_tail: bool = False) -> BatchStream:
        """Return the entries first to last, in batches.

        Args:
            limit: the last entry that may be read.
            is_tail: whether other tails of the client probably read the same now: they share one answer.

        Raises:
            InvalidArgumentError: at the call: first to last is no range.
            NoSuchEntryError: at the call: `last` lies beyond `limit`. While iterating: an entry has been
                trimmed, or no bookie has it.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating; see `blocks`.
        """
        check_limit(self._metadata().ledger_id, first, last, limit)
        return self._batches(first, last, is_tail=is_tail)

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream:
        """Return the entries first to last, up to the first entry that no bookie has.

        Raises:
            InvalidArgumentError: at the call: first to last is no range.
            DigestMismatchError, EntryUnknownError, BookieUnavailableError: while iterating; see `blocks`.
        """
        check_range(first, last)
        return entries_of(self._until_absent(first, last))

    async def _until_absent(self, first: int, last: int) -> BatchStream:
        async with contextlib.aclosing(self._batches(first, last)) as batches:
            with contextlib.suppress(NoSuchEntryError):
                async for batch in batches:
                    yield batch

    async def blocks(self, wanted: ClassRange) -> list[Block]:
        """Read the beginning of a class's range, at least one entry, from any bookie of its write set.

        Cancelling drops the answers that are outstanding.

        Raises:
            NoSuchEntryError: enough bookies of the write set (by default all) deny the entry, or it lies
                outside the ledger by the metadata.
            DigestMismatchError: a bookie returned a damaged copy, and no other bookie an intact one.
            StaleMetadataError: a bookie knows a later content term of the entry than the metadata do.
            EntryUnknownError, BookieUnavailableError: no bookie returned the entry, and too few deny it.
            MetadataUnavailableError, NoSuchLedgerError: the metadata could not be read again.
        """
        read = RangeRead(self._plan, self._metadata(), wanted)
        while True:
            try:
                return await self._ask_in_turn(read)
            except BookKeeperError as error:
                if self._refresh is None:
                    raise
                try:
                    await self._refresh()
                except MetadataUnavailableError:
                    if read.is_certain(error):
                        raise error from None
                    raise
                if not read.look_again(error, self._metadata()):
                    raise

    async def shared_blocks(self, wanted: ClassRange) -> list[Block]:
        """Read as `blocks` does, together with the tails that read the same now; raises as `blocks` does."""
        reads = self._context.tails.reads
        shared = reads.get(wanted)
        if shared is None:
            shared = reads[wanted] = SharedRead(asyncio.create_task(self.blocks(wanted)))
            shared.task.add_done_callback(lambda _: reads.pop(wanted, None))
        try:
            return await shared.result()
        except BookKeeperError:
            return await self.blocks(wanted)  # Its reader may have had older metadata than this one.
        except asyncio.CancelledError:
            # By the tail that waited for it before, or by an application that cancels all tasks.
            if not is_cancelled_alone(shared.task):
                raise
            return await self.blocks(wanted)

    async def _batches(self, first: int, last: int, *, is_tail: bool = False) -> BatchStream:
        ahead: deque[_Chunk] = deque()
        scan = Scan(self._plan, self._metadata(), first, last)
        try:
            while ahead or not scan.is_planned:
                while len(ahead) < self._config.read_ahead_requests:
                    ranges = scan.next_chunk(self._metadata(), is_first=not ahead)
                    if not ranges:
                        break
                    ahead.append(_Chunk(ranges, self.shared_blocks if is_tail else self.blocks))
                async for batch in self._consume(ahead[0]):
                    scan.learn(len(batch), len(batch.buffer))
                    yield batch
                ahead.popleft()
        finally:
            tasks = [part.task for chunk in ahead for part in chunk.parts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _consume(self, chunk: _Chunk) -> BatchStream:
        """Return the entries of a chunk in order; ask again for entries that an answer had no room for."""
        if len(chunk.parts) == 1 and chunk.parts[0].wanted.stride == 1:
            part = chunk.parts[0]
            following = part.wanted.first
            while following <= chunk.last:
                for block in await part.next_blocks():
                    following = block.last_entry + 1
                    yield EntryBatch.of_block(block)
            return
        following = chunk.first
        while following <= chunk.last:
            run: list[memoryview] = []
            for entry_id in range(following, chunk.last + 1):
                part = chunk.parts[(entry_id - chunk.first) % len(chunk.parts)]
                if not part.payloads:
                    if run:
                        break
                    for block in await part.next_blocks():
                        part.payloads.extend(block.payloads())
                run.append(part.payloads.popleft())
            yield EntryBatch.of_payloads(following, run)
            following += len(run)

    # --- asking bookies ---

    async def _ask_in_turn(self, read: RangeRead) -> list[Block]:
        """Ask one bookie after the other, and the next bookie early when an answer is slow."""
        pool = self._context.pool
        read.begin_round({*self._asked_last, *pool.asked_last()})
        asking: set[asyncio.Task[list[Block]]] = set()
        asked: dict[asyncio.Task[list[Block]], str] = {}
        try:
            while True:
                doubtful = pool.asked_last() if asking else ()
                bookie_id = read.next_bookie(sum(asked[task] in doubtful for task in asking))
                if bookie_id is not None:
                    task = asyncio.create_task(self._ask(bookie_id, read.wanted))
                    asking.add(task)
                    asked[task] = bookie_id
                timeout = self._config.speculative_read_s if read.has_unasked else None
                done, asking = await asyncio.wait(
                    asking, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                errors = {task: failure_of(task, asked[task]) for task in done}
                for error in errors.values():
                    if isinstance(error, BookKeeperError):
                        ending = read.failed(error)
                        if ending is not None:
                            raise ending
                    elif error is not None:
                        raise error
                for task, error in errors.items():
                    if error is None:
                        return task.result()
        finally:
            for task in asking:
                task.cancel()

    async def _ask(self, bookie_id: str, wanted: ClassRange) -> list[Block]:
        answer, body = await self._context.pool.ask(
            bookie_id,
            wanted.request(self._config.read_ahead_bytes),
            ReadAnswer,
            timeout_s=self._config.read_timeout_s,
            ledger_id=wanted.ledger_id,
        )
        try:
            blocks, answer = checked_blocks(wanted, answer, body, self._digest)
        except (DigestMismatchError, ProtocolError) as error:  # damaged, forged, or no answer to this request
            self.digest_mismatches += 1
            self._context.counters.digest_mismatches += 1
            logger.error("ledger=%d bookie=%s: %s", wanted.ledger_id, bookie_id, error)
            error.bookie_id = bookie_id
            raise
        if answer.statement is not None:
            self._on_statement(answer.statement)
        if blocks:
            return blocks
        raise refusal(answer, bookie_id, wanted.ledger_id)


class _Part:
    """The entries of a chunk that one write set holds."""

    __slots__ = ("_read", "payloads", "task", "wanted")

    def __init__(self, wanted: ClassRange, read: _Read) -> None:
        self._read = read
        self.wanted = wanted
        self.task = asyncio.create_task(read(wanted))
        self.payloads: deque[memoryview] = deque()

    async def next_blocks(self) -> list[Block]:
        """Return the next blocks: the first answer's, then those of a read for each remainder."""
        while True:
            try:
                blocks = await self.task
                break
            except asyncio.CancelledError:
                if not is_cancelled_alone(self.task):
                    raise
                # An application that cancels all tasks but its reader's ends no read.
                self.task = asyncio.create_task(self._read(self.wanted))
        rest = self.wanted.after(blocks[-1].last_entry)
        if rest is not None:
            self.wanted = rest
            # Not before the consumer has come so far: else the memory of a chunk would not be bounded.
            self.task = asyncio.create_task(self._read(rest))
        return blocks


class _Chunk:
    """A range that is asked for at once, as one part per write set."""

    __slots__ = ("first", "last", "parts")

    def __init__(self, ranges: list[ClassRange], read: _Read) -> None:
        self.first = ranges[0].first
        self.last = max(each.last for each in ranges)
        self.parts = [_Part(each, read) for each in ranges]


async def entries_of(batches: BatchStream) -> EntryStream:
    """Return the entries of batches, one by one."""
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for entry in batch:
                yield entry


def writers_reader(
    context: ClientContext, last_written: Callable[[], LedgerMetadata], digest: Digest
) -> EntryReader:
    """Make a reader of the entries that a writer has had acknowledged.

    Args:
        last_written: returns the ledger's metadata as the writer last wrote them. They may be out of date: a
            repair may have replaced bookies of earlier fragments. Metadata that are read again serve this
            reader alone, until the writer writes the next ones.
    """
    read_again: tuple[LedgerMetadata, LedgerMetadata] | None = None  # for which last written ones, and these

    def metadata() -> LedgerMetadata:
        written = last_written()
        return written if read_again is None or read_again[0] is not written else read_again[1]

    async def refresh() -> None:
        nonlocal read_again
        written = last_written()
        read_again = written, (await context.ledgers.read(written.ledger_id, sync=True))[0]

    return EntryReader(context, metadata, digest, on_statement=lambda _: None, refresh=refresh)
