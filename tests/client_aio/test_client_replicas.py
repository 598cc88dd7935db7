"""Verifying a replica: what a bookie answers is compared with what it was asked for, whatever it says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.admin.replicas import VerifiedReplica, verify_replica
from client_aio.core.repair_plan import Part
from metadata.model.ledger import LedgerMetadata
from tests.support.storage import make_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie_aio.wire.messages import Message, Read

    Script = Callable[[Read], tuple[bytes, Stop]]

WAIT_S = 20
ENTRIES = 20


def block(first: int, count: int, ledger_id: int = 7, **how: Any) -> bytes:
    return bytes(make_block(ledger_id, first, [b"x"] * count, **how).view)


async def verify(script: Script, *, ensemble_size: int = 1) -> tuple[VerifiedReplica, int]:
    """Verify 20 entries of one bookie that answers by a script; return the replica, and the requests."""
    requests = 0

    async def call(request: Read, *_: object, **__: object) -> tuple[Message, memoryview]:
        nonlocal requests
        requests += 1
        await asyncio.sleep(0)
        body, stop = script(request)
        return ReadAnswer(int(stop), request.first, None), memoryview(body)

    async def get(bookie_id: str) -> Any:
        return SimpleNamespace(call=call, bookie_id=bookie_id)

    config = SimpleNamespace(read_ahead_bytes=1 << 20, read_timeout_s=1.0)
    context = SimpleNamespace(pool=SimpleNamespace(get=get), config=config)
    bookies = tuple(f"b{number}" for number in range(1, ensemble_size + 1))
    metadata = LedgerMetadata.new(
        7, ensemble_size=ensemble_size, write_quorum=1, ack_quorum=1, bookies=list(bookies)
    )
    async with asyncio.timeout(WAIT_S):
        found = await verify_replica(
            cast("Any", context), metadata, Part(0, ENTRIES - 1, 0, bookies), bookies[0]
        )
    assert found.intact + found.missing + found.damaged == found.owed
    assert min(found.intact, found.missing, found.damaged) >= 0
    return found, requests


def by_fives(request: Read) -> tuple[bytes, Stop]:
    return block(request.first, min(5, request.last + 1 - request.first)), Stop.BUDGET


async def test_what_was_asked_for_is_intact() -> None:
    found, requests = await verify(by_fives)
    assert (found.status, found.intact, requests) == ("ok", ENTRIES, 4)

    found, _ = await verify(lambda asked: (block(asked.first, 5, stride=4), Stop.END), ensemble_size=4)
    assert (found.status, found.owed, found.intact) == ("ok", 5, 5)


@pytest.mark.parametrize(
    ("script", "intact"),
    [
        (lambda _: (block(0, 5), Stop.BUDGET), 5),  # the same again and again
        (lambda asked: (block(asked.first + 1, 5), Stop.BUDGET), 0),  # one is left out
        (lambda asked: (block(0, ENTRIES + 1), Stop.END), 0),  # one too many
        (lambda asked: (block(0, ENTRIES) + block(ENTRIES, 1), Stop.END), ENTRIES),
        (lambda asked: (block(0, ENTRIES, ledger_id=8), Stop.END), 0),
        (lambda asked: (block(0, ENTRIES, content_term=1), Stop.END), 0),
        (lambda asked: (block(0, 10, stride=2), Stop.END), 0),
        (lambda asked: (block(0, 5) + block(0, 5), Stop.BUDGET), 5),
    ],
)
async def test_other_entries_than_were_asked_for_are_no_copies(script: Script, intact: int) -> None:
    found, requests = await verify(script)
    assert requests <= 2
    assert found.status == "unreachable"
    assert "bookie b1 answers with other entries than it is asked for" in found.error
    assert (found.intact, found.damaged) == (intact, int(intact < ENTRIES))
    assert found.first_bad_entry == (intact if intact < ENTRIES else None)


async def test_a_damaged_head_of_a_later_block_counts_once() -> None:
    bad = bytearray(block(5, 5))
    bad[8] ^= 1

    def script(request: Read) -> tuple[bytes, Stop]:
        return (block(0, 5) + bad, Stop.BUDGET) if request.first == 0 else by_fives(request)

    found, _ = await verify(script)
    assert (found.status, found.intact, found.damaged, found.first_bad_entry) == ("damaged", 19, 1, 5)


@pytest.mark.parametrize("stop", list(Stop))
async def test_a_bookie_that_returns_nothing_is_asked_a_bounded_number_of_times(stop: Stop) -> None:
    found, requests = await verify(lambda _: (b"", stop))
    assert requests <= 2 * ENTRIES
    assert (found.intact, found.missing + found.damaged) == (0, ENTRIES)
