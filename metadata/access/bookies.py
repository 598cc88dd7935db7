"""The records of bookies, and of the cluster they belong to, in the metadata store.

Seven records, each a JSON object under a key of `metadata.ids`:

- `cluster`: the instance id, drawn once when the cluster is made. A store without it holds no cluster;
- `bookies/available/ID` (ephemeral): the addresses of a running bookie, and whether it takes adds;
- `bookies/cookies/ID` (durable): the identity that its data directories must match (rule 6);
- `bookies/retired/ID` (durable): the bookie is gone for good, and is in no list any more;
- `bookies/orders` (durable): the bookies that take no new entries, by an operator's word;
- `bookies/ages/ID` (durable): a number that the bookie raises by compare-and-set, and keeps on its disks;
- `set_backs` (durable): the times at which a bookie found that this store was set back to an older copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from metadata.errors import (
    KeyExistsError,
    MetadataCorruptError,
    NoSuchClusterError,
    NoSuchKeyError,
    VersionConflictError,
    no_cluster,
)
from metadata.ids import (
    KEY_AVAILABLE,
    KEY_CLUSTER,
    KEY_COOKIES,
    KEY_ORDERS,
    KEY_RETIRED,
    KEY_SET_BACKS,
    MALFORMED,
    available_key,
    check_bookie_id,
)
from metadata.model.record import Record
from metadata.store import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from metadata.store import MetadataStore, Version

logger = logging.getLogger(__name__)


READ_ONLY = "read-only"
"""No new ledgers, no ordinary adds, no copies. Recoveries still write to it."""
DRAINING = "draining"
"""No entries of any kind: other bookies get all its seats."""
REMOVED = "removed"
"""No ledger names it any more. It stops, and then its cookie is removed."""
ORDER_MODES = (READ_ONLY, DRAINING, REMOVED)


@dataclass(frozen=True, slots=True)
class ClusterRecord(Record):
    """The cluster's identity."""

    instance_id: str
    created_ms: int

    def _check(self) -> None:
        _require(isinstance(self.instance_id, str) and bool(self.instance_id), "instance_id")


@dataclass(frozen=True, slots=True)
class BookieRecord(Record):
    """A running bookie, as clients see it.

    `addresses` are `host:port` (or `[v6]:port`), best first. `nonce` is drawn at each start.
    """

    bookie_id: str
    addresses: list[str]
    nonce: str
    is_writable: bool = True
    rack: str = ""
    weight: float = 1.0
    properties: dict[str, str] = field(default_factory=dict)
    order: str = ""
    """The mode of the operator's order that the bookie obeys; "" for none."""
    free_bytes: int | None = None
    """The free space of its disks, as it announced it last; None for unknown. See `has_moved`."""
    disk_bytes: int | None = None
    """The size of its disks."""
    is_tight: bool = False
    """Its disks are nearly full: it gets new ledgers only where there are too few other bookies."""

    def _check(self) -> None:
        check_bookie_id(self.bookie_id)
        _require(self.order in ("", *ORDER_MODES), "order")
        _require(isinstance(self.addresses, list) and bool(self.addresses), "addresses")
        for address in self.addresses:
            split_address(address)
        _require(isinstance(self.is_writable, bool), "is_writable")
        _require(isinstance(self.rack, str), "rack")
        for count in (self.free_bytes, self.disk_bytes):
            _require(count is None or _is_count(count), "free_bytes or disk_bytes")
        _require(isinstance(self.is_tight, bool), "is_tight")
        _require(isinstance(self.weight, (int, float)) and self.weight >= 0, "weight")

    def has_moved(self, free_bytes: int, disk_bytes: int, is_tight: bool) -> bool:
        """Return whether the free space differs so much from the announced one that clients should know.

        By a tenth of it, or by a twentieth of the disks. An announcement is a write to the metadata store.
        """
        if self.free_bytes is None or (self.disk_bytes, self.is_tight) != (disk_bytes, is_tight):
            return True
        change = abs(free_bytes - self.free_bytes)
        return change * 20 > disk_bytes or change * 10 > max(free_bytes, self.free_bytes)


