"""Reading entries: from whom, in which order, and what to do when a bookie cannot give one.

A range is cut into chunks of about one answer's budget; several are asked for ahead of the consumer. Each
chunk is asked of one bookie of its write set, the next one of the next, so that a scan spreads over the
ensemble. A miss, a bad digest, an error or a slow answer sends the rest to the next bookie (rule 13). What is
held at any time is bounded by `read_ahead_requests` answers.

Owns the asking. What may be read (the LAC) is its callers' business, `client_aio.ledger.reader` and the
writer.

What a read gives: entries, and batches of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Stop
from client_aio.core.read_plan import ClassRange, checked_blocks, class_ranges, fragment_end, stride_of
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    DigestMismatchError,
    EntryUnknownError,
    InvalidArgumentError,
    MetadataUnavailableError,
    NoSuchEntryError,
    ProtocolError,
    StaleMetadataError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        """Return the id of the last entry."""
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


logger = logging.getLogger(__name__)

EntryStream = AsyncGenerator[Entry, None]
BatchStream = AsyncGenerator[EntryBatch, None]

_FIRST_CHUNK_ENTRIES = 256
_CHUNK_ENTRIES_MAX = 65_536
_SPECULATIVE_MAX = 2


class EntrySource(Protocol):
    """Where a handle reads its ledger's entries; `EntryReader` says what each member does."""

    @property
    def digest_mismatches(self) -> int: ...

    def stream(self, first: int, last: int, limit: int) -> EntryStream: ...

    def batches(self, first: int, last: int, limit: int) -> BatchStream: ...

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream: ...


