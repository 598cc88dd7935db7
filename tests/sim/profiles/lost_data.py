"""Profiles in which a bookie loses data without a checksum that fails: files and directories of another time.

Owns the check that follows them:

- FencesHold and TombstonesHold: after healing, an ordinary add of the lowest term is sent to the bookie whose
  files were damaged, for each ledger that it has fenced or dropped. `bookie_promises` judges the answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie_aio.wire.blocks import encode_block
from bookie_aio.wire.messages import Add, Done
from metadata.errors import BookKeeperError
from tests.sim.checkers.after_healing import CHECKERS
from tests.sim.plan import profile

if TYPE_CHECKING:
    from client_aio import Client
    from tests.sim.plan import Draw, Plan
    from tests.sim.simulation import Simulation

_ONE_FILE = (
    "file_truncated", "file_emptied", "file_removed", "file_zeroed", "file_pages_swapped", "file_duplicated",
    "file_misplaced",
)  # fmt: skip
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
            simulation.history.note("judge", f"{bookie} refuses a late add to ledger {ledger_id}:", repr(error))


CHECKERS.append(check_fences)


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
        draw.fault(draw.rng.choice(_ONE_FILE), draw.dishonest, at=at, other=_power(draw))
        at += draw.rng.uniform(1.5, 4.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)


@profile
def stale_files(draw: Draw) -> Plan:
    """A file of one bookie is put back as it was earlier: its checkpoint, an index, a table, a sealed segment."""
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
def set_back_bookie(draw: Draw) -> Plan:
    """The directories of one bookie are put back as they were before its last start."""
    _crowd(draw)
    at = draw.rng.uniform(0.5, 3.0)
    for _ in range(draw.rng.randint(1, 2)):
        draw.fault("directory_set_back", draw.dishonest, at=at, lasts=draw.rng.uniform(0.8, 5.0))
        at += draw.rng.uniform(2.0, 6.0)
    _also(draw)
    return draw.plan(segment_bytes=draw.rng.choice((24, 32, 64)) * 1024)
