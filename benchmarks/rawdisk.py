"""The limits of the disk itself: the latency of a small synced append, and the bandwidth of large ones.

    python -m benchmarks.rawdisk [--dir DIR] [--seconds 2] [-o table|json]

Measures both in a file whose blocks were only allocated (`fresh`) and in one whose blocks were written before
(`recycled`). An fdatasync of the first kind also commits the file system's metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.running import INTERRUPTED

APPEND_BYTES = 4 << 10
CHUNK_BYTES = 1 << 20
FILE_BYTES = 1 << 30


def prepare(path: Path, *, is_recycled: bool) -> int:
    """Allocate a file, and write all of it once where its blocks are to be recycled ones."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    os.posix_fallocate(descriptor, 0, FILE_BYTES)
    if is_recycled:
        zeros = bytes(CHUNK_BYTES)
        for at in range(0, FILE_BYTES, CHUNK_BYTES):
            os.pwrite(descriptor, zeros, at)
    os.fsync(descriptor)
    return descriptor


def synced_writes(descriptor: int, start: int, size: int, seconds: float) -> list[float]:
    """Append pieces from an offset on, each followed by fdatasync, and return the time of each."""
    piece, took = os.urandom(size), []
    started_at = now = time.perf_counter()
    at = start
    while now < started_at + seconds and at + size <= FILE_BYTES:
        os.pwrite(descriptor, piece, at)
        os.fdatasync(descriptor)
        before, now = now, time.perf_counter()
        took.append(now - before)
        at += size
    return took


def measure(directory: Path, seconds: float) -> dict[str, float]:
    """Measure both kinds of files. Leaves nothing behind."""
    found = {}
    for kind in ("fresh", "recycled"):
        path = directory / f"rawdisk-{os.getpid()}"
        descriptor = prepare(path, is_recycled=kind == "recycled")
        try:
            small = sorted(synced_writes(descriptor, 0, APPEND_BYTES, seconds))
            used = APPEND_BYTES * len(small)
            large = synced_writes(descriptor, -(-used // CHUNK_BYTES) * CHUNK_BYTES, CHUNK_BYTES, seconds)
        finally:
            os.close(descriptor)
            path.unlink()
        found[f"{kind}_p50_ms"] = 1e3 * small[len(small) // 2]
        found[f"{kind}_p99_ms"] = 1e3 * small[int(len(small) * 0.99)]
        found[f"{kind}_mb_per_s"] = len(large) * CHUNK_BYTES / sum(large) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure synced writes to a disk.")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on that disk")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each of the four measurements")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # by which the file is removed
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="rawdisk.") as directory:
        found = measure(Path(directory), arguments.seconds)
    if arguments.output == "json":
        print(json.dumps(found))
        return
    for kind in ("fresh", "recycled"):
        print(
            f"{kind:>8}: fdatasync of a 4 KiB append p50 {found[f'{kind}_p50_ms']:.3f} ms, "
            f"p99 {found[f'{kind}_p99_ms']:.3f} ms; 1 MiB synced writes {found[f'{kind}_mb_per_s']:,.0f} MB/s"
        )


if __name__ == "__main__":
    main()
