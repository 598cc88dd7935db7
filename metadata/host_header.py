"""The Host header of a request over HTTP: whether it names this server, or was chosen by somebody else.

A web site may resolve its own name to this machine (DNS rebinding). Then its scripts read what this machine
alone may read, and the Host header has the site's name. Addresses cannot be rebound.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import TYPE_CHECKING

from metadata.access.bookies import split_address

if TYPE_CHECKING:
    from collections.abc import Collection


def is_host_allowed(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this server: by an address, as localhost, or by one of the names.

    Args:
        names: in lower case (`str.casefold`).
    """
    with suppress(ValueError):
        host, _ = split_address(host)
    host = host.removeprefix("[").removesuffix("]").rstrip(".").casefold()
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
