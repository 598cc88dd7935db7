"""Ledgers with a password: bookies that lie, clients that guess, and what neither of them achieves."""

from __future__ import annotations

import asyncio
import json
import pickle
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest

import client_aio
import client_aio.sync
from bookie_aio.wire.blocks import Block, LacStatement, encode_block, statement_crc
from bookie_aio.wire.messages import (
    Add,
    AddFlag,
    Delete,
    Done,
    Info,
    ListEntries,
    ListEntriesAnswer,
    Message,
    Op,
    ReadAnswer,
    ReadLac,
    ReadLacAnswer,
    Status,
    Stop,
    WriteLac,
)
from client_aio.bookies.connection import connect
from metadata.ids import TERM_FINAL
from tests.support.cluster import BookieProcess, Cluster
from tests.support.links import Frame, Links
from tests.support.rawclient import RawClient, block, lac_statement

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PASSWORD = b"an open secret"
LOCKED: dict[str, Any] = {"digest": "hmac-sha256", "password": PASSWORD}
WAIT_S = 30


def payload(entry_id: int) -> bytes:
    return f"entry {entry_id} ".encode() * (entry_id % 5)


async def contents(reader: client_aio.LedgerReader, last: int | None = None) -> list[tuple[int, bytes]]:
    """Read entry by entry, so that every bookie of the ensemble is asked."""
    stop = reader.last_add_confirmed if last is None else last
    return [(entry.entry_id, entry.data) for at in range(stop + 1) async for entry in reader.read(at, at)]


async def counters_of(bookie: BookieProcess) -> dict[str, Any]:
    """Return what a bookie says it has done."""
    async with await RawClient.connect(bookie.addresses[0]) as client:
        counters = json.loads((await client.call(Info())).body)["counters"]
    assert isinstance(counters, dict)
    return counters


def files_with(folder: Path, text: bytes) -> list[Path]:
    """Return the files that hold a text: the metadata store's, the bookies' and their logs."""
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2)])
async def test_what_was_written_with_a_password_is_read_with_it_and_recovered_with_it(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    sizes: dict[str, Any] = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), shape, strict=True))
    expected = [(entry_id, payload(entry_id)) for entry_id in range(200)]
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(**sizes, **LOCKED) as ledger:
            await ledger.add_entries(data for _, data in expected)
            assert [tuple(entry) async for entry in ledger.read(0, 199)] == expected
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(ledger.ledger_id, password=PASSWORD)
            assert await contents(reader) == expected
            assert reader.digest_mismatches == 0
        abandoned = await client.create_ledger(**sizes, **LOCKED)
        await abandoned.add_entries(data for _, data in expected[:100])
        await cluster[abandoned.metadata.last_fragment.bookies[0]].kill()  # an ensemble change as well
        await abandoned.add_entries(data for _, data in expected[100:])
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(abandoned.ledger_id, recover=True, password=PASSWORD)
            assert reader.is_closed
            assert await contents(reader) == expected
        with pytest.raises(client_aio.LedgerFencedError):
            await abandoned.add_entry(b"late")
    assert not files_with(tmp_path, PASSWORD), "a password rests in clear"


async def test_a_new_ledger_does_not_wait_for_a_lock_that_a_hung_disk_delays(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", add_timeout_s=500.0) as client,
        asyncio.timeout(WAIT_S),
    ):
        held = links["writer", "b3"].answers.hold(Op.FORCE)
        ledger = await client.create_ledger(**LOCKED)
        await held.reached()  # The bookie has locked the ledger all the same.
        assert await ledger.add_entry(b"one") == 0
        held.release()
        await ledger.close()


@pytest.mark.parametrize("option", ["guaranteed_write_quorum", "deferred_sync"])
async def test_codes_go_with_every_way_of_writing(tmp_path: Path, option: str) -> None:
    expected = [(entry_id, payload(entry_id)) for entry_id in range(50)]
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        options: dict[str, Any] = {**LOCKED, option: True}
        ledger = await client.create_ledger(**options)
        await asyncio.gather(*(ledger.add_entry(data) for _, data in expected))
        if option == "deferred_sync":
            await ledger.force()
        await ledger.abort()
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(ledger.ledger_id, recover=True, password=PASSWORD)
            assert await contents(reader) == expected
            assert reader.digest_mismatches == 0


