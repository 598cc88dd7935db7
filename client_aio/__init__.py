"""The asynchronous client of bookie-aio: a replicated, durable log store.

    async with client_aio.connect("sqlite:///var/lib/bookies/metadata.db") as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"hello")

Read first: `client` (what there is), `writer` and `reader` (the handles), `core` (the protocol's decisions).
"""

from client_aio.client import Client, connect
from client_aio.config import ClientConfig
from client_aio.core.placement import Choice, PlacementPolicy, Seating, WeightedRandom
from client_aio.core.racks import RackAware
from client_aio.entries import Entry, EntryBatch
from client_aio.reader import LedgerReader
from client_aio.repair import RepairedFragment, RepairProgress, RepairReport
from client_aio.replicas import Replica
from client_aio.writer import LedgerWriter
from metadata.errors import *  # noqa: F403
from metadata.errors import __all__ as _errors
from metadata.ledger import Fragment, LedgerMetadata, LedgerState

__all__ = [
    "Choice",
    "Client",
    "ClientConfig",
    "Entry",
    "EntryBatch",
    "Fragment",
    "LedgerMetadata",
    "LedgerReader",
    "LedgerState",
    "LedgerWriter",
    "PlacementPolicy",
    "RackAware",
    "RepairProgress",
    "RepairReport",
    "RepairedFragment",
    "Replica",
    "Seating",
    "WeightedRandom",
    "connect",
    *_errors,
]
