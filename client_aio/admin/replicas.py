"""Comparing the entries that bookies hold of a ledger with those that they owe. Never fences.

`list_replicas` asks each bookie for a list of its entries. A list may name entries whose bytes are damaged. A
bookie reports with it whether it knows that it lost data of the ledger (rule 4).

`verify_replica` reads the bytes that one bookie holds of one fragment, and checks them. It asks no other
bookie, so its result is the state of that replica alone.

`client_aio.core.repair_plan` decides which entries a bookie owes.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.bookies.connection import NO_ANSWER, list_entries
from client_aio.core.read_plan import blocks_in_order
from client_aio.core.repair_plan import LostRuns, Part, complete_parts, owed, split
from client_aio.unbounded.paged_fragments import spans
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    DigestMismatchError,
    ProtocolError,
)
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from bookie_aio.wire.listing import Row
    from client_aio.bookies.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.read_plan import ClassRange
    from client_aio.unbounded.paged_fragments import Span
    from metadata.model.ledger import LedgerMetadata


_RANGE_ENTRIES = 1_000_000


@dataclass(frozen=True, slots=True)
class Replica:
    """One bookie's part of one fragment."""

    bookie_id: str
    first_entry: int
    """The fragment's first entry."""
    entries_owed: int | None
    """How many entries the bookie owes; None in the last fragment of a ledger that is not CLOSED."""
    entries_missing: int | None
    """How many of the entries owed it does not list; None where that is not known."""
    is_damaged: bool
    """Whether it lost data of this ledger: then it may have held the missing entries."""
    error: str
    """Why the bookie could not be asked; empty when it answered."""


async def list_replicas(context: ClientContext, ledger_id: int) -> list[Replica]:
    """Ask every bookie named by the ledger's metadata; see `Client.ledger_replicas`.

    An unbounded ledger is compared page after page: memory holds the lists of one page's bookies at a time.
    """
    metadata, _ = await context.ledgers.read(ledger_id)
    replicas: list[Replica] = []
    unreachable: dict[str, str] = {}
    async with aclosing(spans(context, metadata)) as found:
        async for span in found:
            replicas += await _replicas_of(context, span, unreachable)
    if metadata.is_unbounded:
        # Bookies drop trimmed entries, which are not missing.
        metadata, _ = await context.ledgers.read(ledger_id, sync=True)
        replicas = [each for each in replicas if each.first_entry >= metadata.first_entry]
    return replicas


async def _replicas_of(context: ClientContext, span: Span, unreachable: dict[str, str]) -> list[Replica]:
    """Compare the replicas of some fragments.

    Args:
        unreachable: the bookies that could not be asked before, and why. They are not asked again; bookies
            that cannot be asked now are added.
    """
    ledger_id, fragments = span.metadata.ledger_id, span.fragments
    names = sorted({name for fragment in fragments for name in fragment.bookies})
    last = ENTRY_ID_MAX if span.last_entry is None else max(span.last_entry, fragments[0].first_entry)

    async def ask(bookie_id: str) -> tuple[list[Row], bool]:
        if bookie_id not in unreachable:
            try:
                connection = await context.pool.get_briefly(bookie_id)
                return await list_entries(
                    connection, ledger_id, fragments[0].first_entry, last, context.config.read_timeout_s
                )
            except BookKeeperError as error:
                unreachable[bookie_id] = str(error)
        return [], False

    answers = dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))
    parts = {part.first_entry: part for part in complete_parts(fragments, span.last_entry)}
    replicas: list[Replica] = []
    for fragment in fragments:
        part = parts.get(fragment.first_entry)
        for bookie_id in fragment.bookies:
            rows, is_damaged = answers[bookie_id]
            error = unreachable.get(bookie_id, "")
            owing = missing = None
            if part is not None:
                owing, missing = _compare(span.metadata, part, bookie_id, None if error else rows)
            replicas.append(Replica(bookie_id, fragment.first_entry, owing, missing, is_damaged, error))
    return replicas


def _compare(
    metadata: LedgerMetadata, part: Part, bookie_id: str, rows: list[Row] | None
) -> tuple[int, int | None]:
    owing = missing = 0
    for wanted in owed(metadata, part, bookie_id, _RANGE_ENTRIES):
        owing += wanted.entries
        if rows is not None:
            missing += sum(run.entries for run in split(wanted, rows)[0])
    return owing, None if rows is None else missing


_CAREFUL_ENTRIES = 4096
"""A block holds at most so many entries. Behind them, whole ranges are read again."""


