"""The record of a loss that was accepted, in the metadata of the ledger that was closed with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metadata.ids import ENTRY_ID_MAX, NO_ENTRY, check_bookie_id, integer


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The loss that was accepted when a ledger was closed behind the last entry that could be read."""

    lac: int
    """The highest LAC that a bookie stated, or the metadata prove: entries up to it were acknowledged."""
    bookies: tuple[str, ...]
    """The bookies that did not answer, or could not read an entry that they listed.

    They may hold entries behind the end. They are those of the last fragment; where all of its bookies are
    gone for good, those of the fragment before, too. After a set-back of the metadata they may be any."""
    missing: int
    """How many entries of the fragment with the end, before it, no bookie listed that answered."""

    def to_document(self) -> dict[str, object]:
        """Return the stored form."""
        return {"lac": self.lac, "bookies": list(self.bookies), "missing": self.missing}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> GivenUp:
        """Parse the stored form; raises ValueError, KeyError or TypeError where it is damaged."""
        return cls(
            integer(document["lac"], NO_ENTRY, ENTRY_ID_MAX),
            tuple(check_bookie_id(bookie) for bookie in document["bookies"]),
            integer(document["missing"], 0, ENTRY_ID_MAX),
        )
