class Request:
    opcode: int | None
    def serialize(self, xid: int | None = None) -> bytes: ...

