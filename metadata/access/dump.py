"""A cluster's metadata as a file of JSON lines, and back into any store: `metadata dump` and `restore`.

    {"format": 1, "dump": "bookie-aio metadata", "instance_id": "…", "created_ms": 1760000000000}
    {"key": "ledgers/000/0000/0000/0000/0007", "value": "{\\"format\\": …}"}
    …
    {"end": true, "keys": 1234, "ledgers": 1000, "ids": {"ledger": 4096}, "sha256": "…"}

A value is the stored text, to the byte. The last line has the sums, the checksum of all bytes before it, and
the id counter. So a dump that was cut off, or changed anywhere, is refused. No value refers to the version of
another one, so no version is in a dump. Ephemeral keys are not: they end with their processes.

The dump of a running cluster. Each list with pages is consistent in itself: the pages are written first, and
then the head that has not changed meanwhile. The order of the other keys, and what goes wrong without it:

    read                          before        otherwise
    ages, id floor                ledgers       they vouch for ledgers that the dump lacks: bookies drop these
    cookies                       retired ids   of a bookie that leaves neither is there: its id is used again
    cookies, retired ids, orders  ledgers       a bookie that some ledger names has left, and may not start
    ledgers                       late cookies  a bookie that some ledger names is unknown, and may not start
    logs, names of ledgers        ledgers       they list ledgers that were made behind the walk over them
    ledgers                       id counter    the id of a ledger is given out again

So a bookie that left meanwhile is in the dump as at its beginning, with its cookie: some ledgers name it, and
others its successors. A ledger that a log or a name lists is missing only if it was deleted meanwhile. Three
changes give no dump: another restore; a set-back of the metadata that is found, or answered for; and a bookie
that comes and leaves, since nobody has read its cookie.

Restoring is all or nothing for a reader. The file is checked from the first line to the last before anything
is written. The record `cluster` is written last, and a store without it is refused by everybody. The key
`restore` says which dump is being restored. A restore that was interrupted goes on where it was, if it is
run again with the same dump; with another dump it is refused. Every removal depends on the mark's version,
and every batch looks at it. So a run that was stopped does not go on after another one has ended.

The ids. The restored counter is at least the counter of the dump, above every ledger of the dump, and at
least the id floor. It never falls. A dump may be older than the bookies' directories. The bookies find that
at their start, by their ages and by the ids that they know of. Before they serve, they raise the counter far
above all ids that may have been given out. They drop nothing that the dump lacks (rule 15).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from metadata.access.bookies import ClusterRecord, find_cluster
from metadata.access.ledgers import LEDGER_SEQUENCE, LedgerStore
from metadata.access.logs import KEY_LOG_PAGES, KEY_LOGS
from metadata.errors import (
    GuardChangedError,
    InvalidArgumentError,
    InvalidTransitionError,
    KeyExistsError,
    MetadataCorruptError,
    NoSuchKeyError,
    VersionConflictError,
)
from metadata.ids import (
    KEY_AGES,
    KEY_AVAILABLE,
    KEY_CLUSTER,
    KEY_COOKIES,
    KEY_ELECTIONS,
    KEY_FRAGMENTS,
    KEY_ID_FLOOR,
    KEY_LEDGERS,
    KEY_ORDERS,
    KEY_REPAIR_LOCKS,
    KEY_REPAIR_WORKERS,
    KEY_RESTORE,
    KEY_RETIRED,
    KEY_SET_BACKS,
    KEY_UNBOUNDED,
    LEDGER_ID_MAX,
    MALFORMED,
    fragments_key,
    integer,
    ledger_id_of,
    ledger_key,
)
from metadata.keys import TOP_RESERVED, check_key, check_value
from metadata.model.ledger import LedgerMetadata
from metadata.model.record import Record
from metadata.owned_task import for_each, in_order
from metadata.store import VALUE_BYTES_MAX, Guard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator

    from metadata.store import MetadataStore, Versioned

DUMP_FORMAT = 1
DUMP_KIND = "bookie-aio metadata"
LINE_BYTES_MAX = 6 * VALUE_BYTES_MAX + 8192
"""JSON takes up to six bytes for one of a value."""

_EPHEMERAL = (KEY_AVAILABLE, KEY_REPAIR_LOCKS, KEY_REPAIR_WORKERS, KEY_ELECTIONS)
_TOP = frozenset(
    {
        KEY_CLUSTER, KEY_LEDGERS, KEY_ID_FLOOR, KEY_FRAGMENTS, KEY_LOGS, KEY_LOG_PAGES,
        KEY_UNBOUNDED, "bookies", KEY_SET_BACKS, "autorecovery",
    }
)  # fmt: skip
"""The first segments of all keys that a dump may hold."""
_LISTS = (KEY_LEDGERS, KEY_FRAGMENTS, KEY_LOGS, KEY_LOG_PAGES)
_FIRST = (
    (KEY_AGES, KEY_ID_FLOOR, KEY_SET_BACKS),
    (KEY_COOKIES,),
    (KEY_RETIRED, KEY_ORDERS),
    (KEY_UNBOUNDED,),
)
"""What is read before all lists: these keys and what is right below them, group by group."""
_READS_AT_ONCE = 32
_BATCH_KEYS = 64
_BATCHES_AT_ONCE = 16
_CLEARING, _WRITING = "clearing", "writing"


def is_kept(key: str) -> bool:
    """Return whether a key belongs into a dump."""
    is_ephemeral = any(key == one or key.startswith(f"{one}/") for one in _EPHEMERAL)
    return key.partition("/")[0] in _TOP and not is_ephemeral


async def _keys_below(store: MetadataStore, key: str) -> AsyncGenerator[str, None]:
    """Yield the keys below a key, with or without values; children before their parents."""
    for name in await store.children(key):
        child = f"{key}/{name}"
        async with aclosing(_keys_below(store, child)) as below:
            async for each in below:
                yield each
        yield child


async def _read_ahead(
    store: MetadataStore, keys: AsyncIterator[str]
) -> AsyncGenerator[tuple[str, Versioned], None]:
    """Yield keys that have values, with these, in their order; a few reads are under way at once."""

    async def read(key: str) -> Versioned | None:
        try:
            return await store.read(key)
        except NoSuchKeyError:
            return None  # It has only children, or was deleted.

    async with aclosing(in_order(keys, read, _READS_AT_ONCE)) as all_found:
        async for key, found in all_found:
            if found is not None:
                yield key, found


async def _with_pages(
    store: MetadataStore, key: str, head: Versioned, pages_key: str
) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield the pages of a list, and then its head as it was while all of them were there.

    A page that a head refers to is deleted only after the head has changed. So the pages that were listed
    and read between two equal reads of a head are all that it refers to. Pages never change.
    """
    written: set[str] = set()
    while True:
        for name in await store.children(pages_key):
            if name not in written:
                with suppress(NoSuchKeyError):
                    yield f"{pages_key}/{name}", (await store.read(f"{pages_key}/{name}")).value
                    written.add(name)
        try:
            present = await store.read(key)
        except NoSuchKeyError:
            return  # It was deleted. Pages without a head are swept.
        if present.version == head.version:
            yield key, head.value
            return
        head = present


