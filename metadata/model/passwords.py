"""The record of a password in a ledger's metadata: enough to recognise a wrong one, too little to use. Pure.

The password is never stored and never sent. `stretch` makes a *root* of it (scrypt, with the ledger's own
salt). The client derives its keys and tokens from the root (`client_aio.core.digest`). `verifier_of` derives
the verifier that the metadata keep: a hash of the root for this one purpose. Nothing else can be derived from
the verifier. A reader of the metadata can only guess passwords, at the cost of one scrypt each.

Stored form, the member "password" of a ledger's metadata:

    {"kdf": "scrypt", "n": 16384, "r": 8, "p": 1, "salt": "<base64>", "verifier": "<base64>"}

The cost is stored beside the salt, so that it can be raised for new ledgers. A cost that was read is bounded
before use, so that forged metadata cannot make a client compute for minutes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

from metadata.errors import InvalidArgumentError

KDF = "scrypt"
SALT_BYTES = 16
ROOT_BYTES = 32
PASSWORD_BYTES_MAX = 1024
_N, _R, _P = 2**14, 8, 1
"""Some 50 ms and 16 MiB for each guess."""
_MEMORY_BYTES_MAX = 64 * 1024 * 1024
_COST_MAX = 2**21
_VERIFIER_PURPOSE = b"bookie-aio verifier 1"


@dataclass(frozen=True, slots=True)
class PasswordRecord:
    """Salt, cost and verifier of one ledger's password."""

    salt: bytes = field(repr=False)
    verifier: bytes = field(repr=False)
    n: int = _N
    r: int = _R
    p: int = _P

    def __post_init__(self) -> None:
        """Raise ValueError for a record that no release writes, before any computation with it."""
        if len(self.salt) != SALT_BYTES or len(self.verifier) != ROOT_BYTES:
            raise ValueError(f"a salt of {len(self.salt)} and a verifier of {len(self.verifier)} bytes")
        is_power = self.n > 1 and self.n & (self.n - 1) == 0
        if (
            not is_power
            or self.r < 1
            or self.p < 1
            or _memory_bytes(self.n, self.r, self.p) > _MEMORY_BYTES_MAX
        ):
            raise ValueError(f"scrypt with n {self.n}, r {self.r}, p {self.p} is out of range")
        if self.n * self.r * self.p > _COST_MAX:
            raise ValueError(f"scrypt with n {self.n}, r {self.r}, p {self.p} costs too much")

    def stretch(self, password: bytes) -> bytes:
        """Return the root of a password, right or wrong. Takes some 50 ms of a processor."""
        return _stretch(password, self.salt, self.n, self.r, self.p)

    def is_of(self, root: bytes) -> bool:
        """Return whether the root comes from the right password; takes the same time either way."""
        return hmac.compare_digest(verifier_of(root), self.verifier)

    def to_document(self) -> dict[str, object]:
        """Return the stored form."""
        return {
            "kdf": KDF,
            "n": self.n,
            "r": self.r,
            "p": self.p,
            "salt": base64.b64encode(self.salt).decode(),
            "verifier": base64.b64encode(self.verifier).decode(),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> PasswordRecord:
        """Parse the stored form; raises ValueError, TypeError or KeyError where the document is damaged."""
        if document["kdf"] != KDF:
            raise ValueError(f"key derivation {document['kdf']!r} is unknown")
        numbers = [document[name] for name in ("n", "r", "p")]
        if not all(type(number) is int for number in numbers):
            raise TypeError(f"scrypt with {numbers!r}")
        salt, verifier = (base64.b64decode(document[name], validate=True) for name in ("salt", "verifier"))
        return cls(salt, verifier, *numbers)


def new_password(password: bytes, salt: bytes) -> tuple[PasswordRecord, bytes]:
    """Return the record of a new ledger's password, and its root. Takes some 50 ms of a processor.

    Args:
        salt: `SALT_BYTES` drawn for this ledger. It need not be secret, but must not be used twice.
    """
    root = _stretch(password, salt, _N, _R, _P)
    return PasswordRecord(salt, verifier_of(root)), root


def verifier_of(root: bytes) -> bytes:
    """Return the verifier of a root, as the metadata keep it."""
    return hmac.digest(root, _VERIFIER_PURPOSE, "sha256")


def check_password(password: bytes | bytearray | memoryview) -> bytes:
    """Return the password, or raise InvalidArgumentError: not bytes, empty, or longer than 1,024 bytes."""
    if not isinstance(password, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"a password is bytes, not {type(password).__name__}")
    if not 1 <= len(password) <= PASSWORD_BYTES_MAX:
        raise InvalidArgumentError(f"a password has 1 to {PASSWORD_BYTES_MAX:,} bytes, not {len(password):,}")
    return bytes(password)


def _memory_bytes(n: int, r: int, p: int) -> int:
    return 128 * r * (n + p + 2)


def _stretch(password: bytes, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(
        password, salt=salt, n=n, r=r, p=p, maxmem=2 * _memory_bytes(n, r, p), dklen=ROOT_BYTES
    )
