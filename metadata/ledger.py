"""Ledger metadata: what it says, how it is written down, and the only ways it may change.

A `LedgerMetadata` is frozen. Every change goes through a method that checks its legality and returns a
new value; the caller then writes that by compare-and-set. The legal transitions of a bounded ledger:

    OPEN ──ensemble change──▶ OPEN
    OPEN ──begin_recovery──▶ IN_RECOVERY
    OPEN ──close (writer)──▶ CLOSED
    IN_RECOVERY ──close (recovery, with the fragments it ended up with)──▶ CLOSED
    any ──replace_bookie (repair)──▶ the same state

Fragments: non-empty, the first starts at entry 0, first entries strictly increase, content terms never
decrease, each names exactly E distinct bookies.

The stored form is a JSON object that an operator can read in a ZooKeeper shell:

    {"format": 1, "ledger": 7, "state": "OPEN", "ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2,
     "digest": "crc32c", "created_ms": 1790000000000, "term": 0,
     "fragments": [{"first_entry": 0, "content_term": 0, "bookies": ["b1", "b2", "b3"]}],
     "last_entry": null, "length": null, "custom": {"app": "ZGVtbw=="}}

A ledger with guaranteed write quorum (rule 11), and no other, has "guaranteed_write_quorum": true as well.
A ledger with authentication codes (digest "hmac-sha256"), and no other, has "password" as well: see
`metadata.passwords`.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from metadata.errors import InvalidArgumentError, InvalidTransitionError, MetadataCorruptError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, NO_ENTRY, TERM_FINAL, check_bookie_id
from metadata.passwords import PasswordRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT_VERSION = 1
ENSEMBLE_SIZE_MAX = 64
DIGEST_CRC = "crc32c"
DIGEST_HMAC = "hmac-sha256"
DIGESTS = (DIGEST_CRC, DIGEST_HMAC)


class LedgerState(enum.Enum):
    """The life of a ledger."""

    OPEN = "OPEN"
    IN_RECOVERY = "IN_RECOVERY"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of entries kept by one ensemble: from `first_entry` up to the next fragment's."""

    first_entry: int
    bookies: tuple[str, ...]
    content_term: int = 0


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """One ledger's metadata. Build the first one with `new`, later ones with the transition methods."""

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
    ) -> LedgerMetadata:
        """Give the metadata of a new, empty, OPEN ledger.

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
        )
        metadata._check(InvalidArgumentError)
        return metadata

    @property
    def is_closed(self) -> bool:
        """Tell whether the ledger takes no more entries, for ever."""
        return self.state is LedgerState.CLOSED

    @property
    def last_fragment(self) -> Fragment:
        """Give the fragment that new entries go to."""
        return self.fragments[-1]

    def fragment_of(self, entry_id: int) -> Fragment:
        """Give the fragment that holds the entry (whether or not it has been written)."""
        low, high = 0, len(self.fragments)
        while high - low > 1:
            middle = (low + high) // 2
            if self.fragments[middle].first_entry <= entry_id:
                low = middle
            else:
                high = middle
        return self.fragments[low]

    def change_ensemble(self, first_entry: int, bookies: Sequence[str]) -> LedgerMetadata:
        """Start a new fragment, or replace the last one's ensemble if it starts at the same entry.

        Raises:
            InvalidTransitionError: the ledger is not OPEN, or `first_entry` lies before the last fragment.
        """
        self._require(LedgerState.OPEN, "change its ensemble")
        changed = replace(self, fragments=with_ensemble(self.fragments, first_entry, bookies))
        changed._check(InvalidTransitionError)
        return changed

    def begin_recovery(self) -> LedgerMetadata:
        """Go from OPEN to IN_RECOVERY."""
        self._require(LedgerState.OPEN, "begin recovery")
        return replace(self, state=LedgerState.IN_RECOVERY)

    def close(
        self, last_entry: int, length: int, *, fragments: Sequence[Fragment] | None = None
    ) -> LedgerMetadata:
        """Close the ledger behind `last_entry` (−1: empty), with `length` payload bytes in all.

        Recovery passes the fragments it ended up with: those before the last must be the present ones.

        Raises:
            InvalidTransitionError: the ledger is closed already, or the end lies before the last fragment.
        """
        if self.is_closed:
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} is CLOSED at entry {self.last_entry} and cannot be closed again",
                ledger_id=self.ledger_id,
            )
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
        )
        closed._check(InvalidTransitionError)
        return closed

    def replace_bookie(self, index: int, old: str, new: str) -> LedgerMetadata:
        """Put one bookie in another's place within the fragment at `index` (repair, rule 14)."""
        fragment = self.fragments[index]
        if old not in fragment.bookies:
            raise InvalidTransitionError(
                f"bookie {old} is not in fragment {index} of ledger {self.ledger_id}",
                ledger_id=self.ledger_id,
                bookie_id=old,
            )
        bookies = tuple(new if bookie == old else bookie for bookie in fragment.bookies)
        fragments = list(self.fragments)
        fragments[index] = replace(fragment, bookies=bookies)
        changed = replace(self, fragments=tuple(fragments))
        changed._check(InvalidTransitionError)
        return changed

    def _require(self, state: LedgerState, verb: str) -> None:
        if self.state is not state:
            raise InvalidTransitionError(
                f"ledger {self.ledger_id} is {self.state.value}, not {state.value}: it cannot {verb}",
                ledger_id=self.ledger_id,
            )

    def _check(
        self, error: type[InvalidArgumentError | InvalidTransitionError | MetadataCorruptError]
    ) -> None:
        """Raise `error` when an invariant of this module's docstring does not hold."""

        def need(condition: bool, what: str) -> None:
            if not condition:
                raise error(f"metadata of ledger {self.ledger_id}: {what}", ledger_id=self.ledger_id)

        need(0 <= self.ledger_id <= LEDGER_ID_MAX, f"id {self.ledger_id} is out of range")
        need(
            (self.digest == DIGEST_HMAC) == (self.password is not None),
            f"digest {self.digest} and {'a' if self.password else 'no'} password record do not go together",
        )
        need(bool(self.fragments) and self.fragments[0].first_entry == 0, "no fragment starts at entry 0")
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
        closed = self.last_entry is not None and self.length is not None
        need((self.last_entry is None) == (self.length is None), "last entry and length go together")
        need(closed == self.is_closed, f"state {self.state.value} and last entry {self.last_entry} disagree")
        if self.last_entry is not None and self.length is not None:
            need(NO_ENTRY <= self.last_entry <= ENTRY_ID_MAX, f"last entry {self.last_entry} is out of range")
            need(self.length >= 0, f"length {self.length} is negative")
            # A last fragment that holds nothing starts right behind the last entry.
            need(
                self.last_entry + 1 >= self.last_fragment.first_entry,
                f"last entry {self.last_entry} lies before the last fragment's first, "
                f"{self.last_fragment.first_entry}",
            )

    def to_json(self) -> bytes:
        """Give the stored form (see the module's docstring)."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "ledger": self.ledger_id,
                "state": self.state.value,
                "ensemble_size": self.ensemble_size,
                "write_quorum": self.write_quorum,
                "ack_quorum": self.ack_quorum,
                "digest": self.digest,
                **({} if self.password is None else {"password": self.password.to_document()}),
                **({"guaranteed_write_quorum": True} if self.guaranteed_write_quorum else {}),
                "created_ms": self.created_ms,
                "term": self.term,
                "fragments": [
                    {
                        "first_entry": fragment.first_entry,
                        "content_term": fragment.content_term,
                        "bookies": list(fragment.bookies),
                    }
                    for fragment in self.fragments
                ],
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
        if version != FORMAT_VERSION:
            raise MetadataCorruptError(
                f"ledger metadata has format version {version!r}; this release reads {FORMAT_VERSION}"
            )
        try:
            metadata = _parse(cls, document)
            check_quorums(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            raise MetadataCorruptError(f"ledger metadata is damaged: {error!r} in {text[:200]!r}") from error
        metadata._check(MetadataCorruptError)
        return metadata


def check_quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    """Raise InvalidArgumentError unless 64 ≥ E ≥ Qw ≥ Qa ≥ 1, saying which part is wrong."""
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
    """Copy the custom metadata, or raise InvalidArgumentError: str keys, bytes values, 64 KiB in all."""
    checked: dict[str, bytes] = {}
    for key, value in custom.items():
        if not isinstance(key, str) or not isinstance(value, (bytes, bytearray, memoryview)):
            raise InvalidArgumentError(f"custom metadata {key!r}: keys are str and values are bytes")
        checked[key] = bytes(value)
    if sum(len(key.encode()) + len(value) for key, value in checked.items()) > 64 * 1024:
        raise InvalidArgumentError("custom metadata is larger than 64 KiB")
    return checked


def with_ensemble(
    fragments: Sequence[Fragment], first_entry: int, bookies: Sequence[str]
) -> tuple[Fragment, ...]:
    """Give the fragments after an ensemble change at `first_entry` (rule 9).

    Raises:
        InvalidTransitionError: that lies before the last fragment.
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


