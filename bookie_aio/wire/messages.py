"""Messages: requests and answers, as they stand in the header of a frame.

    [op, request_id, auth, *fields]                         a request; `auth` is nil or a token
    [op | 0x80, request_id, status, *fields]                its answer, when the status is OK
    [op | 0x80, request_id, status, message, value]         its answer with any other status

Each is one msgpack array. Answers may come in any order; each names its request. Blocks travel in the body.
Every header is checked against the message's schema: number, types and ranges of its fields.

Owns the form of the messages. docs/PROTOCOL.md has their meaning, and the rules for when a bookie may answer
them. Tokens are explained in `bookie_aio.core.authorisation`.
"""

from __future__ import annotations

import abc
import enum
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bookie_aio.wire.blocks import LacStatement
from bookie_aio.wire.frames import ShortForm
from metadata.errors import MalformedFrameError
from metadata.ids import ENTRY_ID_MAX, LEDGER_ID_MAX, NO_ENTRY, TERM_FINAL

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION_MIN = 3
VERSION_MAX = 5
VERSION_MANY = 5
"""The first version with ADDS and WRITE_LACS."""
VERSION_IS_FREE = 4
"""The first version with IS_FREE."""
ANSWER = 0x80
NO_TERM = -1
"""A read's `term` when it does not fence."""
REQUEST_ID_MAX = 2**32 - 2
ALIVE_ID = REQUEST_ID_MAX + 1
"""No request has this id. A PING's answer under it says: the bookie lives, and reads no requests for now."""
VERSION_ALIVE = 4
"""From this version on, bookies send that answer, and have WATCH."""
WAIT_MS_MAX = 30_000
ADD_FLAGS_MAX = 7
MANY_MAX = 256
"""Requests in one frame of ADDS or WRITE_LACS: a bookie handles so many ADDs of a connection in a row."""


class Op(enum.IntEnum):
    """The operations."""

    HELLO = 1
    PING = 2
    ADD = 3
    READ = 4
    READ_LAC = 5
    WRITE_LAC = 6
    LIST_ENTRIES = 7
    LIST_LEDGERS = 8
    INFO = 9
    FORCE = 10
    DELETE = 11
    WATCH = 12
    IS_FREE = 13
    LIFT_MARK = 14
    ADDS = 15
    WRITE_LACS = 16


class Status(enum.IntEnum):
    """The outcome of a request."""

    OK = 0
    BAD_REQUEST = 1
    UNSUPPORTED_VERSION = 2
    UNAUTHORIZED = 3
    INVALID_TERM = 4  # value: the term the bookie holds
    READ_ONLY = 5
    TOO_MANY_REQUESTS = 6
    STALE_METADATA = 7  # value: the content term the bookie holds
    NO_SUCH_LEDGER = 8  # the ledger has been deleted
    DATA_LOST = 9  # this bookie lost data of the ledger and takes no ordinary adds to it (rule 4)
    WRONG_BOOKIE = 10
    SHUTTING_DOWN = 11
    INTERNAL_ERROR = 12
    ID_TAKEN = 13  # the id of a new ledger was used before, or was not given out


class Stop(enum.IntEnum):
    """The reason why a read's answer ends where it ends."""

    END = 0  # all requested entries are there
    BUDGET = 1  # the next entry would exceed the budget of bytes
    NO_SUCH_ENTRY = 2  # the bookie knows that it does not hold `stop_entry`
    UNKNOWN = 3  # it cannot say whether it held `stop_entry` (rule 4)
    STALE_METADATA = 4  # it holds `stop_entry` under a higher content term


class AddFlag(enum.IntFlag):
    """The kind of an add."""

    NONE = 0
    RECOVERY = 1  # by a recovering client: accepted from the reserve of a read-only bookie
    REPAIR = 2  # stored bytes of another bookie, verbatim (rule 14)
    DEFERRED_SYNC = 4  # answered when it is received; the answer to a later FORCE says that it is durable


