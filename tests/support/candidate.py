"""A candidate of an election as a process of its own: says on standard output when it leads.

python -m tests.support.candidate URI NAME VALUE
"""

from __future__ import annotations

import asyncio
import sys

from client_aio.election import LeaderElection
from metadata.backends.uri import open_store


async def main(uri: str, name: str, value: str) -> None:
    """Stand until ended."""
    async with (
        await open_store(uri, create=True, operation_timeout_s=10, session_timeout_s=1.5) as store,
        LeaderElection(store, name, value.encode()) as election,
    ):
        print("stands", flush=True)
        async for is_leader in election.changes():
            print("leads" if is_leader else "follows", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
