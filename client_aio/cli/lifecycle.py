"""`bookie-aio bookie`, the commands that take a bookie out of use: for a while, or for good."""

import asyncio
import time
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from client_aio.cli.completion import complete_bookies
from client_aio.cli.exit_codes import Exit
from client_aio.cli.known import check_bookie
from client_aio.cli.options import RATE_MIB_MAX, Invocation, Placement, PlacementOption, command, usage_error
from client_aio.cli.output import Output
from client_aio.config import MIB, AutoRecoveryConfig
from metadata.access.bookies import (
    DRAINING,
    READ_ONLY,
    Order,
    Orders,
    available_bookies,
    await_obedience,
    change_order,
)
from metadata.backends.uri import open_store
from metadata.errors import (
    InvalidTransitionError,
)

if TYPE_CHECKING:
    from client_aio import Client
    from client_aio.autorecovery.drain import Drain, DrainReport

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


@command(app, "read-only")
async def read_only(
    invocation: Invocation,
    switch: Annotated[Switch, typer.Argument(help="Whether it is to be read-only.", show_default=False)],
    bookie: BookieArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be.")] = False,
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
        await check_bookie(store, bookie)
        if dry_run:
            order = decide((await Orders.read(store)).by_bookie.get(bookie))
            obeys = False if bookie in await available_bookies(store) else None
        else:
            order = await change_order(store, bookie, decide)
            obeys = await await_obedience(store, bookie, READ_ONLY if is_on else "", _OBEYED_WITHIN_S)
    state = "is read-only" if is_on else "takes entries again"
    if dry_run:
        state = f"would {'be read-only' if is_on else 'take entries'}; nothing was changed"
    elif obeys is None:
        state = f"is down, and {'will be read-only' if is_on else 'takes entries'} from its next start on"
    elif not obeys:
        state = f"is told, and has not obeyed within {_OBEYED_WITHIN_S:.0f} s: see its log"
    invocation.output.document(
        {
            "bookie_id": bookie,
            "read_only": order is not None,
            "running": obeys is not None,
            "obeys": None if dry_run else obeys,
            "dry_run": dry_run,
        },
        text=f"bookie {bookie} {state}",
    )


RecoverAfter = Annotated[
    float | None,
    typer.Option(
        "--recover-after",
        min=0,
        metavar="SECONDS",
        help="Close ledgers that stay open on it for so long, or take them over: that fences a writer.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only show what there is to do, and what stands against it.")
]
Rate = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=RATE_MIB_MAX,
        metavar="MIB",
        help="MiB per second that this process reads at most, if it has to copy.",
    ),
]
_RATE_MIB = AutoRecoveryConfig().worker_bytes_per_s / MIB


@command(app, "decommission")
async def decommission(
    invocation: Invocation,
    bookie: BookieArgument,
    recover_after: RecoverAfter = None,
    rate: Rate = _RATE_MIB,
    placement: PlacementOption = Placement.WEIGHTED,
    dry_run: DryRun = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Take the order back; entries that were copied stay copied.")
    ] = False,
) -> int:
    """Have a bookie leave the cluster: other bookies get all its seats, and then its cookie is removed.

    The bookie may run or be lost. It takes no entries any more, and live writers move off it without a failed
    add. Auto recovery copies its entries; where no worker is alive, this command does. In the end the
    bookie stops, and its id is never used again. May be interrupted anywhere, and run again: it goes on.
    Refused where a ledger has no other bookie to move to, or the disks of the others are surely too small.
    """
    if cancel and dry_run:
        usage_error("--cancel takes the order back, and --dry-run changes nothing: give one of the two")
    if cancel:
        return await _cancel(invocation, bookie)
    return await _drain(
        invocation,
        bookie,
        "",
        recover_after=recover_after,
        rate=rate,
        placement=placement,
        dry_run=dry_run,
        verb="has left",
    )


@command(app, "replace")
async def replace(
    invocation: Invocation,
    old: Annotated[
        str,
        typer.Argument(
            metavar="OLD",
            help="The bookie that leaves.",
            show_default=False,
            autocompletion=complete_bookies,
        ),
    ],
    new: Annotated[
        str,
        typer.Argument(
            metavar="NEW",
            help="The bookie that gets its entries.",
            show_default=False,
            autocompletion=complete_bookies,
        ),
    ],
    recover_after: RecoverAfter = None,
    rate: Rate = _RATE_MIB,
    placement: PlacementOption = Placement.WEIGHTED,
    dry_run: DryRun = False,
) -> int:
    """Put one bookie in another's place: copy what OLD held to NEW, then have OLD leave the cluster.

    OLD may run or be lost. A ledger that has NEW in the same ensemble already gets another bookie. Otherwise
    as `bookie decommission`.
    """
    return await _drain(
        invocation,
        old,
        new,
        recover_after=recover_after,
        rate=rate,
        placement=placement,
        dry_run=dry_run,
        verb=f"is replaced by {new}, and has left",
    )