@pytest.mark.parametrize("password", [b"a guess", b""])
async def test_a_wrong_password_is_refused_before_anything_is_fenced(tmp_path: Path, password: bytes) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(**LOCKED) as ledger:
            await ledger.add_entry(b"one")
            before = {name: await counters_of(bookie) for name, bookie in cluster.bookies.items()}
            async with client_aio.connect(cluster.uri) as other:
                for recover in (False, True):
                    with pytest.raises(client_aio.UnauthorizedAccessError, match="password"):
                        await other.open_ledger(ledger.ledger_id, recover=recover, password=password)
                with pytest.raises(client_aio.UnauthorizedAccessError, match="password"):
                    await other.delete_ledger(ledger.ledger_id, password=password)
            after = {name: await counters_of(bookie) for name, bookie in cluster.bookies.items()}
            for name in cluster.bookies:
                assert after[name]["fences"] == before[name]["fences"] == 0
                for op in ("read", "read_lac", "delete"):
                    assert after[name]["requests"][op] == before[name]["requests"][op]
            assert await ledger.add_entry(b"two") == 1
        assert (await client.ledger_metadata(ledger.ledger_id)).last_entry == 1


async def test_a_password_for_a_ledger_without_one_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger() as ledger:
            await ledger.add_entry(b"anybody could have written this")
        with pytest.raises(client_aio.UnauthorizedAccessError, match="has no password"):
            await client.open_ledger(ledger.ledger_id, password=PASSWORD)
        for wrong in ("text", b"x" * 1025):
            with pytest.raises(client_aio.InvalidArgumentError, match="a password"):
                await client.open_ledger(ledger.ledger_id, password=cast("bytes", wrong))


# --- bookies that lie ---


def rebuilt(one: Block, **changes: Any) -> bytes:
    """Return a block with changes, and with checksums that hold: whoever lies can make those."""
    fields: dict[str, Any] = {
        "ledger_id": one.ledger_id,
        "content_term": one.content_term,
        "first_entry": one.first_entry,
        "stride": one.stride,
        "lac": one.lac,
        "lafr": one.lafr,
        "payloads": [bytes(data) for data in one.payloads()],
        "running": list(one.running),
        "macs": [one.statement.mac, *one.macs],
    }
    return encode_block(**fields | changes)


def of_blocks(lie: Callable[[Block], bytes]) -> Callable[[Frame], Frame | None]:
    """Return a lie about the first block of each read."""

    def forge(frame: Frame) -> Frame | None:
        if frame.op is not Op.READ or not isinstance(frame.message, ReadAnswer) or not frame.body:
            return None
        return frame._replace(body=memoryview(lie(frame.block)))

    return forge


def swap(one: Block) -> bytes:
    """Return the entry under the name of its neighbour's id: what a lie about the ids looks like."""
    payloads = [bytes(data) for data in one.payloads()]
    return rebuilt(one, payloads=[payload(one.first_entry + 1), *payloads[1:]])


class Replay:
    """Gives the first entry that it saw again and again, under the id that was asked for."""

    def __init__(self) -> None:
        self.seen: Block | None = None

    def __call__(self, one: Block) -> bytes:
        if self.seen is None or self.seen.first_entry == one.first_entry:
            self.seen = Block.parse(memoryview(bytes(one.view[: one.total_bytes])))
        return rebuilt(self.seen, first_entry=one.first_entry)


def replay_as_it_was() -> Callable[[Frame], Frame | None]:
    """Return the bytes of an earlier answer, untouched."""
    seen: list[Frame] = []

    def forge(frame: Frame) -> Frame | None:
        if frame.op is not Op.READ or not frame.body:
            return None
        seen.append(frame)
        return frame._replace(message=seen[0].message, body=seen[0].body)

    return forge


