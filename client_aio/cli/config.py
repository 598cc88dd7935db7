"""`bookie-aio config`: what is set, and where."""

from typing import Annotated, Any

import typer

from client_aio.cli.options import Invocation, command
from client_aio.cli.settings import Key, described

app = typer.Typer(no_args_is_help=True, help="Show the settings (docs/CONFIGURATION.md).")


def all_keys() -> dict[str, Key]:
    """Return every key, by name. It imports all commands, whose options are keys."""
    from typer.main import get_command

    from client_aio.cli import main

    main.add_all()
    found: dict[tuple[str, str], Any] = {}

    def walk(one: Any, path: str) -> None:
        for name, each in getattr(one, "commands", {}).items():
            walk(each, f"{path} {name}".strip())
        found.update(((path, parameter.name), parameter) for parameter in one.params)

    walk(get_command(main.app), "")
    return described(found)


@command(app, "show")
def show(
    invocation: Invocation,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only the settings that are set somewhere.")
    ] = False,
) -> None:
    """Show each setting: its value, and where that came from.

    An option of the command line comes first, then the environment, the context in use, the file, and the
    default. Options of other commands are not known here.
    """
    set_by = invocation.settings.found()
    common = {"metadata": invocation.metadata, "output": invocation.output.form, "loop": invocation.loop}
    rows = []
    for key in all_keys().values():
        value, source = key.default, "default"
        if key.name in set_by:
            value, source = set_by[key.name]
        if key.name in common and key.name in invocation.flags:
            value, source = common[key.name], f"--{key.name}"
        if source != "default" or not changed:
            rows.append({"key": key.name, "value": value, "unit": key.unit, "from": source})
    invocation.output.rows(rows, ("key", "value", "unit", "from"))
