"""A task that only its owner ends."""

from __future__ import annotations

import asyncio

import pytest

from metadata.owned_task import OwnedTask, for_each


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
    task = OwnedTask(asyncio.Event().wait, "ours")
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


async def test_items_are_taken_in_order_so_many_at_once_until_one_fails() -> None:
    begun: list[int] = []
    most = running = 0

    async def work(item: int) -> None:
        nonlocal most, running
        begun.append(item)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if item == 7:
            raise ValueError("seven")

    await for_each(range(7), work, 3)
    assert (begun, most) == (list(range(7)), 3)
    with pytest.raises(ValueError, match="seven"):
        await for_each(range(7, 100), work, 3)
    assert len(begun) < 20
