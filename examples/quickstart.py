"""Write a ledger and read it back.

bookie-aio cluster up -n 3 --dir /tmp/cluster        # in another terminal; prints the metadata URI
python examples/quickstart.py sqlite:///tmp/cluster/metadata.db
"""

from __future__ import annotations

import asyncio
import sys

import client_aio


async def main(metadata: str) -> None:
    async with client_aio.connect(metadata) as client:
        async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as ledger:
            first = await ledger.add_entry(b"hello")  # acknowledged: on the disks of two bookies
            futures = [ledger.add_entry(f"entry {n}".encode()) for n in range(1, 1000)]
            batch = ledger.add_batch([b"%d" % n for n in range(1000, 2000)])  # one future for all of them
            await ledger.flush()  # everything issued is acknowledged now
            print(
                f"ledger {ledger.ledger_id}: entries {first} to {futures[-1].result()}, then {batch.result()}"
            )

        reader = await client.open_ledger(ledger.ledger_id)
        async for entry in reader.read(0, 2):
            print(entry.entry_id, bytes(entry.data))
        await reader.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
