"""The options that every command takes (`--metadata`, `-o`, `--loop`, `--debug`), and how a command is run.

A command is a function, plain or a coroutine, whose first parameter is the `Invocation`. `command` adds the
common options and runs the function on the chosen event loop. An error becomes one line on standard error and
a stable exit code.

Also the two options that several groups of commands share: `--password-file` and `--placement`. There is no
option for a password itself. A command line is visible to every user of the machine, and is kept in the
shell's history.
"""

import asyncio
import enum
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import client_aio
from bookie_aio import structured_logging
from client_aio import PlacementPolicy, RackAware, WeightedRandom
from client_aio.cli.exit_codes import Exit, describe, exit_code_of
from client_aio.cli.output import Format, Output, silence_output
from client_aio.cli.settings import Settings
from client_aio.config import (
    PASSWORD_VARIABLE,
    AutoRecoveryConfig,
    ClientConfig,
    password_in_environment,
    password_in_file,
    tune_gc,
)
from metadata.access.bookies import split_address
from metadata.errors import InvalidArgumentError
from metadata.store import MetadataStore
from metadata.text import escape

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.handles import AwaitableContext

METADATA_VARIABLE = "BOOKIE_AIO_METADATA"


class Loop(enum.StrEnum):
    """The event loops that a command can run on."""

    UVLOOP = "uvloop"
    ASYNCIO = "asyncio"


@dataclass(frozen=True)
class Invocation:
    """The values of the common options."""

    metadata: str | None
    output: Output
    loop: Loop
    debug: bool
    settings: Settings = field(default_factory=Settings)
    flags: frozenset[str] = frozenset()
    """The options that stand on the command line, by parameter."""

    @property
    def metadata_uri(self) -> str:
        """Return the metadata store's URI; raises InvalidArgumentError where none is given."""
        if not self.metadata:
            raise InvalidArgumentError(
                f"no metadata store is named: give --metadata URI or set {METADATA_VARIABLE}, "
                "for example sqlite:///absolute/path/metadata.db or zk://host:2181/ledgers"
            )
        return self.metadata

    def connect(
        self, store: MetadataStore | None = None, *, placement: PlacementPolicy | None = None
    ) -> "AwaitableContext[Client]":
        """Return an opening of a client with the settings of [client], as `client_aio.connect` does.

        Args:
            store: an open metadata store; None: the one that is named.
        """
        config = self.settings.made("client", ClientConfig)
        where = self.metadata_uri if store is None else store
        return client_aio.connect(where, config=config, placement=placement)


def _metadata_option(variable: str | None) -> Any:
    return Annotated[
        str | None,
        typer.Option(
            envvar=variable,
            metavar="URI",
            help="The metadata store: zk://h1:2181,h2:2181/root or sqlite:///absolute/path.",
        ),
    ]


_COMMON: dict[str, tuple[Any, Any]] = {
    "metadata": (_metadata_option(METADATA_VARIABLE), None),
    "output": (
        Annotated[Format, typer.Option("--output", "-o", help="The form of the result.")],
        Format.TABLE,
    ),
    "loop": (Annotated[Loop, typer.Option(help="The event loop.")], Loop.UVLOOP),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
}


def _hide_types_of_flags(parameters: list[Any]) -> list[Any]:
    # Newer releases of typer show the type of a flag, as in `--help <bool>`, though a flag takes no value.
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def settings_of(context: Any) -> Settings:
    """Return the settings that the root command's options name, of any command's context."""
    root = context.find_root()
    if root.obj is None:
        root.obj = Settings(config=root.params.get("config"), context=root.params.get("context"))
    found: Settings = root.obj
    return found


def command_path(context: Any) -> str:
    """Return the name of a context's command, with its groups, and without the program."""
    above = context.parent
    return "" if above is None else f"{command_path(above)} {context.info_name}".strip()


def is_flag(context: Any, parameter: str) -> bool:
    """Return whether the command line has given the value of an option."""
    return getattr(context.get_parameter_source(parameter), "name", "") == "COMMANDLINE"


class Command(TyperCommand):
    """A command whose options take their defaults from the settings; help shows flags without a type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Help is shown whatever the settings are."""
        if not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            names = [str(one.name) for one in self.params]
            ctx.default_map = settings_of(ctx).defaults_of(command_path(ctx), names)
        left = super().parse_args(ctx, args)
        for one in self.params:
            value = ctx.params.get(one.name)
            if isinstance(value, float) and not math.isfinite(value):  # no bound of an option refuses NaN
                usage_error(f"{one.opts[0]} {value} is not a finite number")
        return left

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_flags(super().get_params(ctx))


