"""The error tree: what each class keeps when it travels, and what it says of the outcome."""

from __future__ import annotations

import pickle

import pytest

from metadata import errors
from metadata.errors import BookKeeperError, Outcome

CLASSES = [
    getattr(errors, name) for name in errors.__all__ if issubclass(getattr(errors, name), BookKeeperError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling_with_all_it_carries(kind: type[BookKeeperError]) -> None:
    error = kind("what happened", ledger_id=7, entry_id=8, bookie_id="b1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what happened"
    assert (copy.ledger_id, copy.entry_id, copy.bookie_id) == (7, 8, "b1")
    assert copy.outcome is kind.outcome


def test_every_error_class_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BookKeeperError)
    }
    assert defined <= set(errors.__all__)


def test_what_may_have_taken_effect_says_so() -> None:
    unknown = {kind.__name__ for kind in CLASSES if kind.outcome is Outcome.UNKNOWN}
    assert unknown == {
        "OperationTimeoutError",
        "LedgerFencedError",
        "LedgerRepairError",
        "LogFencedError",
        "NotEnoughBookiesError",
        "BookieUnavailableError",
        "MetadataUnavailableError",
        "DiskFailedError",
        "WriterAbortedError",
    }


def test_wrong_arguments_and_timeouts_are_what_python_calls_them() -> None:
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.OperationTimeoutError, TimeoutError)


@pytest.mark.parametrize("kind", CLASSES)
def test_text_of_a_peer_neither_drives_a_terminal_nor_forges_a_line(kind: type[BookKeeperError]) -> None:
    told = "\x1b[2J\x9b31m\x85\u202eevil\u2028line\nbookie b9 is up\udc80"
    error = kind(f"bookie b1 answered: {told}")
    assert str(error) == (
        r"bookie b1 answered: \u001b[2J\u009b31m\u0085\u202eevil\u2028line\nbookie b9 is up\udc80"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind(str(error))) == str(error)
