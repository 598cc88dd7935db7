"""What metadata keep of a password: enough to tell a wrong one, and nothing that could be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from metadata.errors import InvalidArgumentError, MetadataCorruptError
from metadata.model.ledger import LedgerMetadata
from metadata.model.passwords import PasswordRecord, check_password, new_password

PASSWORD = b"correct horse"
RECORD, ROOT = new_password(PASSWORD, bytes(range(16)))


def metadata_of(record: PasswordRecord | None, digest: str = "hmac-sha256") -> LedgerMetadata:
    return LedgerMetadata.new(
        7, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"], digest=digest, password=record
    )


def test_the_right_password_leads_to_the_same_root_and_a_wrong_one_does_not() -> None:
    assert RECORD.stretch(PASSWORD) == ROOT
    assert RECORD.is_of(ROOT)
    assert not RECORD.is_of(RECORD.stretch(b"correct hors"))


def test_equal_passwords_of_two_ledgers_have_nothing_in_common() -> None:
    other, root = new_password(PASSWORD, bytes(16))
    assert root != ROOT
    assert other.verifier != RECORD.verifier
    assert not other.is_of(ROOT)


def test_the_record_survives_the_metadata_store_and_shows_no_secret() -> None:
    stored = metadata_of(RECORD).to_json()
    assert LedgerMetadata.from_json(stored) == metadata_of(RECORD)
    for secret in (PASSWORD, ROOT, ROOT.hex().encode()):
        assert secret not in stored
    assert "verifier" not in repr(metadata_of(RECORD))
    assert LedgerMetadata.from_json(stored).begin_recovery().close(-1, 0).password == RECORD


def test_a_password_and_authentication_codes_go_together() -> None:
    with pytest.raises(InvalidArgumentError, match="do not go together"):
        metadata_of(None)
    with pytest.raises(InvalidArgumentError, match="do not go together"):
        metadata_of(RECORD, digest="crc32c")
    document = json.loads(metadata_of(RECORD).to_json())
    del document["password"]  # somebody who strips a ledger of its protection is noticed
    with pytest.raises(MetadataCorruptError, match="do not go together"):
        LedgerMetadata.from_json(json.dumps(document).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"kdf": "none"},
        {"n": 2**30},
        {"n": 1000},
        {"n": 1},
        {"n": 16384.0},
        {"n": True},
        {"r": 0},
        {"p": 10**9},
        {"salt": "AAAA"},
        {"salt": "!"},
        {"verifier": ""},
        {"verifier": None},
    ],
)
def test_a_record_that_no_release_writes_is_refused_before_anything_is_computed(
    change: dict[str, Any],
) -> None:
    document = json.loads(metadata_of(RECORD).to_json())
    document["password"].update(change)
    with pytest.raises(MetadataCorruptError, match="damaged"):
        LedgerMetadata.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("password", [b"", b"x" * 1025, "text", None])
def test_what_is_no_password_is_refused(password: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a password"):
        check_password(password)
    assert check_password(bytearray(b"x")) == b"x"
