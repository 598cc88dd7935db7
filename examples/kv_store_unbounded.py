"""The key-value store of `kv_store.py` on an unbounded ledger, which its primaries take over in turn.

    python examples/kv_store_unbounded.py [METADATA] [--rounds 5]

Does and prints the same. The differences, to keep when you build your own:

- A position is an entry's id; ids go on from one primary to the next.
- Elected, the standby opens the ledger. That fences the former primary, and finds where the ledger ends. The
  standby reads entries that it has not seen yet through the handle that it writes with.
- A snapshot names the last write in it. Then the ledger is trimmed before that write, by whole fragments:
  `roll` begins a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import client_aio

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.kv_store import KeyValueStore, main

LEDGER, SNAPSHOTS = "kv", "kv-snapshots"
FRAGMENT_BYTES = 64 * 1024


class UnboundedKeyValueStore(KeyValueStore):
    """The data, and the id of the last write in it."""

    async def restore(self) -> None:
        """Load the newest snapshot."""
        self.position = -1
        with contextlib.suppress(client_aio.NoSuchLedgerError):
            async for entry in self.client.read_unbounded_ledger(SNAPSHOTS, None, follow=False):
                self.position, self.data = json.loads(entry.data)

    async def catch_up(self, *, follow: bool) -> None:
        """Apply the entries of the ledger behind this position."""
        while True:
            try:
                async for entry in self.client.read_unbounded_ledger(
                    LEDGER, self.position + 1, follow=follow
                ):
                    self.apply(entry.entry_id, entry.data)
                return
            except client_aio.NoSuchLedgerError:
                await asyncio.sleep(0.1)  # nobody has written yet
            except client_aio.NoSuchEntryError:
                await self.restore()  # trimmed meanwhile: there is a newer snapshot

    def append(self, record: bytes) -> asyncio.Future[Any]:
        ledger: client_aio.UnboundedLedgerWriter = self.log
        return ledger.add_entry(record)

    async def lead(self, election: client_aio.LeaderElection) -> None:
        """Fence the former primary, and serve until the election is lost or somebody else takes over."""
        with contextlib.suppress(client_aio.LedgerFencedError):
            async with self.client.open_unbounded_ledger(LEDGER, fragment_bytes=FRAGMENT_BYTES) as ledger:
                if self.position + 1 < ledger.first_entry:
                    await self.restore()
                async for entry in ledger.read(self.position + 1, ledger.last_add_confirmed):
                    self.apply(entry.entry_id, entry.data)
                self.log = ledger
                await election.lost()
        self.log = None

    async def snapshot(self) -> None:
        """Write a snapshot, then drop the entries that it replaces, in the order that the log needs too."""
        ledger = self.log
        with contextlib.suppress(client_aio.BookKeeperError):
            async with self.client.open_unbounded_ledger(SNAPSHOTS) as snapshots:
                await self.put("", "")
                position = self.position
                newest = await snapshots.add_entry(json.dumps([position, self.data]).encode())
                await snapshots.trim(newest)
            await ledger.trim(position)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(UnboundedKeyValueStore)))
