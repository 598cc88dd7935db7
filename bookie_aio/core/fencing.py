"""Fencing: what a bookie does with the term of a request (rule 7).

A ledger's term at a bookie is a number that only grows. A bounded ledger knows two: the writer's (0) and
the final one that every recovering client uses, so that recoveries do not shut one another out. A bookie
that has never heard of a ledger holds 0 for it.

    request's term    verdict   what the bookie does
    below the held    REFUSE    answers INVALID_TERM with the held term
    the held          ACCEPT    goes on
    above the held    RAISE     stores the term, then goes on; later requests with the old one are refused

The decision and the append that follows it happen in one step: nothing may run between them (rule 7).
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What to do with a request that carries a term."""

    REFUSE = "refuse"
    ACCEPT = "accept"
    RAISE = "raise"


def judge(held_term: int, request_term: int) -> Verdict:
    """Compare a request's term with the one the bookie holds for its ledger."""
    assert held_term >= 0
    assert request_term >= 0
    if request_term == held_term:
        return Verdict.ACCEPT
    return Verdict.RAISE if request_term > held_term else Verdict.REFUSE
