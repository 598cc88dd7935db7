"""Profiles in which a bookie loses data without a checksum that fails: files and directories of another time.

Owns the checks that follow them:

- LogsOpenAgain: once faults stop, a log whose list was set back with the metadata store opens, and takes and
  returns a record.
- FencesHold and TombstonesHold: after healing, an ordinary add of the lowest term is sent to the bookie whose
  files were damaged, for each ledger that it has fenced or dropped. `bookie_promises` judges the answers.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from bookie_aio.wire.blocks import encode_block
from bookie_aio.wire.messages import Add, Done
from metadata.errors import BookKeeperError
from metadata.ids import KEY_LEDGERS, ledger_id_of
from metadata.model.ledger import LedgerMetadata
from tests.sim.checkers.after_healing import CHECKERS
from tests.sim.checkers.log import TAG
from tests.sim.faults.files import ONE_FILE
from tests.sim.faults.older_store import NEWEST_RETURNS
from tests.sim.plan import profile
from tests.sim.workloads.ledger import role

if TYPE_CHECKING:
    from client_aio import Client
    from metadata.store import Version
    from tests.sim.plan import Actor, Draw, Plan
    from tests.sim.simulation import Simulation

_FIVE = ("b1", "b2", "b3", "b4", "b5")
"""One more than any ensemble takes: the damaged bookie may never come back, or take no adds."""
_PROBE_ENTRY = 1 << 40
_LEDGERS_MAX = 40


async def check_fences(simulation: Simulation, client: Client) -> None:
    """Send late adds to the bookie whose files were damaged."""
    if not simulation.damaged_files:
        return
    bookie, words = simulation.dishonest, simulation.history.words
    data = b"late"
    for ledger_id in words.fenced_or_deleted(bookie)[-_LEDGERS_MAX:]:
        block = encode_block(
            ledger_id=ledger_id, content_term=0, first_entry=_PROBE_ENTRY, stride=1, lac=-1, lafr=-1,
            payloads=[data], running=[len(data)],
        )  # fmt: skip
        try:
            connection = await client._context.pool.get(bookie)
            await connection.call(Add(ledger_id, 0, 0), Done, body=block, timeout_s=2.0)
        except BookKeeperError as error:
            simulation.history.note(
                "judge", f"{bookie} refuses a late add to ledger {ledger_id}:", repr(error)
            )


CHECKERS.append(check_fences)


LOG = "restored"
_OPENS_WITHIN_S = 20.0


@role
async def restored_log_writer(simulation: Simulation, actor: Actor, client: Client) -> None:
    """Open a log, append records that name their writer, close it, and open it again."""
    _leave_ledgers_of_logs_out(simulation)
    rng, life = random.Random(f"{simulation.plan.seed}/{actor.name}/restored"), 0
    while not simulation.is_healed:
        life += 1
        try:
            async with client.open_log(LOG, roll_entries=4) as log:
                for number in range(rng.randrange(1, 10)):
                    await log.append(f"{actor.name}.{life}.{number}".encode())
                    simulation.given(f"{actor.name}, life {life}", log.ledger_id)
        except BookKeeperError as error:
            simulation.history.note(actor.name, "the log:", repr(error))
        await asyncio.sleep(0.5 * rng.random())


def _leave_ledgers_of_logs_out(simulation: Simulation) -> None:
    """Have the history check only the bookies' answers of ledgers that are made for logs."""
    if "ledgers of logs" in simulation.shared:
        return
    simulation.shared["ledgers of logs"] = True

    def changed(key: str, value: bytes | None, version: Version | None) -> None:
        is_ledger = key.startswith(KEY_LEDGERS + "/") and key.count("/") == 5
        if is_ledger and value is not None and TAG in LedgerMetadata.from_json(value).custom:
            simulation.history.ignore(ledger_id_of(key))

    simulation.tree.watchers.append(changed)


async def check_restored_log(simulation: Simulation, client: Client) -> None:
    """Open the log, append to it, and read it."""
    if all(actor.role != restored_log_writer.__name__ for actor in simulation.plan.actors):
        return
    history, loop = simulation.history, simulation.loop
    give_up_at = loop.now + _OPENS_WITHIN_S
    while True:
        try:
            async with client.open_log(LOG) as log:
                position = await log.append(b"judge.0.0")
            found = [record async for record in client.read_log(LOG, position)]
            break
        except BookKeeperError as error:
            if loop.now > give_up_at:
                history.fail("LogsOpenAgain", f"the log cannot be opened and read: {error!r}")
                return
            await asyncio.sleep(0.5)
    history.require(
        [record.data for record in found] == [b"judge.0.0"], "LogsOpenAgain", lambda: f"{found} was read"
    )


CHECKERS.append(check_restored_log)