def _is_unbounded(value: bytes) -> bool:
    """Return whether a ledger's metadata may have pages. Damaged metadata are dumped as they are."""
    try:
        return LedgerMetadata.from_json(value).is_unbounded
    except MetadataCorruptError:
        return False


async def foreign_names(store: MetadataStore) -> list[str]:
    """Return the first segments of the keys in a store that are none of a cluster's. No dump has them."""
    known = {*_TOP, *TOP_RESERVED, KEY_ELECTIONS, KEY_RESTORE}
    return [name for name in await store.children("") if name not in known]


async def _kept_keys(store: MetadataStore, leave_out: Collection[str] = ()) -> AsyncGenerator[str, None]:
    """Yield the keys that belong into a dump, with or without values; children before their parents.

    Args:
        leave_out: first segments.
    """
    for top in sorted(_TOP.intersection(await store.children("")).difference(leave_out)):
        async with aclosing(_keys_below(store, top)) as below:
            async for key in below:
                if is_kept(key):
                    yield key
        yield top


async def _first_records(store: MetadataStore) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield what is to be read before the lists."""

    async def of_group(keys: Collection[str]) -> AsyncGenerator[str, None]:
        for key in keys:
            for name in await store.children(key):
                yield f"{key}/{name}"
            yield key

    for group in _FIRST:
        async with aclosing(_read_ahead(store, of_group(group))) as found:
            async for key, versioned in found:
                yield key, versioned.value


async def _lists(store: MetadataStore) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield logs and ledgers; a list's pages come before its head."""

    async def logs() -> AsyncGenerator[str, None]:
        for name in await store.names(KEY_LOGS):
            yield f"{KEY_LOGS}/{name}"

    async with aclosing(_read_ahead(store, logs())) as heads:
        async for key, head in heads:
            pages_key = f"{KEY_LOG_PAGES}/{key.removeprefix(f'{KEY_LOGS}/')}"
            async for record in _with_pages(store, key, head, pages_key):
                yield record

    async def ledgers() -> AsyncGenerator[str, None]:
        async with aclosing(LedgerStore(store).ledger_ids()) as ledger_ids:
            async for ledger_id in ledger_ids:
                yield ledger_key(ledger_id)

    async with aclosing(_read_ahead(store, ledgers())) as heads:
        async for key, head in heads:
            if not _is_unbounded(head.value):
                yield key, head.value
                continue
            async for record in _with_pages(store, key, head, fragments_key(ledger_id_of(key))):
                yield record


