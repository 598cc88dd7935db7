"""Digests prove that an entry, or a LAC statement, is the one that was written.

`Digest` serves ledgers with checksums only ("crc32c"): it finds damage. `HmacDigest` serves ledgers with a
password ("hmac-sha256"): it finds forgery as well, by codes that only holders of the password can make. Both
have the same interface, so that no caller depends on the kind of a ledger's digest.

From a ledger's root (`metadata.model.passwords`), three secrets are derived, each under its own name:

    code key     HMAC(root, "bookie-aio codes 1" ‖ u64 ledger_id)       never leaves the client
    access key   HMAC(root, "bookie-aio access 1" ‖ u64 ledger_id)      never leaves the client
    token        HMAC(access key, "bookie " ‖ bookie_id)                sent to that one bookie

    code of a statement = HMAC(code key, "L" ‖ u64 ledger_id ‖ u64 content_term ‖ i64 lac ‖ i64 lafr)
    code of an entry    = HMAC(code key, "E" ‖ u64 ledger_id ‖ u64 content_term ‖ i64 lac ‖ i64 lafr
                                         ‖ u64 entry_id ‖ u64 running ‖ payload)

HMAC is HMAC-SHA256, all 32 bytes of it, and integers are little-endian. An entry's code covers the fields
that its checksum covers: ledger, content term, id, LAC, LAFR, running length, payload. A bookie knows only
its own token. It cannot make a code, and its token does not authorise requests at another bookie.

Invariant: no key, token or password is in a `repr`, and none is pickled.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from itertools import repeat
from typing import TYPE_CHECKING, NoReturn

from bookie_aio.wire.blocks import LacStatement, statement_crc, statement_is_intact
from metadata.errors import InvalidArgumentError, UnauthorizedAccessError
from metadata.model.ledger import DIGEST_CRC, DIGEST_HMAC
from metadata.model.passwords import check_password

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie_aio.wire.blocks import Block, Buffer
    from client_aio.core.add_window import Codes
    from metadata.model.ledger import LedgerMetadata

CODE_BYTES = 32

_LEDGER = struct.Struct("<Q")
_STATEMENT = struct.Struct("<QQqq")
_ENTRY = struct.Struct("<QQ")
_CODES = b"bookie-aio codes 1"
_ACCESS = b"bookie-aio access 1"
_BOOKIE = b"bookie "
_HASH_BLOCK_BYTES = 64
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))


class Digest:
    """Checksums only."""

    name = "checksum"

    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id

    def codes(self, content_term: int) -> Codes | None:
        """Return the function that computes a batch's codes, for an `AddWindow`; None without codes."""
        return None

    def token(self, bookie_id: str) -> bytes | None:
        """Return the token that authorises a request at that bookie; None if none is needed."""
        return None

    def statement(self, content_term: int, lac: int, lafr: int) -> LacStatement:
        """Make a LAC statement."""
        crc = statement_crc(self.ledger_id, content_term, lac, lafr)
        return LacStatement(content_term, lac, lafr, crc)

    def is_genuine(self, statement: LacStatement) -> bool:
        """Return whether a LAC statement is one that a writer of this ledger made."""
        return statement_is_intact(self.ledger_id, statement)

    def wrong_entries(self, block: Block) -> list[int]:
        """Return the ids of a block's entries that no writer of this ledger made.

        The caller has checked that the block is of this ledger, and that its head's checksum is right.
        """
        if block.payload_is_intact():
            return []
        return block.damaged_entries() or [block.first_entry]


