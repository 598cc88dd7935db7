"""Chains of starts: each begins with what the process before has left, with power cuts at every step.

Owns the making of a chain. A process at work is killed, or loses power. A killed process leaves its data in
the page cache, and nothing more of it is durable than before. The state may then get damage, in the head of a
durable group that is not the last one, so that it can be noticed. Several starts follow, each cut short in
its turn. Their directories may be full, and they may lack the reserve. Some go on to work a little.

A few power cuts are tried at each step, and `tests.sim.crash.states.check_state` checks what they leave. In a
damaged chain, entries that are reported as damaged may be missing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from bookie_aio.storage.segment import format as form
from bookie_aio.storage.segment.format import RESERVE
from tests.sim.cluster.hardware import PAGE, SECTOR
from tests.sim.cluster.quiet import quiet
from tests.sim.crash.states import HOME, Sweep, Work, by_chance, check_state, image_of, record, record_from

if TYPE_CHECKING:
    from tests.sim.cluster.hardware import Hardware
    from tests.sim.crash.states import Facts, Step

CHAINS = 20
STARTS = 4
CUTS = 3
OTHER = "/b/other"
_WHERE = (0, 20, 70, 100, 190)  # from the beginning of a group: in its header, or in rows, or bodies


def start_on_a_full_disk(name: str, left: Hardware, facts: Facts) -> list[Step]:
    """Record a start, which then has nothing to do."""
    left.faults.full.update(dict.fromkeys(_data_directories(left)))
    return record_from(name, left, facts, Work(turns=0, deletes_from=0, first_ledger=0), 0)


def sweep_chains(seed: int, *, chains: int = CHAINS) -> Sweep:
    """Try power cuts at each step of some chains, all behind one recording of an engine at work."""
    rng, result = random.Random(f"chains/{seed}"), Sweep()
    directories = rng.choice(((HOME,), (HOME, OTHER)))
    with quiet() as collect:
        steps = record(seed, directories=directories, restarts=2)
        for number in range(chains):
            name = f"chains/{seed}/{number}"
            found, is_whole = _chain(name, rng.choice(steps), rng)
            result.damaged += not is_whole
            for at, step in enumerate(found):
                result.steps += 1
                for cut in range(CUTS):
                    wrong = check_state(step.facts, by_chance(step, f"{name}/{at}/{cut}"), is_whole=is_whole)
                    result.note(step, f"seed {seed} chain {number} step {at}", wrong)
                if at % 50 == 0:
                    collect()
    return result


def _chain(name: str, step: Step, rng: random.Random) -> tuple[list[Step], bool]:
    """Return the steps of several starts, and whether the disk is whole."""
    steps: list[Step] = []
    is_whole = True
    for start in range(STARTS):
        left = by_chance(step, f"{name}/{start}") if rng.random() < 0.3 else image_of(step.hardware)
        if start == 0 and rng.random() < 0.5:
            is_whole = not _flip_in_a_head(left, rng)
        if rng.random() < 0.6:
            some = rng.choice(_data_directories(left))
            left.faults.full.update(dict.fromkeys(rng.choice(((some,), _data_directories(left)))))
            if rng.random() < 0.3:
                for names in (left.directories[HOME].entries, left.directories[HOME].durable):
                    names.pop(RESERVE, None)
        work = Work(turns=rng.choice((0, 3)), deletes_from=0, first_ledger=21 + 10 * start)
        recorded = record_from(f"{name}/{start}", left, step.facts, work, start)
        steps += recorded
        if recorded:
            step = rng.choice(recorded)
    return steps, is_whole


def _data_directories(hardware: Hardware) -> list[str]:
    return sorted(path for path in hardware.directories if path.startswith("/b/"))


def _flip_in_a_head(left: Hardware, rng: random.Random) -> bool:
    """Flip a bit of what is durable before the last group; gives whether there was such a place."""
    if left.last_group is None:
        return False
    inode, last, _ = left.last_group
    content, heads = bytes(inode.durable), []
    at = content.find(form.GROUP_MAGIC, form.DATA_OFFSET)
    while 0 <= at < last:
        heads.append(at)
        at = content.find(form.GROUP_MAGIC, at + 1)
    places = [one for head in heads if (one := head + rng.choice(_WHERE)) < last - SECTOR]
    if not places:
        return False
    at = rng.choice(places)
    if at // PAGE in inode.dirty:
        return False
    mask = 1 << rng.randrange(8)
    inode.durable[at] ^= mask
    inode.data[at] ^= mask
    return True