async def _drain(
    invocation: Invocation,
    bookie: str,
    successor: str,
    *,
    recover_after: float | None,
    rate: float,
    placement: Placement,
    dry_run: bool,
    verb: str,
) -> int:
    # Imported here: bookies start without the client.
    from client_aio.autorecovery.drain import Drain, DrainProgress
    from client_aio.cli.text import document_of_plan, progress_of_drain, text_of_plan

    output = invocation.output
    async with (
        invocation.connect(placement=placement.policy) as client,
        output.tracking(f"bookie {bookie}") as show,
    ):

        def on_progress(now: DrainProgress) -> None:
            total = now.ledgers_moved + now.ledgers_left
            show(now.ledgers_moved, total, f"ledgers moved; {progress_of_drain(now)}")

        drain = Drain(
            client._context,
            bookie,
            successor=successor,
            recover_after_s=recover_after,
            config=AutoRecoveryConfig(worker_bytes_per_s=int(rate * MIB)),
            on_progress=on_progress,
        )
        if dry_run:
            plan = await drain.plan()
            output.document(document_of_plan(plan), text=text_of_plan(plan))
            return Exit.UNAVAILABLE if plan.is_refused else Exit.OK
        report = await _run(drain, bookie, output)
    output.document(
        asdict(report),
        text=f"bookie {bookie} {verb} the cluster: {report.ledgers_moved:,} ledgers moved in "
        f"{report.took_s:,.1f} s, {report.ledgers_recovered:,} closed or taken over; its directory may go",
    )
    return Exit.OK


async def _run(drain: "Drain", bookie: str, output: Output) -> "DrainReport":
    """Run a drain; one that is interrupted says what stays, and how to go on."""
    try:
        return await drain.run()
    except asyncio.CancelledError:
        if drain.stage == DRAINING:
            output.note(
                f"interrupted: bookie {bookie} stays draining, and takes no entries. Run this again to "
                f"go on; `bookie-aio bookie decommission --cancel {bookie}` takes the order back"
            )
        elif drain.stage:
            output.note(f"interrupted: bookie {bookie} is being removed. Run this again to end that")
        raise


async def _cancel(invocation: Invocation, bookie: str) -> int:
    from client_aio.autorecovery.drain import cancel_drain

    async with invocation.connect() as client:
        await check_bookie(client._context.ledgers.store, bookie)
        had_one = await cancel_drain(client._context, bookie)
    text = "takes entries again" if had_one else "was not being decommissioned"
    invocation.output.document({"bookie_id": bookie, "cancelled": had_one}, text=f"bookie {bookie} {text}")
    return Exit.OK


async def _check_unnamed(client: "Client", bookie: str, output: Output) -> None:
    """Raise InvalidTransitionError where a ledger names the bookie."""
    from client_aio.autorecovery.survey import ledgers_naming

    async with output.tracking(f"bookie {bookie}", every_s=None) as show:
        naming = await ledgers_naming(client._context, bookie, lambda count: show(count, None, "ledgers"))
    if not naming:
        return
    order = (await Orders.read(client._context.ledgers.store)).by_bookie.get(bookie)
    stays = ""
    if order is not None and order.is_leaving:
        stays = f". It stays draining; `bookie decommission --cancel {bookie}` takes that order back"
    raise InvalidTransitionError(
        f"{len(naming):,} ledgers name bookie {bookie}, such as {naming[0]}: have them repaired, "
        f"closed or deleted first (`ledger list --bookie {bookie}`){stays}"
    )


@command(app, "forget")
async def forget(
    invocation: Invocation,
    bookie: BookieArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether it may be forgotten.")] = False,
) -> None:
    """Leave a bookie that is gone for good out of every list. Refused while it runs, or a ledger names it.

    Otherwise as `bookie decommission`: its cookie is removed, and its id is never used again. The bookie does
    not start any more, even on its own directory. May be interrupted anywhere, and run again: it goes on.
    """
    from client_aio.autorecovery.drain import Drain

    async with invocation.connect() as client:
        await check_bookie(client._context.ledgers.store, bookie)
        if bookie in client.bookies:
            raise InvalidTransitionError(f"bookie {bookie} runs: stop it before it is forgotten")
        # Before any order is given: a refusal changes nothing. The drain looks again behind its order, and
        # moves what came to name the bookie meanwhile.
        await _check_unnamed(client, bookie, invocation.output)
        if not dry_run:
            await _run(Drain(client._context, bookie), bookie, invocation.output)
    text = "may be forgotten" if dry_run else "is forgotten, and its id is not used again"
    invocation.output.document(
        {"bookie_id": bookie, "forgotten": not dry_run}, text=f"bookie {bookie} {text}"
    )