def _crowd(draw: Draw) -> None:
    """Add clients that write, fence, delete and read, so that there is something to forget."""
    rng = draw.rng
    draw.bookies = _FIVE
    draw.crowd(recoverers=rng.choice((1, 2)), ack_at_least=2)
    draw.writer(ack_at_least=2, entries=rng.choice((20, 60)), burst=1, gap=0.02, bytes=rng.choice((20, 600)))
    draw.actor("reader", rng.uniform(0.5, 2.0))
    if rng.random() < 0.5:
        draw.actor("deleter", rng.uniform(0.5, 2.0))


def _also(draw: Draw) -> None:
    """Add a few faults of other kinds."""
    for kind in ("kill_bookie", "power_cut", "disk_slow"):
        draw.some(kind, list(draw.bookies), 2)
    draw.some("cut_reset", draw.clients, 2)
    draw.some("kill_client", draw.clients, 1)


def _power(draw: Draw) -> str:
    return draw.rng.choice(("", "", "power"))


@profile
def damaged_files(draw: Draw) -> Plan:
    """Files of one bookie are cut, emptied, removed, zeroed, exchanged or renamed while it does not run."""
    _crowd(draw)
    at = draw.rng.uniform(0.8, 4.0)
    for _ in range(draw.rng.randint(1, 4)):
        draw.fault(draw.rng.choice(ONE_FILE), draw.dishonest, at=at, other=_power(draw))
        at += draw.rng.uniform(1.5, 4.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)


@profile
def stale_files(draw: Draw) -> Plan:
    """A file of one bookie is put back as it was earlier, whichever file it is."""
    _crowd(draw)
    at = draw.rng.uniform(0.5, 2.0)
    for _ in range(draw.rng.randint(1, 3)):
        draw.fault(
            "file_set_back", draw.dishonest, at=at, lasts=draw.rng.uniform(0.3, 5.0), other=_power(draw)
        )
        at += draw.rng.uniform(2.0, 6.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 24, 32)) * 1024)


@profile
def partial_restores(draw: Draw) -> Plan:
    """Many files of one bookie are put back as they were earlier, by a restore that was cut short."""
    _crowd(draw)
    at = draw.rng.uniform(0.5, 2.0)
    for _ in range(draw.rng.randint(1, 2)):
        draw.fault("files_set_back", draw.dishonest, at=at, lasts=draw.rng.uniform(1.0, 6.0))
        at += draw.rng.uniform(3.0, 7.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)


@profile
def set_back_bookie(draw: Draw) -> Plan:
    """The directories of one bookie are put back as they were before its last start."""
    _crowd(draw)
    at = draw.rng.uniform(0.5, 3.0)
    for _ in range(draw.rng.randint(1, 2)):
        draw.fault("directory_set_back", draw.dishonest, at=at, lasts=draw.rng.uniform(0.8, 5.0))
        at += draw.rng.uniform(2.0, 6.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)


@profile
def set_back_metadata(draw: Draw) -> Plan:
    """The metadata store is set back to a copy, and ledgers and a log are written before and afterwards.

    Every bookie is started once more behind the copy, and raises its age. Nothing tells a copy that is
    younger than the last raise from the original.
    """
    rng = draw.rng
    copied_at, lasts = rng.uniform(0.5, 2.0), rng.uniform(2.0, 4.0)
    for bookie in draw.bookies:
        draw.fault("kill_bookie", bookie, at=copied_at + rng.uniform(0.05, 0.5), lasts=0.1)
    back_at = copied_at + lasts
    for at in (0.0, back_at + 0.1):
        for _ in range(rng.choice((1, 2))):
            name = draw.writer(ack_at_least=2, entries=rng.choice((3, 8)), rest=0.1, gap=0.05)
            draw.starts(name, at + rng.uniform(0.0, 0.8))
        if rng.random() < 0.7:
            draw.actor("restored_log_writer", at + rng.uniform(0.0, 0.8))
        draw.actor("reader", at + rng.uniform(0.5, 1.0))
        draw.actor("recoverer", at + rng.uniform(0.5, 1.5))
    draw.actor("deleter", back_at + 0.5)
    draw.fault(
        "metadata_set_back", "", at=copied_at, lasts=lasts, amount=rng.uniform(0.2, 1.0),
        other=rng.choice((NEWEST_RETURNS, "")),
    )  # fmt: skip
    draw.some("kill_bookie", list(draw.bookies), 2)
    draw.some("disk_slow", list(draw.bookies), 2)
    return draw.plan(power_cut_at_end=rng.random() < 0.5)


@profile
def copied_bookie(draw: Draw) -> Plan:
    """A second bookie is started on a copy of a bookie's directories, beside it or in its place."""
    _crowd(draw)
    at = draw.rng.uniform(0.5, 3.0)
    draw.fault(
        "bookie_copied", draw.dishonest, at=at, lasts=draw.rng.uniform(0.6, 3.0), amount=draw.rng.random()
    )
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)
