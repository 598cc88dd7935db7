"""Planning and checking reads: ranges, chunk sizes, whom to ask, and what a failed read means (rule 13).

Entries of one fragment that share a write set form a *class*. Where E = Qw, all entries form one class
(stride 1). Else the entries with the same remainder modulo E form a class (stride E). Every bookie of the
write set holds all entries of the class, so one bookie can answer for a range of the class.

The theory. A `Scan` cuts a range of entries into chunks of about one answer's budget. A chunk lies in one
fragment and consists of one `ClassRange` per write set. A `RangeRead` reads the beginning of one class range
in rounds. A round asks one bookie of the write set after the other, and the next bookie early when an answer
is slow. The first intact answer ends the round.

| a bookie's answer | the round |
|---|---|
| entries, intact | ends with them |
| the bookie knows a later content term | ends at once: the metadata are read again |
| no such entry, damage, doubt, an error, no answer in time | asks the next bookie |

When no bookie is left, damage is reported before absence, and absence before doubt. Absence needs enough
bookies that deny the entry. After a failed round the caller reads the metadata again. Another round follows
where the metadata name other bookies. One more round follows where a bookie knows a later content term that
the metadata store does not know.

The caller's duties:

- read the metadata again after a failed round, and hand them to `RangeRead.look_again`;
- call `RangeRead.next_bookie` at the begin of a round, after every failure, and when an answer is slow;
- hand every failure to `RangeRead.failed`, and every batch's size to `Scan.learn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.blocks import Block, parse_blocks
from bookie_aio.wire.messages import NO_TERM, Read, ReadAnswer, Stop
from client_aio.core.quorum import write_set
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    DigestMismatchError,
    EntryUnknownError,
    InvalidArgumentError,
    MalformedFrameError,
    NoSuchEntryError,
    ProtocolError,
    StaleMetadataError,
)
from metadata.ids import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from client_aio.core.digest import Digest
    from metadata.model.ledger import Fragment, LedgerMetadata

_FIRST_CHUNK_ENTRIES = 256
_CHUNK_ENTRIES_MAX = 65_536
_HEAD_BYTES = 16
"""What a block's head adds to the mean size of an entry."""
_ASKED_AT_ONCE = 2
_READ_FAILURES = (DigestMismatchError, NoSuchEntryError, EntryUnknownError, StaleMetadataError)


class ClassRange(NamedTuple):
    """Entries `first`, `first + stride`, … up to `last` of one fragment; `bookies` are their write set."""

    ledger_id: int
    content_term: int
    first: int
    last: int
    stride: int
    bookies: tuple[str, ...]
    former: tuple[str, ...] = ()
    """Bookies that a repair replaced without their entries. They are asked too, as the last `bookies`."""

    @property
    def present(self) -> tuple[str, ...]:
        """Return the bookies that the metadata name for the entries."""
        return self.bookies[: len(self.bookies) - len(self.former)]

    @property
    def entries(self) -> int:
        """Return the number of entries."""
        return (self.last - self.first) // self.stride + 1

    def after(self, entry_id: int) -> ClassRange | None:
        """Return the range behind one of its entries; None behind the last one."""
        first = entry_id + self.stride
        return self._replace(first=first) if first <= self.last else None

    def request(self, bytes_max: int) -> Read:
        """Return the request that reads the range from a bookie and fences nothing."""
        return Read(self.ledger_id, NO_TERM, self.content_term, self.first, self.last, self.stride, bytes_max)


def stride_of(metadata: LedgerMetadata) -> int:
    """Return the distance between neighbouring entries of one class."""
    return 1 if metadata.ensemble_size == metadata.write_quorum else metadata.ensemble_size


def fragment_end(metadata: LedgerMetadata, fragment: Fragment) -> int | None:
    """Return the last entry that belongs to the fragment; None for the last fragment of an open ledger."""
    index = metadata.fragments.index(fragment)
    if index + 1 < len(metadata.fragments):
        return metadata.fragments[index + 1].first_entry - 1
    return metadata.last_entry


