"""The machine of a measurement, to stand beside every figure."""

from __future__ import annotations

import os
import platform
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("bookie-aio", "uvloop", "msgpack", "crc32c")


def build_of(config_args: str) -> str:
    """Return how an interpreter was optimised, by the arguments that it was configured with.

    Debian passes both to `make`, so its arguments do not name them. They name Debian's folder of wheels.
    """
    if "--with-wheel-pkg-dir=/usr/share/python-wheels" in config_args:
        return "Debian's build, with PGO and LTO"
    found = [
        name
        for option, name in (("--enable-optimizations", "PGO"), ("--with-lto", "LTO"))
        if option in config_args
    ]
    return f"built with {' and '.join(found)}" if found else "built without PGO and LTO"


def machine() -> dict[str, Any]:
    """Return the machine, the system and the package versions."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    config_args = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "python_build": build_of(config_args),
        "python_config_args": config_args,
        "packages": {name: version(name) for name in PACKAGES},
    }