@dataclass(slots=True)
class VerifiedReplica:
    """The state of the entries that one bookie owes in a range of one fragment."""

    ledger_id: int
    first_entry: int
    last_entry: int
    bookie_id: str
    owed: int = 0
    intact: int = 0
    missing: int = 0
    """Entries that the bookie denies."""
    damaged: int = 0
    """Entries whose bytes do not match their checksum, or that the bookie knows it lost."""
    first_bad_entry: int | None = None
    error: str = ""
    """Why the bookie could not be asked, or is not asked any more; what was not read counts as missing."""
    is_silent: bool = False
    """Whether it could not be asked at all: it would not answer for another ledger either."""
    bad: LostRuns = field(default_factory=LostRuns)
    """The entries that are missing or damaged, without those that were not read."""

    @property
    def status(self) -> str:
        """Return "ok", "missing", "damaged" or "unreachable", the worst that applies."""
        if self.error:
            return "unreachable"
        if self.damaged:
            return "damaged"
        return "missing" if self.missing else "ok"

    def row(self) -> dict[str, Any]:
        """Return the replica as a row of reports: without the ledger, and without the runs of bad entries."""
        return {
            "first_entry": self.first_entry,
            "last_entry": self.last_entry,
            "bookie": self.bookie_id,
            "owed": self.owed,
            "intact": self.intact,
            "missing": self.missing,
            "damaged": self.damaged,
            "first_bad_entry": self.first_bad_entry,
            "status": self.status,
            "error": self.error or None,
        }


def parts_of(metadata: LedgerMetadata) -> list[Part]:
    """Return the fragments with a known end: all but the last fragment of a ledger that is not CLOSED."""
    parts = complete_parts(metadata.fragments, metadata.last_entry)
    return [part for part in parts if part.last_entry >= part.first_entry]


async def verify_replica(
    context: ClientContext,
    metadata: LedgerMetadata,
    part: Part,
    bookie_id: str,
    digest: Digest | None = None,
    *,
    throttle: Callable[[int], Awaitable[None]] | None = None,
    unreachable: str = "",
) -> VerifiedReplica:
    """Read all entries that a bookie owes of a fragment (or of a part of one), and check them.

    Checks checksums. With the digest of a ledger that has a password, checks authentication codes as well.
    A failure of the bookie ends in `VerifiedReplica.error`. Cancelling leaves nothing behind.

    Args:
        throttle: awaited with the bytes of each answer, before the next request.
        unreachable: why the bookie is not asked at all; empty to ask it.
    """
    found = VerifiedReplica(metadata.ledger_id, part.first_entry, part.last_entry, bookie_id)
    ranges = list(owed(metadata, part, bookie_id, _RANGE_ENTRIES))
    found.owed = sum(wanted.entries for wanted in ranges)
    try:
        if unreachable:
            raise BookieUnavailableError(unreachable, bookie_id=bookie_id)
        for wanted in ranges:
            await _verify_range(context, await context.pool.get(bookie_id), wanted, found, digest, throttle)
    except BookKeeperError as error:
        found.error = str(error)
        found.is_silent = isinstance(error, NO_ANSWER)
        found.missing = found.owed - found.intact - found.damaged
    return found


async def _verify_range(
    context: ClientContext,
    connection: BookieConnection,
    wanted: ClassRange,
    found: VerifiedReplica,
    digest: Digest | None,
    throttle: Callable[[int], Awaitable[None]] | None,
) -> None:
    rest: ClassRange | None = wanted
    is_careful = False  # After a refusal, read entry by entry: a bookie refuses a block as a whole.
    careful_until = wanted.first
    while rest is not None:
        asked = rest._replace(last=rest.first) if is_careful else rest
        answer, body = await connection.call(
            asked.request(context.config.read_ahead_bytes),
            ReadAnswer,
            timeout_s=context.config.read_timeout_s,
            ledger_id=asked.ledger_id,
        )
        if throttle is not None:
            await throttle(len(body))
        following = asked.first
        try:
            for block in blocks_in_order(asked, body):
                # Check each entry's own checksum, which a read skips where the block's checksum holds.
                wrong = block.damaged_entries()
                if digest is not None:
                    wrong = sorted({*wrong, *digest.wrong_entries(block)})
                _note(found, asked, wrong, "damaged")
                found.intact += block.count - len(wrong)
                following = block.last_entry + asked.stride
        except (DigestMismatchError, ProtocolError) as error:
            if following <= asked.last:
                _note(found, asked, [following], "damaged")
            if following > asked.last or isinstance(error, ProtocolError):
                raise _other_entries(connection.bookie_id, error) from error
            following += asked.stride
        if following > asked.first:
            rest = rest.after(following - asked.stride)
        elif answer.stop == Stop.NO_SUCH_ENTRY:
            _note(found, asked, [asked.first], "missing")
            rest = rest.after(asked.first)
        elif is_careful:
            _note(found, asked, [asked.first], "damaged")
            rest = rest.after(asked.first)
        else:
            is_careful, careful_until = True, asked.first + _CAREFUL_ENTRIES * asked.stride
        if rest is not None and rest.first >= careful_until:
            is_careful = False


def _other_entries(bookie_id: str, error: BookKeeperError) -> ProtocolError:
    return ProtocolError(
        f"bookie {bookie_id} answers with other entries than it is asked for: {error}", bookie_id=bookie_id
    )


def _note(found: VerifiedReplica, asked: ClassRange, entry_ids: Iterable[int], what: str) -> None:
    for entry_id in entry_ids:
        found.bad.add(asked._replace(first=entry_id, last=entry_id), None)
        setattr(found, what, getattr(found, what) + 1)
        if found.first_bad_entry is None or entry_id < found.first_bad_entry:
            found.first_bad_entry = entry_id
