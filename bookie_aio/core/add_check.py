"""Adds: whether the block that an add carries is the one that the request speaks of, and intact.

Owns these checks and no others: the block's own form is `bookie_aio.wire.blocks`'s, terms are `fencing`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from bookie_aio.wire.messages import AddFlag
from metadata.errors import MalformedFrameError

if TYPE_CHECKING:
    from bookie_aio.wire.blocks import Block
    from bookie_aio.wire.messages import Add

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
