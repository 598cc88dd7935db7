"""Remembered: inside, bytes that have been parsed before are not parsed again.

Bookies, clients and checkers of a simulation all read the same few values of the metadata store, and each
parses them. The results are immutable, so they can be shared. The hash of a ledger's password is remembered
as well, and made at a small cost here. In production it costs as much as thousands of callbacks, and a log
has a salt for each of its ledgers.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING

from metadata import ids
from metadata.access.bookies import BookieRecord, ClusterRecord, Cookie
from metadata.model import passwords
from metadata.model.ledger import LedgerMetadata
from metadata.model.log import LogHead

if TYPE_CHECKING:
    from collections.abc import Iterator

_PARSED: tuple[type, ...] = (BookieRecord, ClusterRecord, Cookie, LedgerMetadata, LogHead)
"""Frozen, and made by a `from_json`."""
_PARSER = "from_json"
_VALUES_MAX = 1024


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Remember what the classes parse; what they refuse is refused anew each time."""
    stretch = passwords._stretch

    def stretch_a_little(password: bytes, salt: bytes, n: int, r: int, p: int) -> bytes:
        return stretch(password, salt, 2, 1, 1)

    passwords._stretch = lru_cache(_VALUES_MAX)(stretch_a_little)
    path_of = ids._path_of
    ids._path_of = lru_cache(_VALUES_MAX)(path_of)  # whoever follows the store asks again at each change
    own = {cls: inspect.getattr_static(cls, _PARSER) for cls in _PARSED if _PARSER in vars(cls)}
    for cls in _PARSED:
        setattr(cls, _PARSER, staticmethod(lru_cache(_VALUES_MAX)(getattr(cls, _PARSER))))
    try:
        yield
    finally:
        passwords._stretch = stretch
        ids._path_of = path_of
        for cls in _PARSED:
            if cls in own:
                setattr(cls, _PARSER, own[cls])
            else:
                delattr(cls, _PARSER)
