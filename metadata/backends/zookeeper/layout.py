"""How keys and values lie in ZooKeeper: the nodes of the store's own, and the data of a node. Pure.

A node's data is a JSON object that an operator can read: `{"writers": ["token", …], "value": <the value,
verbatim>}`. A parent without a value has no data. The tokens are those of the last writers. Where the key was
created in a node that existed, by that node's n-th change, `"born": n` comes before the value.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from metadata.errors import MetadataCorruptError
from metadata.ids import MALFORMED

KEY_OWN = ".store"
KEY_IDS = f"{KEY_OWN}/ids"
KEY_SYNC = f"{KEY_OWN}/sync"
KEY_REGISTERED = f"{KEY_OWN}/registered"
OWN_KEYS = (KEY_OWN, KEY_IDS, KEY_REGISTERED, KEY_SYNC)


class Unsealed(NamedTuple):
    """The parts of a node's data."""

    value: bytes
    writers: tuple[str, ...]
    born: int


def seal(value: bytes, writers: tuple[str, ...], born: int = 0) -> bytes:
    """Build a node's data, which has the value verbatim."""
    more = b', "born": %d' % born if born else b""
    return b'{"writers": %b%b, "value": %b}' % (json.dumps(writers).encode(), more, value)


def unseal(key: str, data: bytes) -> Unsealed:
    """Parse a node's data; raises MetadataCorruptError."""
    head, separator, rest = data.partition(b', "value": ')
    try:
        if separator and rest.endswith(b"}") and head.startswith(b'{"writers": '):
            document = json.loads(head + b"}")
            return Unsealed(rest[:-1], _writers(document["writers"]), _born(document))
        # Written by hand, with other spaces: the value is then serialised anew, not returned verbatim.
        document = json.loads(data)
        value = json.dumps(document["value"]).encode()
        return Unsealed(value, _writers(document["writers"]), _born(document))
    except MALFORMED as error:
        raise MetadataCorruptError(
            f"key {key!r} holds no value of ours: {error!r} in {data[:200]!r}"
        ) from error


def _writers(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"writers are {found!r}")
    return tuple(found)


def _born(document: dict[str, object]) -> int:
    born = document.get("born", 0)
    if not isinstance(born, int) or isinstance(born, bool) or not 0 <= born < 1 << 32:
        raise ValueError(f"born is {born!r}")
    return born


def seal_counter(next_id: int) -> bytes:
    """Build the data of a sequence of ids."""
    return json.dumps({"next": next_id}).encode()


def unseal_counter(path: str, data: bytes) -> int:
    """Return the next id of a sequence; raises MetadataCorruptError."""
    try:
        next_id = json.loads(data)["next"]
        if not isinstance(next_id, int) or isinstance(next_id, bool) or next_id < 0:
            raise ValueError(f"next is {next_id!r}")
    except MALFORMED as error:
        raise MetadataCorruptError(f"the sequence of ids at {path} is damaged: {error!r}") from error
    return next_id
