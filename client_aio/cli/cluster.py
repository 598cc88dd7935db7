"""`bookie-aio cluster`: a cluster on this machine."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from client_aio.cli.local_cluster import LocalCluster
from client_aio.cli.options import Invocation, command
from metadata.backends.uri import parse_uri

app = typer.Typer(no_args_is_help=True, help="Run a cluster on this machine.")


@command(app, "up", without_variable=True)
async def up(
    invocation: Invocation,
    bookies: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--bookies",
            min=1,
            max=100,
            help="How many bookies; default: those that DIR has, 3 at least. Fewer than DIR has are refused.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Where everything of the cluster is kept.")
    ] = Path("bookie-aio-cluster"),
    spares: Annotated[int, typer.Option(min=0, max=100, help="Bookies on top of -n.")] = 0,
    base_port: Annotated[
        int, typer.Option(min=0, max=65_000, help="The first bookie's port; 0: any free ones.")
    ] = 0,
    racks: Annotated[
        int, typer.Option(min=0, max=100, help="Label the bookies with so many racks, in turn; 0: none.")
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Start a bookie that died again.")] = False,
) -> None:
    """Start a cluster in DIR and run it until Ctrl-C or SIGTERM.

    Prints the metadata URI once all bookies serve. Starting again on the same directory brings the same
    cluster back, whatever stopped it. DIR/cluster.json names the processes. Metadata is kept in DIR unless
    --metadata is given here (the environment variable is not looked at).
    """
    output = invocation.output
    metadata = invocation.metadata
    if metadata is not None:
        parse_uri(metadata)  # a wrong URI is refused before any file is created
    os.umask(0o077)  # logs and cluster.json, as the data, are for no other user of the machine
    cluster = LocalCluster(
        directory,
        metadata=metadata,
        bookies=bookies,
        spares=spares,
        base_port=base_port,
        racks=racks,
        restart=restart,
        arguments=["--loop", invocation.loop.value],
        report=output.note,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await cluster.prepare()
    starting = asyncio.create_task(cluster.start())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            output.document(cluster.document(), text=cluster.metadata_uri)
            for bookie in cluster.bookies:
                output.note(
                    f"bookie {bookie.bookie_id} serves on {', '.join(bookie.addresses)} (pid {bookie.pid})"
                )
            output.note("Stop with Ctrl-C.")
            await stopped
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        await cluster.stop()
