"""`bookie-aio dashboard`: the status page of a cluster, which an operator keeps open. It changes nothing.

A process of its own, and no part of a bookie. The page reads metadata and asks bookies as a client does, and
a bookie knows no client. So it also goes on when the bookie beside it has died.
"""

import asyncio
import os
import time
from functools import partial
from typing import Annotated

import typer

import client_aio
from bookie_aio.config import is_loopback
from client_aio.cli.options import (
    Invocation,
    LogJson,
    LogLevel,
    command,
    configure_logging,
    http_address,
    stop_event,
    usage_error,
)
from client_aio.config import ClientConfig, tune_gc
from metadata.backends.uri import parse_uri

app = typer.Typer(help="Serve the status page of a cluster over HTTP.")

PORT = 9460


@command(app, "dashboard")
async def dashboard(
    invocation: Invocation,
    uri: Annotated[
        str | None,
        typer.Argument(metavar="[URI]", help="The metadata store; default: --metadata.", show_default=False),
    ] = None,
    http: Annotated[
        str,
        typer.Option(
            "--http", metavar="[HOST:]PORT", help="Where to listen; a port alone: for this machine only."
        ),
    ] = f"127.0.0.1:{PORT}",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name of this machine in the browser's address bar; may be repeated."
        ),
    ] = None,
    allow_remote_without_auth: Annotated[
        bool, typer.Option("--allow-remote-without-auth", help="Listen beyond this machine, open to anybody.")
    ] = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
    stop_with_parent: Annotated[
        bool, typer.Option("--stop-with-parent", help="Stop when standard input ends.")
    ] = False,
) -> None:
    """Serve the status page of a cluster until Ctrl-C or SIGTERM.

    Shows whether the cluster is healthy and why, its bookies, ledgers and logs, the progress of repair, and
    what happened since the start. It changes nothing, and needs no bookie on this machine. A metadata store
    that does not answer is shown as such.
    """
    configure_logging(log_level, as_json=log_json)
    uri = uri or invocation.metadata_uri
    parse_uri(uri)
    host, port = http_address(http)
    if not is_loopback(host) and not allow_remote_without_auth:
        usage_error(
            f"--http {http}: the page has no authentication; --allow-remote-without-auth opens it beyond "
            "this machine"
        )
    try:
        from client_aio.dashboard.server import DashboardServer, Scraper
    except ImportError:
        usage_error("dashboard needs aiohttp: pip install 'bookie-aio[http]'")
    from client_aio.dashboard.model import ClusterModel
    from client_aio.dashboard.observer import Observer

    stop = stop_event(watch_standard_input=stop_with_parent)
    async with Scraper() as scraper:
        connect = partial(client_aio.connect, uri, config=invocation.settings.made("client", ClientConfig))
        observer = Observer(uri, connect, ClusterModel(), wall_clock=time.time, scrape=scraper.scrape)
        async with await DashboardServer.listen(observer, host, port, allow_host or ()) as server:
            row = {"http": server.address, "metadata": uri, "pid": os.getpid()}
            invocation.output.document(row, text=f"the status page is at http://{server.address}/")
            tune_gc()
            observing = asyncio.create_task(observer.run())
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((observing, stopped), return_when=asyncio.FIRST_COMPLETED)
                if observing.done():
                    await observing
            finally:
                for task in (observing, stopped):
                    task.cancel()
                await asyncio.gather(observing, stopped, return_exceptions=True)