def _show(value: object) -> str:
    """Return a short text of a value for an error message. Not the `repr` of nested values: it recurses."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else f"{value!r:.80}"


class _Kind(abc.ABC):
    """A field's schema: checks and converts a value that msgpack decoded."""

    @abc.abstractmethod
    def decode(self, value: object) -> Any:
        """Return the checked value; raise ValueError with what is wrong."""

    def encode(self, value: Any) -> object:
        return value


class _Integer(_Kind):
    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def decode(self, value: object) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise ValueError(f"{_show(value)} is not an integer from {self.low} to {self.high}")
        return value


class _Text(_Kind):
    def decode(self, value: object) -> str:
        if type(value) is not str:
            raise ValueError(f"{_show(value)} is not text")
        return value


class _Bytes(_Kind):
    def decode(self, value: object) -> bytes:
        if type(value) is not bytes:
            raise ValueError(f"{_show(value)} is not bytes")
        return value


class _Flag(_Kind):
    def decode(self, value: object) -> bool:
        if type(value) is not bool:
            raise ValueError(f"{_show(value)} is not a boolean")
        return value


class _Statement(_Kind):
    """A LAC statement, or nil where none is known."""

    def decode(self, value: object) -> LacStatement | None:
        if value is None:
            return None
        if type(value) is not list or len(value) != 5:
            raise ValueError(f"{_show(value)} is not a LAC statement")
        term, lac, lafr, crc, mac = value
        return LacStatement(
            _TERM.decode(term), _LAC.decode(lac), _LAC.decode(lafr), _U32.decode(crc), _BYTES.decode(mac)
        )

    def encode(self, value: LacStatement | None) -> object:
        return None if value is None else list(value)


_U16 = _Integer(0, 2**16 - 1)
_U32 = _Integer(0, 2**32 - 1)
_U64 = _Integer(0, 2**64 - 1)
_MARK = _Integer(0, 2**63 - 1)
_LEDGER = _Integer(0, LEDGER_ID_MAX)
_ENTRY = _Integer(0, ENTRY_ID_MAX)
_LAC = _Integer(NO_ENTRY, ENTRY_ID_MAX)
_TERM = _Integer(0, TERM_FINAL)
_TERM_OR_NONE = _Integer(NO_TERM, TERM_FINAL)
_CURSOR = _Integer(-1, LEDGER_ID_MAX)
_TEXT = _Text()
_BYTES = _Bytes()
_FLAG = _Flag()
_STATEMENT = _Statement()


@dataclass(slots=True)
class Message:
    """The fields of a request or an answer. A subclass lists them, and their schema in the same order."""

    op: ClassVar[Op]
    schema: ClassVar[tuple[_Kind, ...]] = ()

    def encode(self) -> list[object]:
        """Return the fields as they stand in the header."""
        names: Iterable[str] = type(self).__slots__
        return [kind.encode(getattr(self, name)) for name, kind in zip(names, self.schema, strict=True)]

    @classmethod
    def decode(cls, values: list[object]) -> Self:
        """Check the fields against the schema.

        Raises:
            MalformedFrameError: a field is missing, too many, of the wrong type or out of range.
        """
        if not values and not cls.schema:
            return cls()
        if len(values) != len(cls.schema):
            raise MalformedFrameError(f"{cls.__name__} has {len(cls.schema)} fields, not {len(values)}")
        try:
            return cls(*[kind.decode(value) for kind, value in zip(cls.schema, values, strict=True)])
        except ValueError as error:
            name = _field_at_fault(cls, values)
            raise MalformedFrameError(f"{cls.__name__}.{name}: {error}") from error


def _field_at_fault(cls: type[Message], values: list[object]) -> str:
    for field, kind, value in zip(fields(cls), cls.schema, values, strict=True):
        try:
            kind.decode(value)
        except ValueError:
            return field.name
    return "?"


