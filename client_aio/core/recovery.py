"""Finding where a dead writer's ledger ends: the fencing reads and the recovery reads of rule 12.

A takeover of an unbounded ledger does the same to its last fragment, under its own term. It then opens a new
fragment instead of closing the ledger (`client_aio.core.takeover`).

The theory. Fencing LAC reads go to the last fragment's ensemble until every write set is *covered*: fewer
than Qa of its bookies are without an answer. From then on every ack quorum has a member that refuses the
writer's term. So no entry can be acknowledged that the recovery does not learn of.

Fencing alone does not find the end: an add may have reached some bookies before the fence did. So each entry
above the highest verified LAC is asked for with *recovery reads*, which fence as well:

- One positive, verified answer: the entry may have been acknowledged. It is recovered, that is, written back.
- Qw − Qa + 1 answers "no such entry": no ack quorum can have the entry, now or ever. The ledger ends before
  it. Everything behind the end is cut off, including entries that some bookie holds. They were never
  acknowledged, since an entry is acknowledged only after all entries before it.
- Anything else is no answer. A bookie that lost data answers *unknown*, which counts for neither (rule 4).

Owns the tallies. A recovery read asks for a run of entries. A bookie answers with all entries that it has
from the first one on, and with the first id that it has not. Only that id is stated to be absent.

Invariant: `following` moves by one entry at a time, and never past an entry that is not decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.messages import Read, ReadLac, Stop
from client_aio.core.quorum import covers_all_write_sets, proves_absent, write_set, write_set_masks
from metadata.ids import ENTRY_ID_MAX, NO_ENTRY, TERM_FINAL
from metadata.model.ledger import Fragment, LedgerState

if TYPE_CHECKING:
    from bookie_aio.wire.blocks import Block, LacStatement
    from client_aio.core.digest import Digest
    from metadata.model.given_up import GivenUp
    from metadata.model.ledger import LedgerMetadata


_RUN_ENTRIES = 4096


def recovery_term(metadata: LedgerMetadata) -> int:
    """Return the term of a recovery: the final term, or in an unbounded ledger that of the takeover."""
    return metadata.term if metadata.is_unbounded else TERM_FINAL


def entered(metadata: LedgerMetadata) -> LedgerMetadata | None:
    """Return the metadata IN_RECOVERY (rule 12a); None if they are IN_RECOVERY already, or CLOSED."""
    return metadata.begin_recovery() if metadata.state is LedgerState.OPEN else None


def fencing_lac_read(metadata: LedgerMetadata) -> ReadLac:
    """Return the request that fences the ledger at a bookie and asks for the LAC (rule 12b)."""
    return ReadLac(metadata.ledger_id, recovery_term(metadata), NO_ENTRY, 0)


def recovery_read(metadata: LedgerMetadata, ask: Ask, bytes_max: int) -> Read:
    """Return the request for a run of entries (rule 12c).

    It fences as well. A bookie that the LAC reads did not wait for could otherwise answer "no such entry",
    and then acknowledge that very entry to the writer.
    """
    last = min(ask.first + (_RUN_ENTRIES - 1) * ask.stride, ENTRY_ID_MAX)
    term, content_term = recovery_term(metadata), metadata.last_fragment.content_term
    return Read(metadata.ledger_id, term, content_term, ask.first, last, ask.stride, bytes_max)


def believed(statement: LacStatement | None, metadata: LedgerMetadata, digest: Digest) -> LacStatement | None:
    """Return a LAC statement if it can be verified; None if not: it counts as −1 (rule 12b)."""
    if statement is None or statement.content_term > metadata.last_fragment.content_term:
        return None
    return statement if digest.is_genuine(statement) else None


class FenceTally:
    """Collects the answers to fencing LAC reads (rule 12b).

    Args:
        first_entry: that of the last fragment. Every entry before it is acknowledged, and with guaranteed
            write quorum fully replicated.
    """

    def __init__(self, ensemble_size: int, write_quorum: int, ack_quorum: int, first_entry: int) -> None:
        self._sizes = (ensemble_size, write_quorum, ack_quorum)
        self._answered = 0
        self._damaged = 0
        self.lac = first_entry - 1
        self.lafr = first_entry - 1

    def answer(self, seat: int, lac: int | None, lafr: int = NO_ENTRY, *, is_damaged: bool = False) -> None:
        """Note a durable fence, and the LAC and LAFR stated with it; None if they could not be verified.

        Args:
            is_damaged: the bookie lost data of the ledger.
        """
        self._answered |= 1 << seat
        self._damaged |= is_damaged << seat
        if lac is not None:
            self.lac = max(self.lac, lac)
            self.lafr = max(self.lafr, lafr)

    @property
    def is_covered(self) -> bool:
        """Return whether every ack quorum has a member that has answered."""
        return covers_all_write_sets(self._answered, *self._sizes)

    @property
    def can_end(self) -> bool:
        """Return whether all is covered, and enough bookies of some write set could prove an entry absent.

        A bookie that lost data denies nothing (rule 4). Without such a write set no search finds an end. With
        one it may: which write set the end lies in is not known before.
        """
        size, write_quorum, ack_quorum = self._sizes
        denying = self._answered & ~self._damaged
        return self.is_covered and any(
            proves_absent((mask & denying).bit_count(), write_quorum, ack_quorum)
            for mask in write_set_masks(size, write_quorum)
        )

    @property
    def missing(self) -> list[int]:
        """Return the seats without an answer."""
        return [seat for seat in range(self._sizes[0]) if not self._answered >> seat & 1]


class Ask(NamedTuple):
    """A recovery read to send to one seat: entries `first`, `first + stride`, … of its write set."""

    seat: int
    first: int
    stride: int


class Found(NamedTuple):
    """The entry is recoverable."""

    entry_id: int
    payload: bytes


class End(NamedTuple):
    """The ledger ends behind `last_entry`."""

    last_entry: int


class Inconclusive(NamedTuple):
    """No outstanding answer can decide about the entry. These seats gave no answer that counts."""

    entry_id: int
    seats: list[int]


class EntrySearch:
    """Decides, entry by entry, which entries are recoverable and where the ledger ends (rule 12c).

    The caller reports outcomes with `answer` and `error`. After each it calls `step` until that returns None.

    Args:
        lac: the highest verified LAC. An entry up to it was acknowledged: no number of answers can prove it
            absent. It lies below `first_entry`, except with guaranteed write quorum, whose recovery starts
            behind the LAFR.
    """

    def __init__(
        self,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        first_entry: int,
        *,
        lac: int = NO_ENTRY,
    ) -> None:
        self.following = first_entry
        self._lac = lac
        self._ensemble_size = ensemble_size
        self._write_quorum = write_quorum
        self._ack_quorum = ack_quorum
        self._stride = 1 if ensemble_size == write_quorum else ensemble_size
        self._present: dict[int, bytes] = {}
        # Keys: the class of entries (their remainder modulo the stride) and the seat. A verdict: the id at
        # which the seat stopped, and whether it has no such entry (else it does not know).
        self._verdicts: dict[tuple[int, int], tuple[int, bool]] = {}
        self._outstanding: set[tuple[int, int]] = set()
        self._silent: set[tuple[int, int]] = set()

    def step(self) -> list[Ask] | Found | End | Inconclusive | None:
        """Return the next decision, or the reads to send; None while answers are outstanding."""
        entry_id = self.following
        payload = self._present.pop(entry_id, None)
        if payload is not None:
            self.following = entry_id + 1
            return Found(entry_id, payload)
        kind = entry_id % self._stride
        seats = write_set(entry_id % self._ensemble_size, self._ensemble_size, self._write_quorum)
        absent = [seat for seat in seats if self._verdicts.get((kind, seat)) == (entry_id, True)]
        if entry_id > self._lac and proves_absent(len(absent), self._write_quorum, self._ack_quorum):
            return End(entry_id - 1)
        unasked = [seat for seat in seats if self._is_unasked(kind, seat, entry_id)]
        if unasked:
            self._outstanding.update((kind, seat) for seat in unasked)
            return [Ask(seat, entry_id, self._stride) for seat in unasked]
        if any((kind, seat) in self._outstanding for seat in seats):
            return None
        if entry_id <= self._lac:
            return Inconclusive(entry_id, list(seats))
        return Inconclusive(entry_id, [seat for seat in seats if seat not in absent])

    def answer(self, ask: Ask, blocks: list[Block], stop: Stop, stop_entry: int) -> None:
        """Note what a seat answered. The blocks are verified, and hold the entries before `stop_entry`."""
        key = (ask.first % self._stride, ask.seat)
        self._outstanding.discard(key)
        for block in blocks:
            for entry_id, payload in zip(block.entry_ids, block.payloads(), strict=True):
                if entry_id >= self.following:
                    self._present.setdefault(entry_id, bytes(payload))
        if stop in (Stop.NO_SUCH_ENTRY, Stop.UNKNOWN, Stop.STALE_METADATA):
            self._verdicts[key] = (stop_entry, stop is Stop.NO_SUCH_ENTRY)

    def error(self, ask: Ask) -> None:
        """Note that a seat gave no answer. It is not asked again."""
        key = (ask.first % self._stride, ask.seat)
        self._outstanding.discard(key)
        self._silent.add(key)

    def _is_unasked(self, kind: int, seat: int, entry_id: int) -> bool:
        key = (kind, seat)
        if key in self._outstanding or key in self._silent:
            return False
        verdict = self._verdicts.get(key)
        return verdict is None or verdict[0] < entry_id


@dataclass(frozen=True, slots=True)
class RecoveredEnd:
    """The change to CLOSED behind the last recovered entry (rule 12e).

    Attributes:
        known: the metadata from which the recovery started.
        fragments: the fragments of `known`, with the ensemble changes made in memory (rule 12d).
    """

    known: LedgerMetadata
    fragments: tuple[Fragment, ...]
    last_entry: int
    length: int
    below_write_quorum_from: int | None = None
    """With guaranteed write quorum: the first entry that may have fewer than Qw copies."""

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return the metadata to write in place of these; None if their last fragment was not recovered."""
        if metadata.is_closed or metadata.last_fragment != self.known.last_fragment:
            return None
        # Rule 14: earlier fragments may have been repaired meanwhile. The present ones are kept.
        fragments = (*metadata.fragments[:-1], *self.fragments[len(self.known.fragments) - 1 :])
        return metadata.close(
            self.last_entry,
            self.length,
            fragments=fragments,
            below_write_quorum_from=self.below_write_quorum_from,
        )


