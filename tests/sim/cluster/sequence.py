"""Sequence numbers instead of addresses: sets of the product's objects iterate alike in every run.

asyncio keeps tasks in sets, and so do the server and the client with their connections and handles. The
default hash of an object is its address, which differs from run to run. Here it is a number that is drawn
when the hash is first asked for.
"""

from __future__ import annotations

import itertools

from bookie_aio.server.connection import Connection
from client_aio.autorecovery.service import AutoRecovery
from client_aio.bookies.connection import BookieConnection
from client_aio.ledger.reader import LedgerReader
from client_aio.ledger.writer import LedgerWriter

NUMBERED: list[type] = [Connection, BookieConnection, LedgerReader, LedgerWriter, AutoRecovery]
_numbers = itertools.count()
_numbered: dict[int, tuple[object, int]] = {}
"""Objects of compiled classes with their numbers, by address. They are kept: addresses are used again."""


def order_by_number() -> None:
    """Install that hash in the classes, and begin to count anew."""
    global _numbers
    _numbers = itertools.count()
    _numbered.clear()
    for cls in NUMBERED:
        cls.__hash__ = _hash


def _hash(self: object) -> int:
    own = getattr(self, "__dict__", None)
    if own is None:
        if id(self) not in _numbered:
            _numbered[id(self)] = self, next(_numbers)
        return _numbered[id(self)][1]
    number = own.get("sim_number")
    if number is None:
        number = own["sim_number"] = next(_numbers)
    return int(number)
