from typing import Self

class Response:
    opcode: int | None
    @classmethod
    def deserialize(cls, raw_bytes: bytes) -> Self: ...

