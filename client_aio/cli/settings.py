"""The settings of commands: one file, the environment, the context in use, and where each value came from.

Owns the table of all keys. A value is taken from the first of these places that has it:

    1. an option of the command line
    2. the environment: `bookie.limits.polls_max` is BOOKIE_AIO_BOOKIE_LIMITS_POLLS_MAX
    3. the context in use (`bookie-aio context`): the metadata store, and the form of results
    4. the file that `--config` or BOOKIE_AIO_CONFIG names, else config.toml in the user's folder
    5. the default

The keys are those of the options in `_FLAGS`, and the fields of the classes in `SECTIONS`. Their descriptions
and defaults stand there, and nowhere else; docs/CONFIGURATION.md is made of them.

Invariants: a key that does not exist is an error that names the nearest one. Nothing is read before a command
asks. Without file and variables nothing is imported for it.
"""

import ast
import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from client_aio.cli.files import replacing
from client_aio.config import MIB
from metadata.errors import InvalidArgumentError

PREFIX = "BOOKIE_AIO_"
CONFIG_VARIABLE, CONTEXT_VARIABLE = f"{PREFIX}CONFIG", f"{PREFIX}CONTEXT"
_NO_KEYS = {
    *(CONFIG_VARIABLE, CONTEXT_VARIABLE, f"{PREFIX}PASSWORD"),
    *(f"{PREFIX}COMPILE", f"{PREFIX}OPT_LEVEL"),  # of the build of a wheel
}
# Kubernetes sets these for a Service whose name begins with "bookie-aio-".
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")

_Made = TypeVar("_Made")


class Flag(NamedTuple):
    """A key whose value is the default of an option."""

    key: str
    command: str
    """The command that has the option; "" for every command that has an option of this name."""
    parameter: str
    unit: str = ""
    one: float | None = None
    """One unit of the option in units of the key; None where both are the same."""


_FLAGS = (
    Flag("metadata", "", "metadata"),
    Flag("output", "", "output"),
    Flag("loop", "", "loop"),
    Flag("placement", "", "placement"),
    Flag("password_file", "", "password_file"),
    Flag("log_level", "", "log_level"),
    Flag("log_json", "", "log_json"),
    Flag("bookie.dir", "bookie serve", "directories", "list"),
    Flag("bookie.dir", "bookie format", "directories", "list"),
    Flag("bookie.id", "bookie serve", "bookie_id"),
    Flag("bookie.id", "bookie format", "bookie_id"),
    Flag("bookie.listen", "bookie serve", "listen"),
    Flag("bookie.advertise", "bookie serve", "advertise", "list"),
    Flag("bookie.rack", "bookie serve", "rack"),
    Flag("bookie.weight", "bookie serve", "weight"),
    Flag("bookie.sweep_interval_s", "bookie serve", "sweep_interval", "seconds"),
    Flag("bookie.allow_remote_without_auth", "bookie serve", "allow_remote_without_auth"),
    Flag("bookie.autorecovery", "bookie serve", "autorecovery"),
    Flag("bookie.http", "bookie serve", "http"),
    Flag("autorecovery.lost_bookie_delay_s", "", "lost_bookie_delay"),
    Flag("autorecovery.recover_after_s", "autorecovery run", "recover_after"),
    Flag("autorecovery.recover_after_s", "bookie serve", "recover_after"),
    Flag("autorecovery.recover_after_s", "cluster up", "recover_after"),
    Flag("autorecovery.check_interval_s", "autorecovery run", "check_interval"),
    Flag("autorecovery.worker_bytes_per_s", "autorecovery run", "worker_rate", one=MIB),
    Flag("autorecovery.cluster_bytes_per_s", "autorecovery run", "cluster_rate", one=MIB),
    Flag("autorecovery.cluster_bytes_per_s", "cluster repair", "rate", one=MIB),
)

SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "client": ("client_aio.config:ClientConfig", ()),
    "autorecovery": ("client_aio.config:AutoRecoveryConfig", ()),
    "bookie": ("bookie_aio.config:BookieConfig", ("unnamed_grace_s", "age_interval_s")),
    "bookie.limits": ("bookie_aio.config:Limits", ()),
    "bookie.storage": ("bookie_aio.storage.config:StorageConfig", ()),
    "bookie.storage.space": ("bookie_aio.storage.segment.allocator:SpaceLimits", ()),
    "bookie.storage.compaction": ("bookie_aio.storage.maintenance.compactor:CompactionConfig", ()),
    "bookie.storage.scrub": ("bookie_aio.storage.maintenance.scrubber:ScrubConfig", ()),
}
"""The class of each section, and those of its fields that are keys; none named: all of them."""

_UNCHECKED = "bookie.storage"
"""The classes of this section and of those below it do not look at their values: `_check_range` does."""
_MAY_BE_ZERO = frozenset(
    f"bookie.storage.{name}"
    for name in (
        *("short_sync_s", "page_cache_bytes", "space.spare_bytes_max", "scrub.bytes_per_s"),
        *("space.warn_free_bytes", "space.warn_free_share", "space.floor_free_bytes"),
        *("space.floor_free_share", "compaction.compact_below"),
    )
)
_PARTS = frozenset(
    f"bookie.storage.{name}"
    for name in (
        *("space.warn_free_share", "space.floor_free_share"),
        *("compaction.compact_below", "compaction.compact_below_when_low", "compaction.loop_share"),
    )
)
"""Parts of a whole: 1 at most."""
_LEAST = {"bookie.storage.segment_bytes": 64 * 1024}

_TERSE = {
    "bookie.limits.connections_max": "Connections; one more is refused. The descriptors may allow fewer.",
    "bookie.limits.frame_bytes_max": "The size of a frame.",
    "bookie.limits.entry_bytes_max": "The size of an entry.",
    "bookie.limits.connection_reads_max": "Reads of one connection that are being computed.",
    "bookie.limits.connection_reads_bytes_max": "Bytes of answers to the reads of one connection.",
    "bookie.limits.list_rows_max": "Rows in one answer that lists the entries of a ledger.",
    "bookie.limits.list_ledgers_max": "Ledgers in one answer that lists ledgers.",
    "bookie.limits.handshake_timeout_s": "The time that a connection has for its handshake.",
    "bookie.storage.segment_bytes": "The size of a segment, which has room for the largest frame.",
    "bookie.storage.group_bytes_max": "The size of a group commit.",
    "bookie.storage.space.reserve_bytes": "Preallocated space for fences and recovery on a full disk.",
    "bookie.storage.space.spare_bytes_max": "Used segment files that are kept for reuse.",
    "bookie.storage.space.warn_free_bytes": "Below this free space the disk is nearly full.",
    "bookie.storage.space.warn_free_share": "The same as a part of the file system; the lesser one counts.",
    "bookie.storage.space.floor_free_bytes": "Below this free space the bookie is read-only.",
    "bookie.storage.space.floor_free_share": "The same as a part of the file system; the lesser one counts.",
    "bookie.storage.space.retry_s": "How often a bookie without space looks whether there is some again.",
    "bookie.storage.scrub.bytes_per_s": "How many bytes the scrubber reads in a second; 0: it does not run.",
}
"""The descriptions of fields whose class says nothing more than their name."""

# No context counts for these: they make a bookie or a cluster, which is never meant for the cluster in use.
_WITHOUT_CONTEXT = ("bookie serve", "bookie format", "cluster up")


class Key(NamedTuple):
    """A key, as people read of it."""

    name: str
    default: Any
    unit: str
    help: str

    @property
    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return variable_of(self.name)


class Setting(NamedTuple):
    """A value that is set somewhere, and where."""

    value: Any
    source: str


def variable_of(key: str) -> str:
    """Return the environment variable of a key."""
    return PREFIX + key.upper().replace(".", "_")


def _class_of(section: str) -> Any:
    module, _, name = SECTIONS[section][0].partition(":")
    return getattr(import_module(module), name)


