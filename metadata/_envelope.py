"""What a ZooKeeper node's data looks like: a value in its envelope, and a sequence of ids.

Pure. The envelope keeps the tokens of the last writers beside the value, as JSON that an operator can read:
`{"writers": ["token", …], "value": <the value, verbatim>}`.
"""

from __future__ import annotations

import json

from metadata.errors import MetadataCorruptError


def seal(value: bytes, writers: tuple[str, ...]) -> bytes:
    """Build a node's data; the value stands in it verbatim."""
    return b'{"writers": %b, "value": %b}' % (json.dumps(writers).encode(), value)


def unseal(key: str, data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Take a node's data apart into value and writers; raises MetadataCorruptError."""
    head, separator, rest = data.partition(b', "value": ')
    try:
        if separator and rest.endswith(b"}") and head.startswith(b'{"writers": '):
            return rest[:-1], _writers(json.loads(head.removeprefix(b'{"writers": ')))
        # Somebody has written it by hand, with other spaces: then the value is spelt anew.
        document = json.loads(data)
        return json.dumps(document["value"]).encode(), _writers(document["writers"])
    except (ValueError, KeyError, TypeError) as error:
        raise MetadataCorruptError(
            f"key {key!r} holds no value of ours: {error!r} in {data[:200]!r}"
        ) from error


def _writers(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"writers are {found!r}")
    return tuple(found)


def seal_counter(next_id: int) -> bytes:
    """Build the data of a sequence of ids."""
    return json.dumps({"next": next_id}).encode()


def unseal_counter(path: str, data: bytes) -> int:
    """Give the next id of a sequence; raises MetadataCorruptError."""
    try:
        next_id = json.loads(data)["next"]
        if not isinstance(next_id, int) or isinstance(next_id, bool) or next_id < 0:
            raise ValueError(f"next is {next_id!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise MetadataCorruptError(f"the sequence of ids at {path} is damaged: {error!r}") from error
    return next_id
