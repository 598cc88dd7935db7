"""A process that repairs a ledger and, at a step of its progress, stands still to be killed.

    python -m tests.support.repairer URI LEDGER REPLACE BY STEP

Prints a line when it stands still; whoever started it kills it then.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from itertools import count

import client_aio
from client_aio import RepairProgress


async def main(uri: str, ledger_id: int, replace: str, by: str, step: int) -> None:
    """Repair, up to that step."""
    steps = count(1)

    def on_progress(progress: RepairProgress) -> None:
        if next(steps) == step:
            sys.stdout.write(f"{progress}\n")
            sys.stdout.flush()
            signal.pause()

    async with client_aio.connect(uri) as client:
        await client.repair_ledger(ledger_id, replace=replace, by=by, on_progress=on_progress)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])))