def _fields_of(section: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section's class with their defaults, those with a plain default."""
    only = SECTIONS[section][1]
    for one in fields(_class_of(section)):
        if one.default is not MISSING and (one.name in only if only else True):
            yield f"{section}.{one.name}", one.default


def _unit_of(name: str) -> str:
    if name.endswith(("bytes_per_s", "rate_min")):
        return "bytes per second"
    for ending, unit in (("_per_s", "per second"), ("_s", "seconds"), ("_share", "fraction")):
        if name.endswith(ending):
            return unit
    return "bytes" if "bytes" in name else ""


def _docstrings_of(kind: type) -> dict[str, str]:
    """Return the first paragraph of the string that follows each field in a class's source."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for one, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            paragraph = inspect.cleandoc(str(text.value.value)).split("\n\n")[0]
            found[ast.unparse(one.target)] = " ".join(paragraph.split())
    return found


def described(parameter_of: Mapping[tuple[str, str], Any]) -> dict[str, Key]:
    """Return every key with its default, its unit and what it is for.

    Args:
        parameter_of: the options of all commands, by command and parameter.
    """
    found: dict[str, Key] = {}
    for flag in _FLAGS:
        if flag.key not in {*found, *_CLASS_FLAGS}:
            option = next(
                option
                for (command, parameter), option in parameter_of.items()
                if parameter == flag.parameter and flag.command in ("", command)
            )
            default = getattr(option.default, "value", option.default)
            found[flag.key] = Key(flag.key, default, flag.unit, option.help)
    for section in SECTIONS:
        texts = _docstrings_of(_class_of(section))
        for key, default in _fields_of(section):
            name = key.removeprefix(f"{section}.")
            found[key] = Key(key, default, _unit_of(name), _TERSE.get(key) or texts[name])
    order = [*dict.fromkeys(flag.key.rpartition(".")[0] for flag in _FLAGS), *SECTIONS]
    return dict(sorted(found.items(), key=lambda each: order.index(each[0].rpartition(".")[0])))


_FLAG_KEYS = {flag.key for flag in _FLAGS}
_CLASS_FLAGS = {key for key in _FLAG_KEYS if key.startswith("autorecovery.")}
"""Keys that are an option's and a field's."""


def document(keys: Iterable[Key]) -> str:
    """Return the keys as tables in Markdown, one for each section, for docs/CONFIGURATION.md."""
    lines: list[str] = []
    section = None
    for key in keys:
        above, _, name = key.name.rpartition(".")
        if above != section:
            section = above
            title = f"### [{section}]" if section else "### Above all sections"
            lines += ["", title, "", "| key | default | unit | what it is for |", "|---|---|---|---|"]
        default = "" if key.default in (None, "") else f"`{json.dumps(key.default)}`"
        lines.append(f"| `{name}` | {default} | {key.unit} | {' '.join(key.help.split())} |")
    return "\n".join(lines[1:]) + "\n"


def _check_known(keys: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidArgumentError for a key that does not exist. Each comes with its name in its source."""
    unknown = [(key, shown) for key, shown in keys if key not in _FLAG_KEYS]
    if not unknown:
        return
    known = _FLAG_KEYS | {key for section in SECTIONS for key, _ in _fields_of(section)}
    for key, shown in unknown:
        if key not in known:
            from difflib import get_close_matches

            (nearest,) = get_close_matches(key, known, n=1, cutoff=0.0)
            is_variable = shown.startswith("variable")
            named = variable_of(nearest) if is_variable else nearest
            raise InvalidArgumentError(f"{shown} is no setting; the nearest one is {named}")


# --- the places -------------------------------------------------------------------------------------


def folder() -> Path | None:
    """Return the user's folder for files of this command; None for a user that has none."""
    base = os.environ.get("XDG_CONFIG_HOME")
    if not base and os.environ.get("HOME") != "":  # an empty one would be the root of the file system
        base = os.path.expanduser("~/.config")
    return Path(base) / "bookie-aio" if base and os.path.isabs(base) else None


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a file has. Raises InvalidArgumentError where it cannot be read or parsed."""
    import tomllib

    try:
        return tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(f"{path}: {reason}") from error


def _flat(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        key = f"{above}{name}"
        if isinstance(value, dict) and value and key not in _FLAG_KEYS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _of_file(path: Path) -> dict[str, Setting]:
    found = dict(_flat(read_toml(path)))
    _check_known((key, f"{path}: {key}") for key in found)
    for key, value in found.items():
        if isinstance(value, dict) or (isinstance(value, list) and not _is_list(key)):
            raise InvalidArgumentError(f"{path}: {key} is one value, not {value!r}")
    return {key: Setting(value, str(path)) for key, value in found.items()}


def _is_list(key: str) -> bool:
    return any(flag.key == key and flag.unit == "list" for flag in _FLAGS)


def _of_environment() -> dict[str, Setting]:
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(PREFIX) and value and name not in _NO_KEYS and not _OF_KUBERNETES.search(name)
    }
    keys = {variable_of(key): key for key in _FLAG_KEYS}
    if not given.keys() <= keys.keys():
        keys |= {variable_of(key): key for section in SECTIONS for key, _ in _fields_of(section)}
    guessed = {name: name.removeprefix(PREFIX).lower().replace("_", ".", 1) for name in given}
    _check_known((keys.get(name, guessed[name]), f"variable {name}") for name in given)
    return {
        keys[name]: Setting(value.split(",") if _is_list(keys[name]) else value, name)
        for name, value in given.items()
    }


@dataclass
class Contexts:
    """The contexts of a user: clusters under names, and the one that is in use."""

    by_name: dict[str, dict[str, str]] = field(default_factory=dict)
    in_use: str = ""

    @classmethod
    def read(cls) -> "Contexts":
        """Read the user's contexts. Raises InvalidArgumentError where the file is damaged."""
        path = cls.path()
        if path is None or not path.exists():
            return cls()
        document = read_toml(path)
        found = cls(document.get("contexts", {}), document.get("use", ""))
        whole = isinstance(found.by_name, dict) and isinstance(found.in_use, str)
        if not whole or not all(
            isinstance(each, dict) and set(each) <= {"metadata", "output"} for each in found.by_name.values()
        ):
            raise InvalidArgumentError(f"{path} is damaged: remove it, and add the contexts again")
        return found

    @staticmethod
    def path() -> Path | None:
        """Return where the contexts are kept."""
        where = folder()
        return None if where is None else where / "contexts.toml"

    def write(self) -> None:
        """Replace the user's contexts at once, for no other user to read."""
        path = self.path()
        if path is None:
            raise InvalidArgumentError("this user has no folder for contexts: set HOME or XDG_CONFIG_HOME")
        lines = ["# Written by `bookie-aio context`.", f"use = {_quoted(self.in_use)}"]
        for name, values in sorted(self.by_name.items()):
            lines += ["", f"[contexts.{_quoted(name)}]"]
            lines += [f"{key} = {_quoted(value)}" for key, value in values.items()]
        try:
            content = ("\n".join(lines) + "\n").encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError(
                "a context is kept as UTF-8: write other bytes of a path as %FF in its URI"
            ) from None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)

    def of(self, name: str) -> dict[str, str]:
        """Return a context. Raises InvalidArgumentError where there is none of that name."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise InvalidArgumentError(f"there is no context {name!r}; the contexts are: {known}")
        return self.by_name[name]


def _quoted(text: str) -> str:
    """Return a string of TOML. JSON writes a character beyond U+FFFF as two, which TOML does not know."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class Settings:
    """The values of file, context and environment. They are read when a value is asked for, once."""

    def __init__(self, *, config: str | None = None, context: str | None = None) -> None:
        """Name a file and a context instead of those of the environment."""
        self._config = config
        self._context = context

    @cached_property
    def _of_file(self) -> dict[str, Setting]:
        named = self._config if self._config is not None else os.environ.get(CONFIG_VARIABLE)
        if named is not None:
            return _of_file(Path(named)) if named else {}
        where = folder()
        path = None if where is None else where / "config.toml"
        return _of_file(path) if path is not None and path.exists() else {}

    @cached_property
    def _of_context(self) -> dict[str, Setting]:
        contexts = Contexts.read()
        name = self._context or os.environ.get(CONTEXT_VARIABLE) or contexts.in_use
        values = contexts.of(name) if name else {}
        return {key: Setting(value, f"context {name}") for key, value in values.items()}

    @cached_property
    def _of_environment(self) -> dict[str, Setting]:
        return _of_environment()

    def found(self, command: str = "") -> dict[str, Setting]:
        """Return what is set for a command, by key. Raises InvalidArgumentError for what is wrong."""
        if command not in _WITHOUT_CONTEXT:
            return {**self._of_file, **self._of_context, **self._of_environment}
        if self._context and self._context != os.environ.get(CONTEXT_VARIABLE):
            raise InvalidArgumentError(
                f"`{command}` goes by no context, and --context names {self._context!r}: name the metadata "
                "store itself, by --metadata"
            )
        return {**self._of_file, **self._of_environment}

    def defaults_of(self, command: str, parameters: Iterable[str]) -> dict[str, Any]:
        """Return the defaults of a command's options that are set here, by parameter."""
        found, wanted = self.found(command), set(parameters)
        defaults: dict[str, Any] = {}
        for flag in _FLAGS:
            if flag.parameter in wanted and flag.command in ("", command) and flag.key in found:
                value = found[flag.key].value
                defaults[flag.parameter] = value if flag.one is None else _number(found, flag.key) / flag.one
        if command == "cluster up":  # its cluster is the one of its directory
            defaults.pop("metadata", None)
        return defaults

    def source_of(self, command: str, parameter: str) -> str:
        """Return where the default of an option came from, as text; "" for nowhere."""
        found = self.found(command)
        keys = [one.key for one in _FLAGS if one.parameter == parameter and one.command in ("", command)]
        return next((f"{key} of {found[key].source}" for key in keys if key in found), "")

    def plain(self, section: str) -> dict[str, Any]:
        """Return what is set of a section's class, by field.

        Raises:
            InvalidArgumentError: a value is of the wrong type, or not finite, or out of its range where the
                class does not look at it.
        """
        # Contexts have no keys of sections, and bookies start though a user's contexts are damaged.
        given = {**self._of_file, **self._of_environment}
        found = {key: one for key, one in given.items() if key.rpartition(".")[0] == section}
        if not found.keys() - _FLAG_KEYS.difference(_CLASS_FLAGS):
            return {}
        return {
            key.removeprefix(f"{section}."): _check_range(_value(found[key], key, default), key, found[key])
            for key, default in _fields_of(section)
            if key in found
        }

    def made(self, section: str, kind: type[_Made], **given: Any) -> _Made:
        """Return an object of a section's class, with what is set, and what is given in any case.

        Raises:
            InvalidArgumentError: a value is of the wrong type, or the class refuses it.
        """
        values = self.plain(section)
        for one in fields(cast("Any", kind)):
            below, parts = f"{section}.{one.name}", cast("Any", one.default_factory)
            if below in SECTIONS:
                values[one.name] = self.made(below, parts)
        try:
            return kind(**{**values, **given})
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"the settings of [{section}]: {error}") from error


