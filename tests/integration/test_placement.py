"""Placement over racks, quarantine and policies of one's own, on real bookies that are killed."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from typing import TYPE_CHECKING

import pytest

import client_aio
from client_aio.core.quorum import write_set
from examples.own_placement import OneNearby
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 30


def racked(directory: Path, racks: dict[str, str], light: tuple[str, ...] = ()) -> Cluster:
    """A cluster of these bookies on these racks; the light ones are hardly ever drawn by weight."""
    cluster = Cluster(directory, bookies=len(racks))
    for bookie_id, rack in racks.items():
        cluster[bookie_id].arguments = [
            "--rack", rack, "--weight", "0.001" if bookie_id in light else "1",
        ]  # fmt: skip
    return cluster


def racks_of_write_sets(metadata: client_aio.LedgerMetadata, racks: dict[str, str]) -> list[set[str]]:
    """The racks of each write set of each fragment."""
    size, write_quorum = metadata.ensemble_size, metadata.write_quorum
    return [
        {racks[fragment.bookies[seat]] for seat in write_set(start, size, write_quorum)}
        for fragment in metadata.fragments
        for start in range(size)
    ]


async def write_until_changed(ledger: client_aio.LedgerWriter, fragments: int) -> None:
    """Add entries until an ensemble change has added a fragment."""
    async with asyncio.timeout(WAIT_S):
        while len(ledger.metadata.fragments) < fragments:
            await ledger.add_entry(b"more")


@pytest.mark.parametrize("shape", [(3, 3, 2), (4, 2, 2)])
async def test_a_replacement_keeps_two_racks_in_each_write_set(
    tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    """A bookie of the second rack dies; those left there are light, and one takes its seat all the same."""
    racks = {"b1": "r1", "b2": "r1", "b3": "r1", "b4": "r2", "b5": "r2", "b6": "r2"}
    async with (
        racked(tmp_path, racks, light=("b4", "b5", "b6")) as cluster,
        client_aio.connect(cluster.uri, placement=client_aio.RackAware(), rng=random.Random(1)) as client,
    ):
        ledger = await client.create_ledger(
            ensemble_size=shape[0], write_quorum=shape[1], ack_quorum=shape[2]
        )
        await ledger.add_entry(b"first")
        first = ledger.metadata.last_fragment.bookies
        victim = next(bookie_id for bookie_id in first if racks[bookie_id] == "r2")
        await cluster[victim].kill()
        await write_until_changed(ledger, 2)
        replaced = ledger.metadata.last_fragment.bookies
        assert victim not in replaced
        assert [seat for seat in range(shape[0]) if first[seat] != replaced[seat]] == [first.index(victim)]
        assert all(len(names) == 2 for names in racks_of_write_sets(ledger.metadata, racks))
        await ledger.close()


async def test_two_racks_that_cannot_be_had_are_a_warning_and_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    racks = {"b1": "r1", "b2": "r1", "b3": "r1", "b4": "r2"}
    async with (
        racked(tmp_path, racks) as cluster,
        client_aio.connect(cluster.uri, placement=client_aio.RackAware()) as client,
    ):
        ledger = await client.create_ledger()
        await ledger.add_entry(b"first")
        assert "b4" in ledger.metadata.last_fragment.bookies
        assert not [
            record for record in caplog.records if record.name == "client_aio.bookies.ensemble_finder"
        ]
        await cluster["b4"].kill()
        with caplog.at_level(logging.WARNING):
            await write_until_changed(ledger, 2)
        assert set(ledger.metadata.last_fragment.bookies) == {"b1", "b2", "b3"}
        warnings = [
            record.getMessage()
            for record in caplog.records
            if record.name == "client_aio.bookies.ensemble_finder"
        ]
        assert len(warnings) == 1
        ensemble = ",".join(ledger.metadata.last_fragment.bookies)
        assert warnings[0].startswith(f"ledger={ledger.ledger_id} ensemble={ensemble} 3 of 3 write sets")
        await ledger.close()


async def test_a_failed_bookie_stays_in_quarantine_although_it_is_back(tmp_path: Path) -> None:
    """With two others to choose from it is left out; with one, it is better than none."""
    async with (
        Cluster(tmp_path, bookies=3) as cluster,
        client_aio.connect(cluster.uri, quarantine_s=600.0) as client,
    ):
        async with client.create_ledger(ensemble_size=3, ack_quorum=1) as ledger:
            await ledger.add_entry(b"all")
            await cluster["b2"].kill()
            async with asyncio.timeout(WAIT_S):
                while not ledger.failed_bookies:
                    await ledger.add_entry(b"more")
            assert client.quarantined_bookies == ["b2"]
            await cluster["b2"].start()
            async with asyncio.timeout(WAIT_S):
                while ledger.failed_bookies:  # nobody else is there: it takes its seat again
                    await ledger.add_entry(b"more")
        assert client.quarantined_bookies == ["b2"]
        for _ in range(8):
            async with client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=1) as ledger:
                assert set(ledger.metadata.last_fragment.bookies) == {"b1", "b3"}
        async with client.create_ledger(ensemble_size=3) as ledger:
            assert "b2" in ledger.metadata.last_fragment.bookies


async def test_a_policy_of_ones_own_places_ledgers_and_replacements(tmp_path: Path) -> None:
    """The policy of examples/own_placement.py: one bookie nearby, and another one nearby when that dies."""
    racks = {"b1": "near", "b2": "near", "b3": "far", "b4": "far"}
    async with (
        racked(tmp_path, racks) as cluster,
        client_aio.connect(cluster.uri, placement=OneNearby("near")) as client,
    ):
        ledger = await client.create_ledger(ensemble_size=3)
        await ledger.add_entry(b"first")
        first = ledger.metadata.last_fragment.bookies
        assert sorted(racks[bookie_id] for bookie_id in first) == ["far", "far", "near"]
        await cluster[first[0]].kill()
        await write_until_changed(ledger, 2)
        assert [racks[bookie_id] for bookie_id in ledger.metadata.last_fragment.bookies] == [
            "near",
            "far",
            "far",
        ]
        await ledger.close()


async def test_the_example_runs(tmp_path: Path) -> None:
    racks = {"b1": "near", "b2": "far", "b3": "far"}
    async with racked(tmp_path, racks) as cluster:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "examples/own_placement.py", cluster.uri, "near", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert output.decode().split()[:2] == ["b1", "near"]


class Wrong:
    """A policy that answers what it was told to."""

    def __init__(self, bookies: list[str] | None) -> None:
        self.bookies = bookies

    def choose(self, seating: client_aio.Seating, rng: random.Random) -> client_aio.Choice:
        if self.bookies is None:
            raise KeyError("no such rack")
        return client_aio.Choice(self.bookies)


@pytest.mark.parametrize(
    ("bookies", "words"),
    [
        (["b1"], r"Wrong chose \['b1'\] for 2 seats"),
        (["b1", "b1"], r"Wrong chose \['b1', 'b1'\] for 2 seats"),
        (["b1", "elsewhere"], r"\['elsewhere'\], which are not among the candidates \['b1', 'b2'\]"),
        (None, "Wrong failed: KeyError.'no such rack'."),
    ],
)
async def test_a_policy_that_is_wrong_is_told_so(
    tmp_path: Path, bookies: list[str] | None, words: str
) -> None:
    async with (
        Cluster(tmp_path, bookies=2) as cluster,
        client_aio.connect(cluster.uri, placement=Wrong(bookies)) as client,
    ):
        with pytest.raises(client_aio.InvalidArgumentError, match=words):
            await client.create_ledger(ensemble_size=2, write_quorum=2)


async def test_adds_that_a_wrong_policy_ends_may_have_been_done(tmp_path: Path) -> None:
    """The adds had been sent when the policy was asked for a replacement: two bookies have them."""
    policy = Wrong(["b1", "b2", "b3"])
    async with (
        Cluster(tmp_path, bookies=4) as cluster,
        # It must not find b2 gone by telling the LAC, before there is an add to be in doubt.
        client_aio.connect(cluster.uri, placement=policy, explicit_lac_delay_s=60.0) as client,
    ):
        ledger = await client.create_ledger(ack_quorum=3)
        await ledger.add_entry(b"acknowledged")
        policy.bookies = None
        await cluster["b2"].kill()
        with pytest.raises(client_aio.InvalidArgumentError, match="Wrong failed") as raised:
            await asyncio.wait_for(ledger.add_entry(b"in doubt"), WAIT_S)
        assert raised.value.outcome is client_aio.Outcome.UNKNOWN
        policy.bookies = ["b4"]
        closed = await client.open_ledger(ledger.ledger_id, recover=True)
        assert [entry.data async for entry in closed.read(1, closed.last_add_confirmed)] == [b"in doubt"]
