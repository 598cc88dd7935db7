"""The asynchronous client of bookie-aio: a replicated, durable log store.

    async with client_aio.connect("sqlite:///var/lib/bookies/metadata.db") as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"hello")

Read first: `client` (the operations), `ledger.writer` and `ledger.reader` (the handles), `core` (the
protocol's decisions).

A public name is imported when it is first used: a command, or a bookie, needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from metadata.errors import *  # noqa: F403
from metadata.errors import __all__ as _errors

if TYPE_CHECKING:
    from client_aio.admin.repair import RepairedFragment, RepairProgress, RepairReport
    from client_aio.admin.replicas import Replica
    from client_aio.client import Client, connect
    from client_aio.config import ClientConfig, tune_gc
    from client_aio.core.placement import Choice, PlacementPolicy, RackAware, Seating, WeightedRandom
    from client_aio.election import LeaderElection
    from client_aio.healing import WriterState
    from client_aio.ledger.entry_reader import Entry, EntryBatch
    from client_aio.ledger.reader import LedgerReader
    from client_aio.ledger.writer import LedgerWriter
    from client_aio.log.add_ledgers import AddedToLog
    from client_aio.log.gaps import LogGap
    from client_aio.log.reader import LogBatch, LogRecord
    from client_aio.log.takeover import LogMetadata
    from client_aio.log.truncation import SweepReport
    from client_aio.log.writer import LogWriter
    from client_aio.unbounded.operations import UnboundedLedgerReader
    from client_aio.unbounded.writer import UnboundedLedgerWriter
    from metadata.model.given_up import GivenUp
    from metadata.model.ledger import Fragment, LedgerMetadata, LedgerState
    from metadata.model.log import LogRow, Position

__all__ = [
    "AddedToLog",
    "Choice",
    "Client",
    "ClientConfig",
    "Entry",
    "EntryBatch",
    "Fragment",
    "GivenUp",
    "LeaderElection",
    "LedgerMetadata",
    "LedgerReader",
    "LedgerState",
    "LedgerWriter",
    "LogBatch",
    "LogGap",
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
    "WriterState",
    "connect",
    "tune_gc",
    *_errors,
]

_OF_MODULES = {
    "client_aio.client": ("Client", "connect"),
    "client_aio.config": ("ClientConfig", "tune_gc"),
    "client_aio.core.placement": ("Choice", "PlacementPolicy", "RackAware", "Seating", "WeightedRandom"),
    "client_aio.election": ("LeaderElection",),
    "client_aio.ledger.entry_reader": ("Entry", "EntryBatch"),
    "client_aio.log.add_ledgers": ("AddedToLog",),
    "client_aio.log.takeover": ("LogMetadata",),
    "client_aio.log.gaps": ("LogGap",),
    "client_aio.log.reader": ("LogBatch", "LogRecord"),
    "client_aio.log.truncation": ("SweepReport",),
    "client_aio.healing": ("WriterState",),
    "client_aio.log.writer": ("LogWriter",),
    "client_aio.ledger.reader": ("LedgerReader",),
    "client_aio.admin.repair": ("RepairedFragment", "RepairProgress", "RepairReport"),
    "client_aio.admin.replicas": ("Replica",),
    "client_aio.unbounded.operations": ("UnboundedLedgerReader",),
    "client_aio.unbounded.writer": ("UnboundedLedgerWriter",),
    "client_aio.ledger.writer": ("LedgerWriter",),
    "metadata.model.given_up": ("GivenUp",),
    "metadata.model.ledger": ("Fragment", "LedgerMetadata", "LedgerState"),
    "metadata.model.log": ("LogRow", "Position"),
}
_MODULES = {name: module for module, names in _OF_MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
