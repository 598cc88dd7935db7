"""Records in the metadata store that are JSON objects of a few fields. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from metadata.errors import MetadataCorruptError
from metadata.ids import MALFORMED

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A frozen record whose fields are exactly those of its JSON object, plus `format`."""

    def to_json(self) -> bytes:
        """Return the stored form."""
        return json.dumps({"format": FORMAT_VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Parse the stored form; raises MetadataCorruptError."""
        try:
            document: dict[str, Any] = json.loads(text)
            if document.pop("format") != FORMAT_VERSION:
                raise ValueError(f"format version is not {FORMAT_VERSION}")
            record = cls(**document)
            record._check()
        except MALFORMED as error:
            raise MetadataCorruptError(f"{cls.__name__} is damaged: {error!r} in {text[:200]!r}") from error
        return record

    def _check(self) -> None:
        """Raise ValueError where a field has a wrong type or value."""