class EntryReader:
    """Reads entries of one ledger.

    Args:
        metadata: gives the ledger's metadata as its owner knows them now.
        digest: checks entries.
        on_statement: told every LAC statement that an answer carries, not verified yet.
        refresh: reads the metadata again; asked when no bookie named by the present ones has an entry.
        turn: which bookie of its write set the first chunk is asked of; the next one of the next.
        absent_at: how many bookies of a write set that have no such entry are enough to say that there is
            none; by default all of them.
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
    ) -> None:
        self._context = context
        self._config = context.config
        self._metadata = metadata
        self._digest = digest
        self._on_statement = on_statement
        self._refresh = refresh
        self._turn = turn
        self._absent_at = absent_at
        self.digest_mismatches = 0

    def stream(self, first: int, last: int, limit: int) -> EntryStream:
        """Return the entries first to last, one by one; the arguments are checked now."""
        return entries_of(self.batches(first, last, limit))

    def batches(self, first: int, last: int, limit: int) -> BatchStream:
        """Return the entries first to last, in batches; the arguments are checked now.

        Args:
            limit: the last entry that may be read.
        """
        check_limit(self._metadata().ledger_id, first, last, limit)
        return self._batches(first, last)

    def stream_unconfirmed(self, first: int, last: int) -> EntryStream:
        """Return the entries first to last, up to the first that no bookie has."""
        check_range(first, last)
        return entries_of(self._until_absent(first, last))

    async def _until_absent(self, first: int, last: int) -> BatchStream:
        async with contextlib.aclosing(self._batches(first, last)) as batches:
            with contextlib.suppress(NoSuchEntryError):
                async for batch in batches:
                    yield batch

    async def blocks(self, wanted: ClassRange) -> list[Block]:
        """Read the beginning of a class's range, at least one entry of it, from whoever has it.

        Raises:
            NoSuchEntryError: every bookie of the write set says that the entry does not exist.
            DigestMismatchError: a bookie had it with damage, and no other had it without.
            EntryUnknownError, BookieUnavailableError: nobody could tell.
        """
        now = self._current(wanted)
        # One bookie that knows a later content term is enough to read the metadata again: what others hold
        # may be what somebody left who was displaced.
        heeds_stale = self._refresh is not None
        while True:
            try:
                return await self._blocks_once(now, heeds_stale=heeds_stale)
            except (
                NoSuchEntryError, DigestMismatchError, EntryUnknownError, StaleMetadataError,
                BookieUnavailableError,
            ) as error:  # fmt: skip
                if self._refresh is None:
                    raise
                try:
                    await self._refresh()
                except MetadataUnavailableError:
                    if isinstance(error, DigestMismatchError):
                        raise error from None  # That is so, whoever has copies by now.
                    raise
                moved = self._current(wanted)
                if moved == now:
                    if not heeds_stale or not isinstance(error, StaleMetadataError):
                        raise
                    heeds_stale = False  # The store knows of no later one: whoever else has it may be right.
                now = moved

    def _current(self, wanted: ClassRange) -> ClassRange:
        """Return the part of a range that lies in one fragment of the metadata as they are now."""
        metadata = self._metadata()
        self._check_begun(wanted.first)
        end = fragment_end(metadata, metadata.fragment_of(wanted.first))
        if end is not None and wanted.first > end:
            raise self._beyond_the_end(wanted.first)  # closed since it was asked for
        last = wanted.last if end is None else min(wanted.last, end)
        return class_ranges(metadata, wanted.first, wanted.first)[0]._replace(
            last=wanted.first + (last - wanted.first) // wanted.stride * wanted.stride
        )

    async def _batches(self, first: int, last: int) -> BatchStream:
        loop = asyncio.get_running_loop()
        ahead: deque[_Chunk] = deque()
        size = _ChunkSize(self._metadata(), self._config.read_ahead_bytes)
        following = first
        try:
            while following <= last or ahead:
                while following <= last and len(ahead) < self._config.read_ahead_requests:
                    if ahead and following < self._metadata().first_entry:
                        break  # What was asked for before this comes first.
                    self._check_begun(following)
                    end = self._chunk_end(following, last, size.entries)
                    if end < following:
                        if ahead:
                            break
                        raise self._beyond_the_end(following)
                    chunk = _Chunk(following, end)
                    for wanted in class_ranges(self._metadata(), following, end):
                        chunk.parts.append(_Part(wanted, loop.create_task(self.blocks(wanted))))
                    ahead.append(chunk)
                    following = end + 1
                async for batch in self._consume(ahead[0]):
                    size.learn(len(batch), len(batch.buffer))
                    yield batch
                ahead.popleft()
        finally:
            tasks = [part.task for chunk in ahead for part in chunk.parts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_begun(self, entry_id: int) -> None:
        metadata = self._metadata()
        if entry_id < metadata.first_entry:
            raise trimmed(metadata, entry_id)

    def _beyond_the_end(self, entry_id: int) -> NoSuchEntryError:
        metadata = self._metadata()
        return NoSuchEntryError(
            f"entry {entry_id} of ledger {metadata.ledger_id} does not exist: the ledger is closed at entry "
            f"{metadata.last_entry}",
            ledger_id=metadata.ledger_id,
            entry_id=entry_id,
        )

    def _chunk_end(self, first: int, last: int, entries: int) -> int:
        metadata = self._metadata()
        end = fragment_end(metadata, metadata.fragment_of(first))
        return min(last, first + entries - 1, last if end is None else end)

    async def _consume(self, chunk: _Chunk) -> BatchStream:
        """Return the entries of a chunk in order, asking for the rest of a part that came short."""
        if len(chunk.parts) == 1 and chunk.parts[0].wanted.stride == 1:
            part = chunk.parts[0]
            following = part.wanted.first
            while following <= chunk.last:
                for block in await part.next_blocks(self):
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
                    for block in await part.next_blocks(self):
                        part.payloads.extend(block.payloads())
                run.append(part.payloads.popleft())
            yield EntryBatch.of_payloads(following, run)
            following += len(run)

    # --- asking bookies ---

    async def _blocks_once(self, wanted: ClassRange, *, heeds_stale: bool) -> list[Block]:
        """Ask one bookie after the other, and the next one early where an answer is slow.

        Args:
            heeds_stale: end where one of them knows a later content term.
        """
        order = self._order(wanted.bookies)
        errors: list[BookKeeperError] = []
        asking: set[asyncio.Task[list[Block]]] = set()
        try:
            while order or asking:
                if order and len(asking) < _SPECULATIVE_MAX:
                    asking.add(asyncio.create_task(self._ask(order.pop(0), wanted)))
                timeout = self._config.speculative_read_s if order else None
                done, asking = await asyncio.wait(
                    asking, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for error in [task.exception() for task in done]:
                    if heeds_stale and isinstance(error, StaleMetadataError):
                        raise error
                    if isinstance(error, BookKeeperError):
                        errors.append(error)
                    elif error is not None:
                        raise error
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            for task in asking:
                task.cancel()
        raise _worst(wanted, errors, self._absent_at or len(wanted.bookies))

    def _order(self, bookies: tuple[str, ...]) -> list[str]:
        self._turn += 1
        start = self._turn % len(bookies)
        quarantined = self._context.pool.directory.quarantined()
        # Stable: within healthy and quarantined ones the rotation stays.
        return sorted(bookies[start:] + bookies[:start], key=quarantined.__contains__)

    async def _ask(self, bookie_id: str, wanted: ClassRange) -> list[Block]:
        connection = await self._context.pool.get(bookie_id)
        request = Read(
            wanted.ledger_id,
            NO_TERM,
            wanted.content_term,
            wanted.first,
            wanted.last,
            wanted.stride,
            self._config.read_ahead_bytes,
        )
        answer, body = await connection.call(
            request, ReadAnswer, timeout_s=self._config.read_timeout_s, ledger_id=wanted.ledger_id
        )
        try:
            blocks = checked_blocks(wanted, answer, body, self._digest)
        except (DigestMismatchError, ProtocolError) as error:  # damaged, forged, or not what was asked for
            self.digest_mismatches += 1
            logger.error("ledger=%d bookie=%s: %s", wanted.ledger_id, bookie_id, error)
            error.bookie_id = bookie_id
            raise
        if answer.statement is not None:
            self._on_statement(answer.statement)
        if blocks:
            return blocks
        raise _stopped(answer, bookie_id, wanted.ledger_id)


class _Part:
    """The share of a chunk that one write set holds."""

    __slots__ = ("payloads", "task", "wanted")

    def __init__(self, wanted: ClassRange, task: asyncio.Task[list[Block]]) -> None:
        self.wanted = wanted
        self.task = task
        self.payloads: deque[memoryview] = deque()

    async def next_blocks(self, reader: EntryReader) -> list[Block]:
        """Return the next blocks: those asked for ahead, then what they left."""
        blocks = await self.task
        rest = self.wanted.after(blocks[-1].last_entry)
        if rest is not None:
            self.wanted = rest
            # Asked for only now that it is wanted: what is held ahead stays bounded.
            self.task = asyncio.create_task(reader.blocks(rest))
        return blocks


class _Chunk:
    """A range that is asked for in one go, as one part per write set."""

    __slots__ = ("first", "last", "parts")

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.parts: list[_Part] = []


class _ChunkSize:
    """How many entries make an answer's budget, by what was seen so far."""

    def __init__(self, metadata: LedgerMetadata, budget: int) -> None:
        self._budget = budget * (stride_of(metadata) if stride_of(metadata) > 1 else 1)
        self._entries = 0
        self._bytes = 0

    @property
    def entries(self) -> int:
        """Return the number of entries to ask for next."""
        if not self._entries:
            return _FIRST_CHUNK_ENTRIES
        mean = self._bytes / self._entries + 16  # with its share of the head
        return max(1, min(_CHUNK_ENTRIES_MAX, int(self._budget / mean)))

    def learn(self, entries: int, size: int) -> None:
        """Note what a batch held."""
        self._entries += entries
        self._bytes += size


