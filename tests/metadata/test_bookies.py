"""The records of bookies and of the cluster."""

from __future__ import annotations

import asyncio
import json

import pytest

from metadata.access.bookies import (
    BookieRecord,
    ClusterRecord,
    Cookie,
    available_bookies,
    ensure_cluster,
    join_address,
    split_address,
)
from metadata.backends.memory import MemoryMetadataStore, MemoryTree
from metadata.errors import MetadataCorruptError
from metadata.ids import available_key

RECORDS = [
    ClusterRecord("cluster-1", 1_790_000_000_000),
    BookieRecord("b1", ["10.0.0.1:3181", "[::1]:3181"], "n0", rack="r1", properties={"zone": "a"}),
    Cookie("b1", "cluster-1", "i0", 2),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_survives_being_stored(record: ClusterRecord | BookieRecord | Cookie) -> None:
    assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_with_a_field_more_or_less_or_of_the_wrong_type_is_refused(
    record: ClusterRecord | BookieRecord | Cookie,
) -> None:
    document = json.loads(record.to_json())
    first = next(name for name in document if name != "format")
    for wrong in (
        document | {"unknown": 1},
        document | {"format": 2},
        document | {first: None},
        {name: value for name, value in document.items() if name != first},
        [document],
        7,
    ):
        with pytest.raises(MetadataCorruptError):
            type(record).from_json(json.dumps(wrong).encode())


@pytest.mark.parametrize("addresses", [[], ["nowhere"], ["h:x"], ["h:70000"], [":3181"], "h:1"])
def test_a_bookie_without_a_usable_address_is_refused(addresses: object) -> None:
    document = json.loads(RECORDS[1].to_json()) | {"addresses": addresses}
    with pytest.raises(MetadataCorruptError):
        BookieRecord.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("address", ["10.0.0.1:3181", "[::1]:0", "host.example:65535"])
def test_an_address_is_taken_apart_and_put_together(address: str) -> None:
    assert join_address(*split_address(address)) == address


async def test_two_who_begin_a_cluster_at_once_agree() -> None:
    tree = MemoryTree()
    one, two = MemoryMetadataStore(tree), MemoryMetadataStore(tree)
    first, second = await asyncio.gather(
        ensure_cluster(one, draw_id=lambda: "a", now_ms=1), ensure_cluster(two, draw_id=lambda: "b", now_ms=2)
    )
    assert first == second == await ensure_cluster(two, draw_id=lambda: "c", now_ms=3)


async def test_the_available_bookies_are_those_registered() -> None:
    store = MemoryMetadataStore()
    assert await available_bookies(store) == {}
    record = RECORDS[1]
    assert isinstance(record, BookieRecord)
    registration = await store.register(available_key("b1"), record.to_json())
    assert await available_bookies(store) == {"b1": record}
    await registration.close()
    assert await available_bookies(store) == {}