@dataclass(frozen=True, slots=True)
class LossyEnd:
    """The change to CLOSED behind the last entry that can be read, where a loss was accepted.

    Attributes:
        known: the metadata from which the end was found.
        lost_from: the first entry of the last fragments, where all of their bookies are gone for good.
    """

    known: LedgerMetadata
    last_entry: int
    length: int
    given_up: GivenUp
    lost_from: int | None = None

    def apply(self, metadata: LedgerMetadata) -> LedgerMetadata | None:
        """Return the metadata to write in place of these; None if their last fragment or term is another."""
        known = self.known
        if metadata.is_closed or metadata.term != known.term or metadata.last_fragment != known.last_fragment:
            return None
        is_cut = metadata.is_unbounded or self.lost_from is not None
        left = self._left_of(metadata) if is_cut else None
        return metadata.close_with_loss(self.last_entry, self.length, self.given_up, fragments=left)

    def _left_of(self, metadata: LedgerMetadata) -> list[Fragment]:
        """Return the fragments up to the end, and an empty one behind it.

        That one names no bookie that is gone. And an unbounded ledger that is not IN_RECOVERY has its term as
        its last content term.
        """
        lost_from = self.last_entry + 2 if self.lost_from is None else self.lost_from
        left = [each for each in metadata.fragments if each.first_entry < lost_from]
        bookies = (left[-1] if left else metadata.last_fragment).bookies
        kept = [each for each in left if each.first_entry <= self.last_entry]
        return [*kept, Fragment(self.last_entry + 1, bookies, metadata.term)]
