"""The product's writing client, under the load that the ceiling's gets.

    python -m benchmarks.product_client URI ENTRY_BYTES IN_FLIGHT SECONDS

Creates a ledger with E = Qw = 3 and Qa = 2, writes, closes and deletes it. Prints the figures as one line of
JSON.
"""

from __future__ import annotations

import json
import sys

import uvloop

import client_aio
from benchmarks.load import Load, drive


async def main() -> None:
    uri, entry_bytes, in_flight, seconds = sys.argv[1:]
    load = Load(int(entry_bytes), int(in_flight), float(seconds))
    async with client_aio.connect(uri) as client:
        async with client.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2) as ledger:
            figures = await drive(ledger.add_entry, load)
            await ledger.flush()
        await client.delete_ledger(ledger.ledger_id)
    print(json.dumps(figures.to_dict()))


if __name__ == "__main__":
    uvloop.run(main())
