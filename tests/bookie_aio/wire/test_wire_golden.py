"""The bytes on the wire, as peers of this version expect them.

`golden.hex` holds one frame of every message and three blocks. A change of the format changes the protocol's
version; after such a change the file is written anew by running this test with BOOKIE_AIO_REWRITE=1.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from bookie_aio.wire import messages as wire
from bookie_aio.wire.blocks import Block, LacStatement, encode_block, entry_checksums, statement_crc
from bookie_aio.wire.frames import FRAME_BYTES_MAX, FrameParser, encode_frame
from bookie_aio.wire.many import encode_adds, encode_done, encode_write_lacs
from bookie_aio.wire.watching import UNWATCH, Moved, encode_asked, encode_moved
from metadata.ids import TERM_FINAL

FILE = Path(__file__).with_name("golden.hex")
STATEMENT = LacStatement(0, 41, -1, statement_crc(7, 0, 41, -1))


def blocks() -> dict[str, bytes]:
    common = {"ledger_id": 7, "content_term": 0, "lac": 41, "lafr": -1}
    plain = encode_block(
        **common, first_entry=42, stride=1, payloads=[b"first", b"", b"third"], running=[1005, 1005, 1010]
    )
    striped = encode_block(
        **common,
        first_entry=44,
        stride=3,
        payloads=[b"a", b"bc"],
        running=[2001, 2003],
        macs=[bytes([n]) * 32 for n in (1, 2, 3)],
    )
    whole = Block.parse(memoryview(plain))
    start, stop = whole.payload_range(1, 3)
    return {
        "block plain": plain,
        "block striped with codes": striped,
        "block partial": whole.cut_head(1, 3) + plain[start:stop],
    }


def frames() -> dict[str, bytes]:
    block = blocks()["block plain"]
    requests: list[tuple[wire.Message, bytes | None, bytes]] = [
        (wire.Hello(3, 4, "a client", "an instance", "b1"), None, b""),
        (wire.Ping(), bytes(range(32)), b""),
        (wire.Add(7, 0, int(wire.AddFlag.RECOVERY)), None, block),
        (wire.Read(7, wire.NO_TERM, 0, 42, 2**62 - 1, 3, 1 << 20), None, b""),
        (wire.ReadLac(7, TERM_FINAL, -1, 30_000), None, b""),
        (wire.WriteLac(7, 0, STATEMENT), None, b""),
        (wire.ListEntries(7, 42), None, b""),
        (wire.ListLedgers(2**63 - 1), None, b""),
        (wire.Info(), None, b""),
        (wire.Force(7, 0), None, b""),
        (wire.Delete(7), bytes(range(32)), b""),
        (wire.Watch(10_000), None, encode_asked([(7, 41), (8, UNWATCH)])),
        (wire.IsFree(7), None, b""),
        (wire.LiftMark(7, 2**33 + 1), None, b""),
    ]
    answers: list[tuple[wire.Message, wire.Op, bytes]] = [
        (wire.HelloAnswer(4, "b1", "an instance", "a nonce", 5 << 20, 4 << 20), wire.Op.HELLO, b""),
        (wire.Done(), wire.Op.PING, b""),
        (wire.Done(), wire.Op.ADD, b""),
        (wire.ReadAnswer(int(wire.Stop.NO_SUCH_ENTRY), 45, STATEMENT), wire.Op.READ, block),
        (wire.ReadLacAnswer(None, -1, True), wire.Op.READ_LAC, b""),
        (wire.Done(), wire.Op.WRITE_LAC, b""),
        (wire.ListEntriesAnswer(-1, True), wire.Op.LIST_ENTRIES, b"\x2a" + bytes(23)),
        (wire.ListLedgersAnswer(-1), wire.Op.LIST_LEDGERS, b"\x07" + bytes(7)),
        (wire.Done(), wire.Op.INFO, b"{}"),
        (wire.Done(), wire.Op.FORCE, b""),
        (wire.Done(), wire.Op.DELETE, b""),
        (wire.Done(), wire.Op.WATCH, encode_moved([Moved(7, STATEMENT), Moved(8, None)])),
        (wire.Done(), wire.Op.IS_FREE, b""),
        (wire.LiftMarkAnswer(2**33 + 2), wire.Op.LIFT_MARK, b""),
    ]
    found = {}
    adds = [(wire.Add(7, 0, 0), None, block), (wire.Add(8, 3, 4), bytes(range(32)), b"the second block")]
    found["request ADDS"] = b"".join(encode_adds(0x01020304, adds))
    coded = STATEMENT._replace(mac=bytes(range(32, 64)))
    lacs = [(wire.WriteLac(7, 0, STATEMENT), None), (wire.WriteLac(8, 3, coded), bytes(range(32)))]
    found["request WRITE_LACS"] = encode_write_lacs(0x01020304, lacs)
    for op in (wire.Op.ADDS, wire.Op.WRITE_LACS):
        found[f"answer {op.name}"] = encode_done(op, [0x01020304, 0x01020306])
    for request, auth, body in requests:
        header = wire.encode_request(request, 0x01020304, auth)
        found[f"request {request.op.name}"] = encode_frame(header, len(body)) + body
    for answer, op, body in answers:
        header = wire.encode_answer(op, 0x01020304, answer)
        found[f"answer {op.name}"] = encode_frame(header, len(body)) + body
    failure = wire.Failure(wire.Status.INVALID_TERM, "fenced", TERM_FINAL)
    found["answer failure"] = encode_frame(wire.encode_failure(wire.Op.ADD, 1, failure))
    return found


def test_the_bytes_are_those_that_peers_of_this_version_expect() -> None:
    found = {**blocks(), **frames()}
    if os.environ.get("BOOKIE_AIO_REWRITE"):
        FILE.write_text("".join(f"{name}: {data.hex()}\n" for name, data in found.items()))
    lines = FILE.read_text().splitlines()
    golden = {name: bytes.fromhex(data) for name, _, data in (line.partition(": ") for line in lines)}
    assert found == golden


def test_there_is_a_frame_of_every_operation_in_both_directions() -> None:
    names = set(frames())
    assert names == {f"{way} {op.name}" for way in ("request", "answer") for op in wire.Op} | {
        "answer failure"
    }


def test_the_golden_frames_parse() -> None:
    for name, data in frames().items():
        parser = FrameParser(FRAME_BYTES_MAX)
        parser.feed(data)
        ((header, _),) = parser.frames()
        if name.startswith("request"):
            wire.decode_request(header)
        else:
            wire.decode_answer(header)


def crc32c_by_bits(data: bytes) -> int:
    """Return CRC32C (Castagnoli) from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksums_are_plain_crc32c_over_statement_entry_and_payload() -> None:
    assert crc32c_by_bits(b"123456789") == 0xE3069283
    statement = struct.pack("<QQqq", 7, 0, 41, -1)
    entry = struct.pack("<QQ", 42, 1005) + b"first"
    assert statement_crc(7, 0, 41, -1) == crc32c_by_bits(statement)
    assert entry_checksums(crc32c_by_bits(statement), [42], [1005], [b"first"]) == [
        crc32c_by_bits(statement + entry)
    ]
    plain = blocks()["block plain"]
    head_bytes = 80 + 16 * 3
    assert plain[4:8] == struct.pack("<I", crc32c_by_bits(plain[8:head_bytes]))
    assert plain[68:72] == struct.pack("<I", crc32c_by_bits(b"firstthird"))