@dataclass(slots=True)
class Hello(Message):
    """Opens every connection: offers versions, and names the bookie that the caller expects."""

    op = Op.HELLO
    schema = (_U16, _U16, _TEXT, _TEXT, _TEXT)
    version_min: int
    version_max: int
    client: str  # for the bookie's log
    instance_id: str  # of the cluster; "" when the caller does not know it
    bookie_id: str  # that the caller expects; "" for any bookie


@dataclass(slots=True)
class HelloAnswer(Message):
    """Fixes the version and the limits of the connection."""

    op = Op.HELLO
    schema = (_U16, _TEXT, _TEXT, _TEXT, _U32, _U32)
    version: int
    bookie_id: str
    instance_id: str
    nonce: str  # drawn at each start of the bookie
    frame_bytes_max: int
    entry_bytes_max: int


@dataclass(slots=True)
class Ping(Message):
    """Asks for an answer, to check the connection."""

    op = Op.PING


@dataclass(slots=True)
class Add(Message):
    """Asks to store the one block in the body, durably. Refused where the term is below the held one."""

    op = Op.ADD
    schema = (_LEDGER, _TERM, _Integer(0, ADD_FLAGS_MAX))
    ledger_id: int
    term: int
    flags: int  # of `AddFlag`


@dataclass(slots=True)
class Read(Message):
    """Asks for the entries `first`, `first + stride`, … up to `last`. Fences where it carries a term."""

    op = Op.READ
    schema = (_LEDGER, _TERM_OR_NONE, _TERM, _ENTRY, _ENTRY, _Integer(1, 64), _U32)
    ledger_id: int
    term: int
    content_term: int
    first: int
    last: int
    stride: int
    bytes_max: int  # of blocks in the answer, which has at least one entry all the same


@dataclass(slots=True)
class ReadAnswer(Message):
    """The blocks are in the body. `stop_entry` is the first requested entry that is not among them."""

    op = Op.READ
    schema = (_Integer(0, max(Stop)), _Integer(0, ENTRY_ID_MAX + 1), _STATEMENT)
    stop: int  # a `Stop`
    stop_entry: int  # above the last requested entry where all are there
    statement: LacStatement | None


@dataclass(slots=True)
class ReadLac(Message):
    """Asks for the LAC, and fences where it carries a term.

    With `wait_ms` above 0, the answer waits for a LAC above `known_lac`, or for that time.
    """

    op = Op.READ_LAC
    schema = (_LEDGER, _TERM_OR_NONE, _LAC, _Integer(0, WAIT_MS_MAX))
    ledger_id: int
    term: int
    known_lac: int
    wait_ms: int


@dataclass(slots=True)
class ReadLacAnswer(Message):
    """The highest LAC statement that the bookie has, and the highest entry that it holds (−1: none).

    With `is_damaged` the bookie has lost data of the ledger, and may have had a higher statement or entry. It
    is not set where all that is damaged are entries that the bookie lists.
    """

    op = Op.READ_LAC
    schema = (_STATEMENT, _LAC, _FLAG)
    statement: LacStatement | None
    last_entry: int
    is_damaged: bool


@dataclass(slots=True)
class Force(Message):
    """Asks for an answer once every add received earlier over this connection is durable."""

    op = Op.FORCE
    schema = (_LEDGER, _TERM)
    ledger_id: int
    term: int


@dataclass(slots=True)
class WriteLac(Message):
    """Publishes the LAC of an idle writer."""

    op = Op.WRITE_LAC
    schema = (_LEDGER, _TERM, _STATEMENT)
    ledger_id: int
    term: int
    statement: LacStatement | None


@dataclass(slots=True)
class ListEntries(Message):
    """Asks for the ids of the entries of a ledger that the bookie holds, from `from_entry` on."""

    op = Op.LIST_ENTRIES
    schema = (_LEDGER, _ENTRY)
    ledger_id: int
    from_entry: int


