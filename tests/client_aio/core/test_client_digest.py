"""Digests: what each kind of forgery looks like, and that it is seen."""

from __future__ import annotations

import hmac
import pickle
import struct
from itertools import accumulate
from typing import Any

import pytest

from bookie_aio.wire.blocks import Block, LacStatement, encode_block, statement_crc
from bookie_aio.wire.messages import ReadAnswer, Stop
from client_aio.core.digest import Digest, HmacDigest, check_choice, check_root
from client_aio.core.read_plan import ClassRange, checked_blocks
from metadata.errors import DigestMismatchError, InvalidArgumentError, UnauthorizedAccessError
from metadata.model.ledger import LedgerMetadata
from metadata.model.passwords import new_password

LEDGER = 7
ROOT = bytes(range(32))
DIGEST = HmacDigest(LEDGER, ROOT)
PAYLOADS = [b"zero", b"", b"two" * 500, b"three"]
RUNNING = list(accumulate(map(len, PAYLOADS), initial=100))[1:]


def build(digest: HmacDigest = DIGEST, **changes: Any) -> Block:
    """Return a block as a writer makes it; what is changed here is signed as well."""
    fields: dict[str, Any] = {
        "ledger_id": LEDGER,
        "content_term": 0,
        "first_entry": 10,
        "stride": 1,
        "lac": 9,
        "lafr": -1,
        "payloads": PAYLOADS,
        "running": RUNNING,
    } | changes
    behind = fields["first_entry"] + fields["stride"] * len(fields["payloads"])
    ids = range(fields["first_entry"], behind, fields["stride"])
    make = digest.codes(fields["content_term"])
    macs = make(fields["lac"], fields["lafr"], ids, fields["running"], fields["payloads"])
    return Block.parse(memoryview(encode_block(**fields, macs=macs)))


def with_codes_of(genuine: Block, **changes: Any) -> Block:
    """Return a block whose checksums all hold, and whose codes are those of another."""
    fields: dict[str, Any] = {
        "ledger_id": genuine.ledger_id,
        "content_term": genuine.content_term,
        "first_entry": genuine.first_entry,
        "stride": genuine.stride,
        "lac": genuine.lac,
        "lafr": genuine.lafr,
        "payloads": [bytes(payload) for payload in genuine.payloads()],
        "running": list(genuine.running),
        "macs": [genuine.statement.mac, *genuine.macs],
    } | changes
    return Block.parse(memoryview(encode_block(**fields)))


def test_what_the_writer_made_is_accepted_whole_and_cut() -> None:
    block = build(stride=3)
    assert DIGEST.wrong_entries(block) == []
    begin, end = block.payload_range(1, 3)
    cut = Block.parse(memoryview(block.cut_head(1, 3) + bytes(block.view[begin:end])))
    assert cut.is_partial
    assert DIGEST.wrong_entries(cut) == []
    assert DIGEST.is_genuine(cut.statement)


def test_codes_are_as_the_protocol_says() -> None:
    code_key = hmac.digest(ROOT, b"bookie-aio codes 1" + struct.pack("<Q", LEDGER), "sha256")
    block = build()
    stated = struct.pack("<QQqq", LEDGER, 0, 9, -1)
    assert block.statement.mac == hmac.digest(code_key, b"L" + stated, "sha256")
    entry = b"E" + stated + struct.pack("<QQ", 12, RUNNING[2]) + PAYLOADS[2]
    assert block.macs[2] == hmac.digest(code_key, entry, "sha256")
    access = hmac.digest(ROOT, b"bookie-aio access 1" + struct.pack("<Q", LEDGER), "sha256")
    assert DIGEST.token("b1") == hmac.digest(access, b"bookie b1", "sha256")


