"""Readers that follow a log from wherever it ends when they come to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from client_aio import LogRecord
from tests.support.rawclient import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from client_aio import LogWriter


async def appended_until_followed(log: LogWriter, following: AsyncIterator[LogRecord]) -> LogRecord:
    """Append until a reader that follows from the end has begun; then it gives all of the rest, in order.

    Returns:
        The last record appended, which is the last one that the reader gave.
    """
    coming = asyncio.ensure_future(anext(following))
    appended: list[LogRecord] = []
    while not coming.done():
        data = b"followed %d" % len(appended)
        appended.append(LogRecord(await log.append(data), data))
        await asyncio.wait([coming], timeout=0.02)
    first = appended.index(await coming)
    async with asyncio.timeout(WAIT_S):
        assert [await anext(following) for _ in appended[first + 1 :]] == appended[first + 1 :]
    return appended[-1]
