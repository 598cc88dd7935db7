"""Gaps of a log: records that are lost, as far as the bookies' answers prove it, and reading on behind them.

A record is lost when its ledger is gone though the log lists it. It is lost when every bookie of its write
set has answered and none returned it. And it is lost behind the end of a ledger that was closed with a loss
(`client_aio.ledger.accept_loss`). A bookie that does not answer may still hold the record. That is no gap,
and reading fails as it does without gaps. The exception is a bookie that a repair has replaced: whoever
replaced it has given it up. Its copies are read while it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from bookie_aio.wire.listing import listed
from client_aio.bookies.connection import list_entries
from client_aio.core.read_plan import class_ranges, fragment_end
from metadata.errors import (
    BookKeeperError,
    DigestMismatchError,
    EntryUnknownError,
    InvalidArgumentError,
    NoSuchEntryError,
    NoSuchLedgerError,
)
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from bookie_aio.wire.listing import Row
    from client_aio.context import ClientContext
    from client_aio.ledger.entry_reader import EntryBatch
    from client_aio.ledger.reader import LedgerReader
    from metadata.model.log import Position

OnGap = Literal["raise", "skip"]

_LOSSES = (NoSuchEntryError, DigestMismatchError, EntryUnknownError)
_LISTED_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class LogGap:
    """Records of a log that are lost; returned in their place by `read_log(on_gap="skip")`."""

    first: Position
    """The position of the first record lost."""
    last: Position | None
    """The position of the last one. None: all later records of that ledger, whose number is not known."""
    error: BookKeeperError
    """The error that reading ends with where gaps are not skipped."""


class Hole(NamedTuple):
    """Entries of a ledger that are lost."""

    first: int
    last: int | None
    """None: whether the ledger ends before the first one, or had it and more, cannot be decided."""
    error: BookKeeperError


def check_on_gap(on_gap: str) -> bool:
    """Return whether gaps are skipped, or raise InvalidArgumentError."""
    if on_gap not in ("raise", "skip"):
        raise InvalidArgumentError(f'on_gap {on_gap!r} is neither "raise" nor "skip"')
    return on_gap == "skip"


def is_missing(error: BookKeeperError, reader_id: int) -> bool:
    """Return whether the error says that this ledger does not exist."""
    return isinstance(error, NoSuchLedgerError) and error.ledger_id == reader_id


async def read_past_loss(
    context: ClientContext, reader: LedgerReader, first: int, error: BookKeeperError
) -> AsyncGenerator[EntryBatch | Hole, None]:
    """Return the entries from `first` up to the first one that is lost, and then the hole.

    Args:
        error: with which reading from `first` on ended.

    Raises:
        BookKeeperError: that error, or another one met on the way: the entry is not lost for sure.
    """
    at = _lost_entry(error, first)
    while at > first:
        # Entries before the lost one, of other write sets, may not have been returned yet.
        try:
            async with contextlib.aclosing(reader.read_batches(first, at - 1)) as batches:
                async for batch in batches:
                    first = batch.last_entry_id + 1
                    yield batch
        except _LOSSES as earlier:
            at, error = _lost_entry(earlier, first), earlier
    yield Hole(at, await _last_lost(context, reader, at, error), error)


def _lost_entry(error: BookKeeperError, first: int) -> int:
    if not isinstance(error, _LOSSES) or error.is_unanswered:
        raise error  # A bookie that did not say may hold the entry intact.
    return max(first, first if error.entry_id is None else error.entry_id)


async def _last_lost(
    context: ClientContext, reader: LedgerReader, entry_id: int, error: BookKeeperError
) -> int | None:
    """Return the last entry of a run of lost ones that begins with this entry; raise where it may exist.

    None where the ledger has no end yet, and no bookie lists this entry or a later one.
    """
    metadata = reader.metadata
    fragment = metadata.fragment_of(entry_id)
    end = fragment_end(metadata, fragment)
    is_endless = end is None and entry_id > reader.last_add_confirmed
    last = max(entry_id, min(reader.last_add_confirmed, entry_id + _LISTED_ENTRIES))
    last = last if end is None else min(last, end)
    last = ENTRY_ID_MAX if is_endless else last
    if last < entry_id:
        raise error  # The ledger was closed before this entry.

    async def ask(bookie_id: str) -> list[Row] | None:
        try:
            connection = await context.pool.get(bookie_id)
            rows, _ = await list_entries(
                connection, metadata.ledger_id, entry_id, last, context.config.read_timeout_s
            )
        except BookKeeperError:
            return None
        return rows

    names = list(dict.fromkeys((*fragment.bookies, *(each.bookie for each in metadata.absent))))
    answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
    if any(answers[name] is None for name in class_ranges(metadata, entry_id, entry_id)[0].present):
        raise error  # The bookie that did not answer may hold the entry.
    if is_endless:
        if any(answers[name] is None for name in fragment.bookies):
            raise error  # It may hold the next entry.
        await reader.refresh(sync=True)
        if reader.metadata != metadata:
            raise error  # The ledger has an end by now, or a repair has moved entries to another bookie.
        return _last_of_endless(answers.values(), fragment.content_term, entry_id)
    following = last + 1
    if entry_id < last:
        for wanted in class_ranges(metadata, entry_id + 1, last):
            ids = range(wanted.first, wanted.last + 1, wanted.stride)
            marks = bytearray(len(ids))
            for name in wanted.bookies:
                rows = answers[name]
                if rows is None and name in wanted.former:
                    continue
                found = b"\1" if rows is None else listed(ids, rows, wanted.content_term)
                place = found.find(1)
                if place >= 0:
                    marks[place] = 1
            place = marks.find(1)
            if place >= 0:
                following = min(following, ids[place])
    return following - 1


def _last_of_endless(answers: Iterable[list[Row] | None], content_term: int, entry_id: int) -> int | None:
    """Return the last entry of a run of lost ones behind which a ledger may end; None for no bookie's word.

    Each hole with an end takes a listed entry, so reading on ends.
    """
    held = [row.entry_ids for rows in answers for row in rows or () if row.content_term >= content_term]
    later = [ids[bisect_right(ids, entry_id)] for ids in held if ids and ids[-1] > entry_id]
    if later:
        return min(later) - 1
    return entry_id if any(entry_id in ids for ids in held) else None
