"""The form of ledger ids, entry ids and bookie ids, and the layout of keys in the metadata store.

The layout keeps every node of the tree below 10,000 children: a ledger id is written as 19 decimal digits,
cut 3-4-4-4-4.

`integer`, `boolean`, `optional` and `one_of` check fields of stored JSON documents. Each returns the checked
value, or raises ValueError.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from metadata.errors import InvalidArgumentError, MetadataCorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

LEDGER_ID_MAX = 2**63 - 1
ENTRY_ID_MAX = 2**62 - 1
NO_ENTRY = -1
"""The LAC of an empty ledger, and the last entry of an empty closed one."""

TERM_WRITER = 0
TERM_FINAL = 2**63 - 1
"""A bounded ledger knows only these two terms (rule 7)."""

TERM_COUNTED_MAX = TERM_FINAL - 1
"""An unbounded ledger's terms count from 0 up to here."""

BOOKIE_ID_BYTES_MAX = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:\-]{0,99}")
_BOOKIE_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.:\-]{{0,{BOOKIE_ID_BYTES_MAX - 1}}}")
_CUTS = (3, 7, 11, 15, 19)

KEY_CLUSTER = "cluster"
KEY_LEDGERS = "ledgers"
KEY_ID_FLOOR = "ledger-id-floor"
KEY_FRAGMENTS = "fragments"
KEY_UNBOUNDED = "unbounded"
KEY_AVAILABLE = "bookies/available"
KEY_COOKIES = "bookies/cookies"
KEY_AGES = "bookies/ages"
KEY_RETIRED = "bookies/retired"
KEY_ORDERS = "bookies/orders"
KEY_SET_BACKS = "set_backs"
KEY_REPAIR_TASKS = "autorecovery/tasks"
KEY_REPAIR_LOCKS = "autorecovery/locks"
KEY_REPAIR_WORKERS = "autorecovery/workers"
KEY_AUDITOR = "autorecovery/auditor"
KEY_REPAIR_PAUSED = "autorecovery/paused"
KEY_ELECTIONS = "elections"
KEY_RESTORE = "restore"


def check_bookie_id(bookie_id: str) -> str:
    """Return the id, or raise InvalidArgumentError where it could not name a node."""
    if not isinstance(bookie_id, str) or not _BOOKIE_ID.fullmatch(bookie_id):
        raise InvalidArgumentError(
            f"bookie id {bookie_id!r} is not legal: 1 to 100 letters, digits, '_', '.', ':' or '-', "
            "starting with a letter or digit"
        )
    return bookie_id


def check_ledger_id(ledger_id: int) -> int:
    """Return the id, or raise InvalidArgumentError."""
    if not isinstance(ledger_id, int) or isinstance(ledger_id, bool) or not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise InvalidArgumentError(f"ledger id {ledger_id!r} is not an integer from 0 to 2**63 - 1")
    return ledger_id


def check_name(name: str) -> str:
    """Return the name, or raise InvalidArgumentError. No name is a number, so it is never taken for an id."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"the name {name!r} is not legal: 1 to 100 letters, digits, '_', '.', ':' or '-', starting with "
            "a letter or '_'"
        )
    return name


def ledger_key(ledger_id: int) -> str:
    """Return the key of a ledger's metadata: 7 lives at `ledgers/000/0000/0000/0000/0007`."""
    return f"{KEY_LEDGERS}/{_path_of(ledger_id)}"


def fragments_key(ledger_id: int) -> str:
    """Return the key below which the pages of an unbounded ledger's fragment list are."""
    return f"{KEY_FRAGMENTS}/{_path_of(ledger_id)}"


def unbounded_key(name: str) -> str:
    """Return the key that maps a name to the unbounded ledger that has it."""
    return f"{KEY_UNBOUNDED}/{check_name(name)}"


def _path_of(ledger_id: int) -> str:
    digits = f"{check_ledger_id(ledger_id):019d}"
    return "/".join(digits[start:end] for start, end in zip((0, *_CUTS), _CUTS, strict=False))


def ledger_id_of(key: str) -> int:
    """Invert `ledger_key` and `fragments_key`; raises MetadataCorruptError for a key that is neither."""
    head, _, rest = key.partition("/")
    digits = rest.replace("/", "")
    if head not in (KEY_LEDGERS, KEY_FRAGMENTS) or not digits.isdecimal() or len(digits) != 19:
        raise MetadataCorruptError(f"{key!r} is not the key of a ledger")
    ledger_id = int(digits)
    if ledger_id > LEDGER_ID_MAX or _path_of(ledger_id) != rest:
        raise MetadataCorruptError(f"{key!r} is not the key of a ledger")
    return ledger_id


def available_key(bookie_id: str) -> str:
    """Return the key of a bookie's ephemeral registration."""
    return f"{KEY_AVAILABLE}/{check_bookie_id(bookie_id)}"


def cookie_key(bookie_id: str) -> str:
    """Return the key of a bookie's cookie."""
    return f"{KEY_COOKIES}/{check_bookie_id(bookie_id)}"


def age_key(bookie_id: str) -> str:
    """Return the key of a bookie's age."""
    return f"{KEY_AGES}/{check_bookie_id(bookie_id)}"


MALFORMED = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError)
"""The errors that parsing a foreign document may raise: `int(1e999)` and deep nesting among others."""


def integer(value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{value!r} is not an integer from {low} to {high}")
    return value


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def optional(value: object, low: int, high: int) -> int | None:
    return None if value is None else integer(value, low, high)


def one_of(value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return value
