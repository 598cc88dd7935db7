"""Fencing: what a bookie does with the term of a request (rule 7).

A ledger's term at a bookie is a number that only grows. A bounded ledger knows two: the writer's (0) and
the final one that every recovering client uses, so that recoveries do not shut one another out. A bookie
that has never heard of a ledger holds 0 for it.

    request's term    verdict   what the bookie does
    below the held    REFUSE    answers INVALID_TERM with the held term
    the held          ACCEPT    goes on
    above the held    RAISE     stores the term, then goes on; later requests with the old one are refused

The decision and the append that follows it happen in one step: nothing may run between them (rule 7).

Adds: whether the block that an add carries is the one that the request speaks of, and intact.

Owns these checks and no others: the block's own form is `bookie_aio.wire.blocks`'s, terms are `fencing`'s.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from crc32c import crc32c

from bookie_aio.wire.messages import AddFlag
from metadata.errors import MalformedFrameError

if TYPE_CHECKING:
    from bookie_aio.wire.blocks import Block
    from bookie_aio.wire.messages import Add


class Verdict(enum.Enum):
    """What to do with a request that carries a term."""

    REFUSE = "refuse"
    ACCEPT = "accept"
    RAISE = "raise"


def judge(held_term: int, request_term: int) -> Verdict:
    """Compare a request's term with the one the bookie holds for its ledger."""
    assert held_term >= 0
    assert request_term >= 0
    if request_term == held_term:
        return Verdict.ACCEPT
    return Verdict.RAISE if request_term > held_term else Verdict.REFUSE


_REPAIR = int(AddFlag.REPAIR)


def check_block(request: Add, block: Block, body: memoryview) -> None:
    """Check a block that was parsed from the body of an add.

    Raises:
        MalformedFrameError: what the stream carries cannot be trusted.
    """
    # Nearly every block passes here: one look at what the lines below look at one by one.
    if (
        block.head_bytes + block.payload_bytes == len(body)
        and not block.flags
        and block.ledger_id == request.ledger_id
        and block.content_term <= request.term
        and crc32c(block.payload) == block.payload_crc
    ):
        return
    if block.total_bytes != len(body):
        raise MalformedFrameError("an add carries exactly one block")
    if block.is_partial:
        raise MalformedFrameError("an add carries a whole block, not a cut one")
    if block.ledger_id != request.ledger_id:
        raise MalformedFrameError(
            f"an add to ledger {request.ledger_id} carries a block of ledger {block.ledger_id}"
        )
    if block.content_term > request.term and request.flags != _REPAIR:
        raise MalformedFrameError(
            f"an add of term {request.term} carries entries of content term {block.content_term}"
        )
    if not block.payload_is_intact():
        raise MalformedFrameError("the checksum over a block's payload does not hold")
