"""A dump of a store, and its restore into any store: whole, or refused with one sentence."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import metadata.access.logs
import metadata.ids
from metadata.access.bookies import (
    DRAINING,
    REMOVED,
    ClusterRecord,
    Order,
    Orders,
    change_order,
    is_retired,
    retire,
)
from metadata.access.dump import (
    Restore,
    check_dump,
    dump,
    is_kept,
    read_dump,
)
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import (
    InvalidArgumentError,
    InvalidTransitionError,
    MetadataCorruptError,
    NoSuchClusterError,
    NoSuchKeyError,
)
from metadata.ids import (
    KEY_CLUSTER,
    KEY_COOKIES,
    KEY_RESTORE,
    KEY_RETIRED,
    KEY_UNBOUNDED,
    age_key,
    available_key,
    cookie_key,
    ledger_key,
    unbounded_key,
)
from metadata.model.ledger import LedgerMetadata
from tests.metadata.test_fragments import grow, listed, trim
from tests.support.links import ClientStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from metadata.store import Guard, MetadataStore, Version, Versioned
    from tests.metadata.conftest import Backend

LEDGERS = 1200
DRAWN = 3000


class Interrupted(Exception):
    """The process of a restore is gone."""


def _no_link(_: str) -> NoReturn:
    raise AssertionError("no bookie is reached")


def in_memory() -> MemoryMetadataStore:
    """Return an empty store."""
    return MemoryMetadataStore(MemoryTree())


async def fill(store: MetadataStore) -> None:
    """Put some of everything into a store; ledger 7 is unbounded and has pages."""
    await store.create(KEY_CLUSTER, ClusterRecord(instance_id="i-1", created_ms=5).to_json())
    ledgers = LedgerStore(store)
    assert len(await store.allocate_ids(LEDGER_SEQUENCE, DRAWN)) == DRAWN
    await ledgers.raise_floor(3)
    for ledger_id in range(10, 10 + LEDGERS):
        custom = {"größe\u2028": bytes(range(256))}
        await ledgers.create_ledger(
            LedgerMetadata.new(
                ledger_id, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=["b1"], custom=custom
            )
        )
    await grow(listed(store), 700)
    await store.create("unbounded/payments", b'{"format": 1, "ledger": 7}')
    await store.create("logs/orders", b'{"a": 1}')
    await store.create("log-pages/orders/p1", b'{"rows":  [1.50]}')
    await store.create("bookies/cookies/b1", b"{}")
    await store.create("bookies/ages/b1", b"{}")
    await store.create("autorecovery/paused", b"{}")
    await store.register(available_key("b1"), b"{}")
    await store.register("elections/x/queue/0000000000000000001", b"{}")


async def lines_of(store: MetadataStore) -> list[bytes]:
    """Dump a store."""
    return [line async for line in dump(store, now_ms=77)]


def restore_of(lines: list[bytes]) -> Restore:
    """Return the restore of a dump."""
    return Restore(lambda: iter(lines), check_dump(iter(lines)))


def resealed(lines: list[bytes]) -> list[bytes]:
    """Return changed lines with the sums and the checksum that fit them."""
    *body, last = lines
    keys = [json.loads(line).get("key", "") for line in body[1:]]
    sums = {"keys": len(keys), "ledgers": sum(key.startswith("ledgers/") for key in keys)}
    sha256 = hashlib.sha256(b"".join(body)).hexdigest()
    return [*body, json.dumps({**json.loads(last), **sums, "sha256": sha256}).encode() + b"\n"]


async def test_every_store_gives_back_what_another_one_dumped(store: MetadataStore) -> None:
    first = in_memory()
    await fill(first)
    lines = await lines_of(first)
    header, *records = map(json.loads, lines)
    assert (header["format"], header["instance_id"], header["created_ms"]) == (1, "i-1", 77)
    end = records.pop()
    keys = [record["key"] for record in records]
    assert (end["keys"], end["ledgers"], end["ids"]) == (len(keys), LEDGERS + 1, {"ledger": DRAWN})
    assert len(set(keys)) == len(keys)
    assert not [key for key in keys if key.startswith(("bookies/available", "elections"))]
    assert next(one["value"] for one in records if "log-pages" in one["key"]) == '{"rows":  [1.50]}'

    seen: list[int] = []
    counter = await restore_of(lines).run(store, on_progress=seen.append)
    assert counter == await store.ids_drawn(LEDGER_SEQUENCE) == DRAWN
    assert seen[-1] == len(keys)
    assert await lines_of(store) == lines
    with pytest.raises(NoSuchKeyError):
        await store.read(KEY_RESTORE)


async def test_what_is_not_to_be_understood_is_refused_with_its_line() -> None:
    store = in_memory()
    await fill(store)
    lines = await lines_of(store)
    third = json.loads(lines[2])

    def changed(number: int, line: bytes) -> list[bytes]:
        return [line if at == number else each for at, each in enumerate(lines, 1)]

    def record(**fields: Any) -> bytes:
        return json.dumps({**third, **fields}).encode() + b"\n"

    wrong: list[tuple[list[bytes], type[Exception], str]] = [
        ([], MetadataCorruptError, "ends at line 0 without its last line"),
        (lines[:-1], MetadataCorruptError, f"ends at line {len(lines) - 1} without its last line"),
        ([*lines[:5], lines[5][:-3]], MetadataCorruptError, "line 6 of the dump has no end"),
        ([*lines[:5], *lines[6:]], MetadataCorruptError, "lines are missing"),
        (changed(3, b"{]\n"), MetadataCorruptError, "line 3 of the dump is damaged"),
        (changed(3, b"[1]\n"), MetadataCorruptError, "line 3 of the dump is damaged"),
        (changed(3, b"[" * 100_000 + b"\n"), MetadataCorruptError, "line 3 of the dump is damaged"),
        (changed(3, b'{"k": 1}\n'), MetadataCorruptError, "line 3 of the dump is neither a key"),
        (changed(3, record(value="{")), MetadataCorruptError, "line 3 of the dump: a value is UTF-8 JSON"),
        (changed(3, record(value="\ud800")), MetadataCorruptError, "line 3 of the dump"),
        (changed(3, record(key="/etc")), MetadataCorruptError, "line 3 of the dump: key '/etc'"),
        (changed(3, record(key=".store/ids")), MetadataCorruptError, "line 3 of the dump"),
        (changed(3, record(key="app/x")), MetadataCorruptError, "'app/x' is none of a cluster's"),
        (changed(3, record(key=available_key("b"))), MetadataCorruptError, "is none of a cluster's"),
        (changed(3, record(key="ledgers/7")), MetadataCorruptError, "line 3 of the dump: 'ledgers/7'"),
        (
            changed(3, record(value='{"format": 1, "floor": 2}')),
            MetadataCorruptError,
            "does not match",
        ),
        (changed(1, b"{}\n"), InvalidArgumentError, "line 1 is not that of a dump"),
        (
            changed(1, lines[0].replace(b'"format":1', b'"format":2')),
            InvalidArgumentError,
            "has format 2, and this release reads 1",
        ),
        ([*lines, lines[2]], MetadataCorruptError, f"line {len(lines) + 1} of the dump lies behind"),
        (changed(3, record(key="cluster", value="[]")), MetadataCorruptError, "line 3 of the dump: "),
        (
            resealed([line for line in lines if b'"key":"cluster"' not in line]),
            MetadataCorruptError,
            "the cluster's own record 0 times",
        ),
    ]
    for dumped, kind, text in wrong:
        with pytest.raises(kind) as raised:
            check_dump(iter(dumped))
        assert text in str(raised.value)
        assert isinstance(raised.value, kind)


async def test_a_restore_that_was_interrupted_goes_on_and_nobody_uses_the_store_before(
    store: MetadataStore,
) -> None:
    first = in_memory()
    await fill(first)
    lines = await lines_of(first)

    def stop(done: int) -> None:
        raise Interrupted  # after the first of the batches

    with pytest.raises(Interrupted):
        await restore_of(lines).run(store, on_progress=stop)
    with pytest.raises(NoSuchClusterError):
        await lines_of(store)
    other = in_memory()
    await fill(other)
    await other.create("logs/further", b"{}")
    with pytest.raises(InvalidTransitionError, match="of another dump was interrupted"):
        await restore_of(await lines_of(other)).run(store)
    again = restore_of(lines)
    await again.run(store)
    assert again.keys_present > 0
    assert again.keys_written > 0
    assert again.keys_written + again.keys_present == len(lines) - 2
    assert await lines_of(store) == lines


async def test_a_restore_of_which_only_the_mark_is_left_leaves_later_changes_alone() -> None:
    store, first = in_memory(), in_memory()
    await fill(first)
    lines = await lines_of(first)
    restoring = restore_of(lines)
    await restoring.run(store)
    mark = {"format": 1, "sha256": check_dump(iter(lines)).sha256, "phase": "writing"}
    await store.create(KEY_RESTORE, json.dumps(mark).encode())
    await store.delete(ledger_key(10))
    again = restore_of(lines)
    await again.run(store)
    assert again.keys_written == 0
    with pytest.raises(NoSuchKeyError):
        await store.read(ledger_key(10))


async def test_a_store_that_is_not_empty_is_refused_and_cleared_only_when_that_is_asked_for() -> None:
    store, first = in_memory(), in_memory()
    await fill(first)
    lines = await lines_of(first)
    await store.create(KEY_CLUSTER, ClusterRecord(instance_id="i-2", created_ms=5).to_json())
    await store.create("logs/older", b"{}")
    await store.allocate_ids(LEDGER_SEQUENCE, 2 * DRAWN)
    with pytest.raises(InvalidTransitionError, match="is not empty"):
        await restore_of(lines).run(store)
    registration = await store.register(available_key("b1"), b"{}")
    with pytest.raises(InvalidTransitionError, match="bookies b1 run on this store"):
        await restore_of(lines).run(store, clear=True)
    await registration.close()

    def stop(done: int) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await restore_of(lines).run(store, clear=True, on_progress=stop)
    again = restore_of(lines)
    assert await again.run(store) == 2 * DRAWN, "the counter never falls"
    assert (await lines_of(store))[:-1] == lines[:-1]
    await store.create("app/x", b"{}")
    with pytest.raises(InvalidTransitionError, match="none of a cluster's, such as 'app'"):
        await restore_of(lines).run(store, clear=True)


async def test_a_cluster_that_may_have_lived_since_the_mark_is_cleared_only_when_that_is_asked_for() -> None:
    store, first = in_memory(), in_memory()
    await fill(first)
    async with MemoryMetadataStore(store.tree) as ended:
        await fill(ended)
    lines = await lines_of(first)
    mark = {"format": 1, "sha256": check_dump(iter(lines)).sha256, "phase": "clearing"}
    await store.create(KEY_RESTORE, json.dumps(mark).encode())
    await store.create("logs/newer", b"{}")
    with pytest.raises(InvalidTransitionError, match="is not empty"):
        await restore_of(lines).run(store)
    removed: list[int] = []
    await restore_of(lines).run(store, clear=True, on_clear=removed.append)
    assert removed[-1] > LEDGERS
    assert await lines_of(store) == lines


async def test_a_worker_of_auto_recovery_uses_the_store() -> None:
    store, first = in_memory(), in_memory()
    await fill(first)
    await store.register("autorecovery/workers/w1", b"{}")
    with pytest.raises(InvalidTransitionError, match="workers of auto recovery w1 run on this store"):
        await restore_of(await lines_of(first)).run(store)


@pytest.mark.parametrize("is_restored", [False, True])
async def test_a_store_that_is_cleared_while_it_is_dumped_gives_no_dump(is_restored: bool) -> None:
    store = in_memory()
    await fill(store)
    lines: list[bytes] = []

    async def dump_and_clear() -> None:
        async for line in dump(store, now_ms=1):
            lines.append(line)
            if len(lines) == 3:
                record, version = await store.read(KEY_CLUSTER)
                await store.delete(KEY_CLUSTER, version, keeps_place=True)
                if is_restored:
                    await store.create(KEY_CLUSTER, record)

    with pytest.raises(InvalidTransitionError, match="was restored to the store"):
        await dump_and_clear()
    with pytest.raises(MetadataCorruptError, match="without its last line"):
        check_dump(iter(lines))


async def test_a_value_that_no_store_would_take_is_named_when_it_is_dumped() -> None:
    store = in_memory()
    await fill(store)

    async def read(key: str) -> Versioned:
        found = await MemoryMetadataStore.read(store, key)
        return found._replace(value=b"\xff") if key == "logs/orders" else found

    store.read = read  # type: ignore[method-assign]
    with pytest.raises(MetadataCorruptError, match="the key 'logs/orders' is damaged"):
        await lines_of(store)


class StoppingStore(ClientStore):
    """One client's view of a store. The client is stopped before it first does that with a key of that part.

    It goes on when `others` has ended.
    """

    def __init__(
        self, inner: MetadataStore, what: str, part: str, others: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(inner, _no_link)
        self.has_stopped = False
        self._at = (what, part)
        self._others = others

    async def _reach(self, what: str, key: str) -> None:
        if not self.has_stopped and what == self._at[0] and key.startswith(self._at[1]):
            self.has_stopped = True
            await self._others()

    async def create(self, key: str, value: bytes, *, token: str | None = None) -> Version:
        await self._reach("create", key)
        return await super().create(key, value, token=token)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        version: Version,
        *,
        token: str | None = None,
        guard: Guard | None = None,
    ) -> Version:
        await self._reach("set", key)
        return await super().compare_and_set(key, value, version, token=token, guard=guard)

    async def delete(
        self,
        key: str,
        version: Version | None = None,
        *,
        keeps_place: bool = False,
        guard: Guard | None = None,
    ) -> None:
        await self._reach("delete", key)
        await super().delete(key, version, keeps_place=keeps_place, guard=guard)

    async def sync(self, key: str) -> None:
        await self._reach("sync", key)
        await super().sync(key)


@pytest.mark.parametrize(
    ("what", "part", "is_empty"),
    [
        ("create", "restore", True),
        ("create", "restore", False),
        ("delete", "ledgers/", False),
        ("set", "restore", False),
        ("sync", "restore", True),
        ("sync", "restore", False),
        ("delete", "restore", False),
    ],
)
async def test_a_restore_that_was_stopped_changes_nothing_after_another_run_has_ended(
    backend: Backend, what: str, part: str, is_empty: bool
) -> None:
    first, other = in_memory(), await backend.open()
    for store in (first,) if is_empty else (first, other):
        await store.create(KEY_CLUSTER, ClusterRecord(instance_id="i-1", created_ms=5).to_json())
        for ledger_id in (10, 11, 12):
            await store.create(ledger_key(ledger_id), b"{}")
    lines = await lines_of(first)
    left: list[list[bytes]] = []

    async def run_again_and_live() -> None:
        await restore_of(lines).run(other, clear=True)
        await other.register(available_key("b1"), b"{}")
        await other.create(ledger_key(4001), b"{}")
        await other.delete(ledger_key(12))
        left.append(await lines_of(other))

    stopping = StoppingStore(await backend.open(), what, part, run_again_and_live)
    with pytest.raises(InvalidTransitionError, match=r"another run has gone on|bookies b1 run on"):
        await restore_of(lines).run(stopping, clear=True)
    assert stopping.has_stopped
    assert await lines_of(other) == left[0]
    with pytest.raises(NoSuchKeyError):
        await other.read(KEY_RESTORE)


async def test_the_counter_is_above_every_ledger_and_the_floor() -> None:
    store = in_memory()
    await fill(store)
    *body, last = await lines_of(store)
    document = json.loads(last)
    for key, value, expected in (
        (ledger_key(5000), "{}", 5001),
        ("fragments/000/0000/0000/0000/6000/page", "{}", 6001),
        ("ledger-id-floor", '{"format":1,"floor":7000}', 7000),
    ):
        line = json.dumps({"key": key, "value": value}).encode() + b"\n"
        kept = [each for each in body if b'"ledger-id-floor"' not in each]
        lines = resealed([*kept, line, json.dumps(document).encode() + b"\n"])
        assert check_dump(iter(lines)).counter == expected
        assert await restore_of(lines).run(in_memory(), least_id=9000) == 9000


async def test_a_list_that_changes_while_it_is_dumped_is_whole_in_the_dump(store: MetadataStore) -> None:
    await store.create(KEY_CLUSTER, ClusterRecord(instance_id="i-1", created_ms=5).to_json())
    fragments = listed(store)
    await grow(fragments, 1500)
    lines: list[bytes] = []
    async for line in dump(store, now_ms=1):
        lines.append(line)
        if len(lines) == 2:  # the header, and the first page
            await trim(fragments, 3000)
            await fragments.sweep()
    copied = in_memory()
    await restore_of(lines).run(copied)
    head, _ = await listed(copied).read()
    assert [row[0] async for row in listed(copied).walk(head)] == list(range(3000, 15_000, 10))


Step = Callable[[], Awaitable[object]]


class ChangingStore(ClientStore):
    """One client's view of a store. Others do a step each before some of its reads and listings."""

    def __init__(self, inner: MetadataStore, steps: list[Step], at: list[int]) -> None:
        super().__init__(inner, _no_link)
        self._steps = list(zip(at, steps, strict=True))
        self.looks = 0

    async def _look(self) -> None:
        self.looks += 1
        while self._steps and self._steps[0][0] <= self.looks:
            await self._steps.pop(0)[1]()

    async def read(self, key: str) -> Versioned:
        await self._look()
        return await super().read(key)

    async def children(self, key: str) -> list[str]:
        await self._look()
        return await super().children(key)