@dataclass(slots=True)
class ListEntriesAnswer(Message):
    """The rows are in the body (`bookie_aio.wire.listing`). `next_entry` −1: there are no more.

    With `is_damaged` the ledger has a mark: entries were lost, among those that are listed, or others.
    """

    op = Op.LIST_ENTRIES
    schema = (_LAC, _FLAG)
    next_entry: int
    is_damaged: bool


@dataclass(slots=True)
class ListLedgers(Message):
    """Asks for the ids of the ledgers that the bookie holds data of, from `from_ledger` on."""

    op = Op.LIST_LEDGERS
    schema = (_LEDGER,)
    from_ledger: int


@dataclass(slots=True)
class ListLedgersAnswer(Message):
    """The ids are in the body, as little-endian u64, ascending. `next_ledger` −1: there are no more."""

    op = Op.LIST_LEDGERS
    schema = (_CURSOR,)
    next_ledger: int


@dataclass(slots=True)
class Info(Message):
    """Asks for the bookie's metrics, a JSON object in the body of the answer."""

    op = Op.INFO


@dataclass(slots=True)
class Delete(Message):
    """Says that a ledger has been deleted. The bookie checks it before it drops the ledger (rule 15)."""

    op = Op.DELETE
    schema = (_LEDGER,)
    ledger_id: int


@dataclass(slots=True)
class Watch(Message):
    """Watches the LACs of many ledgers, which are rows in the body (`bookie_aio.wire.watching`).

    The answer waits until the LAC of a watched ledger has moved, for `wait_ms`, or until this connection's
    next WATCH. Each row adds a ledger to those that the connection watches, or takes one out.
    """

    op = Op.WATCH
    schema = (_Integer(0, WAIT_MS_MAX),)
    wait_ms: int


@dataclass(slots=True)
class IsFree(Message):
    """Asks whether a new ledger may have this id: the bookie has never heard of it."""

    op = Op.IS_FREE
    schema = (_LEDGER,)
    ledger_id: int


@dataclass(slots=True)
class LiftMark(Message):
    """Asks to lift the marks of lost data of a ledger, up to the number `mark` (rule 4).

    With 0 it lifts nothing, and asks for the number of the present mark.
    """

    op = Op.LIFT_MARK
    schema = (_LEDGER, _MARK)
    ledger_id: int
    mark: int


@dataclass(slots=True)
class LiftMarkAnswer(Message):
    """The number of the highest mark of the ledger that counts; 0: the ledger has none."""

    op = Op.LIFT_MARK
    schema = (_MARK,)
    mark: int


@dataclass(slots=True)
class Adds(Message):
    """Carries the ADDs of many ledgers in one frame, whose body `bookie_aio.wire.many` describes.

    They have the request ids from the frame's on. Each is judged, and answered, as an ADD of its own.
    """

    op = Op.ADDS
    schema = (_Integer(1, MANY_MAX),)
    count: int


@dataclass(slots=True)
class WriteLacs(Message):
    """Carries the WRITE_LACs of many ledgers in one frame, as `Adds` carries ADDs."""

    op = Op.WRITE_LACS
    schema = (_Integer(1, MANY_MAX),)
    count: int


@dataclass(slots=True)
class Done(Message):
    """The answer without fields: to PING, ADD, WRITE_LAC, FORCE, DELETE, INFO, WATCH, IS_FREE.

    That to ADDS and WRITE_LACS names, in its body, the requests that are done.
    """

    op = Op.PING


