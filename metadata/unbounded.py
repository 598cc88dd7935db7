"""What an unbounded ledger's metadata say beyond a bounded one's.

An unbounded ledger is written by one client after another, each under a *term* of its own. Its fragment list
grows for ever at the end and is cut at the front, so only the newest fragments stand in the ledger's node,
the *head*; the older ones are in pages (`metadata.pages`), whose rows are
`[first entry, content term, [bookies]]`, with the first entry for a key.

Owns the record of all this. Does not own the transitions (`metadata.ledger`) nor the store
(`metadata.fragments`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metadata.ids import check_name

if TYPE_CHECKING:
    from metadata.pages import PageRef


@dataclass(frozen=True, slots=True)
class UnboundedRecord:
    """The part of an unbounded ledger's metadata that a bounded one's lack.

    Attributes:
        name: the ledger's, which leads to its id; empty for none.
        length_before: payload bytes of all entries below the last fragment, trimmed ones included.
        pages: where the fragments before the head's first one are, oldest first.
    """

    name: str = ""
    length_before: int = 0
    pages: tuple[PageRef, ...] = ()

    def to_document(self) -> dict[str, object]:
        """Give the stored form, without the pages, which stand with the fragments."""
        return {"name": self.name, "length_before": self.length_before}

    @classmethod
    def from_document(cls, document: dict[str, object], pages: tuple[PageRef, ...]) -> UnboundedRecord:
        """Parse the stored form; raises ValueError or KeyError where it is damaged."""
        name, length = document["name"], document["length_before"]
        if not isinstance(name, str) or not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ValueError(f"an unbounded ledger of name {name!r} and length {length!r}")
        return cls(check_name(name) if name else "", length, pages)