def deny(frame: Frame) -> Frame | None:
    """Say that there is no such entry."""
    if frame.op is not Op.READ or not isinstance(frame.message, ReadAnswer) or not frame.body:
        return None
    answer = ReadAnswer(int(Stop.NO_SUCH_ENTRY), frame.block.first_entry, frame.message.statement)
    return frame._replace(message=answer, body=memoryview(b""))


def end_early(frame: Frame) -> Frame | None:
    """Say that the answer is complete, and leave its entries out."""
    if frame.op is not Op.READ or not isinstance(frame.message, ReadAnswer) or not frame.body:
        return None
    return frame._replace(body=memoryview(b""))


LIES: dict[str, Callable[[], Callable[[Frame], Frame | None]]] = {
    "forged": lambda: of_blocks(lambda one: rebuilt(one, payloads=[b"forged"] * one.count)),
    "forged without codes": lambda: of_blocks(lambda one: rebuilt(one, payloads=[b"x"] * one.count, macs=())),
    "codes stripped": lambda: of_blocks(lambda one: rebuilt(one, macs=())),
    "swapped": lambda: of_blocks(swap),
    "truncated": lambda: of_blocks(
        lambda one: rebuilt(one, payloads=[bytes(data)[:-1] for data in one.payloads()])
    ),
    "longer": lambda: of_blocks(lambda one: rebuilt(one, payloads=[bytes(d) + b"x" for d in one.payloads()])),
    "another length of the ledger": lambda: of_blocks(
        lambda one: rebuilt(one, running=[length + 1 for length in one.running])
    ),
    "another LAC": lambda: of_blocks(lambda one: rebuilt(one, lac=max(one.lac - 1, -1))),
    "replayed under another id": lambda: of_blocks(Replay()),
    "replayed as it was": replay_as_it_was,
    "answer cut short": lambda: end_early,
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_bookie_that_lies_about_entries_is_caught_and_the_next_one_is_asked(
    tmp_path: Path, lie: str
) -> None:
    expected = [(entry_id, payload(entry_id)) for entry_id in range(1, 13)]
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as client,
        links.connect("reader") as reading,
    ):
        async with client.create_ledger(**LOCKED) as ledger:
            for entry_id in range(13):
                await ledger.add_entry(payload(entry_id))
        reader = await reading.open_ledger(ledger.ledger_id, password=PASSWORD)
        links["reader", "b2"].answers.forge = LIES[lie]()
        assert (await contents(reader))[1:] == expected
        assert 0 < reader.digest_mismatches <= 13
        assert reader.last_add_confirmed == 12


async def test_a_bookie_that_denies_entries_below_the_lac_is_passed_over(tmp_path: Path) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as client,
        links.connect("reader") as reading,
    ):
        async with client.create_ledger(**LOCKED) as ledger:
            await ledger.add_entries(payload(entry_id) for entry_id in range(9))
        reader = await reading.open_ledger(ledger.ledger_id, password=PASSWORD)
        links["reader", "b2"].answers.forge = deny
        assert await contents(reader) == [(entry_id, payload(entry_id)) for entry_id in range(9)]


def state_lac(ledger_id: int, lac: int, mac: bytes) -> Callable[[Frame], Frame | None]:
    """Return a lie about the LAC, with a checksum that holds."""
    statement = LacStatement(0, lac, -1, statement_crc(ledger_id, 0, lac, -1), mac)

    def forge(frame: Frame) -> Frame | None:
        message = frame.message
        if isinstance(message, ReadLacAnswer):
            return frame._replace(message=replace(message, statement=statement))
        if isinstance(message, ReadAnswer):
            return frame._replace(message=ReadAnswer(message.stop, message.stop_entry, statement))
        return None

    return forge


