"""The settings of a client, and what it draws by itself."""

from __future__ import annotations

import random

import pytest

import client_aio
from bookie_aio.wire.frames import FRAME_BYTES_MAX, entry_room
from client_aio.config import ClientConfig
from metadata.access.bookies import ensure_cluster
from metadata.backends.memory import MemoryMetadataStore, MemoryTree

ENTRY_BYTES_MAX = entry_room(FRAME_BYTES_MAX)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("entry_bytes_max", ENTRY_BYTES_MAX + 1),
        ("entry_bytes_max", 0),
        ("read_ahead_bytes", 2**32),
        ("read_ahead_bytes", 1.5),
        ("ensemble_changes_max", 10.0),
        ("long_poll_s", 0.0005),
        ("quarantine_s", -1),
        ("quarantine_s", True),
    ],
)
def test_what_no_bookie_or_frame_takes_is_refused(setting: str, value: object) -> None:
    with pytest.raises(client_aio.InvalidArgumentError, match=setting):
        ClientConfig(**{setting: value})


def test_the_largest_entry_has_room_in_a_frame() -> None:
    ClientConfig(entry_bytes_max=ENTRY_BYTES_MAX)
    assert ClientConfig().entry_bytes_max <= ENTRY_BYTES_MAX


async def test_clients_of_one_seed_draw_no_token_alike() -> None:
    """Else one would take the other's write for its own."""
    tree = MemoryTree()
    await ensure_cluster(MemoryMetadataStore(tree), draw_id=lambda: "cluster", now_ms=1)
    tokens, salts = set(), set()
    for _ in range(2):
        store = MemoryMetadataStore(tree)
        async with client_aio.connect(store, rng=random.Random(0)) as client:
            tokens |= {client._context.draw_token() for _ in range(100)}
            record, _ = await client._context.lock(7, b"password")
            assert record is not None
            salts.add(record.salt)
    assert len(tokens) == 200
    assert len(salts) == 2