def class_ranges(metadata: LedgerMetadata, first: int, last: int) -> list[ClassRange]:
    """Cut a range within one fragment into one range per class, in the order of their first entries."""
    fragment = metadata.fragment_of(first)
    stride = stride_of(metadata)
    ranges = []
    for start in range(first, min(first + stride, last + 1)):
        seats = write_set(start % metadata.ensemble_size, metadata.ensemble_size, metadata.write_quorum)
        bookies = tuple(fragment.bookies[seat] for seat in seats)
        # A replacement lacks entries that only the former bookie of the seat may hold.
        lacking = (
            each.bookie
            for each in metadata.absent
            if each.first_entry == fragment.first_entry and each.seat in seats
        )
        former = tuple(dict.fromkeys(each for each in lacking if each not in bookies))
        end = start + (last - start) // stride * stride
        bookies += former
        ranges.append(
            ClassRange(metadata.ledger_id, fragment.content_term, start, end, stride, bookies, former)
        )
    return ranges


def checked_blocks(
    asked: ClassRange, answer: ReadAnswer, body: memoryview, digest: Digest
) -> tuple[list[Block], ReadAnswer]:
    """Parse the blocks of an answer, and check that they are the intact beginning of the range asked for.

    An answer is judged entry by entry. Before a wrong entry its entries count. Of the wrong entry the answer
    says nothing, as a bookie does that lost it: the answer returned stops there with UNKNOWN.

    Raises:
        DigestMismatchError: the first entry's bytes do not match its checksum, or its authentication code.
        ProtocolError: the answer does not fit this request.
    """
    blocks = list(blocks_in_order(asked, body))
    for number, block in enumerate(blocks):
        beginning: Block | None = block
        first_wrong = None
        # The codes of a block are checked only where all of its checksums are right.
        while beginning is not None and (wrong := digest.wrong_entries(beginning)):
            first_wrong = min(wrong)
            count = block.entry_ids.index(first_wrong)
            beginning = Block.parse(block.whole(0, count)) if count else None
        if first_wrong is not None:
            intact = blocks[:number] + ([beginning] if beginning is not None else [])
            if intact:
                return intact, ReadAnswer(Stop.UNKNOWN, first_wrong, answer.statement)
            raise DigestMismatchError(
                f"entry {first_wrong} of ledger {asked.ledger_id} does not match its {digest.name}",
                ledger_id=asked.ledger_id,
                entry_id=first_wrong,
            )
    following = blocks[-1].last_entry + asked.stride if blocks else asked.first
    if answer.stop == Stop.END:
        if following <= asked.last:
            raise ProtocolError(f"the answer ends before entry {following} without saying why")
    elif answer.stop_entry != following or answer.stop not in list(Stop):
        raise ProtocolError(f"the answer stops at entry {answer.stop_entry}, its entries before {following}")
    if answer.stop == Stop.BUDGET and not blocks:
        raise ProtocolError("the answer holds nothing, for want of budget")
    return blocks, answer


def blocks_in_order(asked: ClassRange, body: memoryview) -> Iterator[Block]:
    """Yield the blocks of an answer, and check that they are the beginning of the range asked for.

    The checksums of entries are left to the caller.

    Raises:
        DigestMismatchError: a block's head is damaged, and so is its first entry.
        ProtocolError: the answer holds other entries than were asked for.
    """
    expected = asked.first
    try:
        for block in parse_blocks(body):
            if (
                block.ledger_id != asked.ledger_id
                or block.content_term != asked.content_term
                or block.first_entry != expected
                or (block.count > 1 and block.stride != asked.stride)
                or block.last_entry > asked.last
            ):
                raise ProtocolError(
                    f"expected entry {expected} of ledger {asked.ledger_id}, term {asked.content_term}; got "
                    f"{block.first_entry} to {block.last_entry} of ledger {block.ledger_id}, "
                    f"term {block.content_term}"
                )
            expected = block.last_entry + asked.stride
            yield block
    except MalformedFrameError as error:
        # The head's checksum protects the entry too, so damage of the head is damage of the entry.
        raise DigestMismatchError(
            f"entry {expected} of ledger {asked.ledger_id} does not match its checksum: {error}",
            ledger_id=asked.ledger_id,
            entry_id=expected,
        ) from error