def _parse(cls: type[LedgerMetadata], document: dict[str, Any]) -> LedgerMetadata:
    return cls(
        ledger_id=_integer(document["ledger"], 0, LEDGER_ID_MAX),
        ensemble_size=_integer(document["ensemble_size"], 1, ENSEMBLE_SIZE_MAX),
        write_quorum=_integer(document["write_quorum"], 1, ENSEMBLE_SIZE_MAX),
        ack_quorum=_integer(document["ack_quorum"], 1, ENSEMBLE_SIZE_MAX),
        fragments=tuple(
            Fragment(
                _integer(row["first_entry"], 0, ENTRY_ID_MAX),
                tuple(check_bookie_id(bookie) for bookie in row["bookies"]),
                _integer(row["content_term"], 0, TERM_FINAL),
            )
            for row in document["fragments"]
        ),
        state=LedgerState(document["state"]),
        digest=_one_of(document["digest"], DIGESTS),
        password=PasswordRecord.from_document(document["password"]) if "password" in document else None,
        guaranteed_write_quorum=_boolean(document.get("guaranteed_write_quorum", False)),
        created_ms=_integer(document["created_ms"], 0, 2**63 - 1),
        term=_integer(document["term"], 0, TERM_FINAL),
        last_entry=_optional(document["last_entry"], NO_ENTRY, ENTRY_ID_MAX),
        length=_optional(document["length"], 0, 2**63 - 1),
        custom=MappingProxyType(
            {str(key): base64.b64decode(value, validate=True) for key, value in document["custom"].items()}
        ),
    )


def _integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{value!r} is not an integer from {low} to {high}")
    return value


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _optional(value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(value, low, high)


def _one_of(value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return value
