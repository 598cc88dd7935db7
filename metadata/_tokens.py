"""Writer tokens: the mark of one write, by which it is known again when its answer was lost."""

from __future__ import annotations

import secrets

from metadata.keys import check_token


def token_of(token: str | None) -> str:
    """Give the token given, checked, or a new one."""
    return secrets.token_hex(8) if token is None else check_token(token)