def _of_one_bookie(ledger_id: int, bookie: str) -> LedgerMetadata:
    return LedgerMetadata.new(ledger_id, ensemble_size=1, write_quorum=1, ack_quorum=1, bookies=[bookie])


async def _cluster_that_changes(store: MetadataStore) -> list[Step]:
    """Make a cluster of bookie x with ledgers; return steps: all moves to bookie y, and x leaves."""
    await store.create(KEY_CLUSTER, ClusterRecord(instance_id="i-1", created_ms=5).to_json())
    for ledger_id in (10, 20_000, 30_000):
        await store.create(ledger_key(ledger_id), _of_one_bookie(ledger_id, "x").to_json())
    await store.create(cookie_key("x"), b'{"of": "x"}')
    await store.create(age_key("x"), b"{}")

    async def order(mode: str) -> None:
        await change_order(store, "x", lambda _: Order(mode) if mode else None)

    async def move(ledger_id: int) -> None:
        _, version = await store.read(ledger_key(ledger_id))
        await store.compare_and_set(ledger_key(ledger_id), _of_one_bookie(ledger_id, "y").to_json(), version)

    async def begin() -> None:
        await store.create(cookie_key("y"), b'{"of": "y"}')
        await store.create(age_key("y"), b"{}")
        await order(DRAINING)

    async def remove() -> None:
        await store.delete(cookie_key("x"))

    async def make_late() -> None:
        await store.create(ledger_key(40_000), _of_one_bookie(40_000, "y").to_json())
        await store.create(unbounded_key("late"), b'{"format": 1, "ledger": 40000}')

    return [
        begin,
        make_late,
        *(partial(move, ledger_id) for ledger_id in (10, 20_000, 30_000)),
        partial(order, REMOVED),
        partial(retire, store, "x"),
        remove,
        partial(order, ""),
    ]  # fmt: skip


