"""Quiet: code that runs inside leaves nothing on standard error, and its leftovers are collected when told.

A simulated power cut leaves coroutines at the await they had reached. When they are collected, their
`finally` blocks run, and complain on standard error. The garbage collector is off inside. It would run in the
middle of a simulation, at a moment that differs from run to run.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PROGRAMS = ("bookie_aio", "client_aio", "metadata")
"""Whose loggers are listened to."""


def _collect() -> None:
    """Collect garbage; twice, since finalisers of the first time bring some of it back."""
    gc.collect()
    gc.collect()


class _Overhearing(logging.Handler):
    def __init__(self, heard: Callable[[BaseException, str], None]) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on what comes with a traceback: nobody had foreseen it."""
        if record.exc_info and record.exc_info[1] is not None:
            self._heard(record.exc_info[1], f"logged: {record.getMessage()}")


@contextlib.contextmanager
def overheard(heard: Callable[[BaseException, str], None]) -> Iterator[None]:
    """Pass on the errors that the programs log with a traceback; inside `quiet`."""
    handler = _Overhearing(heard)
    loggers = [logging.getLogger(name) for name in _PROGRAMS]
    before = [(each, each.propagate) for each in loggers]
    logging.disable(logging.INFO)
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each, propagates in before:
            each.removeHandler(handler)
            each.propagate = propagates
        logging.disable(logging.CRITICAL)


@contextlib.contextmanager
def quiet() -> Iterator[Callable[[], object]]:
    """Silence logs, warnings and finalisers; gives the function that collects garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what is there already is not looked through again and again
    logging.disable(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield _collect
            _collect()
    finally:
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)
        if was_enabled:
            gc.enable()