async def _records(store: MetadataStore) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield all keys that belong into a dump, with their values, in the order of the module's docstring."""
    await store.sync("")
    of_bookies: set[str] = set()
    async with aclosing(_first_records(store)) as first:
        async for record in first:
            if record[0].startswith("bookies/"):
                of_bookies.add(record[0])
            yield record
    async with aclosing(_lists(store)) as lists:
        async for record in lists:
            yield record

    async def others() -> AsyncGenerator[str, None]:
        async with aclosing(_kept_keys(store, (*_LISTS, KEY_UNBOUNDED))) as keys:
            async for key in keys:
                is_late = key.startswith(f"{KEY_COOKIES}/") and key not in of_bookies
                if is_late or not _is_first(key):
                    yield key

    async with aclosing(_read_ahead(store, others())) as found:
        async for key, versioned in found:
            if key.startswith("bookies/"):
                of_bookies.add(key)
            yield key, versioned.value
    for name in await store.children(KEY_RETIRED):
        if of_bookies.isdisjoint((f"{KEY_COOKIES}/{name}", f"{KEY_RETIRED}/{name}")):
            raise InvalidTransitionError(
                f"bookie {name} has come and left while this dump was made, which lacks its cookie: make it "
                "again"
            )


def _is_first(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}/") for group in _FIRST for one in group)


