"""A task that only its owner ends."""

from __future__ import annotations

import asyncio

import pytest

from metadata.owned_task import OwnedTask


async def test_a_task_that_others_cancel_is_started_again_until_its_owner_ends_it() -> None:
    started = asyncio.Semaphore(0)

    async def run() -> None:
        started.release()
        await asyncio.Event().wait()

    task = OwnedTask(run, "ours")
    async with asyncio.timeout(30):
        for _ in range(3):
            await started.acquire()
            for each in asyncio.all_tasks() - {asyncio.current_task()}:
                each.cancel()
        await started.acquire()
        assert not task.done()
        task.cancel()
        await task.wait()
    assert task.done()
    task.result()


async def test_an_owner_ends_a_task_that_is_about_to_be_started_again() -> None:
    task = OwnedTask(asyncio.Event().wait, "ours")  # type: ignore[arg-type]
    (other,) = asyncio.all_tasks() - {asyncio.current_task()}
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    task.cancel()
    async with asyncio.timeout(30):
        await task.wait()
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_task_that_fails_has_ended() -> None:
    async def run() -> None:
        raise LookupError("it")

    task = OwnedTask(run, "ours")
    async with asyncio.timeout(30):
        await task.wait()
    with pytest.raises(LookupError):
        task.result()
