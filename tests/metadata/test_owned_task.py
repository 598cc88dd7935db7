"""A task that only its owner ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from metadata.errors import MetadataUnavailableError
from metadata.owned_task import OwnedTask, OwningLock, for_each, in_order, unless

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


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


def _cancel_others() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


@pytest.mark.parametrize("is_cancelled_early", [False, True])
async def test_no_item_is_passed_over_when_somebody_else_cancels_the_tasks(is_cancelled_early: bool) -> None:
    done: list[int] = []
    under_way, go_on = asyncio.Event(), asyncio.Event()

    async def work(item: int) -> None:
        under_way.set()
        if item < 4:
            await go_on.wait()
        done.append(item)

    async def cancel() -> None:
        if not is_cancelled_early:  # the tasks have not run a step
            await under_way.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task(), caller}:
            task.cancel()
        go_on.set()

    caller = asyncio.current_task()
    cancelling = asyncio.create_task(cancel())
    await for_each(range(9), work, 3)
    await cancelling
    assert sorted(done) == list(range(9))


async def test_a_call_that_is_cancelled_itself_ends() -> None:
    begun = 0
    under_way = asyncio.Event()

    async def work(_: int) -> None:
        nonlocal begun
        begun += 1
        under_way.set()
        await asyncio.Event().wait()

    async def all_of() -> None:
        await for_each(range(9), work, 3)

    async def first_of() -> None:
        async for _ in in_order(_numbers(9), work, 3):
            pass

    for call in (all_of, first_of):
        begun = 0
        under_way.clear()
        calling = asyncio.create_task(call())
        await under_way.wait()
        _cancel_others()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert begun <= 3


async def test_results_are_all_there_when_somebody_else_cancels_the_tasks() -> None:
    under_way, go_on = asyncio.Event(), asyncio.Event()
    caller = asyncio.current_task()

    async def work(number: int) -> int:
        under_way.set()
        await go_on.wait()
        return 10 * number

    async def cancel() -> None:
        await under_way.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task(), caller}:
            task.cancel()
        go_on.set()

    cancelling = asyncio.create_task(cancel())
    found = [pair async for pair in in_order(_numbers(7), work, 3)]
    await cancelling
    assert found == [(number, 10 * number) for number in range(7)]


async def test_work_that_somebody_else_cancels_counts_as_an_event_that_came() -> None:
    forever, working = asyncio.Event(), asyncio.Event()
    caller = asyncio.current_task()

    async def work() -> str:
        working.set()
        await forever.wait()
        return "done"

    async def cancel() -> None:
        await working.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task(), caller}:
            task.cancel()

    cancelling = asyncio.create_task(cancel())
    assert await unless(forever.wait(), work()) is None
    await cancelling


async def _numbers(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        yield number


async def test_results_come_in_order_and_so_many_are_under_way() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(7 - number):
            await asyncio.sleep(0)
        running -= 1
        return 10 * number

    found = [pair async for pair in in_order(_numbers(7), work, 3)]
    assert found == [(number, 10 * number) for number in range(7)]
    assert most == 3


async def test_an_error_comes_in_its_turn_and_ends_what_is_under_way() -> None:
    ended, all_run = [], asyncio.Event()

    async def work(number: int) -> int:
        if number == 2:
            await all_run.wait()
            raise ValueError("2")
        try:
            if number == 5:
                all_run.set()
            if number > 2:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(number)
            raise
        return number

    results = in_order(_numbers(9), work, 4)
    assert [(await anext(results))[0], (await anext(results))[0]] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        await anext(results)
    assert ended == [3, 4, 5]


async def test_work_is_cancelled_when_the_event_comes_first() -> None:
    event, ended = asyncio.Event(), asyncio.Event()

    async def work(rounds: int | None) -> str:
        try:
            if rounds is None:
                event.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise
        return "done"

    assert await unless(event.wait(), work(1)) == "done"
    assert await unless(event.wait(), work(None)) is None
    assert ended.is_set()


async def test_work_under_an_owning_lock_goes_on_when_its_caller_is_cancelled() -> None:
    lock, done, begun, goes_on = OwningLock(), [], asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await goes_on.wait()
        done.append("the work")
        raise ValueError("an error that nobody awaits")

    callers = [asyncio.create_task(lock.run(work)) for _ in range(3)]
    await begun.wait()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    goes_on.set()
    async with lock:
        assert done == ["the work"]  # that of callers which were still waiting has not begun
    with pytest.raises(ValueError, match="nobody awaits"):
        await lock.run(work)


async def test_an_owning_lock_that_was_ended_runs_nothing_more() -> None:
    lock, begun = OwningLock(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    callers = [asyncio.create_task(lock.run(work)) for _ in range(2)]
    await begun.wait()
    await lock.end()
    for caller in callers:
        with pytest.raises(MetadataUnavailableError):
            await caller
    assert not lock.locked()
