"""Ledger metadata: its content, its stored form, and its legal transitions.

A `LedgerMetadata` is frozen. Every change is a method that checks its legality and returns a new value; the
caller writes that value by compare-and-set. The legal transitions of a bounded ledger:

    OPEN ──ensemble change──▶ OPEN
    OPEN ──begin_recovery──▶ IN_RECOVERY
    OPEN ──close (writer)──▶ CLOSED
    IN_RECOVERY ──close (recovery, with the fragments it ended up with)──▶ CLOSED
    any ──replace_bookie (repair)──▶ the same state

An unbounded ledger is written by one client after another, each under a *term* of its own. It is closed only
when its writer seals it, or with a loss (`close_with_loss`, as a bounded one):

    OPEN ──ensemble change, roll──▶ OPEN
    OPEN, IN_RECOVERY ──take_over: term + 1──▶ IN_RECOVERY
    IN_RECOVERY ──open_term: a new fragment under that term──▶ OPEN
    OPEN ──close (its writer seals it)──▶ CLOSED
    IN_RECOVERY ──close_with_loss──▶ CLOSED
    any ──replace_bookie (repair), trim (drops fragments at the front)──▶ the same state

Invariants of the fragments:

- There is at least one. The first starts at entry 0; in an unbounded ledger, where the last page ends or
  where it was trimmed.
- First entries strictly increase, and content terms never decrease.
- Each fragment names exactly E distinct bookies.
- No content term is above the ledger's term, and an OPEN ledger's last one is the ledger's term.

The stored form is a JSON object that an operator can read in a ZooKeeper shell:

    {"format": 3, "ledger": 7, "state": "OPEN", "ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2,
     "digest": "crc32c", "created_ms": 1790000000000, "term": 0,
     "fragments": [{"first_entry": 0, "content_term": 0, "bookies": ["b1", "b2", "b3"]}],
     "length_before": 0, "last_entry": null, "length": null, "custom": {"app": "ZGVtbw=="}}

"length_before" is the length of all entries below the last fragment. So a recovery reads no entry of an
earlier fragment. These members are written only where they apply:

- "guaranteed_write_quorum": true, for a ledger with guaranteed write quorum (rule 11);
- "below_write_quorum_from": the first entry that may have fewer than Qw copies. A ledger with guaranteed
  write quorum has it if it was closed at its ack quorum, until a repair has made the copies;
- "log": the log that the ledger belongs to, written before that log lists it;
- "given_up": {"lac": 99, "bookies": ["b1", "b2"], "missing": 3}, for a ledger closed with a loss (`GivenUp`);
- "absent": [[0, 1, "b2", 100], …], entries that a repair could copy from no bookie (`Absent`);
- "password", for a ledger with authentication codes (digest "hmac-sha256"): see `metadata.model.passwords`.

An unbounded ledger has another "format", a member "unbounded", and as its fragments a paged list:

    "format": 4, "unbounded": {"name": "payments"},
    "fragments": {"pages": [["NAME", 0, 200], …], "rows": [[5000, 3, ["b1", "b2", "b3"]], …]}

A release that knows bounded ledgers only refuses format 4: its recovery would fence the ledger for ever.

The fragment list of an unbounded ledger grows without end and is cut at the front. Only the newest fragments
are in the ledger's own node, the *head*. The older ones are in pages (`metadata.model.paged_list`), as rows
`[first entry, content term, [bookies]]` whose key is the first entry.

Does not own where ledgers and pages are stored (`metadata.access.ledgers`, `metadata.access.fragments`).
"""

from __future__ import annotations