async def entries_of(batches: BatchStream) -> EntryStream:
    """Return the entries of batches, one by one."""
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for entry in batch:
                yield entry


def check_range(first: int, last: int) -> None:
    """Raise InvalidArgumentError unless first to last is a range of entries, perhaps an empty one."""
    if not isinstance(first, int) or not isinstance(last, int) or first < 0 or last < first - 1:
        raise InvalidArgumentError(f"{first!r} to {last!r} is no range of entries")


def check_limit(ledger_id: int, first: int, last: int, limit: int) -> None:
    """Raise unless first to last is a range of entries, perhaps an empty one, that may be read.

    Raises:
        InvalidArgumentError: it is no range.
        NoSuchEntryError: it goes beyond `limit`.
    """
    check_range(first, last)
    if last > limit and first <= last:
        raise NoSuchEntryError(
            f"entry {last} of ledger {ledger_id} lies beyond the last add confirmed, {limit}",
            ledger_id=ledger_id,
            entry_id=last,
        )


def trimmed(metadata: LedgerMetadata, entry_id: int) -> NoSuchEntryError:
    """Build the error of an entry that has been trimmed."""
    return NoSuchEntryError(
        f"entry {entry_id} of ledger {metadata.ledger_id} has been trimmed: the ledger begins at entry "
        f"{metadata.first_entry}",
        ledger_id=metadata.ledger_id,
        entry_id=entry_id,
    )


def _stopped(answer: ReadAnswer, bookie_id: str, ledger_id: int) -> BookKeeperError:
    kinds: dict[int, tuple[type[BookKeeperError], str]] = {
        Stop.NO_SUCH_ENTRY: (NoSuchEntryError, "has no entry"),
        Stop.UNKNOWN: (EntryUnknownError, "lost data and cannot say whether it held entry"),
        Stop.STALE_METADATA: (StaleMetadataError, "knows a newer content term of entry"),
    }
    kind, text = kinds[answer.stop]
    return kind(
        f"bookie {bookie_id} {text} {answer.stop_entry} of ledger {ledger_id}",
        ledger_id=ledger_id,
        entry_id=answer.stop_entry,
        bookie_id=bookie_id,
    )


def _worst(wanted: ClassRange, errors: list[BookKeeperError], absent_at: int) -> BookKeeperError:
    """Sum up why no bookie gave an entry: damage, then absence where enough say so, then doubt."""

    def pick(kinds: tuple[type[BookKeeperError], ...]) -> Iterator[BookKeeperError]:
        return (error for error in errors if isinstance(error, kinds))

    first: BookKeeperError
    if (first_found := next(pick((DigestMismatchError,)), None)) is not None:
        first = first_found
    elif len(absent := list(pick((NoSuchEntryError,)))) >= absent_at:
        first = absent[0]
    else:
        ranked = [*pick((StaleMetadataError,)), *pick((EntryUnknownError,)), *pick((BookKeeperError,))]
        first = next((error for error in ranked if not isinstance(error, NoSuchEntryError)), errors[0])
    kind = type(first) if isinstance(first, _READ_FAILURES) else BookieUnavailableError
    return kind(
        f"entry {wanted.first} of ledger {wanted.ledger_id} could not be read from any of "
        f"{', '.join(wanted.bookies)}: {'; '.join(map(str, errors))}",
        ledger_id=wanted.ledger_id,
        entry_id=wanted.first,
    )


_READ_FAILURES = (DigestMismatchError, NoSuchEntryError, EntryUnknownError, StaleMetadataError)


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
