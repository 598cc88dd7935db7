"""Settling a lost answer by content, against a model that knows the truth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metadata import write_outcome
from metadata.errors import KeyExistsError, MetadataUnavailableError, VersionConflictError
from metadata.store import WRITERS_KEPT, Version


def history(tokens: list[str], incarnation: int = 1) -> list[Version]:
    """Return the versions that writes with those tokens lead through, the create first."""
    writers: tuple[str, ...] = ()
    versions = []
    for number, token in enumerate(tokens):
        writers = write_outcome.add_writer(writers, token)
        versions.append(Version(number, incarnation, writers))
    return versions


@given(before=st.integers(0, 30), after=st.integers(0, 30), took_effect=st.booleans())
def test_a_lost_compare_and_set_is_settled_as_it_was_or_not_at_all(
    before: int, after: int, took_effect: bool
) -> None:
    tokens = [f"b{n}" for n in range(before + 1)]
    expected = history(tokens)[-1]
    tokens += ["mine"] if took_effect else []
    tokens += [f"a{n}" for n in range(after)]
    current = history(tokens)[-1]
    if current == expected:
        return
    try:
        made = write_outcome.settle_compare_and_set("k", expected, current, "mine", maybe_sent=True)
    except MetadataUnavailableError:
        assert after + took_effect > WRITERS_KEPT
    except VersionConflictError:
        assert not took_effect
    else:
        assert took_effect
        assert made == history(tokens)[before + 1]
        assert made.writers == history(tokens)[before + 1].writers[-len(made.writers) :]


@given(after=st.integers(0, 30), mine=st.booleans(), maybe_sent=st.booleans())
def test_a_lost_create_is_settled_as_it_was_or_not_at_all(after: int, mine: bool, maybe_sent: bool) -> None:
    tokens = ["mine" if mine else "theirs", *(f"a{n}" for n in range(after))]
    versions = history(tokens)
    try:
        made = write_outcome.settle_create("k", versions[-1], "mine", maybe_sent=maybe_sent or mine)
    except MetadataUnavailableError:
        assert len(tokens) >= WRITERS_KEPT
    except KeyExistsError:
        assert not mine
    else:
        assert mine
        assert made == versions[0]


def test_a_key_created_anew_is_a_conflict_even_with_the_same_token() -> None:
    expected, current = history(["a", "b"])[-1], history(["a", "b", "mine"], incarnation=2)[-1]
    with pytest.raises(VersionConflictError):
        write_outcome.settle_compare_and_set("k", expected, current, "mine", maybe_sent=True)


def test_a_token_of_an_older_write_settles_nothing() -> None:
    versions = history(["create", "mine", "other", "another"])
    with pytest.raises(VersionConflictError):
        write_outcome.settle_compare_and_set("k", versions[2], versions[3], "mine", maybe_sent=False)
