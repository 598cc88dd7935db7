"""`bookie-aio context`: clusters under names, one of which is in use."""

from typing import Annotated

import typer

from client_aio.cli.options import Invocation, command, usage_error
from client_aio.cli.output import Format
from client_aio.cli.settings import Contexts
from metadata.backends.uri import parse_uri
from metadata.text import escape

app = typer.Typer(no_args_is_help=True, help="Name clusters, and choose the one that commands are about.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the context.", show_default=False)]


def _complete(incomplete: str) -> list[str]:
    return [name for name in sorted(Contexts.read().by_name) if name.startswith(incomplete)]


Known = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The name of a context.", show_default=False, autocompletion=_complete
    ),
]


@command(app, "add")
def add(
    invocation: Invocation,
    name: Name,
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI",
            help="The metadata store: zk://h1:2181,h2:2181/root or sqlite:///absolute/path.",
            show_default=False,
        ),
    ],
    form: Annotated[
        Format | None,
        typer.Option("--form", help="The form of results, where -o says nothing.", show_default=False),
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
) -> None:
    """Add a context, or change it. The first one is in use at once."""
    if not name:
        usage_error("the name of the context is empty: give it one")
    if not name.isprintable():
        usage_error(f"the name {escape(name)!r} has characters that cannot be shown")
    parse_uri(uri)
    contexts = Contexts.read()
    contexts.by_name[name] = {"metadata": uri, **({} if form is None else {"output": form.value})}
    if use or len(contexts.by_name) == 1:
        contexts.in_use = name
    contexts.write()
    _print(invocation, contexts)


@command(app, "use")
def use(
    invocation: Invocation,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="Without a name: none.", show_default=False, autocompletion=_complete
        ),
    ] = "",
) -> None:
    """Use a context from now on; an option, or BOOKIE_AIO_METADATA, still comes before it."""
    contexts = Contexts.read()
    if name:
        contexts.of(name)
    contexts.in_use = name
    contexts.write()
    _print(invocation, contexts)


@command(app, "remove")
def remove(invocation: Invocation, name: Known) -> None:
    """Remove a context. Nothing of the cluster is changed."""
    contexts = Contexts.read()
    contexts.of(name)
    del contexts.by_name[name]
    if contexts.in_use == name:
        contexts.in_use = ""
    contexts.write()
    _print(invocation, contexts)


@command(app, "list")
def list_(invocation: Invocation) -> None:
    """List the contexts."""
    _print(invocation, Contexts.read())


def _print(invocation: Invocation, contexts: Contexts) -> None:
    rows = [
        {
            "name": name,
            "in_use": name == contexts.in_use,
            "metadata": values.get("metadata"),
            "output": values.get("output"),
        }
        for name, values in sorted(contexts.by_name.items())
    ]
    invocation.output.rows(rows, ("name", "in_use", "metadata", "output"))
