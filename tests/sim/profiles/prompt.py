"""Profiles in which only processes stand still, and everything else has to be prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.plan import profile
from tests.sim.workloads import prompt

if TYPE_CHECKING:
    from tests.sim.plan import Draw, Plan

ROLES = (prompt.prompt_writer, prompt.prompt_tailer, prompt.prompt_recoverer)
"""What these profiles are played by."""


def _writer(
    draw: Draw, sizes: tuple[int, int, int], *, blames_nobody: bool, closes: bool, ends: bool = False
) -> str:
    rng = draw.rng
    quorums = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), sizes, strict=True))
    return draw.actor(
        "prompt_writer", rng.uniform(0.0, 0.5), quorums=quorums, blames_nobody=blames_nobody, closes=closes,
        entries=rng.choice((10, 60)), gap=rng.choice((0.05, 0.2)), bytes=rng.choice((20, 1200)), ends=ends,
    )  # fmt: skip


@profile
def hung_minority(draw: Draw) -> Plan:
    """Bookies hang, fewer than the ack quorum can do without; tails and recoveries go on with the others."""
    rng = draw.rng
    draw.bookies = tuple(f"b{number}" for number in range(1, 6))
    sizes = rng.choice(((3, 3, 2), (4, 3, 2), (5, 5, 3), (5, 5, 3)))
    hung = rng.sample(draw.bookies, 2 if sizes[0] == 5 else 1)
    begin = rng.uniform(2.0, 5.0)
    for _ in range(rng.choice((1, 2, 3))):
        writer = _writer(draw, sizes, blames_nobody=False, closes=rng.random() < 0.3)
        draw.actor("prompt_tailer", rng.uniform(0.3, 1.0), of=writer)
        if rng.random() < 0.3:
            draw.actor("prompt_recoverer", begin + rng.choice((0.05, 0.7, 2.0)), of=writer)
    for bookie_id in hung:
        draw.fault("pause", bookie_id, at=begin, lasts=rng.uniform(4.0, 8.0))
    return draw.plan(power_cut_at_end=False)


@profile
def own_blocking(draw: Draw) -> Plan:
    """Clients stand still for longer than every timeout; the bookies answered all along.

    The metadata store may be out of reach meanwhile, and for less than any timeout while the client runs.
    """
    rng = draw.rng
    draw.duration = 25.0
    writers = [_writer(draw, (3, 3, 2), blames_nobody=True, closes=True) for _ in range(rng.choice((1, 2)))]
    for writer in writers:
        if rng.random() < 0.4:
            at, lasts = rng.uniform(1.5, 10.0), rng.uniform(8.0, 14.0)
            draw.fault("pause", writer, at=at, lasts=lasts)
            draw.fault("meta_cut", writer, at=at - 1.0, lasts=lasts + 1.5)
            continue
        for _ in range(rng.choice((1, 2, 3))):
            draw.fault("pause", writer, lasts=rng.choice((rng.uniform(0.3, 4.0), rng.uniform(10.0, 14.0))))
    return draw.plan(power_cut_at_end=False)


@profile
def busy_loop(draw: Draw) -> Plan:
    """Clients compute in slices all the time. Nobody is blamed who answers, and what hangs ends an add."""
    rng = draw.rng
    draw.duration = 40.0
    draw.bookies, draw.dishonest = draw.bookies[:3], "b1"
    hung = rng.sample(draw.bookies, rng.choice((0, 1, 2)))
    writer = _writer(draw, (3, 3, 2), blames_nobody=not hung, closes=True, ends=True)
    draw.fault("busy", writer, at=rng.uniform(1.5, 2.5), lasts=draw.duration, amount=rng.random())
    begin = rng.uniform(3.0, 8.0)
    for bookie_id in hung:
        draw.fault("pause", bookie_id, at=begin, lasts=rng.uniform(26.0, 30.0))
    return draw.plan(power_cut_at_end=False)