async def test_every_bookie_that_a_dump_of_a_changing_cluster_names_may_start_after_a_restore() -> None:
    rng, looks = random.Random(7), 48
    for _ in range(400):
        store = in_memory()
        steps = await _cluster_that_changes(store)
        changing = ChangingStore(store, steps, sorted(rng.choices(range(looks), k=len(steps))))
        lines = await lines_of(changing)
        copied = in_memory()
        await restore_of(lines).run(copied)
        ledgers = LedgerStore(copied)
        ids = [each async for each in ledgers.ledger_ids()]
        named = {name for each in ids for name in (await ledgers.read(each))[0].last_fragment.bookies}
        orders = (await Orders.read(copied)).by_bookie
        for name in named:
            assert (await copied.read(cookie_key(name))).value == b'{"of": "%s"}' % name.encode()
            assert not await is_retired(copied, name)
            assert name not in orders or orders[name].mode != REMOVED
        # A bookie that has left is gone for good, or it has its cookie: no new one is formatted as it.
        known = {*await copied.children(KEY_COOKIES), *await copied.children(KEY_RETIRED)}
        assert "x" in known
        assert 40_000 in ids or not await copied.children(KEY_UNBOUNDED)


async def test_a_bookie_that_comes_and_leaves_while_a_cluster_is_dumped_leaves_no_dump() -> None:
    store = in_memory()
    steps = await _cluster_that_changes(store)

    async def pass_through() -> None:
        await store.create(cookie_key("z"), b"{}")
        await retire(store, "z")
        await store.delete(cookie_key("z"))

    changing = ChangingStore(store, [pass_through], [20])
    with pytest.raises(InvalidTransitionError, match="bookie z has come and left while"):
        await lines_of(changing)
    assert steps