async def dump(store: MetadataStore, *, now_ms: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a dump, each with its newline. Memory holds some values, and the pages of one list.

    After an error the dump has no last line, and is refused.

    Raises:
        NoSuchClusterError: the store holds no cluster.
        MetadataUnavailableError: the store does not answer.
        MetadataCorruptError: a value is no JSON. No store takes it, so the dump could not be restored.
        InvalidTransitionError: the store was cleared meanwhile, so the dump lacks keys; or it was found to be
            set back; or a bookie has come and left.
    """
    digest, keys, ledgers = hashlib.sha256(), 0, 0
    cluster = await find_cluster(store)
    before = await _present(store, KEY_CLUSTER)
    set_backs = await _present(store, KEY_SET_BACKS)
    head = {
        "format": DUMP_FORMAT,
        "dump": DUMP_KIND,
        "instance_id": cluster.instance_id,
        "created_ms": now_ms,
    }

    def line(document: dict[str, Any]) -> bytes:
        text = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        digest.update(text)
        return text

    yield line(head)
    async with aclosing(_records(store)) as records:
        async for key, value in records:
            keys += 1
            ledgers += key.startswith(f"{KEY_LEDGERS}/")
            yield line({"key": key, "value": _text_of(key, value)})
    if before is None or await _present(store, KEY_CLUSTER) != before:
        raise InvalidTransitionError(
            "another dump was restored to the store while this one was made: it lacks keys, so make it again"
        )
    if await _present(store, KEY_SET_BACKS) != set_backs:
        raise InvalidTransitionError(
            "the store was found to be set back, or that was answered for, while this dump was made: make it "
            "again"
        )
    ids = {LEDGER_SEQUENCE: await store.ids_drawn(LEDGER_SEQUENCE)}
    sums = {"end": True, "keys": keys, "ledgers": ledgers, "ids": ids}
    yield line({**sums, "sha256": digest.hexdigest()})


async def _present(store: MetadataStore, key: str) -> Versioned | None:
    """Return what is at a key now. A restore removes the cluster's record first, and writes it last."""
    await store.sync(key)
    with suppress(NoSuchKeyError):
        return await store.read(key)
    return None


def _text_of(key: str, value: bytes) -> str:
    try:
        return check_value(value).decode()
    except InvalidArgumentError as error:
        raise MetadataCorruptError(
            f"the key {key!r} is damaged, and no store would take it from a dump: {error}"
        ) from error


class DumpSummary(NamedTuple):
    """A dump that was read to its end, and found whole."""

    instance_id: str
    created_ms: int
    keys: int
    ledgers: int
    counter: int
    """The lowest ledger id to be given out after a restore."""
    sha256: str


def read_dump(lines: Iterator[bytes]) -> Iterator[tuple[str, bytes] | DumpSummary]:
    """Yield the records of a dump, and at its end the summary. Memory holds one line.

    Args:
        lines: as in the file, each with its newline.

    Raises:
        MetadataCorruptError: it is damaged or cut off; the message has the number of the line.
        InvalidArgumentError: it is no dump, or of a version that is not known here.
    """
    digest, number, keys, ledgers, counter = hashlib.sha256(), 0, 0, 0, 0
    header: dict[str, Any] = {}
    instance_ids: list[str] = []
    for number, text in enumerate(lines, 1):
        document = _parse(number, text)
        if number == 1:
            header = _check_header(document)
        elif document.get("end") is True:
            _check_end(number, document, keys, ledgers, digest.hexdigest())
            if next(lines, b""):
                raise MetadataCorruptError(f"line {number + 1} of the dump lies behind its last line")
            if instance_ids != [header["instance_id"]]:
                raise MetadataCorruptError(
                    f"the dump has the cluster's own record {len(instance_ids)} times, or another cluster's"
                )
            counter = max(counter, document["ids"][LEDGER_SEQUENCE])
            yield DumpSummary(
                header["instance_id"], header["created_ms"], keys, ledgers, counter, document["sha256"]
            )
            return
        else:
            key, value = _check_record(number, document)
            keys += 1
            ledgers += key.startswith(f"{KEY_LEDGERS}/")
            counter = max(counter, _least_id(number, key, value))
            if key == KEY_CLUSTER:
                instance_ids.append(_instance_id(number, value))
            yield key, value
        digest.update(text)
    raise MetadataCorruptError(
        f"the dump ends at line {number} without its last line: it was cut off, so nothing of it is used"
    )


def _parse(number: int, text: bytes) -> dict[str, Any]:
    if len(text) > LINE_BYTES_MAX:
        raise MetadataCorruptError(f"line {number} of the dump is longer than {LINE_BYTES_MAX:,} bytes")
    if not text.endswith(b"\n"):
        raise MetadataCorruptError(
            f"line {number} of the dump has no end: it was cut off, so nothing of it is used"
        )
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise MetadataCorruptError(f"line {number} of the dump is damaged: {error}") from error
    return document


def _check_header(header: dict[str, Any]) -> dict[str, Any]:
    if header.get("dump") != DUMP_KIND:
        raise InvalidArgumentError(f'line 1 is not that of a dump: it has no "dump": "{DUMP_KIND}"')
    if header.get("format") != DUMP_FORMAT:
        raise InvalidArgumentError(
            f"line 1: the dump has format {header.get('format')!r}, and this release reads {DUMP_FORMAT}"
        )
    try:
        if not isinstance(header["instance_id"], str):
            raise ValueError("instance_id is no text")
        integer(header["created_ms"], 0, 2**63 - 1)
    except MALFORMED as error:
        raise MetadataCorruptError(f"line 1 of the dump is damaged: {error!r}") from error
    return header


def _check_end(number: int, document: dict[str, Any], keys: int, ledgers: int, sha256: str) -> None:
    try:
        integer(document["ids"][LEDGER_SEQUENCE], 0, LEDGER_ID_MAX)
        found = (document["keys"], document["ledgers"], document["sha256"])
    except MALFORMED as error:
        raise MetadataCorruptError(f"line {number}, the last of the dump, is damaged: {error!r}") from error
    if found[:2] != (keys, ledgers):
        raise MetadataCorruptError(
            f"the dump has {keys} keys and {ledgers} ledgers, and its last line, {number}, says {found[0]} "
            f"and {found[1]}: lines are missing"
        )
    if found[2] != sha256:
        raise MetadataCorruptError(
            f"the checksum in line {number}, the last of the dump, does not match: it was changed, or damaged"
        )


def _check_record(number: int, document: dict[str, Any]) -> tuple[str, bytes]:
    if document.keys() != {"key", "value"} or not isinstance(document["value"], str):
        raise MetadataCorruptError(f"line {number} of the dump is neither a key with its value nor the end")
    try:
        key, value = check_key(document["key"]), check_value(document["value"].encode())
    except (InvalidArgumentError, *MALFORMED) as error:
        raise MetadataCorruptError(f"line {number} of the dump: {error}") from error
    if not is_kept(key):
        raise MetadataCorruptError(f"line {number} of the dump: the key {key!r} is none of a cluster's")
    return key, value


def _least_id(number: int, key: str, value: bytes) -> int:
    """Return the lowest id that may be given out beside this record."""
    try:
        if key.startswith((f"{KEY_LEDGERS}/", f"{KEY_FRAGMENTS}/")):
            path = key if key.startswith(KEY_LEDGERS) else key.rpartition("/")[0]
            return ledger_id_of(path) + 1
        return integer(json.loads(value)["floor"], 0, LEDGER_ID_MAX) if key == KEY_ID_FLOOR else 0
    except (MetadataCorruptError, *MALFORMED) as error:
        raise MetadataCorruptError(f"line {number} of the dump: {error}") from error


def _instance_id(number: int, value: bytes) -> str:
    try:
        return ClusterRecord.from_json(value).instance_id
    except MetadataCorruptError as error:
        raise MetadataCorruptError(f"line {number} of the dump: {error}") from error


@dataclass(frozen=True, slots=True)
class RestoreMark(Record):
    """The restore that is under way in a store: `restore`."""

    sha256: str
    phase: str


class Marked(NamedTuple):
    """A mark as it is in the store."""

    mark: RestoreMark
    guard: Guard
    """Holds until another run goes on from this mark, or ends."""


class Target(NamedTuple):
    """A store that a dump may be restored into."""

    marked: Marked | None
    """Of the same restore, which was interrupted; None for a new one."""
    is_empty: bool
    is_written: bool
    """Whether all is there, and only the mark is left of the restore."""


def check_dump(lines: Iterator[bytes]) -> DumpSummary:
    """Read a dump to its end, and return its summary; see `read_dump` for the errors."""
    *_, summary = deque(read_dump(lines), maxlen=1)
    assert isinstance(summary, DumpSummary)
    return summary


class Restore:
    """Writes a dump into a store."""

    def __init__(self, lines: Callable[[], Iterator[bytes]], summary: DumpSummary) -> None:
        """Prepare.

        Args:
            lines: returns the lines of the dump, from the first one on.
            summary: of the same lines, by `check_dump`.
        """
        self._lines = lines
        self._summary = summary
        self.keys_written = 0
        self.keys_present = 0
        """Keys that an earlier attempt had written."""
        self.keys_removed = 0

    async def run(
        self,
        store: MetadataStore,
        *,
        clear: bool = False,
        least_id: int = 0,
        on_progress: Callable[[int], None] = lambda _: None,
        on_clear: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Restore; a restore of the same dump that was interrupted goes on.

        Args:
            clear: remove all that the store holds first.
            least_id: ledger ids below this one are not given out any more, beside those of the dump.
            on_progress: called with the number of keys that are there.
            on_clear: called before, with the number of keys that were removed.

        Returns:
            The lowest ledger id that will be given out.

        Raises:
            InvalidTransitionError: as `look` does; or another run or another client writes to the store.
            MetadataUnavailableError: the store does not answer. Run it again: nobody can use the store yet.
        """
        target = await self.look(store, clear=clear)
        least_id = max(least_id, self._summary.counter)
        try:
            if target.marked is None:
                target = await self._begin(store, target, clear=clear)
            assert target.marked is not None
            mark, guard = target.marked
            if not target.is_written:
                if mark.phase == _CLEARING:
                    await self._clear(store, guard, on_clear)
                    writing = replace(mark, phase=_WRITING).to_json()
                    version = await store.compare_and_set(KEY_RESTORE, writing, guard.version)
                    guard = guard._replace(version=version)
                await store.ids_drawn(LEDGER_SEQUENCE, least=least_id)
                await self._write(store, guard, on_progress)
            # Its place is kept: a run that was stopped must not take a later mark for its own.
            await store.delete(KEY_RESTORE, guard.version, keeps_place=True)
        except (GuardChangedError, VersionConflictError, NoSuchKeyError) as error:
            raise _overtaken() from error
        return await store.ids_drawn(LEDGER_SEQUENCE, least=least_id)

    async def look(self, store: MetadataStore, *, clear: bool) -> Target:
        """Check that the store may be written to; changes nothing.

        Raises:
            InvalidTransitionError: the store is not empty, is in use, or is in the middle of another restore.
        """
        await store.sync("")
        for what, key in (("bookies", KEY_AVAILABLE), ("workers of auto recovery", KEY_REPAIR_WORKERS)):
            running = await store.children(key)
            if running:
                raise InvalidTransitionError(
                    f"{what} {', '.join(running)} run on this store: stop all bookies and clients first"
                )
        foreign = await foreign_names(store)
        if foreign:
            raise InvalidTransitionError(
                f"the store has keys that are none of a cluster's, such as {foreign[0]!r}: name an empty root"
            )

        marked = await _mark_of(store)
        mark = None if marked is None else marked.mark
        if mark is not None and mark.sha256 != self._summary.sha256:
            raise InvalidTransitionError(
                "a restore of another dump was interrupted in this store: run it again with that dump, or "
                "restore into another, empty root"
            )
        is_begun = mark is not None
        with suppress(NoSuchKeyError):
            cluster = ClusterRecord.from_json((await store.read(KEY_CLUSTER)).value)
            is_begun = False  # Its record is removed first. The cluster may have lived since the mark.
            if mark is not None and mark.phase == _WRITING:
                if cluster.instance_id != self._summary.instance_id:
                    raise InvalidTransitionError(
                        "a bookie made another cluster in this store before the restore was complete: name "
                        "another, empty root"
                    )
                return Target(marked, is_empty=False, is_written=True)
        present = await _first_key(store)
        if present is not None and not is_begun and not clear:
            raise InvalidTransitionError(
                f"the store is not empty, it has the key {present!r}: name an empty root, or clear this one "
                "(--clear)"
            )
        return Target(marked, is_empty=present is None, is_written=False)

    async def _begin(self, store: MetadataStore, target: Target, *, clear: bool) -> Target:
        """Make the mark, and look again: another run may have ended between the look and the mark."""
        mark = RestoreMark(self._summary.sha256, _WRITING if target.is_empty else _CLEARING)
        try:
            version = await store.create(KEY_RESTORE, mark.to_json())
        except KeyExistsError as error:
            raise _overtaken() from error
        try:
            if (await self.look(store, clear=clear)).is_written:
                raise _overtaken()
        except InvalidTransitionError:
            await store.delete(KEY_RESTORE, version, keeps_place=True)
            raise
        return target._replace(marked=Marked(mark, Guard(KEY_RESTORE, version)))

    async def _clear(self, store: MetadataStore, guard: Guard, on_clear: Callable[[int], None]) -> None:
        """Remove all keys; the cluster's record first, so that nobody opens what is half removed.

        Each removal depends on the mark. A run that was stopped may go on after another run has ended, and
        the cluster lives then.
        """

        async def remove(key: str) -> bool:
            with suppress(NoSuchKeyError):
                await store.delete(key, guard=guard)
                return True
            return False

        await remove(KEY_CLUSTER)
        async with aclosing(_kept_keys(store)) as keys:
            async for key in keys:
                self.keys_removed += await remove(key)
                on_clear(self.keys_removed)

    async def _write(self, store: MetadataStore, guard: Guard, on_progress: Callable[[int], None]) -> None:
        """Write all keys, and then the cluster's record, which lets others in."""
        last: list[tuple[str, bytes]] = []

        def records() -> Iterator[tuple[str, bytes]]:
            for item in read_dump(self._lines()):
                if isinstance(item, DumpSummary):
                    if item != self._summary:
                        raise MetadataCorruptError("the dump has changed while it was restored")
                elif item[0] == KEY_CLUSTER:
                    last.append(item)
                else:
                    yield item

        def batches() -> Iterator[list[tuple[str, bytes]]]:
            source = records()
            while batch := list(itertools.islice(source, _BATCH_KEYS)):
                yield batch

        async def write(batch: list[tuple[str, bytes]]) -> None:
            await store.sync(guard.key)
            if (await store.read(guard.key)).version != guard.version:
                raise _overtaken()
            found = await store.create_missing(batch)
            values = dict(batch)
            for key in found:
                if (await store.read(key)).value != values[key]:
                    raise InvalidTransitionError(
                        f"the key {key!r} has another value than in the dump: another client writes to the "
                        "store"
                    )
            self.keys_present += len(found)
            self.keys_written += len(batch) - len(found)
            on_progress(self.keys_written + self.keys_present)

        await for_each(batches(), write, _BATCHES_AT_ONCE)
        await write(last)


async def _mark_of(store: MetadataStore) -> Marked | None:
    try:
        value, version = await store.read(KEY_RESTORE)
    except NoSuchKeyError:
        return None
    return Marked(RestoreMark.from_json(value), Guard(KEY_RESTORE, version))


def _overtaken() -> InvalidTransitionError:
    return InvalidTransitionError(
        "the mark of this restore has changed: another run has gone on in this store, or has ended; this run "
        "ends here"
    )


async def _first_key(store: MetadataStore) -> str | None:
    """Return a key of a cluster in the store; None where there is none."""
    async with aclosing(_kept_keys(store)) as keys:
        async for key in keys:
            with suppress(NoSuchKeyError):
                await store.read(key)
                return key
    return None
