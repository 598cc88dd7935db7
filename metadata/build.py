"""The form in which the code runs: compiled or pure Python, and under which interpreter (docs/WHEELS.md)."""

from __future__ import annotations

import platform
from importlib.machinery import EXTENSION_SUFFIXES

from metadata import metrics


def form() -> str:
    """Return "compiled" where the modules of the hot paths are extension modules, else "pure".

    A wheel has all of them in one form, so one of them stands for all.
    """
    return "compiled" if str(metrics.__file__).endswith(tuple(EXTENSION_SUFFIXES)) else "pure"


def interpreter() -> str:
    """Return the name and version of the interpreter, such as "CPython 3.11.2"."""
    return f"{platform.python_implementation()} {platform.python_version()}"
