"""`bookie-aio`: the groups of commands, put together, and how a command ends."""

import logging
import sys
from collections.abc import Sequence
from copy import copy
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from bookie_aio.structured_logging import MessageFormatter
from client_aio.cli.exit_codes import Exit
from client_aio.cli.options import Group, command_path, report, settings_of
from client_aio.cli.output import prepare_streams
from client_aio.cli.settings import CONFIG_VARIABLE, CONTEXT_VARIABLE
from metadata.errors import InvalidArgumentError
from metadata.text import escape

_GROUPS = (
    "cluster", "bookie", "ledger", "log", "autorecovery", "metadata", "spark", "bench", "context", "config",
)  # fmt: skip

_COMMANDS = ("dashboard", "doctor", "top")
"""Commands that are in no group: the module of each has it as the only one of its `app`."""

app = typer.Typer(
    cls=Group,
    name="bookie-aio",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A replicated, durable log store: run bookies, write and read ledgers, measure.",
    epilog="Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 unavailable or no answer in time, "
    "5 data damaged, 130 interrupted, 141 the reader of our output went away, 143 ended by SIGTERM.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata as distribution

        from metadata import build

        version = distribution.version("bookie-aio")
        sys.stdout.write(f"bookie-aio {version} ({build.form()}, {build.interpreter()})\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show version, form and interpreter."
        ),
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar=CONFIG_VARIABLE,
            help="The file with settings; default: config.toml in ~/.config/bookie-aio.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar=CONTEXT_VARIABLE,
            help="The context, instead of the one in use (`context use`).",
            show_default=False,
        ),
    ] = None,
) -> None:
    pass  # `options.settings_of` looks at the values


def add_all() -> None:
    """Import all groups of commands, but for those that were imported already."""
    _add_groups([])


def _add_groups(arguments: Sequence[str]) -> None:
    """Import the group of commands that is called; without one, import all groups, to be listed.

    Typer builds the parameters of each command that it knows. So a command that is called is its only one.
    """
    called = arguments[:2] if arguments and arguments[0] in (*_GROUPS, *_COMMANDS) else ()
    for name in called[:1] or (*_GROUPS, *_COMMANDS):
        group: typer.Typer = import_module(f"client_aio.cli.{name}").app
        if only := [one for one in group.registered_commands if one.name in called[1:]]:
            group = copy(group)
            group.registered_commands = only
        if all(one.typer_instance is not group for one in app.registered_groups):
            app.add_typer(group, name=name if name in _GROUPS else None, cls=Group)


def main() -> NoReturn:
    """Run the command line; ends the process with a stable exit code."""
    prepare_streams()
    _escape_warnings()
    try:
        _add_groups(sys.argv[1:])
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:  # while modules are imported, or arguments parsed
        code = Exit.INTERRUPTED
    except SystemExit as ended:  # with 1, by typer, where the reader of help went away
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = report(ended.__context__)
    except typer.Abort as abort:  # a question was answered with no, or not at all
        code = Exit.INTERRUPTED if isinstance(abort.__context__, KeyboardInterrupt) else Exit.FAILURE
    except (OSError, InvalidArgumentError) as error:  # help is written, and settings are read, outside of it
        code = report(error)
    except Exception as error:
        code = _report_usage(error)
    sys.exit(code or Exit.OK)


def _escape_warnings() -> None:
    """Make each warning of our libraries one escaped line."""
    if logging.lastResort is not None:  # it handles warnings where logging is not configured
        logging.lastResort.setFormatter(MessageFormatter())


def _report_usage(error: Exception) -> int:
    """Write one line on standard error about a wrong argument, and return the exit code."""
    # Recognised by its method: the class is click's or, with newer releases of typer, a copy of click's.
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(f"{format_message()}\n")
        return Exit.USAGE
    message = escape(" ".join(format_message().split()))
    hint = f" (see `{context.command_path} --help`)" if context is not None else ""
    sys.stderr.write(f"bookie-aio: {message}{_source(error)}{hint}\n")
    return int(getattr(error, "exit_code", Exit.USAGE))


def _source(error: Exception) -> str:
    """Return where a wrong value came from, where that is not the command line."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None:
        return ""
    how = getattr(context.get_parameter_source(parameter.name), "name", "")
    if how == "DEFAULT_MAP":
        return escape(f" It is {settings_of(context).source_of(command_path(context), parameter.name)}.")
    return f" It is the variable {parameter.envvar}." if how == "ENVIRONMENT" else ""