def _number(found: Mapping[str, Setting], key: str) -> float:
    return float(_value(found[key], key, 0))


def _value(setting: Setting, key: str, default: Any) -> Any:
    """Return a value in the type of its default. Text of the environment is parsed."""
    value, kind = setting.value, type(default)
    if isinstance(value, str) and setting.source.startswith(PREFIX):
        try:
            value = int(value) if kind is int else float(value)
        except ValueError:
            value = setting.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and not isinstance(value, int)):
        what = "a whole number" if kind is int else "a number"
        raise InvalidArgumentError(f"{key} of {setting.source} is {value!r}, which is not {what}")
    if not math.isfinite(value):
        raise InvalidArgumentError(f"{key} of {setting.source} is {value!r}, which is not a finite number")
    return value


def _check_range(value: Any, key: str, setting: Setting) -> Any:
    """Return the value of a key whose class does not look at it, or raise InvalidArgumentError."""
    if not key.startswith(_UNCHECKED):
        return value
    least = _LEAST.get(key, 0)
    why = ""
    if value < least:
        why = f"below {least:,}"
    elif value == 0 and key not in _MAY_BE_ZERO:
        why = "not above zero"
    elif value > 1 and key in _PARTS:
        why = "above 1, and is a part of a whole"
    if why:
        raise InvalidArgumentError(f"{key} of {setting.source} is {value!r}, which is {why}")
    return value
