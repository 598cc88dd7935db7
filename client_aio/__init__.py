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
from client_aio.election import LeaderElection
from client_aio.entries import Entry, EntryBatch
from client_aio.log.adding import AddedToLog
from client_aio.log.listing import LogMetadata
from client_aio.log.records import LogBatch, LogRecord
from client_aio.log.sweeping import SweepReport
from client_aio.log.writer import LogWriter
from client_aio.reader import LedgerReader
from client_aio.repair import RepairedFragment, RepairProgress, RepairReport
from client_aio.replicas import Replica
from client_aio.unbounded.reader import UnboundedLedgerReader
from client_aio.unbounded.writer import UnboundedLedgerWriter
from client_aio.writer import LedgerWriter
from metadata.errors import *  # noqa: F403
from metadata.errors import __all__ as _errors
from metadata.ledger import Fragment, LedgerMetadata, LedgerState
from metadata.log import LogRow, Position

__all__ = [
    "AddedToLog",
    "Choice",
    "Client",
    "ClientConfig",
    "Entry",
    "EntryBatch",
    "Fragment",
    "LeaderElection",
    "LedgerMetadata",
    "LedgerReader",
    "LedgerState",
    "LedgerWriter",
    "LogBatch",
    "LogMetadata",
    "LogRecord",
    "LogRow",
    "LogWriter",
    "PlacementPolicy",
    "Position",
    "RackAware",
    "RepairProgress",
    "RepairReport",
    "RepairedFragment",
    "Replica",
    "Seating",
    "SweepReport",
    "UnboundedLedgerReader",
    "UnboundedLedgerWriter",
    "WeightedRandom",
    "connect",
    *_errors,
]
