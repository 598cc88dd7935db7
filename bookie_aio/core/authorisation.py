"""Authorisation: who may write to a ledger, fence it, or have it dropped, at one bookie.

The theory. A ledger with a password has a *token* for each bookie, which only holders of the password can
derive (`client_aio.core.digest`). The first request that carries one *locks* the ledger at that bookie: the
bookie keeps a hash of the token, the *lock*, as durably as what the request itself did. From then on every
request that changes something needs that token:

    lock    token      verdict   what the bookie does
    none    none       ALLOW     a ledger without a password, for all the bookie knows
    none    a token    LOCK      stores the lock, then goes on
    held    the right  ALLOW
    held    another    REFUSE    answers UNAUTHORIZED; nothing was done
    held    none       REFUSE

The writer locks the ledger at each bookie of its ensemble as soon as it has made the metadata, and at a
replacement with the first entry it sends there. A bookie that a ledger has not reached yet takes requests
for it from anybody, as it does for a ledger without a password. That can keep a writer from using this
bookie, and can forge nothing, since no bookie can make a code.

Reading needs no token: what is read is not secret from whoever reaches a bookie. Repair needs none either: it
carries stored bytes as they are, never over a good copy (rule 14), and runs without the password. But then it
puts nothing above what a locked ledger has here, or is yet to have (`bookie_aio.storage.repair_writes`). One
that carries a token is judged as every other request is.

A token travels as it is. It is that of one ledger at one bookie: seen there, it opens no other.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import TYPE_CHECKING

from bookie_aio.wire.messages import NO_TERM, Add, AddFlag, Delete, Force, Read, ReadLac, WriteLac

if TYPE_CHECKING:
    from bookie_aio.wire.messages import Message

TOKEN_BYTES = 32
LOCK_BYTES = 32
_PURPOSE = b"bookie-aio lock 1"
_REPAIR = int(AddFlag.REPAIR)


class Access(enum.Enum):
    """What to do with a request that changes a ledger."""

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
    """Return the ledger that a request changes something of; None where it does not."""
    if isinstance(request, Add):
        return None if request.flags == _REPAIR and not has_token else request.ledger_id
    if isinstance(request, Read | ReadLac):
        return None if request.term == NO_TERM else request.ledger_id
    if isinstance(request, WriteLac | Force | Delete):
        return request.ledger_id
    return None