def command(
    app: typer.Typer, name: str, *, without_loop: bool = False, without_variable: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a command of `app`, with the common options added.

    Args:
        without_loop: the command runs on no event loop of this module, and takes no `--loop`.
        without_variable: `--metadata` counts only on the command line, not from the environment.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function).parameters.values())[1:]
        common_options = dict(_COMMON)
        if without_loop:
            del common_options["loop"]
        if without_variable:
            common_options["metadata"] = (_metadata_option(None), None)
        added = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in common_options.items()
        ]

        @wraps(function)
        def call(typer_context: Any, **values: Any) -> None:
            common = {option: values.pop(option) for option in common_options}
            invocation = Invocation(
                metadata=common["metadata"],
                output=Output(common["output"]),
                loop=common.get("loop", Loop.UVLOOP),
                debug=common["debug"],
                settings=settings_of(typer_context),
                flags=frozenset(one for one in typer_context.params if is_flag(typer_context, one)),
            )
            raise typer.Exit(_run(invocation, function, values))

        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        context = inspect.Parameter(
            "typer_context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [context, *own, *added]
        call.__dict__["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        app.command(name, cls=Command, help=_help_of(function))(call)
        return function

    return register


def _help_of(function: Callable[..., Any]) -> str:
    """Return a docstring as help: each paragraph on one line, for the terminal to fold."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))


def _run(invocation: Invocation, function: Callable[..., Any], values: dict[str, Any]) -> int:
    try:
        tune_gc()
        result = function(invocation, **values)
        if inspect.iscoroutine(result):
            result = _run_coroutine(invocation.loop, result)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        return report(error, debug=invocation.debug)
    return int(result or Exit.OK)


def _run_coroutine(loop: Loop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if loop is Loop.UVLOOP:
        try:
            import uvloop
        except ImportError:  # no uvloop for this platform: asyncio's own loop is used
            pass
        else:
            factory = uvloop.new_event_loop
    running = _until_terminated(coroutine)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(running)
    finally:
        running.close()  # of a command that was interrupted before it began; else this does nothing
        coroutine.close()


async def _until_terminated(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a command. SIGTERM cancels it as Ctrl-C does: it ends its output, and undoes what it had begun.

    Commands with a `stop_event` have a handler of their own.
    """
    task, is_terminated = asyncio.current_task(), False
    assert task is not None

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if is_terminated:
            return Exit.TERMINATED
        raise


def report(error: Exception, *, debug: bool = False) -> int:
    """Write one line on standard error about an error that ended a command, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        silence_output()
        return Exit.BROKEN_PIPE
    while isinstance(error, ExceptionGroup):  # of tasks that failed together, the first is reported
        error = error.exceptions[0]
    if debug:
        sys.stderr.write(escape("".join(traceback.format_exception(error)), keep="\n"))
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again at exit, and print a traceback
        silence_output()
    sys.stderr.write(f"bookie-aio: {describe(error)}\n")
    return exit_code_of(error)


def usage_error(message: str) -> NoReturn:
    """Raise the error of a command that was called wrongly."""
    raise InvalidArgumentError(message)


def address_of(option: str, value: str) -> tuple[str, int]:
    """Return the host and the port of an option's value."""
    try:
        return split_address(value)
    except ValueError as error:
        usage_error(f"{option}: {error}")


def http_address(value: str) -> tuple[str, int]:
    """Return the host and the port of --http, which may be a port of 127.0.0.1."""
    host, _, port = value.rpartition(":")
    return address_of("--http", value if host else f"127.0.0.1:{port}")


LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]


def configure_logging(log_level: str, *, as_json: bool) -> None:
    """Log to standard error from a level on, as `--log-level` and `--log-json` say.

    Raises:
        InvalidArgumentError: there is no such level.
    """
    level = log_level.upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        usage_error(f"--log-level {log_level!r} is not one of debug, info, warning, error")
    structured_logging.configure(level=level, as_json=as_json)


def stop_event(*, watch_standard_input: bool = False) -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set from now on, instead of ending the process.

    Args:
        watch_standard_input: the end of standard input sets it as well.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def ended() -> None:
        try:
            data = os.read(0, 4096)
        except BlockingIOError:
            return
        except OSError:  # of a terminal that is gone: it would be readable for ever
            data = b""
        if not data:
            loop.remove_reader(0)
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if watch_standard_input:
        loop.add_reader(0, ended)
    return stop


PasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="BOOKIE_AIO_PASSWORD_FILE",
        metavar="FILE",
        help=f"A file with the ledger's password; one newline at its end does not count. Without it "
        f"{PASSWORD_VARIABLE} holds the password. There is no option for the password itself: a command "
        "line is seen by all users of the machine.",
        show_default=False,
    ),
]


def password_of(file: Path | None) -> bytes:
    """Return the password that the file or the environment holds; b"" where neither is given.

    Raises:
        InvalidArgumentError: the file cannot be read, is empty, or too large to be a password.
    """
    if file is None:
        return password_in_environment()
    try:
        return password_in_file(file)
    except InvalidArgumentError as error:
        usage_error(f"--password-file {error}")


class Placement(enum.StrEnum):
    """The placement policies that can be named on the command line."""

    WEIGHTED = "weighted"
    RACK_AWARE = "rack-aware"

    @property
    def policy(self) -> PlacementPolicy:
        """Return the policy of that name."""
        return RackAware() if self is Placement.RACK_AWARE else WeightedRandom()


PlacementOption = Annotated[
    Placement,
    typer.Option(
        "--placement",
        envvar="BOOKIE_AIO_PLACEMENT",
        help="How bookies are chosen: by weight, or so that each entry's copies span two racks.",
    ),
]


LostBookieDelay = Annotated[
    float,
    typer.Option(
        "--lost-bookie-delay",
        min=0.1,
        metavar="SECONDS",
        help="Auto recovery copies what a bookie held when it is gone for longer.",
    ),
]
LOST_BOOKIE_DELAY_S = AutoRecoveryConfig().lost_bookie_delay_s
RATE_MIB_MAX = 1e6
"""The highest rate that an option takes, in MiB a second: more than any machine reads."""
RecoverAbandoned = Annotated[
    float | None,
    typer.Option(
        "--recover-after",
        min=0.1,
        metavar="SECONDS",
        help="Auto recovery recovers ledgers that stay in recovery for longer, and open ones with entries on "
        "a lost bookie that have not moved for longer: that fences a writer that was idle all the time. "
        "Default: none.",
        show_default=False,
    ),
]