@pytest.mark.parametrize("mac", [b"", bytes(32)], ids=["no code", "a wrong code"])
async def test_a_bookie_that_lies_about_the_lac_is_caught_and_tailing_goes_on(
    tmp_path: Path, mac: bytes
) -> None:
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        client_aio.connect(cluster.uri) as client,
        links.connect("reader") as reading,
        asyncio.timeout(WAIT_S),
        client.create_ledger(**LOCKED) as ledger,
    ):
        await ledger.add_entry(b"zero")
        links["reader", "b2"].answers.forge = state_lac(ledger.ledger_id, 1_000_000, mac)
        reader = await reading.open_ledger(ledger.ledger_id, password=PASSWORD)
        assert reader.last_add_confirmed <= 0
        async with aclosing(reader.tail()) as entries:
            for entry_id in range(5):
                entry = await anext(entries)
                assert entry.entry_id == entry_id
                await ledger.add_entry(b"next")
        assert reader.last_add_confirmed <= 5
        assert reader.digest_mismatches > 0


@pytest.mark.parametrize("lie", ["forged", "codes stripped", "replayed under another id", "truncated"])
async def test_recovery_takes_no_entry_from_a_bookie_that_lies(tmp_path: Path, lie: str) -> None:
    expected = [(entry_id, payload(entry_id)) for entry_id in range(1, 20)]
    async with (
        Cluster(tmp_path) as cluster,
        Links(cluster.uri) as links,
        links.connect("writer", explicit_lac_delay_s=60) as client,
        links.connect("recoverer") as recovering,
    ):
        ledger = await client.create_ledger(**LOCKED)
        await asyncio.gather(*(ledger.add_entry(payload(entry_id)) for entry_id in range(20)))
        links["recoverer", "b2"].answers.forge = LIES[lie]()
        reader = await recovering.open_ledger(ledger.ledger_id, recover=True, password=PASSWORD)
        assert reader.last_add_confirmed == 19
        async with client_aio.connect(cluster.uri) as other:
            honest = await other.open_ledger(ledger.ledger_id, password=PASSWORD)
            assert (await contents(honest))[1:] == expected
            assert honest.digest_mismatches == 0, "recovery has written what nobody vouches for"


# --- clients that have not got the password ---


def unauthorised(ledger_id: int) -> list[tuple[Message, bytes]]:
    """Return everything that would change something of a ledger."""
    return [
        (ReadLac(ledger_id, TERM_FINAL, -1, 0), b""),
        (Add(ledger_id, TERM_FINAL, int(AddFlag.RECOVERY)), block(ledger_id, 0, [b"forged"])),
        (Add(ledger_id, 0, 0), block(ledger_id, 0, [b"forged"])),
        (WriteLac(ledger_id, 0, lac_statement(ledger_id, 99)), b""),
        (Delete(ledger_id), b""),
    ]


@pytest.mark.parametrize("entries", [0, 3])
async def test_the_bookies_refuse_whoever_has_not_got_the_password(tmp_path: Path, entries: int) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(**LOCKED) as ledger:
            await ledger.add_entries(payload(entry_id) for entry_id in range(entries))
            # The token of one bookie is what that bookie, and whoever listens to it, could try elsewhere.
            stolen = ledger._digest.token("b1")
            for name, auth in (("b1", None), ("b2", stolen), ("b3", bytes(32))):
                async with await RawClient.connect(cluster[name].addresses[0]) as intruder:
                    for request, body in unauthorised(ledger.ledger_id):
                        answer = await intruder.call(request, body, auth=auth)
                        assert answer.status is Status.UNAUTHORIZED, (name, request)
            assert await ledger.add_entry(b"goes on") == entries
        reader = await client.open_ledger(ledger.ledger_id, password=PASSWORD)
        assert [entry for _, entry in await contents(reader)][entries:] == [b"goes on"]


async def test_the_refusal_is_a_typed_error(tmp_path: Path) -> None:
    async with Cluster(tmp_path, bookies=1) as cluster, client_aio.connect(cluster.uri) as client:
        sizes: dict[str, Any] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
        async with client.create_ledger(**sizes, **LOCKED) as ledger:
            intruder = await connect(
                cluster["b1"].addresses[0], bookie_id="b1", instance_id="", timeout_s=WAIT_S
            )
            fence = ReadLac(ledger.ledger_id, TERM_FINAL, -1, 0)
            with pytest.raises(client_aio.UnauthorizedAccessError, match="UNAUTHORIZED"):
                await intruder.call(fence, ReadLacAnswer, timeout_s=WAIT_S, ledger_id=ledger.ledger_id)
            with pytest.raises(client_aio.UnauthorizedAccessError, match="UNAUTHORIZED"):
                await intruder.call(Delete(ledger.ledger_id), Done, timeout_s=WAIT_S)
            intruder.close()
            await ledger.add_entry(b"goes on")


