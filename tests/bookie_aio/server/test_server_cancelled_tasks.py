"""An application that runs a bookie cancels all tasks of its loop: whoever waits for one is answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from bookie_aio.server.given_ids import GivenIds
from bookie_aio.server.password_ledgers import PasswordLedgers
from metadata.errors import MetadataUnavailableError, NoSuchLedgerError

if TYPE_CHECKING:
    from bookie_aio.storage.engine import Engine
    from metadata.access.ledgers import LedgerStore

WAIT_S = 10.0


async def test_whoever_waits_for_the_id_counter_is_told_that_the_reading_was_cancelled() -> None:
    begun = asyncio.Event()

    async def read() -> int:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    given = GivenIds(0, read)
    async with asyncio.timeout(WAIT_S):
        waiting = asyncio.create_task(given.read_again())
        await begun.wait()
        assert given._reading is not None
        given._reading.cancel()
        with pytest.raises(MetadataUnavailableError):
            await waiting
    await given.close()


async def test_a_question_that_was_cancelled_before_it_was_asked_is_asked_anew() -> None:
    asked = []

    class Ledgers:
        async def read(self, ledger_id: int, **_: Any) -> None:
            asked.append(ledger_id)
            raise NoSuchLedgerError("there is none", ledger_id=ledger_id)

    engine, ledgers = cast("Engine", None), cast("LedgerStore", Ledgers())
    passwords = PasswordLedgers(engine, ledgers)
    question = passwords.has_password(7)
    assert isinstance(question, asyncio.Future)
    question.cancel()
    await asyncio.wait([question])
    again = passwords.has_password(7)
    assert isinstance(again, asyncio.Future)
    async with asyncio.timeout(WAIT_S):
        assert await again is False
    assert asked == [7]
    await passwords.close()