import base64
import enum
import json
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from metadata.errors import InvalidArgumentError, InvalidTransitionError, MetadataCorruptError
from metadata.ids import (
    BOOKIE_ID_BYTES_MAX,
    ENTRY_ID_MAX,
    LEDGER_ID_MAX,
    MALFORMED,
    NO_ENTRY,
    TERM_COUNTED_MAX,
    TERM_FINAL,
    boolean,
    check_bookie_id,
    check_name,
    integer,
    one_of,
    optional,
)
from metadata.model.given_up import GivenUp
from metadata.model.paged_list import PagedRows
from metadata.model.passwords import PasswordRecord
from metadata.store import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from metadata.model.paged_list import PageRef, Row


@dataclass(frozen=True, slots=True)
class UnboundedRecord:
    """The fields that only an unbounded ledger's metadata have.

    Attributes:
        name: the name that leads to the ledger's id; empty for none.
        pages: references to the pages with the fragments before the head's first one, oldest first.
    """

    name: str = ""
    pages: tuple[PageRef, ...] = ()

    def to_document(self) -> dict[str, object]:
        """Return the stored form, without the pages, which are stored with the fragments."""
        return {"name": self.name}

    @classmethod
    def from_document(cls, document: dict[str, object], pages: tuple[PageRef, ...]) -> UnboundedRecord:
        """Parse the stored form; raises ValueError or KeyError where the document is damaged."""
        name = document["name"]
        if not isinstance(name, str):
            raise ValueError(f"an unbounded ledger of name {name!r}")
        return cls(check_name(name) if name else "", pages)


class Absent(NamedTuple):
    """Entries that a repair could copy from no bookie: the seat's new bookie lacks them.

    The former bookie may still hold them. It keeps its copies while it is named here, and a repair of the new
    bookie in its place copies from it once it answers.
    """

    first_entry: int
    """The first entry of the fragment."""
    seat: int
    bookie: str
    """The former bookie of the seat."""
    entries: int
    """How many there are."""

    @classmethod
    def of_row(cls, row: Row) -> Absent:
        """Return the record of a stored row; raises ValueError or TypeError where the row is damaged."""
        first_entry, seat, bookie, entries = row
        return cls(
            integer(first_entry, 0, ENTRY_ID_MAX),
            integer(seat, 0, ENSEMBLE_SIZE_MAX - 1),
            check_bookie_id(bookie),
            integer(entries, 1, ENTRY_ID_MAX),
        )


FORMAT_BOUNDED = 3
FORMAT_UNBOUNDED = 4
ENSEMBLE_SIZE_MAX = 64
ABSENT_MAX = 1000
"""How many records of entries that no bookie returned one ledger's metadata keep."""
_CLOSE_BYTES_MAX = 256
"""Upper bound of the bytes that lengths and closing add to the stored form."""
DIGEST_CRC = "crc32c"
DIGEST_HMAC = "hmac-sha256"
DIGESTS = (DIGEST_CRC, DIGEST_HMAC)


