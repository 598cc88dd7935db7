"""`python -m tests.support.wheel`: the tests, on the compiled wheel.

python -m tests.support.wheel                      units of what is compiled, integration, 200 seeds
python -m tests.support.wheel --build              only the wheel, if a source has changed
python -m tests.support.wheel --quick              fewer tests, on code that the C compiler does not optimise
python -m tests.support.wheel tests/cli -x         these tests, with these options of pytest, and no seeds

The wheel is built when a source has changed, and installed into an environment of its own under build/. The
other packages come from the environment that runs this. The tests run in a copy beside no source of ours:
Python would import the sources first. Seeds of the simulator run here, as pure Python, and on the wheel. Each
must give the same trace: what is compiled sends the same bytes at the same times.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from typing import TYPE_CHECKING

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

BUILD = ROOT / "build" / "compiled"
PACKAGES = ("metadata", "bookie_aio", "client_aio")
BESIDE = (
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "deploy",
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
)
UNITS = (
    "tests/test_compiled.py",
    "tests/test_metrics.py",
    "tests/bookie_aio/wire",
    "tests/bookie_aio/core",
    "tests/client_aio/core",
    "tests/scenarios",
)
QUICK = (
    *UNITS,
    "tests/bookie_aio/storage/test_storage_journal.py",
    "tests/bookie_aio/server/test_server_operations.py",
    "tests/integration/test_write_options.py",
)
FULL = (
    *UNITS,
    "tests/bookie_aio",
    "tests/client_aio",
    "tests/integration/test_arguments.py",
    "tests/integration/test_event_loops.py",
    "tests/integration/test_gathering.py",
    "tests/integration/test_healing.py",
    "tests/integration/test_ledgers.py",
    "tests/integration/test_logs.py",
    "tests/integration/test_log_healing.py",
    "tests/integration/test_sync.py",
    "tests/integration/test_unbounded.py",
    "tests/integration/test_unbounded_healing.py",
    "tests/integration/test_write_options.py",
    "tests/integration/test_writer_interleavings.py",
)
_TRACES = """
import sys
from tests.sim.campaign import runner
from tests.sim.profiles import all_profiles, draw_plan
from tests.sim.simulation import run_plan
for name, seed in runner.jobs(all_profiles(), range(int(sys.argv[1]))):
    result = run_plan(draw_plan(name, seed), is_traced=True)
    print(name, seed, result.digest, result.steps, flush=True)
"""


def sources() -> list[Path]:
    """Return what the wheel is made of."""
    modules = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
    return [ROOT / "pyproject.toml", ROOT / "setup.py", *modules]


def build(opt_level: str) -> Path:
    """Build the wheel unless it is there; return it."""
    key = opt_level + hashlib.sha256(b"\0".join(path.read_bytes() for path in sources())).hexdigest()
    stamp, folder = BUILD / "sources", BUILD / "dist"
    if not stamp.exists() or stamp.read_text() != key:
        shutil.rmtree(BUILD, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder],
            env={**os.environ, "BOOKIE_AIO_COMPILE": "1", "BOOKIE_AIO_OPT_LEVEL": opt_level},
            cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        stamp.write_text(key)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path) -> str:
    """Install the wheel into an environment of its own; return its interpreter."""
    folder = BUILD / "environment"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # A path in a .pth file is no site directory: the editable installation that is there takes no effect.
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "other_packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return str(python)


def copy() -> Path:
    """Copy the tests and what they read; return the folder."""
    folder = BUILD / "tree"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in BESIDE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def differing_traces(python: str, tree: Path, seeds: int) -> list[str]:
    """Return the seeds whose traces differ between the sources and the wheel, as lines of both."""
    running = [
        subprocess.Popen([each, "-c", _TRACES, str(seeds)], cwd=folder, stdout=subprocess.PIPE, text=True)
        for each, folder in ((sys.executable, ROOT), (python, tree))
    ]
    pure, compiled = (process.communicate()[0].splitlines() for process in running)
    print(f"{seeds} seeds: {len(pure)} ran as pure Python, {len(compiled)} compiled", flush=True)
    found = [
        f"pure {one}, compiled {other}" for one, other in zip(pure, compiled, strict=False) if one != other
    ]
    return found if len(pure) == len(compiled) == seeds else [*found, "not every seed has ended"]


def main() -> int:
    """Do what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.wheel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--build", action="store_true", help="only build the wheel, if a source has changed")
    parser.add_argument("--quick", action="store_true", help="fewer tests, and no optimisation")
    parser.add_argument("--seeds", type=int, help="how many seeds run in both forms")
    arguments, of_pytest = parser.parse_known_args()
    wheel = build("0" if arguments.quick else "3")
    if arguments.build:
        return 0
    python, tree = install(wheel), copy()
    selected = of_pytest or list(QUICK if arguments.quick else FULL)
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    failed = subprocess.run([*command, *selected], cwd=tree, check=False).returncode != 0
    seeds = arguments.seeds if arguments.seeds is not None else 0 if of_pytest else 200
    differing = differing_traces(python, tree, seeds) if seeds else []
    print("\n".join(differing[:20]) or "no trace differs", flush=True)
    return 1 if failed or differing else 0


if __name__ == "__main__":
    sys.exit(main())