async def test_locks_survive_the_kill_of_all_bookies(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(ack_quorum=3, **LOCKED)
        await ledger.add_entry(b"zero")
        await ledger.abort()
        await cluster.kill()
        await cluster.start()
        for bookie in cluster.bookies.values():
            async with await RawClient.connect(bookie.addresses[0]) as intruder:
                answer = await intruder.call(ReadLac(ledger.ledger_id, TERM_FINAL, -1, 0))
                assert answer.status is Status.UNAUTHORIZED
        reader = await client.open_ledger(ledger.ledger_id, recover=True, password=PASSWORD)
        assert await contents(reader) == [(0, b"zero")]


async def test_repair_carries_codes_as_they_are_and_needs_no_password(tmp_path: Path) -> None:
    expected = [(entry_id, payload(entry_id)) for entry_id in range(50)]
    async with Cluster(tmp_path, bookies=4) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(**LOCKED) as ledger:
            await ledger.add_entries(data for _, data in expected)
        old = ledger.metadata.last_fragment.bookies
        (spare,) = set(cluster.bookies) - set(old)
        await cluster[old[0]].kill()
        async with client_aio.connect(cluster.uri) as repairer:
            await repairer.repair_ledger(ledger.ledger_id, replace=old[0], by=spare)
        for name in old[1:]:
            await cluster[name].kill()
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(ledger.ledger_id, password=PASSWORD)
            assert [tuple(entry) async for entry in reader.read(0, 49)] == expected
            assert reader.digest_mismatches == 0


@pytest.mark.parametrize(
    "password", [b"", b"another", PASSWORD], ids=["without it", "with another", "with it"]
)
async def test_a_bookie_with_entries_of_a_former_term_is_repaired(tmp_path: Path, password: bytes) -> None:
    """Entry 1 of term 1 is at one bookie, which was down when that of term 2 was acknowledged.

    Auto recovery has no password. The bookie takes the entry that the metadata give term 2.
    """
    name = "payments"
    async with Cluster(tmp_path, bookies=4) as cluster, Links(cluster.uri) as links:
        async with links.connect("w1") as client, client_aio.connect(cluster.uri) as other:
            first = await client.open_unbounded_ledger(name, **LOCKED)
            await first.add_entry(b"zero")
            (dirty, *rest) = first.metadata.last_fragment.bookies
            for bookie_id in set(cluster.bookies) - {dirty}:
                links["w1", bookie_id].requests.hold(Op.ADD)
            answer = links["w1", dirty].answers.see(Op.ADD)
            adding = first.add_entry(b"dirty")
            await asyncio.wait_for(answer.reached(), WAIT_S)
            await cluster[dirty].kill()
            second = await other.open_unbounded_ledger(name, **LOCKED)
            assert await second.add_entry(b"one") == 1
            await second.close(seal=True)
        with pytest.raises(client_aio.BookKeeperError):
            await adding
        (lost,) = set(second.metadata.last_fragment.bookies) - {dirty, *rest}
        await cluster[dirty].start()
        await cluster[lost].kill()
        async with client_aio.connect(cluster.uri) as repairer:
            report = await repairer.repair_ledger(second.ledger_id, replace=lost, by=dirty, password=password)
            assert report.fragments[-1].entries_copied == 1
        for bookie_id in set(cluster.bookies) - {dirty, lost}:
            await cluster[bookie_id].kill()
        async with client_aio.connect(cluster.uri) as other:
            reader = await other.open_ledger(second.ledger_id, password=PASSWORD)
            assert await contents(reader, 1) == [(0, b"zero"), (1, b"one")]
            assert reader.digest_mismatches == 0


# --- deletion ---


@pytest.mark.parametrize("password", [b"", b"another one"])
async def test_a_log_takes_no_ledger_that_its_password_does_not_open(tmp_path: Path, password: bytes) -> None:
    """Else nobody could read on to it, or take the log over."""
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        for key in (password, PASSWORD):
            options = {"digest": "hmac-sha256", "password": key} if key else {}
            async with client.create_ledger(**options) as ledger:
                await ledger.add_entry(key)
            if key == password:
                with pytest.raises(client_aio.UnauthorizedAccessError):
                    await client.add_to_log("a", [ledger.ledger_id], password=PASSWORD)
                assert [name async for name in client.list_logs()] == []
            else:
                await client.add_to_log("a", [ledger.ledger_id], password=PASSWORD)
        async with client.open_log("a", **LOCKED) as log:
            await log.append(b"more")
        found = [record.data async for record in client.read_log("a", password=PASSWORD)]
        assert found == [PASSWORD, b"more"]


async def test_add_after_delete(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        ledger = await client.create_ledger(**LOCKED)
        await ledger.add_entry(b"zero")
        async with client_aio.connect(cluster.uri) as other:
            await other.delete_ledger(ledger.ledger_id, password=PASSWORD)
            with pytest.raises(client_aio.NoSuchLedgerError):
                await other.open_ledger(ledger.ledger_id, recover=True, password=PASSWORD)
        with pytest.raises(client_aio.NoSuchLedgerError):
            await asyncio.wait_for(ledger.add_entry(b"late"), WAIT_S)
        for run in range(2):
            for name, bookie in cluster.bookies.items():
                token = ledger._digest.token(name)
                async with await RawClient.connect(bookie.addresses[0]) as late:
                    for request, body in unauthorised(ledger.ledger_id)[:4]:
                        answer = await late.call(request, body, auth=token)
                        assert answer.status is Status.NO_SUCH_LEDGER, (run, request)
                    listed = await late.call(ListEntries(ledger.ledger_id, 0))
                    assert listed.status is Status.NO_SUCH_LEDGER
            await cluster.kill()
            await cluster.start()


async def test_a_bookie_that_was_down_at_the_deletion_drops_the_ledger_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster, client_aio.connect(cluster.uri) as client:
        async with client.create_ledger(ack_quorum=3) as kept:  # or b2 need not have it
            await kept.add_entry(b"kept")
        async with client.create_ledger(ack_quorum=3) as ledger:
            await ledger.add_entry(b"zero")
        await cluster["b2"].kill()
        await client.delete_ledger(ledger.ledger_id)
        await cluster["b2"].start("--sweep-interval", "0.05")
        async with await RawClient.connect(cluster["b2"].addresses[0]) as late, asyncio.timeout(WAIT_S):
            for number in count():
                answer = await late.add(ledger.ledger_id, number, [b"late"])
                if answer.status is Status.NO_SUCH_LEDGER:
                    break
                assert answer.status is Status.OK  # not noticed yet: an orphan, that goes with the rest
            listed = await late.call(ListEntries(kept.ledger_id, 0))
            assert isinstance(listed.message, ListEntriesAnswer)
            assert len(listed.body) == 24


# --- without an event loop ---


def write_blocking(uri: str) -> int:
    with client_aio.sync.connect(uri) as client:
        with client.create_ledger(**LOCKED) as ledger:
            ledger.add_entry(b"zero")
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(ledger)
            assert PASSWORD.decode() not in repr(vars(ledger))
        with client.open_ledger(ledger.ledger_id, password=PASSWORD) as reader:
            assert [entry.data for entry in reader.read(0, 0)] == [b"zero"]
        with pytest.raises(client_aio.UnauthorizedAccessError):
            client.open_ledger(ledger.ledger_id)
        with pytest.raises(client_aio.UnauthorizedAccessError):
            client.delete_ledger(ledger.ledger_id)
        client.delete_ledger(ledger.ledger_id, password=PASSWORD)
        with pytest.raises(client_aio.NoSuchLedgerError):
            client.open_ledger(ledger.ledger_id, password=PASSWORD)
        return ledger.ledger_id


async def test_the_blocking_adapter_passes_passwords_on(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        assert await asyncio.to_thread(write_blocking, cluster.uri) == 0