_ALL = (
    Hello, Ping, Add, Read, ReadLac, WriteLac, ListEntries, ListLedgers, Info, Force, Delete, Watch,
    IsFree, LiftMark, Adds, WriteLacs,
)  # fmt: skip
REQUESTS: dict[int, type[Message]] = {message.op: message for message in _ALL}
ANSWERS: dict[int, type[Message]] = {
    Op.HELLO: HelloAnswer,
    Op.PING: Done,
    Op.ADD: Done,
    Op.READ: ReadAnswer,
    Op.READ_LAC: ReadLacAnswer,
    Op.WRITE_LAC: Done,
    Op.LIST_ENTRIES: ListEntriesAnswer,
    Op.LIST_LEDGERS: ListLedgersAnswer,
    Op.INFO: Done,
    Op.FORCE: Done,
    Op.DELETE: Done,
    Op.WATCH: Done,
    Op.IS_FREE: Done,
    Op.LIFT_MARK: LiftMarkAnswer,
    Op.ADDS: Done,
    Op.WRITE_LACS: Done,
}


@dataclass(slots=True)
class Failure:
    """An answer other than OK."""

    status: Status
    message: str
    value: int = 0


def encode_request(request: Message, request_id: int, auth: bytes | None = None) -> list[object]:
    """Return a request's header."""
    return [int(request.op), request_id, auth, *request.encode()]


ADDED = ShortForm(bytes((0x93, 0xCC, Op.ADD | ANSWER, 0xCE)), b"\x00")
"""The most frequent answer: an add is stored."""


def decode_request(header: list[object]) -> tuple[int, bytes | None, Message]:
    """Return request id, authorisation and request.

    Raises:
        MalformedFrameError: the header is not that of a request.
    """
    if len(header) < 3:
        raise MalformedFrameError(f"a request's header has at least 3 fields, not {len(header)}")
    op, request_id, auth = header[:3]
    message = REQUESTS.get(op) if type(op) is int else None
    if message is None:
        raise MalformedFrameError(f"{_show(op)} is no operation")
    if type(request_id) is not int or not 0 <= request_id <= REQUEST_ID_MAX:
        raise MalformedFrameError(f"{_show(request_id)} is no request id")
    if auth is not None and type(auth) is not bytes:
        raise MalformedFrameError("the authorisation is neither nil nor bytes")
    return request_id, auth, message.decode(header[3:])


def encode_answer(op: int, request_id: int, answer: Message) -> list[object]:
    """Return the header of an answer that is OK."""
    return [op | ANSWER, request_id, int(Status.OK), *answer.encode()]


def encode_failure(op: int, request_id: int, failure: Failure) -> list[object]:
    """Return the header of an answer that is not OK."""
    # A message may quote bytes that are not UTF-8, such as the name of a file.
    message = failure.message[:1000].encode("utf-8", "backslashreplace").decode()
    return [op | ANSWER, request_id, int(failure.status), message[:1000], failure.value]


def decode_answer(header: list[object]) -> tuple[int, int, Message | Failure]:
    """Return operation, request id and answer.

    Raises:
        MalformedFrameError: the header is not that of an answer.
    """
    if len(header) < 3:
        raise MalformedFrameError(f"an answer's header has at least 3 fields, not {len(header)}")
    op, request_id, status = header[:3]
    if type(op) is not int or op & ANSWER == 0 or (op ^ ANSWER) not in ANSWERS:
        raise MalformedFrameError(f"{_show(op)} answers no operation")
    if type(request_id) is not int or not 0 <= request_id <= ALIVE_ID:
        raise MalformedFrameError(f"{_show(request_id)} is no request id")
    op ^= ANSWER
    if status == Status.OK and type(status) is int:
        return op, request_id, ANSWERS[op].decode(header[3:])
    return op, request_id, _decode_failure(status, header[3:])


def _decode_failure(status: object, values: list[object]) -> Failure:
    try:
        if type(status) is not int or len(values) != 2:
            raise ValueError(f"status {_show(status)} with {len(values)} fields is no failure")
        return Failure(Status(status), _TEXT.decode(values[0]), _U64.decode(values[1]))
    except ValueError as error:
        raise MalformedFrameError(str(error)) from error