@dataclass(frozen=True, slots=True)
class Cookie(Record):
    """A bookie's identity: the same in the metadata store and in each of its data directories."""

    bookie_id: str
    instance_id: str
    incarnation: str  # drawn when the directories are formatted
    directories: int  # how many there are

    def _check(self) -> None:
        check_bookie_id(self.bookie_id)
        _require(isinstance(self.instance_id, str) and bool(self.instance_id), "instance_id")
        _require(isinstance(self.incarnation, str) and bool(self.incarnation), "incarnation")
        _require(isinstance(self.directories, int) and self.directories >= 1, "directories")


@dataclass(frozen=True, slots=True)
class AgeRecord(Record):
    """A bookie's age, as the metadata store knows it; `bookie_aio.core.identity` has the use.

    `number` only grows. `token` is drawn at each start. `place` are the absolute paths of the directories
    that the bookie last ran on.
    """

    number: int
    token: str
    place: list[str]

    def is_behind(self, token: str, number: int) -> bool:
        """Return whether this is of before an age that the bookie had once, or of another life of it.

        An age in the store only grows. So the store was set back, unless a new bookie was formatted under the
        id since then.
        """
        return self.token != token if self.number == number else self.number < number

    def _check(self) -> None:
        _require(_is_count(self.number), "number")
        _require(isinstance(self.token, str) and bool(self.token), "token")
        _require(_is_list_of_text(self.place), "place")


@dataclass(frozen=True, slots=True)
class SetBack(Record):
    """One time at which a bookie found that the metadata store had been set back to an older copy.

    All ledger ids below `raised_to` may have been given out before. None of them is given out any more.
    `counter` is the lowest id that the older copy had not given out. `answered` are the bookies whose ledgers
    an operator has looked at since. `ages` are the highest ages, token and number, that any bookie had seen
    of another one: the records in the older copy prove nothing.
    """

    token: str
    bookie_id: str
    counter: int
    raised_to: int
    answered: list[str]
    ages: dict[str, list[Any]] = field(default_factory=dict)

    def answer_for(self, bookies: Iterable[str]) -> SetBack:
        """Return the event with these bookies among those that are answered for."""
        return replace(self, answered=sorted({*self.answered, *bookies}))

    def _check(self) -> None:
        _require(isinstance(self.token, str) and bool(self.token), "token")
        check_bookie_id(self.bookie_id)
        _require(_is_count(self.counter), "counter")
        _require(_is_count(self.raised_to), "raised_to")
        _require(_is_list_of_text(self.answered), "answered")
        _require(isinstance(self.ages, dict), "ages")
        for age in self.ages.values():
            _require(isinstance(age, list) and len(age) == 2, "ages")
            _require(isinstance(age[0], str) and _is_count(age[1]), "ages")


SET_BACKS_KEPT = 32
"""The number of events that the metadata store keeps, the newest last."""


@dataclass(frozen=True, slots=True)
class SetBacks:
    """The events in the metadata store, oldest first, and the version of the key; None: no such key."""

    events: tuple[SetBack, ...] = ()
    version: Version | None = None

    @classmethod
    async def read(cls, store: MetadataStore) -> SetBacks:
        """Read the events; raises MetadataCorruptError."""
        try:
            text, version = await store.read(KEY_SET_BACKS)
        except NoSuchKeyError:
            return cls()
        try:
            events = tuple(
                SetBack.from_json(json.dumps(each).encode()) for each in json.loads(text)["events"]
            )
        except MALFORMED as error:
            raise MetadataCorruptError(f"{KEY_SET_BACKS} is damaged: {error!r} in {text[:200]!r}") from error
        return cls(events, version)

    async def replace(self, store: MetadataStore, events: Sequence[SetBack]) -> None:
        """Replace the events.

        Raises:
            VersionConflictError: another client changed them since the read.
        """
        documents = [json.loads(each.to_json()) for each in events[-SET_BACKS_KEPT:]]
        text = json.dumps({"events": documents}).encode()
        try:
            if self.version is None:
                await store.create(KEY_SET_BACKS, text)
            else:
                await store.compare_and_set(KEY_SET_BACKS, text, self.version)
        except (KeyExistsError, NoSuchKeyError) as error:
            raise VersionConflictError(f"{KEY_SET_BACKS} was changed by another client") from error


def unanswered_below(events: Sequence[SetBack], bookie_id: str) -> int:
    """Return the id below which the metadata may be older than what a bookie holds; 0 for nowhere.

    Where the store lists all that the bookie holds, that is no answer. A ledger that it does not list may be
    on other bookies, and one that it lists may have been repaired since the copy. Only an operator knows that
    no newer copy will come back.
    """
    return max((event.raised_to for event in events if bookie_id not in event.answered), default=0)


