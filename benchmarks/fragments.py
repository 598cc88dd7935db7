"""Unbounded ledgers of many fragments: what opening, adding, reading and trimming cost.

    python -m benchmarks.fragments [--fragments 200 20000] [--rounds 20] [-o table|json]

For each length a ledger is made with so many fragments of five entries each (the fragments are begun by the
product's own rolls), and then: opened for writing and the first entry acknowledged, read from its middle,
trimmed to its last tenth; and the largest node of the metadata store is looked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import client_aio
from benchmarks.running import Workplace, run
from metadata.ids import fragments_key, ledger_key
from metadata.open import open_store
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from metadata.store import MetadataStore

ENTRIES = 5
READ_ENTRIES = 100


async def grow(client: client_aio.Client, name: str, fragments: int) -> int:
    """Make a ledger of so many fragments; gives its id."""
    async with client.open_unbounded_ledger(name) as ledger:
        for number in range(fragments):
            if number:
                await ledger.roll()
            await ledger.add_entries(b"%d.%d" % (number, entry) for entry in range(ENTRIES))
        return ledger.ledger_id


async def measure(uri: str, fragments: int, rounds: int) -> dict[str, float]:
    """Make a ledger of so many fragments, and measure; times in milliseconds."""
    name = f"of-{fragments}"
    async with client_aio.connect(uri) as client:
        ledger_id = await grow(client, name, fragments)
    async with client_aio.connect(uri) as client, await open_store(uri) as store:
        await client.ledger_metadata(name)  # connected, by now
        figures: dict[str, float] = {"fragments": fragments}
        opened, first, middle = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            started = time.perf_counter()
            ledger = await client.open_unbounded_ledger(name)
            opened.append(1e3 * (time.perf_counter() - started))
            await ledger.add_entry(b"one more")
            first.append(1e3 * (time.perf_counter() - started))
            await ledger.close()
            started = time.perf_counter()
            at = fragments * ENTRIES // 2
            async with aclosing(client.read_unbounded_ledger(name, at)) as entries:
                seen = [(await anext(entries)).entry_id for _ in range(READ_ENTRIES)]
            assert seen == list(range(at, at + READ_ENTRIES))
            middle.append(1e3 * (time.perf_counter() - started))
        figures["open, ms"] = statistics.median(opened)
        figures["open and first add, ms"] = statistics.median(first)
        figures[f"read {READ_ENTRIES} from the middle, ms"] = statistics.median(middle)
        figures["pages"] = len(await store.children(fragments_key(ledger_id)))
        figures["largest node, bytes"] = await largest(store, ledger_id)
        async with client.open_unbounded_ledger(name) as ledger:
            started = time.perf_counter()
            left = await ledger.trim(fragments * ENTRIES * 9 // 10)
            figures["trim nine tenths, ms"] = 1e3 * (time.perf_counter() - started)
            assert left == fragments * ENTRIES * 9 // 10
        figures["pages left"] = len(await store.children(fragments_key(ledger_id)))
    return figures


async def largest(store: MetadataStore, ledger_id: int) -> int:
    """Give the size of the largest value that the ledger has in the metadata store."""
    folder = fragments_key(ledger_id)
    keys = [ledger_key(ledger_id), *(f"{folder}/{name}" for name in await store.children(folder))]
    return max([len((await store.read(key)).value) for key in keys])


async def main(lengths: list[int], rounds: int, home: Path, show: Callable[[dict[str, float]], None]) -> None:
    """Measure each length."""
    async with Cluster(home, bookies=4) as cluster:
        for fragments in lengths:
            show(await measure(cluster.uri, fragments, rounds))


def _show(figures: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures), flush=True)
    else:
        print(*(f"{name}: {value:,.1f}" for name, value in figures.items()), sep="\n", end="\n\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fragments", type=int, nargs="+", default=[200, 20_000], help="each at least 50")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    chosen = parser.parse_args()
    with Workplace(None, "fragments-") as place:
        run(
            main(
                chosen.fragments, chosen.rounds, place.path,
                lambda figures: _show(figures, chosen.output == "json"),
            )
        )  # fmt: skip
    sys.exit(0)
