"""`python -m tests.support.pythons`: the tests, on every other supported Python that this machine has.

python -m tests.support.pythons                     the whole suite, on each
python -m tests.support.pythons tests/cli -x        these tests, with these options of pytest

`make test` runs on one Python only. Each of the others gets an environment of its own in .venv, which is made
as `make` makes one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14))
_IS = "import sys; print('%d.%d' % sys.version_info[:2])"
_PYTEST = ("-m", "pytest", "-n", "3", "--dist", "loadgroup")


def interpreters() -> dict[str, str]:
    """Return an interpreter of each version that this machine has: version → command."""
    found: dict[str, str] = {}
    for major, minor in VERSIONS:
        wanted = f"{major}.{minor}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python"))
        for candidate in (sys.executable, f"python{wanted}", *map(str, pyenv)):
            if wanted not in found and version_of(candidate) == wanted:
                found[wanted] = candidate
    return found


def version_of(python: str) -> str:
    """Return "3.12" of an interpreter, "" of what is none."""
    try:
        told = subprocess.run([python, "-c", _IS], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip()


def environment(version: str, python: str, extra: str = "") -> str:
    """Make an environment with the package and what this extra needs. Return its interpreter."""
    folder = ROOT / ".venv" / f"python-{version}"
    subprocess.run(
        [ROOT / ".ci" / "environment", folder, extra],
        env={**os.environ, "PYTHON": python}, cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return str(folder / "bin" / "python")


def run_on_others(arguments: list[str]) -> int:
    """Run the tests on every version but the one that runs this. Return the exit code."""
    own = version_of(sys.executable)
    found = interpreters()
    failed = []
    for version, python in found.items():
        if version == own:
            continue
        print(f"Python {version} ({python}): making .venv/python-{version}", flush=True)
        inside = environment(version, python, "dev")
        if subprocess.run([inside, *_PYTEST, *arguments], cwd=ROOT, check=False).returncode:
            failed.append(version)
    others = [version for version in found if version != own]
    missing = [f"{major}.{minor}" for major, minor in VERSIONS if f"{major}.{minor}" not in found]
    print(f"tests failed on Python: {', '.join(failed) or 'none'}, of {', '.join(others) or 'none found'}")
    if missing:
        print(f"not found, so not tested: Python {', '.join(missing)}")
    return 1 if failed or not others else 0


if __name__ == "__main__":
    sys.exit(run_on_others(sys.argv[1:]))
