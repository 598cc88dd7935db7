"""Reading every copy of every entry, and checking it: `ledger verify`.

Each bookie is asked for what it owes of each complete fragment, and for nothing else. Checksums are checked,
and with a password authentication codes as well. Nothing is fenced, and nothing is changed.

The theory. A large fragment is verified in *pieces*. Of each piece the bad entries of every bookie are known
by id. So the good copies of the scarcest entry are exact. Two bookies that lost different entries leave one
copy more than two that lost the same ones. Memory holds the bad entries of a few pieces.

A ledger may be deleted, trimmed or repaired while it is read. Then bookies rightly lack entries. So where
something is bad, the metadata are read anew, and a fragment that has changed is verified again.

The last fragment of a ledger that is not CLOSED is left out: which entries are owed there is not settled.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from client_aio.admin.replicas import VerifiedReplica, verify_replica
from client_aio.core.audit import Condition, condition_of, fewest_copies
from client_aio.core.courtesy import TokenBucket
from client_aio.core.repair_plan import Part, complete_parts
from client_aio.unbounded.paged_fragments import spans
from metadata.errors import MetadataCorruptError, NoSuchLedgerError, UnauthorizedAccessError
from metadata.owned_task import in_order

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from client_aio.context import ClientContext
    from client_aio.core.digest import Digest
    from metadata.model.ledger import LedgerMetadata

_PIECE_ENTRIES = 100_000
_READ_AGAIN_MAX = 5
"""A fragment that changes whenever it was read is reported as it was read last."""
_SILENT_S = 10.0
"""A bookie that could not be asked is not asked again for so long: each time may cost a timeout."""
_BURST_S = 0.25
_RUNS_SHOWN = 1000


@dataclass(slots=True)
class VerifiedLedger:
    """The copies of one ledger's entries."""

    ledger_id: int
    state: str = ""
    write_quorum: int = 0
    good_copies: int = 0
    """The copies of the scarcest entry; Qw if nothing is wrong."""
    owed: int = 0
    """Copies of entries that bookies owe."""
    intact: int = 0
    missing: int = 0
    damaged: int = 0
    codes_checked: bool | None = None
    """Whether authentication codes were checked; None for a ledger without a password."""
    is_end_left_out: bool = False
    """Whether the last fragment was not verified, since the ledger is not CLOSED."""
    bad: list[VerifiedReplica] = field(default_factory=list)
    """The replicas of which something is missing or damaged, or that were not read; large ones in pieces."""
    error: str = ""
    """Why its metadata cannot be read; empty if they can."""

    @property
    def condition(self) -> Condition:
        """Return how bad it is."""
        return Condition.AT_RISK if self.error else condition_of(self.good_copies, self.write_quorum)

    def row(self) -> dict[str, Any]:
        """Return the ledger's part of the report."""
        return {
            "ledger_id": self.ledger_id,
            "condition": self.condition.label,
            "state": self.state,
            "write_quorum": self.write_quorum,
            "good_copies": self.good_copies,
            "owed": self.owed,
            "intact": self.intact,
            "missing": self.missing,
            "damaged": self.damaged,
            "codes_checked": self.codes_checked,
            "last_fragment_left_out": self.is_end_left_out,
            "error": self.error or None,
            "replicas": [
                {**one.row(), "bad_runs": [list(run) for run in one.bad.runs()[:_RUNS_SHOWN]]}
                for one in self.bad
            ],
        }


@dataclass(slots=True)
class Totals:
    """The sums over all ledgers that were verified."""

    ledgers: int = 0
    by_condition: dict[str, int] = field(default_factory=dict)
    intact: int = 0
    missing: int = 0
    damaged: int = 0
    bytes_read: int = 0
    codes_unchecked: int = 0
    """Ledgers with a password that was not given: only their checksums were checked."""
    ends_left_out: int = 0
    condition: Condition = Condition.HEALTHY

    def add(self, ledger: VerifiedLedger) -> None:
        """Count a ledger."""
        condition = ledger.condition
        self.ledgers += 1
        self.by_condition[condition.label] = self.by_condition.get(condition.label, 0) + 1
        self.intact += ledger.intact
        self.missing += ledger.missing
        self.damaged += ledger.damaged
        self.codes_unchecked += ledger.codes_checked is False
        self.ends_left_out += ledger.is_end_left_out
        self.condition = max(self.condition, condition)