class HmacDigest(Digest):
    """Checksums and authentication codes, under the root of the ledger's password."""

    name = "authentication code"

    def __init__(self, ledger_id: int, root: bytes) -> None:
        super().__init__(ledger_id)
        self._access_key = hmac.digest(root, _ACCESS + _LEDGER.pack(ledger_id), "sha256")
        code_key = hmac.digest(root, _CODES + _LEDGER.pack(ledger_id), "sha256")
        # HMAC by its definition, from copies of two states. This takes half the time of `hmac.digest` for an
        # entry of 100 bytes, and does not copy the payload.
        padded = code_key.ljust(_HASH_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(padded.translate(_INNER))
        self._outer = hashlib.sha256(padded.translate(_OUTER))

    def __repr__(self) -> str:
        return f"HmacDigest(ledger {self.ledger_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the key of a ledger is not pickled: open the ledger where it is used")

    def codes(self, content_term: int) -> Codes:
        def make(
            lac: int, lafr: int, ids: Sequence[int], running: Sequence[int], payloads: Sequence[bytes]
        ) -> list[bytes]:
            stated = _STATEMENT.pack(self.ledger_id, content_term, lac, lafr)
            return [self._code(b"L" + stated), *self._entry_codes(stated, ids, running, payloads)]

        return make

    def token(self, bookie_id: str) -> bytes:
        return hmac.digest(self._access_key, _BOOKIE + bookie_id.encode(), "sha256")

    def statement(self, content_term: int, lac: int, lafr: int) -> LacStatement:
        stated = _STATEMENT.pack(self.ledger_id, content_term, lac, lafr)
        return super().statement(content_term, lac, lafr)._replace(mac=self._code(b"L" + stated))

    def is_genuine(self, statement: LacStatement) -> bool:
        stated = _STATEMENT.pack(self.ledger_id, statement.content_term, statement.lac, statement.lafr)
        return super().is_genuine(statement) and hmac.compare_digest(self._code(b"L" + stated), statement.mac)

    def wrong_entries(self, block: Block) -> list[int]:
        wrong = super().wrong_entries(block)
        if wrong:
            return wrong
        if block.mac_bytes != CODE_BYTES or not self.is_genuine(block.statement):
            return list(block.entry_ids)
        stated = _STATEMENT.pack(self.ledger_id, block.content_term, block.lac, block.lafr)
        ought = self._entry_codes(stated, block.entry_ids, block.running, block.payloads())
        pairs = zip(block.entry_ids, ought, block.macs, strict=True)
        return [entry_id for entry_id, code, found in pairs if not hmac.compare_digest(code, found)]

    def _entry_codes(
        self,
        stated: bytes,
        ids: Sequence[int],
        running: Sequence[int] | memoryview,
        payloads: Sequence[Buffer],
    ) -> list[bytes]:
        heads = map(b"".join, zip(repeat(b"E" + stated), map(_ENTRY.pack, ids, running), strict=False))
        return list(map(self._code, heads, payloads))

    def _code(self, head: bytes, payload: Buffer = b"") -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(head)
        inner.update(payload)
        outer.update(inner.digest())
        return outer.digest()


def check_choice(digest: str, password: bytes | bytearray | memoryview) -> bytes:
    """Return a new ledger's password; b"" for none.

    Raises:
        InvalidArgumentError: the digest needs a password and none is given, or the other way round.
    """
    if digest == DIGEST_HMAC:
        return check_password(password)
    if not isinstance(password, (bytes, bytearray, memoryview)):
        raise InvalidArgumentError(f"a password is bytes, not {type(password).__name__}")
    if password:
        raise InvalidArgumentError(
            f"a password is of no use with digest {digest!r}: authentication codes are made with "
            f"digest {DIGEST_HMAC!r}"
        )
    return b""


def check_root(metadata: LedgerMetadata, password: bytes, root: bytes | None) -> Digest:
    """Return the digest of a ledger that is opened, if the password is right.

    Args:
        root: the result of `PasswordRecord.stretch`; None if the ledger or the caller has no password.

    Raises:
        UnauthorizedAccessError: the password is wrong or missing, or the ledger has none. If a superfluous
            password were ignored, a reader would trust entries that no code protects.
    """
    ledger_id = metadata.ledger_id
    if metadata.password is None:
        if password:
            raise UnauthorizedAccessError(
                f"ledger {ledger_id} has no password (its digest is {DIGEST_CRC}): open it without one",
                ledger_id=ledger_id,
            )
        return Digest(ledger_id)
    if not password:
        raise UnauthorizedAccessError(f"ledger {ledger_id} needs a password", ledger_id=ledger_id)
    if root is None or not metadata.password.is_of(root):
        raise UnauthorizedAccessError(f"wrong password for ledger {ledger_id}", ledger_id=ledger_id)
    return HmacDigest(ledger_id, root)
