"""The options of the data source "ledger": names, defaults, and the messages for wrong ones.

Owns the parsing of `.option(…)` values, which Spark passes as strings under names whose case does not matter.
An unknown name is an error that names the nearest option: ignoring a misspelt `encodnig` would write other
bytes than asked for. Owns also how long an outage may last (`Outage`). Touches neither Spark nor a cluster.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from metadata.backends.uri import parse_uri
from metadata.errors import (
    BookieUnavailableError,
    BookKeeperError,
    InvalidArgumentError,
    LedgerRecoveryError,
    MetadataUnavailableError,
    NotEnoughBookiesError,
)
from metadata.ids import check_ledger_id, check_name
from metadata.model.ledger import check_quorums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Source = TypeVar("Source", int, str, int | str)

ENCODINGS = ("binary", "json", "arrow")
_OF_SPARK = frozenset({"checkpointlocation", "queryname"})
"""Options that Spark acts upon itself, and passes on to the data source."""

_OF_TABLES = frozenset({"provider", "owner"})
"""Properties of a table in the catalog, which Spark passes with its options to find the table's columns."""
NO_TABLES = (
    "Spark gives the options of a table to no source in Python, so that its rows could not be found. Use "
    "CREATE TEMPORARY VIEW … USING ledger OPTIONS (metadata '…', log '…'), or a table of declared columns "
    "and the options in each statement, … WITH (metadata = '…', log = '…')"
)
"""Why a table of the catalog holds no log by itself, and the forms of SQL that work."""

COMPRESSIONS = ("none", "zstd", "lz4")
ALL = "all"
OUTAGE_S = 120
"""As long as a writer waits for an ack quorum (`ClientConfig.add_quorum_timeout_s`)."""
MIB = 1024 * 1024
ENTRY_BYTES_MAX = 4 * MIB
"""The largest entry that a client takes, by its defaults."""


AWAY = (MetadataUnavailableError, BookieUnavailableError, NotEnoughBookiesError, LedgerRecoveryError)
"""Errors of an outage: the same request may be answered later, when servers are back."""
_PAUSE_S = 0.5


class Outage:
    """Decides how long a caller goes on asking while servers are out of reach. It has no clock of its own.

    Args:
        timeout_s: how long one outage may last. An answer ends the outage.
        warn: called with a format and the error when an outage begins.
    """

    def __init__(self, timeout_s: float, warn: Callable[[str, BookKeeperError], None]) -> None:
        self._timeout_s = timeout_s
        self._warn = warn
        self._began: float | None = None

    def ended(self) -> None:
        """Note an answer."""
        self._began = None

    def pause_s(self, error: BookKeeperError, now: float, asked: float) -> float:
        """Return how long to wait before asking again; raises the error once the outage has lasted too long.

        Args:
            now: the time; `asked` is when the request that failed was sent.
        """
        if self._began is None:
            self._began = asked
            self._warn("waiting for servers that are out of reach: %s", error)
        if now - self._began >= self._timeout_s:
            raise error
        return _PAUSE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """The options of `spark.read` and `spark.readStream`."""

    metadata: str
    """The metadata store's URI."""
    log: tuple[str, ...] = ()
    """The logs to read; a stream reads one."""
    ledger: tuple[int | str, ...] | None = None
    """The ledgers to read, by id, unbounded ones also by name; the empty tuple (`all`) is every ledger."""
    encoding: str = "auto"
    """How entries are decoded. `auto`: by the tags of the log or the ledger, without tags not at all.
    `binary`: only decompressed. `raw`: not at all, and not decompressed."""
    columns: tuple[str, ...] = ()
    """The columns to read; by default all."""
    mode: str = "failfast"
    """The treatment of an entry that is missing, damaged or cannot be decoded. It fails the task, or
    (`permissive`) becomes a row with the reason in the column `_error`."""
    partition_bytes: int | None = None
    """About how much one task reads; by default it grows with the read (`scan_plan.partition_size`)."""
    starting_position: str = "earliest"
    """Of a stream: `earliest`, `latest`, a position as in the column `position`, or a time (ISO 8601)."""
    max_entries_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    """Of a stream: whether records that were truncated before they were read end the query."""
    outage_timeout: int = OUTAGE_S
    """How many seconds bookies or the metadata store may be out of reach before the task or query fails."""
    password_file: str | None = None
    """A file with the ledgers' password, which the driver and each executor read."""
    password_env: str | None = None
    """The environment variable that holds the ledgers' password in each process; empty for no password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of `df.write` and `df.writeStream`."""

    metadata: str
    log: str
    encoding: str = "auto"
    """`auto`: binary for a frame of one binary column, else arrow."""
    value: str | None = None
    """The column of bytes, with the encoding binary; needed only where there are several columns."""
    compression: str = "none"
    if_exists: str = "append"
    """How a log that holds records is treated: `append`, `error`, or `ignore`, which writes nothing."""
    if_replayed: str = "compare"
    """Of a stream: whether a batch that the log has recorded must come again with the same rows
    (`compare`), or is dropped by its number alone (`drop`)."""
    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    ledger_bytes: int = 1024 * MIB
    """The size at which a task goes on to another ledger."""
    entry_bytes: int = 1 * MIB
    """With the encoding arrow: the size above which a batch of rows is cut into several entries."""
    outage_timeout: int = OUTAGE_S
    """How many seconds bookies or the metadata store may be out of reach before the task or query fails."""
    password_file: str | None = None
    """A file with the ledgers' password, which the driver and each executor read."""
    password_env: str | None = None
    """The environment variable that holds the ledgers' password in each process; empty for no password."""