def not_free_below(events: Sequence[SetBack]) -> int:
    """Return the id below which no new ledger may be made: a client may have drawn such ids from a copy.

    It grows by 2^20 with each event, so the terms of unbounded ledgers that were counted behind a copy are
    below it, too.
    """
    return max((event.raised_to for event in events), default=0)


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's order to one bookie, which holds until it is taken back."""

    mode: str
    successor: str = ""
    """The bookie that is to get its entries; "" for any."""
    since_ms: int = 0
    """When it was given, by the wall clock of who gave it. For people only."""

    def __post_init__(self) -> None:
        _require(self.mode in ORDER_MODES, "mode")
        _require(isinstance(self.successor, str), "successor")
        _require(_is_count(self.since_ms), "since_ms")
        if self.successor:
            check_bookie_id(self.successor)

    @property
    def is_leaving(self) -> bool:
        """Return whether the bookie is to lose all its seats."""
        return self.mode in (DRAINING, REMOVED)


@dataclass(frozen=True, slots=True)
class Orders:
    """All orders that hold, by bookie, and the version of the key; None: no such key.

    They stand in one value, so one watch tells every client of each change. A bookie that is down when it
    gets an order obeys it from its next start on.
    """

    by_bookie: Mapping[str, Order] = field(default_factory=dict)
    version: Version | None = None

    @classmethod
    async def read(cls, store: MetadataStore) -> Orders:
        """Read the orders; raises MetadataCorruptError."""
        try:
            text, version = await store.read(KEY_ORDERS)
        except NoSuchKeyError:
            return cls()
        try:
            found = {
                check_bookie_id(name): Order(**order) for name, order in json.loads(text)["orders"].items()
            }
        except MALFORMED as error:
            raise MetadataCorruptError(f"{KEY_ORDERS} is damaged: {error!r} in {text[:200]!r}") from error
        return cls(found, version)

    @property
    def leaving(self) -> list[str]:
        """Return the bookies that are to lose all their seats, sorted."""
        return sorted(name for name, order in self.by_bookie.items() if order.is_leaving)


async def change_order(
    store: MetadataStore, bookie_id: str, decide: Callable[[Order | None], Order | None]
) -> Order | None:
    """Change the order of one bookie by compare-and-set, and return it.

    Args:
        decide: returns the order that is to hold, from the one that holds; None for none. May raise, which
            changes nothing. It is called again after a conflict.

    Raises:
        MetadataUnavailableError: the change may take effect, now or later.
    """
    check_bookie_id(bookie_id)
    while True:
        await store.sync(KEY_ORDERS)
        orders = await Orders.read(store)
        before = orders.by_bookie.get(bookie_id)
        after = decide(before)
        if after == before:
            return before
        changed = {name: order for name, order in orders.by_bookie.items() if name != bookie_id}
        if after is not None:
            changed[bookie_id] = after
        text = _text_of(changed)
        with contextlib.suppress(KeyExistsError, VersionConflictError, NoSuchKeyError):
            if orders.version is None:
                await store.create(KEY_ORDERS, text)
            else:
                await store.compare_and_set(KEY_ORDERS, text, orders.version)
            return after


async def guard_of_staying(store: MetadataStore, bookie_id: str) -> Guard | None:
    """Return the guard of a write that relies on a bookie's staying in the cluster.

    It holds until an operator gives any order. None: the bookie is to leave, or has left. Who removes a
    bookie gives an order first, then looks for what needs it, and removes it last. That look sees a write
    under this guard, or the write never takes effect.
    """
    while True:
        await store.sync(KEY_ORDERS)
        orders = await Orders.read(store)
        if orders.version is not None:
            break
        with contextlib.suppress(KeyExistsError):
            await store.create(KEY_ORDERS, _text_of({}))
    order = orders.by_bookie.get(bookie_id)
    if (order is not None and order.is_leaving) or await is_retired(store, bookie_id):
        return None
    return Guard(KEY_ORDERS, orders.version)


def _text_of(orders: Mapping[str, Order]) -> bytes:
    return json.dumps({"orders": {name: asdict(orders[name]) for name in sorted(orders)}}).encode()


