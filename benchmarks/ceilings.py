"""Runs of the ceiling, each in processes of its own: three bookies and a client."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from benchmarks.load import Figures, Load, figures_of
from benchmarks.processes import start_module

if TYPE_CHECKING:
    from pathlib import Path

BOOKIES = 3


async def run_ceiling(directory: Path, blocks: str, loads: list[Load]) -> list[Figures]:
    """Measure loads one after another on one set of bookies; `blocks` is `fresh` or `recycled`.

    With fresh blocks the bookies write round a file of 1 GiB: give each load a set of its own then.
    """
    found = []
    async with contextlib.AsyncExitStack() as stack:
        log = directory / "ceiling.log"
        bookies = await asyncio.gather(
            *(
                start_module("benchmarks.ceiling.bookie", str(directory / f"ceiling-{n}"), blocks, log=log)
                for n in range(BOOKIES)
            )
        )
        for n, bookie in enumerate(bookies):
            await stack.enter_async_context(bookie)
            stack.callback((directory / f"ceiling-{n}").unlink, missing_ok=True)
        ports = [(await bookie.line(lambda line: line.startswith("ready "))).split()[1] for bookie in bookies]
        for load in loads:
            client = await start_module(
                "benchmarks.ceiling.client",
                ",".join(ports),
                *load.arguments(),
                log=log,
            )
            async with client:
                found.append(await figures_of(client, load))
    return found