class LedgerState(enum.Enum):
    """The state of a ledger; the module's docstring has the transitions."""

    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of entries kept by one ensemble: from `first_entry` up to the next fragment's."""

    first_entry: int
    bookies: tuple[str, ...]
    content_term: int = 0

    def replace_bookie(self, old: str, new: str) -> Fragment:
        """Return the fragment with one bookie in another's place."""
        return replace(self, bookies=tuple(new if bookie == old else bookie for bookie in self.bookies))

    @property
    def row(self) -> Row:
        """Return the fragment as a row of a paged list."""
        return (self.first_entry, self.content_term, list(self.bookies))

    @classmethod
    def of_row(cls, row: Row) -> Fragment:
        """Return the fragment of a row; raises ValueError or TypeError where the row is damaged."""
        first_entry, content_term, bookies = row
        return cls(
            integer(first_entry, 0, ENTRY_ID_MAX),
            tuple(check_bookie_id(bookie) for bookie in bookies),
            integer(content_term, 0, TERM_FINAL),
        )


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """One ledger's metadata. Build the first one with `new`, later ones with the transition methods.

    Attributes:
        length_before: payload bytes of all entries below the last fragment, trimmed ones included.
        below_write_quorum_from: with guaranteed write quorum, the first entry that may have fewer than Qw
            copies, since the ledger was closed at its ack quorum. None for none.
    """

    ledger_id: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    fragments: tuple[Fragment, ...]
    state: LedgerState = LedgerState.OPEN
    digest: str = DIGEST_CRC
    password: PasswordRecord | None = None
    guaranteed_write_quorum: bool = False
    created_ms: int = 0
    term: int = 0
    last_entry: int | None = None
    length: int | None = None
    custom: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    unbounded: UnboundedRecord | None = None
    length_before: int = 0
    below_write_quorum_from: int | None = None
    log: str = ""
    """The log that the ledger was added to, or is being added to; empty for none."""
    absent: tuple[Absent, ...] = ()
    given_up: GivenUp | None = None
    """Set where the ledger was closed with a loss."""

    @classmethod
    def new(
        cls,
        ledger_id: int,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        bookies: Sequence[str],
        digest: str = DIGEST_CRC,
        password: PasswordRecord | None = None,
        guaranteed_write_quorum: bool = False,
        created_ms: int = 0,
        custom: Mapping[str, bytes] | None = None,
        unbounded: UnboundedRecord | None = None,
    ) -> LedgerMetadata:
        """Return the metadata of a new, empty, OPEN ledger. A new unbounded ledger has term 0 and no owner.

        Raises:
            InvalidArgumentError: the quorums, the digest, the bookies or the custom metadata are wrong.
        """
        check_quorums(ensemble_size, write_quorum, ack_quorum)
        if digest not in DIGESTS:
            raise InvalidArgumentError(f"digest {digest!r} is unknown; choose one of {', '.join(DIGESTS)}")
        metadata = cls(
            ledger_id=ledger_id,
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            fragments=(Fragment(0, tuple(bookies)),),
            digest=digest,
            password=password,
            guaranteed_write_quorum=guaranteed_write_quorum,
            created_ms=created_ms,
            custom=MappingProxyType(check_custom(custom or {})),
            unbounded=unbounded,
        )
        metadata._check(InvalidArgumentError)
        return metadata

    @property
    def is_closed(self) -> bool:
        """Return whether the ledger is CLOSED: it never takes another entry."""
        return self.state is LedgerState.CLOSED

    @property
    def last_fragment(self) -> Fragment:
        """Return the fragment that new entries belong to."""
        return self.fragments[-1]

    @property
    def is_unbounded(self) -> bool:
        """Return whether the ledger is written under one term after another."""
        return self.unbounded is not None

    @property
    def first_entry(self) -> int:
        """Return the first entry that has not been trimmed; 0 in a bounded ledger."""
        pages = self.unbounded.pages if self.unbounded is not None else ()
        return pages[0].first if pages else self.fragments[0].first_entry

    @property
    def rows(self) -> PagedRows:
        """Return the fragments as a paged list."""
        pages = self.unbounded.pages if self.unbounded is not None else ()
        return PagedRows(pages, tuple(fragment.row for fragment in self.fragments))

    def with_rows(self, rows: PagedRows) -> LedgerMetadata:
        """Return an unbounded ledger whose fragments are paged otherwise, or dropped at the front."""
        assert self.unbounded is not None
        changed = replace(
            self,
            unbounded=replace(self.unbounded, pages=rows.pages),
            fragments=tuple(map(Fragment.of_row, rows.rows)),
        )
        # Nobody owes what was trimmed, so nobody needs it of a former bookie.
        changed = replace(
            changed, absent=tuple(each for each in self.absent if each.first_entry >= changed.first_entry)
        )
        changed._check(InvalidTransitionError)
        assert changed.last_fragment == self.last_fragment
        return changed

    def fragment_of(self, entry_id: int) -> Fragment:
        """Return the one of `fragments` that covers the entry, written or not."""
        assert entry_id >= self.fragments[0].first_entry
        low, high = 0, len(self.fragments)
        while high - low > 1:
            middle = (low + high) // 2
            if self.fragments[middle].first_entry <= entry_id:
                low = middle
            else:
                high = middle
        return self.fragments[low]

    def change_ensemble(self, first_entry: int, bookies: Sequence[str], *, length: int = 0) -> LedgerMetadata:
        """Start a new fragment, or replace the last one's ensemble if it starts at the same entry.

        Args:
            length: payload bytes below `first_entry`.

        Raises:
            InvalidTransitionError: the ledger is not OPEN, or `first_entry` lies before the last fragment.
        """
        self._require(LedgerState.OPEN, "change its ensemble")
        changed = replace(
            self,
            fragments=with_ensemble(self.fragments, first_entry, bookies),
            length_before=length,
        )
        changed._check(InvalidTransitionError)
        return changed

    def changes_that_fit(self, wanted: int) -> int:
        """Return how many of `wanted` ensemble changes the stored form has room for, with ids of any length.

        One change too many and the ledger could not be closed. The limit is for bounded ledgers: the
        fragments of an unbounded one are in pages.
        """
        if self.is_unbounded:
            return wanted
        room = VALUE_BYTES_MAX - len(self.to_json()) - _CLOSE_BYTES_MAX
        fragment = Fragment(ENTRY_ID_MAX, ("b" * BOOKIE_ID_BYTES_MAX,) * self.ensemble_size, TERM_FINAL)
        return max(0, min(wanted, room // len(json.dumps(_listed([fragment])))))

    @property
    def is_crowded(self) -> bool:
        """Return whether the metadata are so large that no fragment should begin for its size alone.

        The remaining room is for takeovers and replacements. Nobody could take over, and so trim, a ledger
        whose metadata are full.
        """
        return len(self.to_json()) > VALUE_BYTES_MAX // 2

    def begin_recovery(self) -> LedgerMetadata:
        """Return a bounded OPEN ledger as IN_RECOVERY, from which it can only become CLOSED."""
        self._require(LedgerState.OPEN, "begin recovery")
        self._require_bounded(True, "it is taken over, not recovered")
        return replace(self, state=LedgerState.IN_RECOVERY)

    def take_over(self, least: int = 0) -> LedgerMetadata:
        """Return the ledger as IN_RECOVERY under a new term, from OPEN or from an unfinished takeover.

        Args:
            least: the new term is not below this.

        Raises:
            InvalidTransitionError: the ledger is bounded, or sealed, or its terms are used up.
        """
        self._require_bounded(False, "it has no terms to count")
        if self.is_closed:
            raise self._closed_already("taken over")
        term = max(self.term + 1, least)
        if term > TERM_COUNTED_MAX:
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} has used up its terms", ledger_id=self.ledger_id
            )
        return replace(self, state=LedgerState.IN_RECOVERY, term=term)

    def open_term(
        self, first_entry: int, bookies: Sequence[str], *, length: int, fragments: Sequence[Fragment]
    ) -> LedgerMetadata:
        """Return an IN_RECOVERY ledger as OPEN, with a new fragment under the ledger's term.

        A last fragment that would stay empty, or lie behind the end, is replaced.

        Args:
            first_entry: the first one behind the end that the takeover found.
            length: payload bytes below it.
            fragments: the takeover's result; all but the last must be the present ones.
        """
        self._require(LedgerState.IN_RECOVERY, "open a term")
        self._require_bounded(False, "it has no terms to open")
        kept = [fragment for fragment in fragments if fragment.first_entry < first_entry]
        opened = replace(
            self,
            state=LedgerState.OPEN,
            fragments=(*kept, Fragment(first_entry, tuple(bookies), self.term)),
            length_before=length,
        )
        opened._check(InvalidTransitionError)
        return opened

    def close(
        self,
        last_entry: int,
        length: int,
        *,
        fragments: Sequence[Fragment] | None = None,
        below_write_quorum_from: int | None = None,
    ) -> LedgerMetadata:
        """Close the ledger behind `last_entry` (−1: empty), with `length` payload bytes in all.

        Only its writer closes (seals) an unbounded ledger. Recovery of a bounded one passes the fragments it
        ended up with; all but the last must be the present ones.

        Args:
            below_write_quorum_from: the first entry that may have fewer than Qw copies, although they are
                guaranteed.

        Raises:
            InvalidTransitionError: the ledger is closed already, or the end lies before the last fragment.
        """
        if self.is_closed:
            raise self._closed_already("closed again")
        if self.is_unbounded:
            self._require(LedgerState.OPEN, "be sealed")
        if fragments is not None and self.state is not LedgerState.IN_RECOVERY:
            raise InvalidTransitionError(
                "only recovery closes a ledger with new fragments", ledger_id=self.ledger_id
            )
        closed = replace(
            self,
            state=LedgerState.CLOSED,
            last_entry=last_entry,
            length=length,
            fragments=self.fragments if fragments is None else tuple(fragments),
            below_write_quorum_from=below_write_quorum_from,
        )
        closed._check(InvalidTransitionError)
        return closed

    def fully_replicated(self) -> LedgerMetadata:
        """Return the ledger after a repair that found all Qw copies of all entries."""
        return replace(self, below_write_quorum_from=None)

    def close_with_loss(
        self,
        last_entry: int,
        length: int,
        given_up: GivenUp,
        *,
        fragments: Sequence[Fragment] | None = None,
    ) -> LedgerMetadata:
        """Close an IN_RECOVERY ledger behind the last entry that can be read, with a record of the loss.

        Args:
            fragments: those that are left, where the last one begins behind the end; None for the present.
        """
        self._require(LedgerState.IN_RECOVERY, "be closed with a loss")
        closed = replace(
            self,
            state=LedgerState.CLOSED,
            last_entry=last_entry,
            length=length,
            fragments=self.fragments if fragments is None else tuple(fragments),
            length_before=self.length_before if fragments is None else length,
            given_up=given_up,
        )
        closed._check(InvalidTransitionError)
        return closed

    def replace_bookie(self, index: int, old: str, new: str) -> LedgerMetadata:
        """Return the ledger with one bookie in another's place in one fragment (repair, rule 14)."""
        fragment = self.fragments[index]
        if old not in fragment.bookies:
            raise InvalidTransitionError(
                f"bookie {old} is not in fragment {index} of ledger {self.ledger_id}",
                ledger_id=self.ledger_id,
                bookie_id=old,
            )
        fragments = list(self.fragments)
        fragments[index] = fragment.replace_bookie(old, new)
        changed = replace(self, fragments=tuple(fragments))
        changed._check(InvalidTransitionError)
        return changed

    def with_absent(self, absent: Absent) -> LedgerMetadata:
        """Return the ledger with a record of entries that a repair found nowhere.

        It is the ledger as it was where the fragment has been trimmed.

        Raises:
            InvalidTransitionError: there is no room for another record.
        """
        if absent.first_entry < self.first_entry:
            return self
        others = tuple(each for each in self.absent if each[:3] != absent[:3])
        if len(others) >= ABSENT_MAX:
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} has {ABSENT_MAX} records of entries that are absent: repair "
                "the bookies that are there in their place first",
                ledger_id=self.ledger_id,
            )
        return replace(self, absent=(*others, absent))

    def without_absent(
        self, first_entry: int, seat: int, kept: Collection[str] = ()
    ) -> LedgerMetadata | None:
        """Return the ledger without the records of one seat of one fragment; None where there are none.

        Args:
            kept: the bookies whose records stay.
        """
        left = tuple(each for each in self.absent if each[:2] != (first_entry, seat) or each.bookie in kept)
        return None if left == self.absent else replace(self, absent=left)

    def former_bookies(self, first_entry: int) -> list[str]:
        """Return the bookies that may hold entries of a fragment which its present bookies lack."""
        return sorted({each.bookie for each in self.absent if each.first_entry == first_entry})

    def owned_by(self, log: str) -> LedgerMetadata:
        """Return the ledger as that of a log; with "" as nobody's."""
        return replace(self, log=log)

    def _closed_already(self, what: str) -> InvalidTransitionError:
        return InvalidTransitionError(
            f"ledger {self.ledger_id} is CLOSED at entry {self.last_entry} and cannot be {what}",
            ledger_id=self.ledger_id,
        )

    def _require_bounded(self, is_bounded: bool, why: str) -> None:
        if self.is_unbounded is is_bounded:
            kind = "an unbounded" if self.is_unbounded else "a bounded"
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} is {kind} one: {why}", ledger_id=self.ledger_id
            )

    def _require(self, state: LedgerState, verb: str) -> None:
        if self.state is not state:
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} is {self.state.value}, not {state.value}: it cannot {verb}",
                ledger_id=self.ledger_id,
            )

    def _check(
        self, error: type[InvalidArgumentError | InvalidTransitionError | MetadataCorruptError]
    ) -> None:
        """Raise `error` where an invariant of this module's docstring does not hold."""

        def need(condition: bool, what: str) -> None:
            if not condition:
                raise error(f"metadata of ledger {self.ledger_id}: {what}", ledger_id=self.ledger_id)

        need(0 <= self.ledger_id <= LEDGER_ID_MAX, f"id {self.ledger_id} is out of range")
        need(
            (self.digest == DIGEST_HMAC) == (self.password is not None),
            f"digest {self.digest} and {'a' if self.password else 'no'} password record do not go together",
        )
        need(bool(self.fragments), "there is no fragment")
        need(self.is_unbounded or self.fragments[0].first_entry == 0, "no fragment starts at entry 0")
        self._check_terms(need)
        previous: Fragment | None = None
        for fragment in self.fragments:
            need(
                len(fragment.bookies) == self.ensemble_size == len(set(fragment.bookies)),
                f"the fragment at entry {fragment.first_entry} names {list(fragment.bookies)}, "
                f"not {self.ensemble_size} distinct bookies",
            )
            if previous is not None:
                need(
                    fragment.first_entry > previous.first_entry,
                    f"fragments at {previous.first_entry} and {fragment.first_entry} are out of order",
                )
                need(fragment.content_term >= previous.content_term, "content terms decrease")
            previous = fragment
        need(self.length_before >= 0, f"the length before its last fragment is {self.length_before}")
        need(
            self.below_write_quorum_from is None or (self.guaranteed_write_quorum and self.is_closed),
            "only a CLOSED ledger with guaranteed write quorum may have entries below its write quorum",
        )
        closed = self.last_entry is not None and self.length is not None
        need((self.last_entry is None) == (self.length is None), "last entry and length go together")
        need(closed == self.is_closed, f"state {self.state.value} and last entry {self.last_entry} disagree")
        if self.last_entry is not None and self.length is not None:
            need(NO_ENTRY <= self.last_entry <= ENTRY_ID_MAX, f"last entry {self.last_entry} is out of range")
            need(self.length >= 0, f"length {self.length} is negative")
            # An empty last fragment starts right behind the last entry.
            need(
                self.last_entry + 1 >= self.last_fragment.first_entry,
                f"last entry {self.last_entry} lies before the last fragment's first, "
                f"{self.last_fragment.first_entry}",
            )

    def _check_terms(self, need: Callable[[bool, str], None]) -> None:
        if self.unbounded is None:
            return
        content_term = self.last_fragment.content_term
        need(0 <= content_term <= self.term <= TERM_COUNTED_MAX, f"its terms are {content_term}, {self.term}")
        need(
            self.state is LedgerState.IN_RECOVERY or content_term == self.term,
            f"it is {self.state.value} under term {self.term}, its last content term is {content_term}",
        )
        need(not self.guaranteed_write_quorum, "an unbounded ledger knows no guaranteed write quorum")
        pages = self.unbounded.pages
        need(
            not pages or pages[-1].first < self.fragments[0].first_entry,
            "its pages overlap with its head",
        )

    def to_json(self) -> bytes:
        """Return the stored form (see the module's docstring)."""
        return json.dumps(
            {
                "format": FORMAT_UNBOUNDED if self.is_unbounded else FORMAT_BOUNDED,
                "ledger": self.ledger_id,
                "state": self.state.value,
                "ensemble_size": self.ensemble_size,
                "write_quorum": self.write_quorum,
                "ack_quorum": self.ack_quorum,
                "digest": self.digest,
                **({} if self.password is None else {"password": self.password.to_document()}),
                **({"guaranteed_write_quorum": True} if self.guaranteed_write_quorum else {}),
                **({"log": self.log} if self.log else {}),
                **({"given_up": self.given_up.to_document()} if self.given_up is not None else {}),
                **({"absent": self.absent} if self.absent else {}),
                "created_ms": self.created_ms,
                "term": self.term,
                **({} if self.unbounded is None else {"unbounded": self.unbounded.to_document()}),
                "fragments": self.rows.to_document() if self.is_unbounded else _listed(self.fragments),
                "length_before": self.length_before,
                **(
                    {}
                    if self.below_write_quorum_from is None
                    else {"below_write_quorum_from": self.below_write_quorum_from}
                ),
                "last_entry": self.last_entry,
                "length": self.length,
                "custom": {key: base64.b64encode(value).decode() for key, value in self.custom.items()},
            },
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> LedgerMetadata:
        """Parse the stored form.

        Raises:
            MetadataCorruptError: not JSON, a field missing or of the wrong type, an unknown format version,
                or a broken invariant.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MetadataCorruptError(f"ledger metadata is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise MetadataCorruptError(f"ledger metadata is not a JSON object: {text[:80]!r}")
        version = document.get("format")
        if version not in (FORMAT_BOUNDED, FORMAT_UNBOUNDED):
            raise MetadataCorruptError(
                f"ledger metadata has format version {version!r}; this release reads {FORMAT_BOUNDED} and "
                f"{FORMAT_UNBOUNDED}"
            )
        try:
            metadata = _parse(cls, document)
            check_quorums(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        except MALFORMED as error:
            raise MetadataCorruptError(f"ledger metadata is damaged: {error!r} in {text[:200]!r}") from error
        metadata._check(MetadataCorruptError)
        return metadata


def check_quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    """Raise InvalidArgumentError unless 64 ≥ E ≥ Qw ≥ Qa ≥ 1; the message names the wrong part."""
    for name, value in (
        ("ensemble_size", ensemble_size),
        ("write_quorum", write_quorum),
        ("ack_quorum", ack_quorum),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgumentError(f"{name} {value!r} is not an integer")
    if ack_quorum < 1:
        raise InvalidArgumentError(f"ack_quorum {ack_quorum} is below 1: nothing would be durable")
    if write_quorum < ack_quorum:
        raise InvalidArgumentError(f"write_quorum {write_quorum} is below ack_quorum {ack_quorum}")
    if ensemble_size < write_quorum:
        raise InvalidArgumentError(f"ensemble_size {ensemble_size} is below write_quorum {write_quorum}")
    if ensemble_size > ENSEMBLE_SIZE_MAX:
        raise InvalidArgumentError(f"ensemble_size {ensemble_size} is above {ENSEMBLE_SIZE_MAX}")


def check_custom(custom: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a copy of the custom metadata: str keys, bytes values, 64 KiB in all.

    Raises:
        InvalidArgumentError: the custom metadata are something else.
    """
    checked: dict[str, bytes] = {}
    if not hasattr(custom, "items"):
        raise InvalidArgumentError(f"custom metadata are a mapping, not {type(custom).__name__}")
    for key, value in custom.items():
        if not isinstance(key, str) or not isinstance(value, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"custom metadata {key!r}: keys are str and values are bytes")
        if not key.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in key):
            raise InvalidArgumentError(f"custom metadata {key!r}: a key is text that UTF-8 can hold")
        checked[key] = bytes(value)
    if sum(len(key.encode()) + len(value) for key, value in checked.items()) > 64 * 1024:
        raise InvalidArgumentError("custom metadata is larger than 64 KiB")
    return checked


