"""Compiles the modules that pyproject.toml lists, if BOOKIE_AIO_COMPILE=1; all else stands in pyproject.toml.

Only a wheel is compiled. An sdist has the sources, and an editable installation runs them. The C compiler
optimises at BOOKIE_AIO_OPT_LEVEL, 0 to 3; at 0 the wheel is built in two thirds of the time, for tests.
"""

import os
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup

SETTINGS = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text("utf-8"))
IS_COMPILED = os.environ.get("BOOKIE_AIO_COMPILE", "0") == "1"


def extensions() -> list[Extension]:
    """Translate the modules to C; each becomes a small extension module, beside one library with all code."""
    from mypyc.build import mypycify

    modules: list[str] = SETTINGS["tool"]["bookie-aio"]["compiled-modules"]
    sources = [f"{name.replace('.', '/')}.py" for name in modules]
    return mypycify(
        ["--ignore-missing-imports", *sources],
        opt_level=os.environ.get("BOOKIE_AIO_OPT_LEVEL", "3"),
        debug_level="0",
        target_dir="build/mypyc",
        group_name="bookie_aio",
    )


setup(
    ext_modules=extensions() if IS_COMPILED and "bdist_wheel" in sys.argv else [],
    setup_requires=SETTINGS["project"]["optional-dependencies"]["compile"] if IS_COMPILED else [],
)
