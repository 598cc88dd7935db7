"""Fencing: the verdict on the term of a request (rule 7), and on the block of an add.

A ledger's term at a bookie is a number that only grows. A bounded ledger has two terms: the writer's (0), and
the final term, which every recovering client uses. Recoveries share it so that they do not fence one another.
A bookie without a record of a ledger holds term 0 for it.

    request's term    verdict   what the bookie does
    below the held    REFUSE    answers INVALID_TERM with the held term
    the held          ACCEPT    goes on
    above the held    RAISE     stores the term, then goes on; later requests with the old one are refused

The verdict and the append that follows it are one step: nothing may run between them (rule 7).

The block of an add is checked before the verdict. It must be of the request's ledger, and its checksum must
hold. Its content term must not be above the request's term, except in a repair. Does not own the form of a
block (`bookie_aio.wire.blocks`).
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
    """The verdict on a request that carries a term."""

    REFUSE = "refuse"
    ACCEPT = "accept"
    RAISE = "raise"


def judge(held_term: int, request_term: int) -> Verdict:
    """Compare a request's term with the term that the bookie holds for its ledger."""
    assert held_term >= 0
    assert request_term >= 0
    if request_term == held_term:
        return Verdict.ACCEPT
    return Verdict.RAISE if request_term > held_term else Verdict.REFUSE


_REPAIR = int(AddFlag.REPAIR)


def check_block(request: Add, block: Block, body: memoryview) -> None:
    """Check a block that was parsed from the body of an add.

    Raises:
        MalformedFrameError: the block does not match the request or its own checksum.
    """
    # The fast path of nearly every block. The lines below repeat these checks to name the fault.
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