class Verification:
    """Verifies ledgers, several at once."""

    def __init__(
        self,
        context: ClientContext,
        *,
        password: bytes = b"",
        bytes_per_s: float | None = None,
        ledgers_at_once: int = 4,
    ) -> None:
        """Prepare.

        Args:
            password: checks the codes of the ledgers that have this password.
            bytes_per_s: how much is read in a second at most; None for no bound.
            ledgers_at_once: how many ledgers are read at once, each from all bookies of a fragment.
        """
        self._context = context
        self._password = password
        self._at_once = ledgers_at_once
        self._loop = asyncio.get_running_loop()
        self._bucket = None if bytes_per_s is None else TokenBucket(bytes_per_s, bytes_per_s * _BURST_S)
        self._unreachable: dict[str, tuple[float, str]] = {}
        self.totals = Totals()

    async def run(
        self, ledgers: AsyncGenerator[tuple[int, LedgerMetadata | MetadataCorruptError], None]
    ) -> AsyncGenerator[VerifiedLedger, None]:
        """Yield the verified ledgers, in the order given. A ledger that was deleted is left out.

        Raises:
            MetadataUnavailableError: the store does not answer.
        """
        async with aclosing(ledgers), aclosing(in_order(ledgers, self._ledger, self._at_once)) as verified:
            async for _, found in verified:
                if found is not None:
                    self.totals.add(found)
                    yield found

    async def _ledger(
        self, ledger: tuple[int, LedgerMetadata | MetadataCorruptError]
    ) -> VerifiedLedger | None:
        ledger_id, metadata = ledger
        found = VerifiedLedger(ledger_id)
        try:
            if isinstance(metadata, MetadataCorruptError):
                raise metadata
            await self._fragments(metadata, found)
        except NoSuchLedgerError:
            return None
        except MetadataCorruptError as error:
            found.error = str(error)
        return found

    async def _fragments(self, metadata: LedgerMetadata, found: VerifiedLedger) -> None:
        digest = None
        if metadata.password is not None:
            digest = await self._unlock(metadata)
            found.codes_checked = digest is not None
        found.good_copies = found.write_quorum = metadata.write_quorum
        async with aclosing(spans(self._context, metadata)) as all_spans:
            async for span in all_spans:
                metadata = span.metadata
                for part in complete_parts(span.fragments, span.last_entry):
                    await self._part(metadata, part, digest, found)
        found.state = metadata.state.value
        found.is_end_left_out = not metadata.is_closed

    async def _unlock(self, metadata: LedgerMetadata) -> Digest | None:
        """Return the digest of a ledger that has a password; None if the given one is not that password."""
        if not self._password:
            return None
        try:
            return await self._context.unlock(metadata, self._password)
        except UnauthorizedAccessError:
            return None

    async def _part(
        self, metadata: LedgerMetadata, part: Part, digest: Digest | None, found: VerifiedLedger
    ) -> None:
        for first in range(part.first_entry, part.last_entry + 1, _PIECE_ENTRIES):
            last = min(first + _PIECE_ENTRIES - 1, part.last_entry)
            for _ in range(_READ_AGAIN_MAX):
                piece = Part(first, last, part.content_term, part.bookies)
                replicas = await self._piece(metadata, piece, digest)
                bad = [one for one in replicas if one.status != "ok"]
                if not bad:
                    break
                present = await self._present(metadata.ledger_id, part)
                if present is None:
                    return  # It was trimmed.
                if present == part:
                    break
                part = present
            unread = {one.bookie_id for one in bad if one.error}
            lacking = {
                one.bookie_id: [
                    entry_id
                    for run in one.bad.runs()
                    for entry_id in range(run.first, run.last + 1, run.step)
                ]
                for one in bad
            }
            copies = fewest_copies(piece, metadata.write_quorum, unread, lacking)
            found.good_copies = min(found.good_copies, copies)
            found.bad += bad
            for one in replicas:
                found.owed += one.owed
                found.intact += one.intact
                found.missing += one.missing
                found.damaged += one.damaged

    async def _piece(
        self, metadata: LedgerMetadata, piece: Part, digest: Digest | None
    ) -> list[VerifiedReplica]:
        """Verify the copies of some entries at all their bookies."""

        async def verify(bookie_id: str) -> VerifiedReplica:
            until, why = self._unreachable.get(bookie_id, (0.0, ""))
            replica = await verify_replica(
                self._context,
                metadata,
                piece,
                bookie_id,
                digest,
                throttle=self._throttle,
                unreachable=why if self._loop.time() < until else "",
            )
            if not replica.error:
                self._unreachable.pop(bookie_id, None)
            elif replica.is_silent and self._loop.time() >= until:
                self._unreachable[bookie_id] = (self._loop.time() + _SILENT_S, replica.error)
            return replica

        return [one for one in await asyncio.gather(*map(verify, piece.bookies)) if one.owed]

    async def _present(self, ledger_id: int, part: Part) -> Part | None:
        """Return a fragment as it is in the metadata now; None where it was trimmed.

        Raises:
            NoSuchLedgerError: the ledger was deleted.
        """
        metadata, _ = await self._context.ledgers.read(ledger_id, sync=True)
        if part.first_entry < metadata.first_entry:
            return None
        async with aclosing(spans(self._context, metadata, part.first_entry)) as found:
            async for span in found:
                for present in complete_parts(span.fragments, span.last_entry):
                    if present.first_entry == part.first_entry:
                        return present
        return None

    async def _throttle(self, size: int) -> None:
        self.totals.bytes_read += size
        if self._bucket is not None:
            pause_s = self._bucket.take(size, self._loop.time())
            if pause_s > 0:
                await asyncio.sleep(pause_s)
