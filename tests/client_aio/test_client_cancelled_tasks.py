"""An application cancels all tasks of its loop, those of its client too: each call ends, or goes on.

A task may be cancelled before its first step. Then none of its code runs, neither `except` nor `finally`.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from client_aio.config import ClientConfig
from client_aio.tails import WatchedBookie
from metadata.errors import BookKeeperError
from tests.support.scriptedbookies import scene

WAIT_S = 10.0


def cancel_others(*spared: asyncio.Task[Any] | None) -> None:
    """Cancel the client's tasks, as an application does that takes them for its own."""
    for task in asyncio.all_tasks() - {asyncio.current_task(), *spared}:
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and ("/client_aio/" in code.co_filename or "/metadata/" in code.co_filename):
            task.cancel()


@pytest.mark.parametrize("turns", range(0, 45))
async def test_a_recovery_ends_wherever_its_tasks_are_cancelled(turns: int) -> None:
    async with scene(3, read_timeout_s=1.0, add_timeout_s=1.0) as stage:
        await stage.create(ledger_id=100)

        async def opening() -> int:
            async with stage.client.open_ledger(100, recover=True) as reader:
                return reader.last_add_confirmed

        call = asyncio.create_task(opening())
        for _ in range(turns):
            await asyncio.sleep(0)
        cancel_others(call)
        done, _ = await asyncio.wait([call], timeout=WAIT_S)
        assert done
        assert not call.cancelled(), "nobody cancelled the call"
        assert call.exception() is None or isinstance(call.exception(), BookKeeperError)


async def test_a_bookie_is_watched_again_though_connecting_was_cancelled_before_it_began() -> None:
    sent = asyncio.Event()

    class Connection:
        is_open = True

        def request(self, *_: Any, **__: Any) -> None:
            sent.set()

    async def get(_: str) -> Connection:
        return Connection()

    tails: Any = SimpleNamespace(look=lambda: None)
    pool: Any = SimpleNamespace(get=get)
    bookie = WatchedBookie(tails, pool, ClientConfig(), "b1")
    bookie.arm(1, 0)
    assert bookie._timer is not None
    bookie._timer.cancel()
    bookie._send()
    cancel_others()
    await asyncio.wait_for(sent.wait(), WAIT_S)
    bookie.stop()