async def test_a_set_back_that_is_found_while_a_store_is_dumped_leaves_no_dump() -> None:
    store = in_memory()
    await fill(store)
    changing = ChangingStore(store, [partial(store.create, "set_backs", b'{"events": []}')], [20])
    with pytest.raises(InvalidTransitionError, match="was found to be set back, or that was answered"):
        await lines_of(changing)


def test_every_key_is_known_to_be_kept_or_left_out() -> None:
    left_out = {
        "bookies/available", "autorecovery/locks", "autorecovery/workers", "elections", "restore",
    }  # fmt: skip
    keys = {
        value
        for module in (metadata.ids, metadata.access.logs)
        for name, value in vars(module).items()
        if name.startswith("KEY_")
    }
    assert {key for key in keys if not is_kept(f"{key}/x")} == left_out


def test_a_record_is_handed_on_before_the_next_line_is_read() -> None:
    lines_read = 0

    def lines() -> Iterator[bytes]:
        nonlocal lines_read
        for line in (
            b'{"format": 1, "dump": "bookie-aio metadata", "instance_id": "i", "created_ms": 1}\n',
            *(b'{"key": "logs/l%d", "value": "{}"}\n' % number for number in range(3)),
        ):
            lines_read += 1
            yield line

    records = read_dump(lines())
    for number in range(3):
        assert next(records) == (f"logs/l{number}", b"{}")
        assert lines_read == number + 2
    with pytest.raises(MetadataCorruptError, match="ends at line 4"):
        next(records)
