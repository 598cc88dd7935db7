"""Authorisation: who may write to a ledger, fence it, or have it dropped, at one bookie.

The theory. A ledger with a password has a *token* for each bookie, which only holders of the password can
derive (`client_aio.core.digest`). The first request with a token *locks* the ledger at that bookie. The
bookie then keeps a hash of the token, the *lock*. The lock is durable no later than the effect of the request
itself. From then on every request that changes the ledger needs that token:

    lock    token      verdict   what the bookie does
    none    none       ALLOW     carries out the request: it knows of no password
    none    a token    LOCK      stores the lock, then carries out the request
    held    the right  ALLOW     carries out the request
    held    another    REFUSE    answers UNAUTHORIZED; nothing was done
    held    none       REFUSE    answers UNAUTHORIZED; nothing was done

A lock is stored only where the ledger's metadata have a password. Otherwise one request with a made-up token
would keep the writer of a ledger without a password out (`has_password`). The bookie reads the metadata once.

The writer locks the ledger at each bookie of its ensemble as soon as it has created the metadata. It locks
the ledger at a replacement with the first entry that it sends there. A bookie that no token has reached yet
takes requests for the ledger from anybody, as for a ledger without a password. Such requests can keep a
writer from using this bookie. They cannot forge an entry, since no bookie can make an authentication code.

A read needs no token: entries are not secret from a client that reaches a bookie. A repair needs no token
either, since it runs without the password. It carries stored bytes verbatim, and never writes over a good
copy (rule 14). A repair with a token is judged as every other request is. A repair of a ledger with a
password and without a token must not add to the ledger what its writer never wrote, and must not supersede
entries of the writer:

- It is taken only for entries whose bookies are settled by the metadata (`Repairable`). Behind them a
  recovery would find the junk of a stranger in place of the end.
- Where the metadata give the entries another content term, or are not known to, it is refused if its content
  term is above the ledger's term here, or that of a copy held here (`bookie_aio.storage.repair_writes`).

A token is sent in the clear. It is valid for one ledger at one bookie, so an eavesdropper on that bookie's
connection gains no other ledger and no other bookie.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from bookie_aio.wire.messages import NO_TERM, Add, AddFlag, Delete, Force, Read, ReadLac, WriteLac

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bookie_aio.wire.messages import Message
    from metadata.model.ledger import Fragment, LedgerMetadata
    from metadata.model.paged_list import PageRef

TOKEN_BYTES = 32
LOCK_BYTES = 32
_PURPOSE = b"bookie-aio lock 1"
_REPAIR = int(AddFlag.REPAIR)


class Access(enum.Enum):
    """The verdict on a request that changes a ledger."""

    ALLOW = "allow"
    LOCK = "lock"
    REFUSE = "refuse"


def lock_of(token: bytes) -> bytes:
    """Return the lock that a token opens."""
    return hashlib.sha256(_PURPOSE + token).digest()


def judge_token(lock: bytes, token: bytes | None) -> Access:
    """Compare a request's token with the lock that the bookie holds for its ledger; b"" for none."""
    assert len(lock) in (0, LOCK_BYTES)
    if not lock and token is None:
        return Access.ALLOW
    if token is None or len(token) != TOKEN_BYTES:
        return Access.REFUSE
    if not lock:
        return Access.LOCK
    return Access.ALLOW if hmac.compare_digest(lock_of(token), lock) else Access.REFUSE


def ledger_at_stake(request: Message, *, has_token: bool) -> int | None:
    """Return the ledger that a request changes; None where it changes none, or needs no token."""
    if isinstance(request, Add):
        return None if request.flags == _REPAIR and not has_token else request.ledger_id
    if isinstance(request, Read | ReadLac):
        return None if request.term == NO_TERM else request.ledger_id
    if isinstance(request, WriteLac | Force | Delete):
        return request.ledger_id
    return None


def has_password(metadata: LedgerMetadata) -> bool:
    """Return whether a ledger has a password, so that a request may lock it. This never changes."""
    return metadata.password is not None


class RepairRight(enum.Enum):
    """What a repair without a token may do with a block of a ledger with a password."""

    NONE = "none"
    MISSING = "missing"
    """Store missing entries, of no higher content term than the ledger's term here."""
    NAMED = "named"
    """Store missing entries, above those of lower content terms too: the metadata give them this one."""


class Repairable(NamedTuple):
    """What a repair without a token may store of a ledger with a password."""

    end: int
    """The id behind the last entry that it may store. It never falls."""
    fragments: tuple[tuple[int, int], ...]
    """First entry and content term of the fragments in the head of the metadata, ascending."""
    pages: tuple[PageRef, ...] = ()
    """The pages with the older fragments of an unbounded ledger, ascending."""

    def parts(self, first_entry: int, last_entry: int) -> list[tuple[PageRef | None, range]]:
        """Return which pages list the fragments of which of these entries; None stands for the head.

        Ascending. Entries before the first fragment are trimmed, and go with the first part.
        """
        pages: list[PageRef | None] = [*self.pages, None]
        starts = [*(page.first for page in self.pages), self.fragments[0][0]]
        begin, end = max(bisect_right(starts, first_entry) - 1, 0), max(bisect_right(starts, last_entry), 1)
        cuts = [first_entry, *starts[begin + 1 : end], last_entry + 1]
        return [(page, range(*cut)) for page, cut in zip(pages[begin:end], pairwise(cuts), strict=True)]


def have_term(fragments: tuple[tuple[int, int], ...], entries: range, content_term: int) -> bool:
    """Return whether fragments give all these entries this content term.

    Args:
        fragments: the first entry and the content term of each, ascending.
    """
    starts = [first for first, _ in fragments]
    first, last = bisect_right(starts, entries[0]) - 1, bisect_right(starts, entries[-1]) - 1
    return first >= 0 and all(term == content_term for _, term in fragments[first : last + 1])


def repairable(metadata: LedgerMetadata) -> Repairable:
    """Return what a repair without a token may store of a ledger with a password."""
    pages = () if metadata.unbounded is None else metadata.unbounded.pages
    return Repairable(_repairable_end(metadata), content_terms(metadata.fragments), pages)


def content_terms(fragments: Iterable[Fragment]) -> tuple[tuple[int, int], ...]:
    """Return the first entry and the content term of each fragment."""
    return tuple((one.first_entry, one.content_term) for one in fragments)


def _repairable_end(metadata: LedgerMetadata) -> int:
    """Return the id behind the entries of a ledger with a password that a repair without a token may store.

    Of a closed ledger these are all entries. Of any other ledger the last fragment is left out, where the
    writer and recoveries find the end. This id never falls.
    """
    if metadata.last_entry is not None:
        return metadata.last_entry + 1
    return metadata.last_fragment.first_entry
