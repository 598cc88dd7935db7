"""The shell of healing: which time makes adds overdue, and how often it reports that it tries in vain."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from client_aio.healing import Healing
from client_aio.ledger.futures import BatchAdd
from client_aio.log.healing import Healer
from metadata.awake import AwakeClock
from metadata.errors import NotEnoughBookiesError

if TYPE_CHECKING:
    from metadata.errors import BookKeeperError, OperationTimeoutError


class Owner:
    """A writer with one add that is never acknowledged."""

    def __init__(self) -> None:
        self._has_ended = False
        self._first_failure: BookKeeperError | None = None
        self.given_up: list[OperationTimeoutError] = []

    def _counts(self) -> tuple[int, int]:
        return 1, 0

    def _fail(self, error: BookKeeperError) -> None:
        self._first_failure = error

    def _give_up(self, error: OperationTimeoutError) -> None:
        self.given_up.append(error)


def stand_still(seconds: float) -> None:
    """Block the event loop."""
    time.sleep(seconds)


async def test_time_in_which_our_own_loop_stood_still_makes_no_append_older() -> None:
    clock, owner = AwakeClock(), Owner()
    clock.start()
    healing = Healing(cast("Any", SimpleNamespace(clock=clock)), "log 'l'", owner, 1.0)
    healing.watch_ages()
    stand_still(0.9)
    await asyncio.sleep(0.35)  # In real time it is too old by now.
    assert not owner.given_up
    while not owner.given_up:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    healing.stop_watching()
    clock.stop()


class Ledger:
    """A ledger of a log that has no room at first, and takes what it is given."""

    def __init__(self, bytes_in_flight: int) -> None:
        self.bytes_in_flight = bytes_in_flight
        self.failure = None
        self.is_drained = asyncio.Event()
        self.taken: list[bytes] = []

    async def drain(self) -> None:
        await self.is_drained.wait()
        raise NotEnoughBookiesError("a bookie lacks acknowledged entries")

    def take(self, records: list[bytes], add: object) -> None:
        self.taken += records

    def send(self) -> None:
        """Send nothing: nobody is there."""


@pytest.mark.parametrize("rolls", [False, True])
async def test_records_that_wait_for_room_wait_on_when_the_log_rolls_from_a_ledger_without_any(
    rolls: bool,
) -> None:
    config = SimpleNamespace(max_in_flight_bytes=1000)
    context = cast("Any", SimpleNamespace(config=config, clock=None, check_loop=lambda: None))
    full, empty = Ledger(2000), Ledger(0)
    log = SimpleNamespace(current=full, bytes_in_flight=2000, max_in_flight_bytes=1000)
    healer = Healer(
        context, cast("Any", SimpleNamespace(name="l")), cast("Any", None), {}, cast("Any", log), None
    )
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    batch = [bytes(300)] * 10  # more than there is room for
    healer.put(batch, BatchAdd(future, len(batch)), is_closing=False)
    draining = asyncio.ensure_future(healer.drain())
    await asyncio.sleep(0)
    if rolls:
        log.current = empty
    full.is_drained.set()
    if rolls:
        await asyncio.wait_for(draining, 10)
        assert empty.taken == batch
        assert not future.done()
    else:
        with pytest.raises(NotEnoughBookiesError):
            await asyncio.wait_for(future, 10)
        draining.cancel()
    await healer.stop()