@pytest.mark.parametrize(
    "changes",
    [
        {"lac": 8},
        {"lafr": 0},
        {"content_term": 1},
        {"running": [length + 1 for length in RUNNING]},
        {"payloads": [b"ZERO", *PAYLOADS[1:]]},
        {"payloads": [b"zer", *PAYLOADS[1:]]},
        {"payloads": [b"zerot", b"", *PAYLOADS[2:]]},
        {"first_entry": 14},
        {"stride": 2},
        {"ledger_id": 8},
        {"macs": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_change_to_anything_that_a_code_covers_is_seen(changes: dict[str, Any]) -> None:
    forged = with_codes_of(build(), **changes)
    assert forged.payload_is_intact()  # whoever forges can make checksums
    assert not forged.damaged_entries()
    assert DIGEST.wrong_entries(forged)


def test_swapped_entries_are_named() -> None:
    genuine = build()
    macs = [genuine.statement.mac, genuine.macs[0], genuine.macs[3], genuine.macs[2], genuine.macs[1]]
    swapped = with_codes_of(genuine, payloads=[PAYLOADS[at] for at in (0, 3, 2, 1)], macs=macs)
    assert DIGEST.wrong_entries(swapped) == [11, 13]


def test_an_entry_of_another_ledger_under_the_same_password_is_seen() -> None:
    other = build(HmacDigest(8, ROOT), ledger_id=8)
    assert DIGEST.wrong_entries(with_codes_of(other, ledger_id=LEDGER)) == [10, 11, 12, 13]


def test_plain_damage_is_named_without_looking_at_codes() -> None:
    data = bytearray(build().view)
    data[-1] ^= 1
    assert DIGEST.wrong_entries(Block.parse(memoryview(data))) == [13]
    assert Digest(LEDGER).wrong_entries(Block.parse(memoryview(data))) == [13]


def test_a_statement_is_believed_only_with_its_code() -> None:
    genuine = DIGEST.statement(0, 9, 3)
    assert DIGEST.is_genuine(genuine)
    assert DIGEST.is_genuine(build().statement)
    assert not DIGEST.is_genuine(genuine._replace(mac=b""))
    for forged in (genuine._replace(lac=10), genuine._replace(lafr=4), genuine._replace(content_term=1)):
        crc = statement_crc(LEDGER, forged.content_term, forged.lac, forged.lafr)
        assert Digest(LEDGER).is_genuine(forged._replace(crc=crc))
        assert not DIGEST.is_genuine(forged._replace(crc=crc))
    assert not DIGEST.is_genuine(genuine._replace(crc=genuine.crc ^ 1))
    assert not HmacDigest(8, ROOT).is_genuine(genuine)
    assert not HmacDigest(LEDGER, bytes(32)).is_genuine(genuine)


def test_an_entry_does_not_pass_for_a_statement() -> None:
    block = build()
    for code in block.macs:
        assert not DIGEST.is_genuine(LacStatement(0, 9, -1, block.lac_crc, code))


def test_each_bookie_and_each_ledger_has_a_token_of_its_own() -> None:
    tokens = {HmacDigest(ledger, ROOT).token(bookie) for ledger in (7, 8) for bookie in ("b1", "b2")}
    assert len(tokens) == 4
    assert Digest(LEDGER).token("b1") is None


def test_no_secret_is_shown_or_pickled() -> None:
    assert repr(DIGEST) == "HmacDigest(ledger 7)"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(DIGEST)


def test_a_password_is_asked_for_where_it_is_needed_and_refused_where_it_is_not() -> None:
    assert check_choice("hmac-sha256", b"secret") == b"secret"
    assert check_choice("crc32c", b"") == b""
    with pytest.raises(InvalidArgumentError, match="1 to 1,024 bytes"):
        check_choice("hmac-sha256", b"")
    with pytest.raises(InvalidArgumentError, match="of no use"):
        check_choice("crc32c", b"secret")


def test_opening_takes_the_right_password_only() -> None:
    record, root = new_password(b"secret", bytes(16))
    sizes: dict[str, Any] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1, "bookies": ["b1"]}
    locked = LedgerMetadata.new(7, **sizes, digest="hmac-sha256", password=record)
    plain = LedgerMetadata.new(7, **sizes)
    assert isinstance(check_root(locked, b"secret", root), HmacDigest)
    assert type(check_root(plain, b"", None)) is Digest
    with pytest.raises(UnauthorizedAccessError, match="wrong password"):
        check_root(locked, b"guess", record.stretch(b"guess"))
    with pytest.raises(UnauthorizedAccessError, match="needs a password"):
        check_root(locked, b"", None)
    with pytest.raises(UnauthorizedAccessError, match="has no password"):
        check_root(plain, b"secret", None)


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("how", ["forged", "damaged", "damaged behind a forged one"])
def test_the_entries_of_an_answer_before_a_wrong_one_count(how: str, at: int) -> None:
    """Of the wrong entry the answer says nothing. A whole answer thrown away would hide genuine entries."""
    payloads = [b"entry %d" % number for number in range(6)]
    running = list(accumulate(map(len, payloads)))
    genuine = build(DIGEST, payloads=payloads, running=running)
    raw = bytearray(genuine.whole(0, 6))
    first = genuine.first_entry
    if how == "damaged":
        raw[genuine.payload_range(at, at + 1)[0]] ^= 1
        body = bytes(raw)
    else:
        stranger = HmacDigest(LEDGER, bytes(32))
        forged = build(stranger, payloads=payloads[at:], running=running[at:], first_entry=first + at)
        head = genuine.whole(0, at) if at else b""
        tail = bytearray(forged.whole(0, 6 - at))
        if how == "damaged behind a forged one":
            tail[forged.payload_range(5 - at, 6 - at)[0]] ^= 1
        body = bytes(head) + bytes(tail)
    asked = ClassRange(LEDGER, genuine.content_term, first, first + 5, 1, ("b1",))
    answer = ReadAnswer(Stop.END, first + 6, None)
    if at == 0:
        with pytest.raises(DigestMismatchError):
            checked_blocks(asked, answer, memoryview(body), DIGEST)
        return
    blocks, judged = checked_blocks(asked, answer, memoryview(body), DIGEST)
    found = [bytes(payload) for block in blocks for payload in block.payloads()]
    assert found == payloads[:at]
    assert (judged.stop, judged.stop_entry) == (Stop.UNKNOWN, first + at)
