"""`bookie-aio autorecovery`: have lost copies made again without an operator."""

from typing import Annotated

import typer

from client_aio.autorecovery.service import AutoRecovery
from client_aio.autorecovery.survey import auto_recovery_state
from client_aio.cli.options import (
    LOST_BOOKIE_DELAY_S,
    RATE_MIB_MAX,
    Invocation,
    LogJson,
    LogLevel,
    LostBookieDelay,
    Placement,
    PlacementOption,
    RecoverAbandoned,
    command,
    configure_logging,
    stop_event,
)
from client_aio.cli.text import recovery_text
from client_aio.config import MIB, AutoRecoveryConfig
from metadata.access.repair_tasks import RepairTasks
from metadata.backends.uri import open_store

app = typer.Typer(no_args_is_help=True, help="Have lost copies made again, and look at how that goes.")

_DEFAULTS = AutoRecoveryConfig()


@command(app, "run")
async def run(
    invocation: Invocation,
    lost_bookie_delay: LostBookieDelay = LOST_BOOKIE_DELAY_S,
    recover_after: RecoverAbandoned = None,
    worker_rate: Annotated[
        float,
        typer.Option(
            min=0.01, max=RATE_MIB_MAX, metavar="MIB", help="MiB per second that this worker reads at most."
        ),
    ] = _DEFAULTS.worker_bytes_per_s / MIB,
    cluster_rate: Annotated[
        float,
        typer.Option(
            min=0.01, max=RATE_MIB_MAX, metavar="MIB", help="MiB per second of all workers together."
        ),
    ] = _DEFAULTS.cluster_bytes_per_s / MIB,
    check_interval: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Every ledger's replicas are checked once in this time."),
    ] = _DEFAULTS.check_interval_s,
    placement: PlacementOption = Placement.WEIGHTED,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
) -> None:
    """Run an auditor and a worker until Ctrl-C or SIGTERM; logs go to standard error.

    Any number may run at once, also inside of bookies (`bookie serve --autorecovery`). One auditor is
    elected. A worker that is killed leaves its task to another one. A bookie that is gone for longer than the
    delay is lost. Its entries are copied to others, which get its seats.
    """
    configure_logging(log_level, as_json=log_json)
    config = invocation.settings.made(
        "autorecovery",
        AutoRecoveryConfig,
        lost_bookie_delay_s=lost_bookie_delay,
        recover_after_s=recover_after,
        worker_bytes_per_s=int(worker_rate * MIB),
        cluster_bytes_per_s=int(cluster_rate * MIB),
        check_interval_s=check_interval,
    )
    stop = stop_event()
    async with (
        invocation.connect(placement=placement.policy) as client,
        AutoRecovery(client, config) as recovery,
    ):
        invocation.output.document({"name": recovery.name}, text=f"auto recovery {recovery.name} runs")
        await stop.wait()


@command(app, "status")
async def status(invocation: Invocation) -> None:
    """Show who audits, who repairs, and which ledgers wait for a repair. `cluster status` shows more."""
    async with invocation.connect() as client:
        state = await auto_recovery_state(client._context)
    invocation.output.document(state.to_document(), text=recovery_text(state))


@command(app, "pause")
async def pause(invocation: Invocation) -> None:
    """Pause all workers. Repairs under way are given up; the auditor goes on making tasks."""
    await _set_paused(invocation, is_paused=True)


@command(app, "resume")
async def resume(invocation: Invocation) -> None:
    """End the pause."""
    await _set_paused(invocation, is_paused=False)


async def _set_paused(invocation: Invocation, *, is_paused: bool) -> None:
    async with await open_store(invocation.metadata_uri) as store:
        await RepairTasks(store).pause(is_paused)
    text = "auto recovery is paused" if is_paused else "auto recovery goes on"
    invocation.output.document({"paused": is_paused}, text=text)
