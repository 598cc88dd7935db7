"""Text that others chose, such as a peer's message, a key's name or a value that was given.

It is escaped where it enters an error's message, a line of a log, or the output of a command. So it can
neither drive a terminal nor forge a line, in this project's processes and in applications.
"""

from __future__ import annotations

import re

# C0, DEL and C1; the bidi controls; U+2028 and U+2029; surrogates.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape(text: str, *, keep: str = "") -> str:
    r"""Return text in which no character drives a terminal, ends a line or cannot be encoded.

    These are C0, DEL, C1, the bidi controls, U+2028, U+2029 and surrogates (bytes that are not UTF-8). Each
    becomes `\u001b`, or `\n`, `\r` and `\t`, as in JSON: escaped JSON is the same JSON. Text that is escaped
    already stays as it is.

    Args:
        keep: characters to leave as they are, such as the newlines of a text of several lines.
    """
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return _SHORT.get(character) or f"\\u{ord(character):04x}"
