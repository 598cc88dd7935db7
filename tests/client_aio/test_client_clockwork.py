"""What a writer does by the clock, and that it does nothing any more once the writer has ended."""

from __future__ import annotations

import asyncio

from client_aio.clockwork import LacPublisher
from client_aio.core.window import AddWindow


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
    publisher = LacPublisher(window, lambda: published.append(window.lac), 0.001)
    publisher.moved()
    publisher.stop()
    window.abort()
    publisher.moved()  # the third bookie's answer comes after the writer has failed
    over = loop.create_future()
    loop.call_later(0.01, over.set_result, None)
    await over
    assert published == []
    assert publisher._timer is None
