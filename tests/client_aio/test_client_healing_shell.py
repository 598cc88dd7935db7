"""The shell of healing: which time makes adds overdue, and how often it reports that it tries in vain."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from client_aio.healing import Healing
from metadata.awake import AwakeClock

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
