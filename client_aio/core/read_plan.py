"""Planning and checking reads: which bookies hold what, and whether an answer is what was asked for.

Entries of one fragment that share a write set form a *class*: all of them where E = Qw (stride 1), else
the ids with the same remainder modulo E (stride E). A bookie of the write set holds them all, so a range of
one class is read from one bookie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.blocks import Block, parse_blocks
from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.core.quorum import write_set
from metadata.errors import DigestMismatchError, MalformedFrameError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from client_aio.core.digest import Digest
    from metadata.model.ledger import Fragment, LedgerMetadata


class ClassRange(NamedTuple):
    """Entries `first`, `first + stride`, … up to `last`, of one fragment, kept by `bookies`."""

    ledger_id: int
    content_term: int
    first: int
    last: int
    stride: int
    bookies: tuple[str, ...]

    @property
    def entries(self) -> int:
        """Return how many entries it names."""
        return (self.last - self.first) // self.stride + 1

    def after(self, entry_id: int) -> ClassRange | None:
        """Return what is left behind an entry of it; None when that was the last."""
        first = entry_id + self.stride
        return self._replace(first=first) if first <= self.last else None


def stride_of(metadata: LedgerMetadata) -> int:
    """Return the distance of neighbouring entries of one class."""
    return 1 if metadata.ensemble_size == metadata.write_quorum else metadata.ensemble_size


def fragment_end(metadata: LedgerMetadata, fragment: Fragment) -> int | None:
    """Return the last entry that belongs to the fragment; None for the last fragment of an open ledger."""
    index = metadata.fragments.index(fragment)
    if index + 1 < len(metadata.fragments):
        return metadata.fragments[index + 1].first_entry - 1
    return metadata.last_entry


def class_ranges(metadata: LedgerMetadata, first: int, last: int) -> list[ClassRange]:
    """Cut a range that lies within one fragment into its classes, by their first entry."""
    fragment = metadata.fragment_of(first)
    stride = stride_of(metadata)
    ranges = []
    for start in range(first, min(first + stride, last + 1)):
        seats = write_set(start % metadata.ensemble_size, metadata.ensemble_size, metadata.write_quorum)
        bookies = tuple(fragment.bookies[seat] for seat in seats)
        end = start + (last - start) // stride * stride
        ranges.append(ClassRange(metadata.ledger_id, fragment.content_term, start, end, stride, bookies))
    return ranges


def checked_blocks(asked: ClassRange, answer: ReadAnswer, body: memoryview, digest: Digest) -> list[Block]:
    """Parse and check the blocks of an answer: they are the beginning of what was asked for, intact.

    Raises:
        DigestMismatchError: an entry's bytes do not match its checksum, or its authentication code.
        ProtocolError: the answer is not one to this request.
    """
    blocks = list(_in_order(asked, body))
    for block in blocks:
        wrong = digest.wrong_entries(block)
        if wrong:
            raise DigestMismatchError(
                f"entry {wrong[0]} of ledger {asked.ledger_id} does not match its {digest.name}",
                ledger_id=asked.ledger_id,
                entry_id=wrong[0],
            )
    following = blocks[-1].last_entry + asked.stride if blocks else asked.first
    if answer.stop == Stop.END:
        if following <= asked.last:
            raise ProtocolError(f"the answer ends before entry {following} without saying why")
    elif answer.stop_entry != following or answer.stop not in list(Stop):
        raise ProtocolError(f"the answer stops at entry {answer.stop_entry}, its entries before {following}")
    if answer.stop == Stop.BUDGET and not blocks:
        raise ProtocolError("the answer holds nothing, for want of budget")
    return blocks


def _in_order(asked: ClassRange, body: memoryview) -> Iterator[Block]:
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
        # The head's checksum is part of what protects an entry: damage there is damage of the entry.
        raise DigestMismatchError(
            f"entry {expected} of ledger {asked.ledger_id} does not match its checksum: {error}",
            ledger_id=asked.ledger_id,
            entry_id=expected,
        ) from error
