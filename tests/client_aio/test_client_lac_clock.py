"""What a writer does by the clock, and that it does nothing any more once the writer has ended."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from client_aio.core.add_window import AddWindow
from client_aio.lac_clock import LacClock, LacPublisher

if TYPE_CHECKING:
    import pytest


def window_with_an_entry_outstanding() -> AddWindow[str]:
    window: AddWindow[str] = AddWindow(
        ledger_id=7, content_term=0, ensemble_size=3, write_quorum=3, ack_quorum=2,
        guaranteed_write_quorum=True,
    )  # fmt: skip
    window.add(b"a", "a")
    sends = window.flush()
    window.acknowledged(sends[0])
    window.acknowledged(sends[1])
    window.add(b"b", "b")
    window.flush()
    return window


async def test_a_late_answer_does_not_wake_a_publisher_that_was_stopped() -> None:
    loop, window, published = asyncio.get_running_loop(), window_with_an_entry_outstanding(), []
    clock = LacClock(0.001)
    publisher = LacPublisher(window, lambda: published.append(window.lac), clock)
    publisher.moved()
    publisher.stop()
    window.abort()
    publisher.moved()  # the third bookie's answer comes after the writer has failed
    over = loop.create_future()
    loop.call_later(0.01, over.set_result, None)
    await over
    assert published == []
    assert clock._timer is None


async def test_a_writer_that_goes_on_publishes_nothing_and_one_that_stops_does_so_once() -> None:
    window, clock, published = AddWindow[str](
        ledger_id=7, content_term=0, ensemble_size=1, write_quorum=1, ack_quorum=1
    ), LacClock(0.002), []  # fmt: skip
    publisher = LacPublisher(window, lambda: published.append(window.lac), clock)
    publisher.moved()
    for _ in range(3):  # between one look and the next, the LAC has moved
        window.add(b"a", "a")
        (send,) = window.flush()
        window.acknowledged(send)
        assert not publisher.look()
    assert published == []
    assert publisher.look()
    assert published == [2]
    publisher.moved()  # a late answer
    assert publisher.look()
    assert published == [2]
    publisher.stop()


async def test_a_lafr_that_moves_behind_the_lac_is_published_once_it_stands_still() -> None:
    window, clock, published = AddWindow[str](
        ledger_id=7, content_term=0, ensemble_size=3, write_quorum=3, ack_quorum=2,
        guaranteed_write_quorum=True,
    ), LacClock(0.002), []  # fmt: skip
    publisher = LacPublisher(window, lambda: published.append((window.lac, window.lafr_to_state)), clock)
    late = []
    for _ in range(2):
        window.add(b"a", "a")
        *sends, last = window.flush()
        late.append(last)
        for send in sends:
            window.acknowledged(send)
    window.advance()
    publisher.moved()
    assert [publisher.look(), publisher.look()] == [False, True]
    assert published == [(1, -1)]
    for answer in late:  # between one look and the next, the LAFR has moved
        window.acknowledged(answer)
        window.advance()
        publisher.moved()
        assert not publisher.look()
    assert published == [(1, -1)]
    assert publisher.look()
    assert published == [(1, -1), (1, 1)]
    publisher.moved()
    assert publisher.look()
    assert published == [(1, -1), (1, 1)]
    publisher.stop()


async def test_all_writers_of_a_client_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, clock, timers = asyncio.get_running_loop(), LacClock(0.002), []
    call_later = loop.call_later
    idle = [asyncio.Event() for _ in range(1000)]
    publishers = []
    for event in idle:
        window: AddWindow[str] = AddWindow(
            ledger_id=7, content_term=0, ensemble_size=1, write_quorum=1, ack_quorum=1
        )
        window.add(b"a", "a")
        window.acknowledged(*window.flush())
        publishers.append(LacPublisher(window, event.set, clock))
    monkeypatch.setattr(loop, "call_later", lambda *timer: timers.append(timer) or call_later(*timer))
    for publisher in publishers:
        publisher.moved()
    for event in idle:
        await event.wait()
    # One look to see the LACs, one for a few writers, and then full frames until all have had their turn.
    assert len(timers) == 2 + math.ceil((len(idle) - 32) / 256)


async def test_few_writers_publish_at_a_tick_while_another_one_adds() -> None:
    clock = LacClock(3600.0)
    published: list[LacPublisher] = []

    def publisher_of(window: AddWindow[str]) -> LacPublisher:
        window.add(b"a", "a")
        window.acknowledged(*window.flush())

        def publish() -> None:
            published.append(made)

        made = LacPublisher(window, publish, clock)
        made.moved()
        return made

    def window() -> AddWindow[str]:
        return AddWindow(ledger_id=7, content_term=0, ensemble_size=1, write_quorum=1, ack_quorum=1)

    idle, adding = [publisher_of(window()) for _ in range(100)], window()
    busy = publisher_of(adding)
    counts = []
    for _ in range(5):
        adding.add(b"a", "a")
        adding.acknowledged(*adding.flush())
        clock._tick()
        counts.append(len(published))
    assert counts == [0, 32, 64, 96, 100]
    assert published == idle
    clock._tick()
    assert published[-1] is busy
    assert clock._timer is None
