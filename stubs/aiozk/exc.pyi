class ZKError(Exception): ...

class ResponseError(ZKError):
    error_code: int | None

response_error_xref: dict[int | None, type[ResponseError]]