class ReadPlan:
    """The decisions of one reader of a ledger's entries; its scans and reads share the rotation of bookies.

    Args:
        bytes_max: the budget of one answer.
        can_refresh: whether the reader can read the metadata again.
        turn: where in its write set the first read starts; each further read starts one bookie further on.
        absent_at: how many bookies of a write set that deny an entry are enough to say that there is none;
            by default all of them.
    """

    def __init__(
        self, bytes_max: int, *, can_refresh: bool, turn: int = 0, absent_at: int | None = None
    ) -> None:
        self.bytes_max = bytes_max
        self.can_refresh = can_refresh
        self.absent_at = absent_at
        self._turn = turn

    def order(self, bookies: tuple[str, ...], asked_last: Collection[str]) -> list[str]:
        """Return a write set in the order of asking: rotated by one for each call, doubtful bookies last."""
        self._turn += 1
        start = self._turn % len(bookies)
        # The sort is stable: within the healthy and the doubtful bookies the rotation stays.
        return sorted(bookies[start:] + bookies[:start], key=asked_last.__contains__)


class Scan:
    """The chunks of one range of entries, in order.

    Args:
        metadata: of the ledger; only its sizes are used here.
    """

    def __init__(self, plan: ReadPlan, metadata: LedgerMetadata, first: int, last: int) -> None:
        self._following = first
        self._last = last
        self._budget = plan.bytes_max * stride_of(metadata)
        self._entries = 0
        self._bytes = 0

    @property
    def is_planned(self) -> bool:
        """Return whether all chunks have been returned."""
        return self._following > self._last

    def next_chunk(self, metadata: LedgerMetadata, *, is_first: bool) -> list[ClassRange]:
        """Return the next chunk: one range per write set, in one fragment; empty where none can be asked for.

        Args:
            metadata: as they are now.
            is_first: whether the consumer waits for this chunk. An error waits until earlier chunks are
                consumed: meanwhile the caller may read the metadata again.

        Raises:
            NoSuchEntryError: the chunk's first entry has been trimmed, or the ledger is closed before it.
        """
        first = self._following
        if first > self._last:
            return []
        if first < metadata.first_entry:
            if is_first:
                raise trimmed(metadata, first)
            return []
        end = fragment_end(metadata, metadata.fragment_of(first))
        last = min(self._last, first + self._chunk_entries - 1, self._last if end is None else end)
        if last < first:
            if is_first:
                raise _beyond_the_end(metadata, first)
            return []
        self._following = last + 1
        return class_ranges(metadata, first, last)

    def learn(self, entries: int, size: int) -> None:
        """Note how many entries a batch held, and their bytes."""
        self._entries += entries
        self._bytes += size

    @property
    def _chunk_entries(self) -> int:
        """Return how many entries make an answer's budget for each write set, by the batches so far."""
        if not self._entries:
            return _FIRST_CHUNK_ENTRIES
        mean = self._bytes / self._entries + _HEAD_BYTES
        return max(1, min(_CHUNK_ENTRIES_MAX, int(self._budget / mean)))


