"""What a bookie learns of the id counter is kept, and its age is raised for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bookie_aio.server import age
from tests.bookie_aio.server.test_server_age import WAIT_S, draw, fresh

if TYPE_CHECKING:
    from tests.bookie_aio.server.conftest import Bookies

__all__ = ["fresh"]


@pytest.mark.pure
async def test_ids_that_are_learned_while_the_age_is_being_written_are_kept_and_covered(
    fresh: Bookies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the write that ends, nor the raise, knows of them."""
    store = fresh.store()
    bookie = await fresh.start(store=store, sweep_interval_s=3600.0, age_interval_s=3600.0)
    real_drawn, asked, is_drawn = store.ids_drawn, asyncio.Event(), asyncio.Event()
    real_write, begun, goes_on = age.write_file, asyncio.Event(), asyncio.Event()

    async def draw_late(name: str, *, least: int = 0) -> int:
        found = await real_drawn(name, least=least)
        asked.set()
        await is_drawn.wait()
        return found

    async def write_late(*arguments: Any) -> None:
        begun.set()
        await goes_on.wait()
        await real_write(*arguments)

    await draw(fresh, 40)
    monkeypatch.setattr(store, "ids_drawn", draw_late)
    monkeypatch.setattr(age, "write_file", write_late)
    async with asyncio.timeout(WAIT_S):
        learning = asyncio.create_task(bookie.age.learn_ids())
        await asked.wait()
        raising = asyncio.create_task(bookie.age.raise_if_written(is_forced=True))
        await begun.wait()
        is_drawn.set()
        learned = await learning
        goes_on.set()
        await raising
        assert bookie.age.ids_known == learned
        for raised in (1, 0):
            before = bookie.age.number
            await bookie.age.raise_if_written()
            assert bookie.age.number == before + raised