def parse_read(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read.

    Raises:
        InvalidArgumentError: an option is unknown, wrong, missing, or contradicts another.
    """
    values = _parse(options, _READ, "read")
    parsed = ReadOptions(**values)
    named = [name for name in ("log", "ledger") if values.get(name) is not None]
    if len(named) != 1:
        found = "both" if named else "neither"
        raise InvalidArgumentError(f"one of the options log and ledger is needed; there is {found}")
    return parsed


_OF_STREAMS = ("startingPosition", "maxEntriesPerTrigger", "maxBytesPerTrigger", "failOnDataLoss")


def check_kind(options: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError for a stream's option in a batch read."""
    given = {name.lower() for name in options}
    for name in _OF_STREAMS:
        if name.lower() in given:
            raise InvalidArgumentError(
                f"the option {name} is for a stream, spark.readStream, and would do nothing here: leave it "
                "out"
            )


def parse_write(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write; raises as `parse_read` does."""
    values = _parse(options, _WRITE, "write")
    if "log" not in values:
        raise InvalidArgumentError('the option log is needed: .option("log", "name of the log to write to")')
    if "value" in values and values.get("encoding", "binary") not in ("binary", "auto"):
        raise InvalidArgumentError(
            f"the option value names the column for encoding binary, and encoding is {values['encoding']!r}"
        )
    parsed = WriteOptions(**values)
    if parsed.entry_bytes > ENTRY_BYTES_MAX:
        raise InvalidArgumentError(
            f"the option entryBytes is {parsed.entry_bytes:,}, and the largest entry has {ENTRY_BYTES_MAX:,} "
            "bytes: set it lower"
        )
    check_quorums(parsed.ensemble_size, parsed.write_quorum, parsed.ack_quorum)
    return parsed


def _parse(
    options: Mapping[str, str], parsers: Mapping[str, Callable[[str, str], Any]], verb: str
) -> dict[str, Any]:
    known = {name.lower(): name for name in parsers}
    values = {}
    for given, text in options.items():
        if given.lower() in _OF_SPARK:
            continue
        if given.lower() in _OF_TABLES or given.lower().startswith("option."):
            raise InvalidArgumentError(f"CREATE TABLE … USING ledger is refused: {NO_TABLES}")
        name = known.get(given.lower())
        if name is None:
            raise InvalidArgumentError(_unknown(given, list(parsers), verb))
        values[_field_of(name)] = parsers[name](name, str(text).strip())
    if not options:
        raise InvalidArgumentError(
            f"there are no options, as in a statement on a table of the catalog: {NO_TABLES}"
        )
    if "metadata" not in values:
        raise InvalidArgumentError(
            'the option metadata is needed: .option("metadata", "zk://host:2181/ledgers" or '
            '"sqlite:///absolute/path/metadata.db")'
        )
    return values


def _unknown(given: str, names: list[str], verb: str) -> str:
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), list(lower), n=1, cutoff=0.5)
    hint = f"did you mean {lower[near[0]]}?" if near else "there is none like it."
    if given.lower() == "path":
        hint = "a log is named by the option log: call save() and load() without a path."
    if given.lower() == "pushfilters":
        hint = (
            "Spark keeps the plan of a frame, and later queries would get what its filter left: use where()."
        )
    if given.lower() == "password":
        hint = "Spark shows options in plans and keeps them in event logs: use passwordFile or passwordEnv."
    return f"option {given!r} is unknown; {hint} The options of a {verb}: {', '.join(sorted(names))}"


def _field_of(name: str) -> str:
    """Turn `partitionBytes` into `partition_bytes`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _uri(name: str, text: str) -> str:
    parse_uri(text)
    return text


def _name(name: str, text: str) -> str:
    if not text:
        raise InvalidArgumentError(f"the option {name} is empty")
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    return tuple(_name(name, part.strip()) for part in text.split(","))


def _logs(name: str, text: str) -> tuple[str, ...]:
    return check_distinct(_names(name, text), f"the option {name}")


def check_distinct(named: Sequence[Source], what: str) -> tuple[Source, ...]:
    """Return the logs or ledgers of a read; raises InvalidArgumentError where one is named twice."""
    for each, count in Counter(named).items():
        if count > 1:
            raise InvalidArgumentError(
                f"{what} names {each!r} {count} times, and its rows would come {count} times: name it once"
            )
    return tuple(named)


def _ledgers(name: str, text: str) -> tuple[int | str, ...]:
    if text.lower() == ALL:
        return ()
    try:
        ledgers = tuple(map(_ledger, text.split(",")))
    except ValueError as error:
        raise InvalidArgumentError(
            f"the option {name} is a ledger's id, an unbounded ledger's name, several with commas, or {ALL}: "
            f"not {text!r}"
        ) from error
    return check_distinct(ledgers, f"the option {name}")


def _ledger(text: str) -> int | str:
    text = text.strip()
    return check_ledger_id(int(text)) if text.isascii() and text.isdecimal() else check_name(text)


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() in choices:
            return text.lower()
        raise InvalidArgumentError(f"the option {name} is one of {', '.join(choices)}: not {text!r}")

    return parse


def _number(name: str, text: str) -> int:
    """Parse a positive number; sizes may end in k, m or g (powers of 1024)."""
    units = {"k": 1024, "m": MIB, "g": 1024 * MIB}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1)
    if not digits.isascii() or not digits.isdecimal() or int(digits) == 0:
        raise InvalidArgumentError(
            f"the option {name} is a positive number, which may end in k, m or g: not {text!r}"
        )
    return int(digits) * unit


def _count(name: str, text: str) -> int:
    """Parse a positive number that is no size: with a unit, "2m" of seconds would be weeks."""
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        unit = ", of seconds" if name == "outageTimeout" else ""
        raise InvalidArgumentError(
            f"the option {name} is a positive number{unit}, without a unit: not {text!r}"
        )
    return int(text)


def _text(name: str, text: str) -> str:
    return text


def _boolean(name: str, text: str) -> bool:
    return _one_of("true", "false")(name, text) == "true"


_READ: dict[str, Callable[[str, str], Any]] = {
    "metadata": _uri,
    "log": _logs,
    "ledger": _ledgers,
    "encoding": _one_of("auto", "raw", *ENCODINGS),
    "columns": _names,
    "mode": _one_of("failfast", "permissive"),
    "partitionBytes": _number,
    "startingPosition": _name,
    "maxEntriesPerTrigger": _number,
    "maxBytesPerTrigger": _number,
    "failOnDataLoss": _boolean,
    "outageTimeout": _count,
    "passwordFile": _name,
    "passwordEnv": _text,
}
_WRITE: dict[str, Callable[[str, str], Any]] = {
    "metadata": _uri,
    "log": _name,
    "encoding": _one_of("auto", *ENCODINGS),
    "value": _name,
    "compression": _one_of(*COMPRESSIONS),
    "ifExists": _one_of("append", "error", "ignore"),
    "ifReplayed": _one_of("compare", "drop"),
    "ensembleSize": _count,
    "writeQuorum": _count,
    "ackQuorum": _count,
    "ledgerBytes": _number,
    "entryBytes": _number,
    "outageTimeout": _count,
    "passwordFile": _name,
    "passwordEnv": _text,
}
assert {_field_of(name) for name in _READ} == {field.name for field in fields(ReadOptions)}
assert {_field_of(name) for name in _WRITE} == {field.name for field in fields(WriteOptions)}