def with_ensemble(
    fragments: Sequence[Fragment], first_entry: int, bookies: Sequence[str]
) -> tuple[Fragment, ...]:
    """Return the fragments after an ensemble change at `first_entry` (rule 9).

    Raises:
        InvalidTransitionError: `first_entry` lies before the last fragment.
    """
    last = fragments[-1]
    if first_entry < last.first_entry:
        raise InvalidTransitionError(
            f"an ensemble change at entry {first_entry} lies before the last fragment, which starts at "
            f"{last.first_entry}",
            entry_id=first_entry,
        )
    fragment = Fragment(first_entry, tuple(bookies), last.content_term)
    if first_entry == last.first_entry:
        return (*fragments[:-1], fragment)
    return (*fragments, fragment)


def _listed(fragments: Sequence[Fragment]) -> list[dict[str, object]]:
    return [
        {
            "first_entry": fragment.first_entry,
            "content_term": fragment.content_term,
            "bookies": list(fragment.bookies),
        }
        for fragment in fragments
    ]


def _parse(cls: type[LedgerMetadata], document: dict[str, Any]) -> LedgerMetadata:
    unbounded: UnboundedRecord | None = None
    if document["format"] == FORMAT_UNBOUNDED:
        paged = PagedRows.from_document(document["fragments"])
        unbounded = UnboundedRecord.from_document(document["unbounded"], paged.pages)
        rows: Sequence[Row] = paged.rows
    else:
        rows = [(row["first_entry"], row["content_term"], row["bookies"]) for row in document["fragments"]]
    return cls(
        ledger_id=integer(document["ledger"], 0, LEDGER_ID_MAX),
        ensemble_size=integer(document["ensemble_size"], 1, ENSEMBLE_SIZE_MAX),
        write_quorum=integer(document["write_quorum"], 1, ENSEMBLE_SIZE_MAX),
        ack_quorum=integer(document["ack_quorum"], 1, ENSEMBLE_SIZE_MAX),
        fragments=tuple(map(Fragment.of_row, rows)),
        state=LedgerState(document["state"]),
        digest=one_of(document["digest"], DIGESTS),
        password=PasswordRecord.from_document(document["password"]) if "password" in document else None,
        guaranteed_write_quorum=boolean(document.get("guaranteed_write_quorum", False)),
        created_ms=integer(document["created_ms"], 0, 2**63 - 1),
        term=integer(document["term"], 0, TERM_FINAL),
        last_entry=optional(document["last_entry"], NO_ENTRY, ENTRY_ID_MAX),
        length=optional(document["length"], 0, 2**63 - 1),
        custom=MappingProxyType(
            {str(key): base64.b64decode(value, validate=True) for key, value in document["custom"].items()}
        ),
        unbounded=unbounded,
        length_before=integer(document["length_before"], 0, 2**63 - 1),
        below_write_quorum_from=optional(document.get("below_write_quorum_from"), 0, ENTRY_ID_MAX),
        log=_text(document.get("log", "")),
        given_up=GivenUp.from_document(document["given_up"]) if "given_up" in document else None,
        absent=tuple(map(Absent.of_row, document.get("absent", ()))),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    return value
