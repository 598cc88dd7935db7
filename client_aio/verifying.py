"""Reading what one bookie holds of one fragment, entry by entry, and checking it against what it owes.

A listing says what a bookie believes to hold; this reads the bytes. Never fences, and asks no other bookie:
what is found is that one replica's state. Owns the counting. What is owed is `client_aio.core.repair`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bookie_aio.wire.blocks import parse_blocks
from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Stop
from client_aio.core.repair import Part, complete_parts, owed
from metadata.errors import BookKeeperError, MalformedFrameError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client_aio.connection import BookieConnection
    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from client_aio.core.reads import ClassRange
    from metadata.ledger import LedgerMetadata

_RANGE_ENTRIES = 1_000_000
_CAREFUL_ENTRIES = 4096
"""A block holds no more: behind so many entries, ranges are read again."""


@dataclass(slots=True)
class VerifiedReplica:
    """What one bookie holds of the entries that it owes in a range of one fragment."""

    ledger_id: int
    first_entry: int
    last_entry: int
    bookie_id: str
    owed: int = 0
    intact: int = 0
    missing: int = 0
    """It says that there is no such entry."""
    damaged: int = 0
    """Its bytes do not match their checksum, or it knows that it lost them."""
    first_bad_entry: int | None = None
    error: str = ""
    """Why it could not be asked; what is owed then counts as missing."""

    @property
    def status(self) -> str:
        """Sum it up in a word."""
        if self.error:
            return "unreachable"
        if self.damaged:
            return "damaged"
        return "missing" if self.missing else "ok"


def parts_of(metadata: LedgerMetadata) -> list[Part]:
    """Give the fragments whose entries are known: all but the last one of a ledger that is not CLOSED."""
    parts = complete_parts(metadata.fragments, metadata.last_entry)
    return [part for part in parts if part.last_entry >= part.first_entry]


async def verify_replica(
    context: ClientContext,
    metadata: LedgerMetadata,
    part: Part,
    bookie_id: str,
    digest: Digest | None = None,
) -> VerifiedReplica:
    """Read everything that a bookie owes of a fragment (or of a part of one), and check it.

    Checksums are checked; with the digest of a ledger that has a password, authentication codes as well.
    Cancelling leaves nothing behind.
    """
    found = VerifiedReplica(metadata.ledger_id, part.first_entry, part.last_entry, bookie_id)
    ranges = list(owed(metadata, part, bookie_id, _RANGE_ENTRIES))
    found.owed = sum(wanted.entries for wanted in ranges)
    try:
        for wanted in ranges:
            await _verify_range(context, await context.pool.get(bookie_id), wanted, found, digest)
    except BookKeeperError as error:
        found.error = str(error)
        found.missing = found.owed - found.intact - found.damaged
    return found


async def _verify_range(
    context: ClientContext,
    connection: BookieConnection,
    wanted: ClassRange,
    found: VerifiedReplica,
    digest: Digest | None,
) -> None:
    rest: ClassRange | None = wanted
    is_careful = False  # after a refusal: entry by entry, since a block is refused as a whole
    careful_until = wanted.first
    while rest is not None:
        asked = rest._replace(last=rest.first) if is_careful else rest
        answer, body = await connection.call(
            Read(
                asked.ledger_id, NO_TERM, asked.content_term, asked.first, asked.last, asked.stride,
                context.config.read_ahead_bytes,
            ),
            ReadAnswer,
            timeout_s=context.config.read_timeout_s,
            ledger_id=asked.ledger_id,
        )  # fmt: skip
        last = None
        try:
            for block in parse_blocks(body):
                # Each entry's own checksum, which a read may leave aside where that of the block holds.
                wrong = block.damaged_entries()
                if digest is not None:
                    wrong = sorted({*wrong, *digest.wrong_entries(block)})
                _note(found, wrong, "damaged")
                found.intact += block.count - len(wrong)
                last = block.last_entry
        except MalformedFrameError:
            _note(found, [asked.first], "damaged")
            last = asked.first
        if last is not None:
            rest = rest.after(last)
        elif answer.stop == Stop.NO_SUCH_ENTRY:
            _note(found, [asked.first], "missing")
            rest = rest.after(asked.first)
        elif is_careful:
            _note(found, [asked.first], "damaged")
            rest = rest.after(asked.first)
        else:
            is_careful, careful_until = True, asked.first + _CAREFUL_ENTRIES * asked.stride
        if rest is not None and rest.first >= careful_until:
            is_careful = False


def _note(found: VerifiedReplica, entry_ids: Iterable[int], what: str) -> None:
    for entry_id in entry_ids:
        setattr(found, what, getattr(found, what) + 1)
        if found.first_bad_entry is None or entry_id < found.first_bad_entry:
            found.first_bad_entry = entry_id