async def await_obedience(store: MetadataStore, bookie_id: str, mode: str, timeout_s: float) -> bool | None:
    """Wait until a running bookie announces that it obeys an order.

    Args:
        mode: that of the order; "" where it was taken back.

    Returns:
        Whether it did in time; None for a bookie that does not run.
    """
    key = available_key(bookie_id)
    try:
        async with asyncio.timeout(timeout_s), contextlib.aclosing(store.watch(key)) as changes:
            async for _ in changes:
                try:
                    record = BookieRecord.from_json((await store.read(key)).value)
                except NoSuchKeyError:
                    return None
                if record.order == mode:
                    return True
    except TimeoutError:
        pass
    return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _require(condition: bool, name: str) -> None:
    if not condition:
        raise ValueError(f"{name} is missing or wrong")


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; raises ValueError for any other form."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) <= 65535 or not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Invert `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def find_cluster(store: MetadataStore) -> ClusterRecord:
    """Read the cluster's record. A lagging server's no is checked again after a sync.

    Raises:
        NoSuchClusterError: the store holds no cluster.
    """
    try:
        return ClusterRecord.from_json((await store.read(KEY_CLUSTER)).value)
    except NoSuchKeyError:
        await store.sync(KEY_CLUSTER)
    try:
        return ClusterRecord.from_json((await store.read(KEY_CLUSTER)).value)
    except NoSuchKeyError:
        raise no_cluster(store.uri, "the store holds none") from None


async def ensure_cluster(store: MetadataStore, *, draw_id: Callable[[], str], now_ms: int) -> ClusterRecord:
    """Read the cluster's record, or create it. A bookie that loses the race adopts the winner's record.

    For a caller that was told to make a cluster, or that starts its first bookie.
    """
    try:
        return await find_cluster(store)
    except NoSuchClusterError:
        pass
    record = ClusterRecord(instance_id=draw_id(), created_ms=now_ms)
    try:
        await store.create(KEY_CLUSTER, record.to_json())
    except KeyExistsError:
        return ClusterRecord.from_json((await store.read(KEY_CLUSTER)).value)
    return record


async def registered_bookies(store: MetadataStore) -> list[str]:
    """Return the ids of all bookies that have a cookie, running or not, sorted. Retired ones are left out."""
    retired = await retired_bookies(store)
    return [name for name in await store.children(KEY_COOKIES) if name not in retired]


async def retired_bookies(store: MetadataStore) -> set[str]:
    """Return the ids of all bookies that are gone for good."""
    return set(await store.children(KEY_RETIRED))


async def is_retired(store: MetadataStore, bookie_id: str) -> bool:
    """Return whether a bookie is gone for good."""
    try:
        await store.read(f"{KEY_RETIRED}/{check_bookie_id(bookie_id)}")
    except NoSuchKeyError:
        return False
    return True


async def retire(store: MetadataStore, bookie_id: str) -> None:
    """Leave a bookie that is gone for good out of every list. Its caller checked that no ledger names it.

    Its id is never used again. A new bookie under it would have lost its fences. Then a writer that was cut
    off for long could have an entry acknowledged there (rule 6). The caller removes the cookie afterwards:
    without one, the bookie does not start on its own directory either.
    """
    with contextlib.suppress(KeyExistsError):
        await store.create(f"{KEY_RETIRED}/{check_bookie_id(bookie_id)}", b"{}")


async def are_gone(store: MetadataStore, bookies: Collection[str]) -> bool:
    """Return whether none of these bookies will come back: none runs, and each has left, or is to leave.

    A bookie that is merely down has its cookie, and no order to leave.
    """
    await store.sync(KEY_AVAILABLE)
    if not set(await store.children(KEY_AVAILABLE)).isdisjoint(bookies):
        return False
    await store.sync(KEY_ORDERS)
    staying = {*await registered_bookies(store)} - {*(await Orders.read(store)).leaving}
    return staying.isdisjoint(bookies)


async def available_bookies(store: MetadataStore) -> dict[str, BookieRecord]:
    """Read the registrations of all running bookies, by id.

    A registration that vanishes meanwhile is left out. A damaged one is logged and left out.
    """
    found: dict[str, BookieRecord] = {}
    for name in await store.children(KEY_AVAILABLE):
        try:
            record = BookieRecord.from_json((await store.read(f"{KEY_AVAILABLE}/{name}")).value)
        except NoSuchKeyError:
            continue
        except MetadataCorruptError as error:
            logger.error("the registration of bookie %s is left out: %s", name, error)
            continue
        found[record.bookie_id] = record
    return found