class RangeRead:
    """The read of the beginning of one class range: whom to ask next, and what a failure means.

    Attributes:
        wanted: the part of the range that lies in one fragment of the metadata as they are now.

    Raises:
        NoSuchEntryError: the range's first entry has been trimmed, or the ledger is closed before it.
    """

    def __init__(self, plan: ReadPlan, metadata: LedgerMetadata, asked: ClassRange) -> None:
        self._plan = plan
        self._asked = asked
        self.wanted = _in_one_fragment(metadata, asked)
        # Rule 13: one bookie that knows a later content term is enough to read the metadata again. The
        # entries of the other bookies may be leftovers of a fenced writer.
        self._heeds_stale = plan.can_refresh
        self._unasked: list[str] = []
        self._outstanding = 0
        self._errors: list[BookKeeperError] = []

    @property
    def has_unasked(self) -> bool:
        """Return whether a bookie is left to ask in this round."""
        return bool(self._unasked)

    def begin_round(self, asked_last: Collection[str]) -> None:
        """Begin to ask the write set; nothing may be outstanding. Doubtful bookies are asked last."""
        self._unasked = self._plan.order(self.wanted.bookies, asked_last)
        self._outstanding = 0
        self._errors = []

    def next_bookie(self, silent: int = 0) -> str | None:
        """Return the bookie to ask now; None where enough are outstanding, or all have been asked.

        Args:
            silent: how many of the bookies that owe an answer answer nothing at all for now.
        """
        if not self._unasked or self._outstanding - silent >= _ASKED_AT_ONCE:
            return None
        self._outstanding += 1
        return self._unasked.pop(0)

    def failed(self, error: BookKeeperError) -> BookKeeperError | None:
        """Note that a bookie gave no entry; return the error that ends the round, None where it goes on."""
        if self._heeds_stale and isinstance(error, StaleMetadataError):
            return error
        self._outstanding -= 1
        self._errors.append(error)
        if self._unasked or self._outstanding:
            return None
        # A replacement that lacks entries proves nothing by denying them.
        absent_at = None if self.wanted.former else self._plan.absent_at
        return _worst(self.wanted, self._errors, absent_at or len(self.wanted.bookies))

    def is_certain(self, error: BookKeeperError) -> bool:
        """Return whether a round's error holds though the metadata cannot be read: a copy is damaged."""
        return isinstance(error, DigestMismatchError)

    def look_again(self, error: BookKeeperError, metadata: LedgerMetadata) -> bool:
        """Return whether to ask another round, by the metadata that were read after a failed one.

        Raises:
            NoSuchEntryError: the range's first entry has been trimmed meanwhile, or the ledger is closed
                before it.
        """
        moved = _in_one_fragment(metadata, self._asked)
        if moved == self.wanted:
            if not self._heeds_stale or not isinstance(error, StaleMetadataError):
                return False
            # The store knows of no later content term, so the bookies that know none may be right.
            self._heeds_stale = False
        self.wanted = moved
        return True


def check_range(first: int, last: int) -> None:
    """Raise InvalidArgumentError unless first to last is a range of entries, perhaps an empty one."""
    are_ids = all(isinstance(each, int) and not isinstance(each, bool) for each in (first, last))
    if not are_ids or not 0 <= first <= last + 1 or last > ENTRY_ID_MAX:
        raise InvalidArgumentError(
            f"{first!r} to {last!r} is no range of entries: their ids are integers from 0 to 2**62 - 1"
        )


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


def _beyond_the_end(metadata: LedgerMetadata, entry_id: int) -> NoSuchEntryError:
    return NoSuchEntryError(
        f"entry {entry_id} of ledger {metadata.ledger_id} does not exist: the ledger is closed at entry "
        f"{metadata.last_entry}",
        ledger_id=metadata.ledger_id,
        entry_id=entry_id,
    )


def _in_one_fragment(metadata: LedgerMetadata, asked: ClassRange) -> ClassRange:
    """Return the beginning of a range, as far as one fragment of these metadata goes."""
    if asked.first < metadata.first_entry:
        raise trimmed(metadata, asked.first)
    end = fragment_end(metadata, metadata.fragment_of(asked.first))
    if end is not None and asked.first > end:
        raise _beyond_the_end(metadata, asked.first)  # closed since it was asked for
    last = asked.last if end is None else min(asked.last, end)
    return class_ranges(metadata, asked.first, asked.first)[0]._replace(
        last=asked.first + (last - asked.first) // asked.stride * asked.stride
    )


def refusal(answer: ReadAnswer, bookie_id: str, ledger_id: int) -> BookKeeperError:
    """Build the error of an answer without entries: why the bookie stopped before the first one."""
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
    elif wanted.former and len(absent) >= len(wanted.present):
        # In doubt, as with a bookie that lost data: a bookie that a repair replaced may hold it.
        first = EntryUnknownError("replaced by a repair")
    else:
        ranked = [*pick((StaleMetadataError,)), *pick((EntryUnknownError,)), *pick((BookKeeperError,))]
        first = next((error for error in ranked if not isinstance(error, NoSuchEntryError)), errors[0])
    kind = type(first) if isinstance(first, _READ_FAILURES) else BookieUnavailableError
    summary = kind(
        f"entry {wanted.first} of ledger {wanted.ledger_id} could not be read from any of "
        f"{', '.join(wanted.bookies)}: {'; '.join(map(str, errors))}",
        ledger_id=wanted.ledger_id,
        entry_id=wanted.first,
    )
    summary.is_unanswered = any(
        not isinstance(error, _READ_FAILURES) and error.bookie_id not in wanted.former for error in errors
    )
    return summary
