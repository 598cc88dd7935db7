"""`bookie-aio bookie`, the commands that take a bookie out of use: for a while, or for good."""

import asyncio
import time
from contextlib import aclosing
from enum import StrEnum
from typing import Annotated

import typer

import client_aio
from client_aio.cli.completion import complete_bookies
from client_aio.cli.options import Invocation, command
from metadata.access.bookies import (
    READ_ONLY,
    Order,
    Orders,
    available_bookies,
    change_order,
    registered_bookies,
    retire,
)
from metadata.backends.uri import open_store
from metadata.errors import (
    InvalidTransitionError,
    NoSuchKeyError,
)
from metadata.ids import available_key
from metadata.store import MetadataStore

app = typer.Typer()
"""Its commands are those of `client_aio.cli.bookie`."""

BookieArgument = Annotated[
    str,
    typer.Argument(
        metavar="BOOKIE", help="The bookie's id.", show_default=False, autocompletion=complete_bookies
    ),
]

_OBEYED_WITHIN_S = 15.0


class Switch(StrEnum):
    """The second word of `bookie read-only`."""

    ON = "on"
    OFF = "off"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _check_known(store: MetadataStore, bookie: str) -> None:
    """Raise NoSuchKeyError for a bookie that neither has a cookie, nor runs, nor has an order."""
    known = await registered_bookies(store)
    if bookie not in {*known, *await available_bookies(store), *(await Orders.read(store)).by_bookie}:
        raise NoSuchKeyError(f"there is no bookie {bookie}; the cluster's are {', '.join(known) or 'none'}")


async def _obeys(store: MetadataStore, bookie: str, mode: str) -> bool | None:
    """Wait until a running bookie announces that it obeys; None for one that is down."""
    try:
        async with asyncio.timeout(_OBEYED_WITHIN_S), aclosing(store.watch(available_key(bookie))) as changes:
            async for _ in changes:
                record = (await available_bookies(store)).get(bookie)
                if record is None:
                    return None
                if record.order == mode:
                    return True
    except TimeoutError:
        pass
    return False


@command(app, "read-only")
async def read_only(
    invocation: Invocation,
    switch: Annotated[Switch, typer.Argument(help="Whether it is to be read-only.", show_default=False)],
    bookie: BookieArgument,
) -> None:
    """Have a bookie take no new ledgers and no ordinary adds, or let it take them again.

    The order holds until it is taken back: across restarts, and also for a bookie that is down. Writers move
    off the bookie without a failed add, where there is another one. It goes on serving reads and fences, and
    recoveries may write to it.
    """
    is_on = switch is Switch.ON

    def decide(order: Order | None) -> Order | None:
        if order is not None and order.mode != READ_ONLY:
            raise InvalidTransitionError(
                f"bookie {bookie} is being decommissioned: `bookie decommission --cancel {bookie}` ends that"
            )
        if not is_on:
            return None
        return order or Order(READ_ONLY, since_ms=_now_ms())

    async with await open_store(invocation.metadata_uri) as store:
        await _check_known(store, bookie)
        order = await change_order(store, bookie, decide)
        obeys = await _obeys(store, bookie, READ_ONLY if is_on else "")
    state = "is read-only" if is_on else "takes entries again"
    if obeys is None:
        state = f"is down, and {'will be read-only' if is_on else 'takes entries'} from its next start on"
    elif not obeys:
        state = f"is told, and has not obeyed within {_OBEYED_WITHIN_S:.0f} s: see its log"
    invocation.output.document(
        {"bookie_id": bookie, "read_only": order is not None, "running": obeys is not None, "obeys": obeys},
        text=f"bookie {bookie} {state}",
    )


@command(app, "forget")
async def forget(
    invocation: Invocation,
    bookie: BookieArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether it may be forgotten.")] = False,
) -> None:
    """Leave a bookie that is gone for good out of every list. Refused while it runs, or a ledger names it.

    Its id is never used again: a new bookie under it would have lost what the old one promised.
    """
    async with client_aio.connect(invocation.metadata_uri) as client:
        store = client._context.ledgers.store
        await _check_known(store, bookie)
        if bookie in client.bookies:
            raise InvalidTransitionError(f"bookie {bookie} runs: stop it before it is forgotten")
        from client_aio.autorecovery.survey import ledgers_naming

        naming = await ledgers_naming(client._context, bookie)
        if naming:
            raise InvalidTransitionError(
                f"{len(naming):,} ledgers name bookie {bookie}, such as {naming[0]}: have them repaired, "
                f"closed or deleted first (`ledger list --bookie {bookie}`)"
            )
        if not dry_run:
            await retire(store, bookie)
            await change_order(store, bookie, lambda _: None)
    text = "may be forgotten" if dry_run else "is forgotten, and its id is not used again"
    invocation.output.document(
        {"bookie_id": bookie, "forgotten": not dry_run}, text=f"bookie {bookie} {text}"
    )
