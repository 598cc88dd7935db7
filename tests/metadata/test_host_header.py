"""Host headers: which ones name this machine, and which ones a web site may have chosen."""

from __future__ import annotations

import pytest

from metadata.host_header import is_host_allowed


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("127.0.0.1:9460", True), ("127.0.0.1", True), ("[::1]:9460", True), ("10.1.2.3:80", True),
        ("localhost:9460", True), ("LOCALHOST", True), ("localhost.", True), ("ops.example:1", True),
        ("evil.example:9460", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
        ("", False), ("[::1", False), ("evil.example@127.0.0.1", False), ("127.0.0.1:9460:1", False),
    ],
)  # fmt: skip
def test_a_name_that_somebody_else_chose_is_refused(host: str, is_allowed: bool) -> None:
    assert is_host_allowed(host, {"ops.example"}) is is_allowed
