from aiozk.exc import ResponseError

from .request import Request
from .response import Response

class ACL: ...

UNRESTRICTED_ACCESS: ACL

class Stat:
    created_zxid: int
    version: int
    ephemeral_owner: int
    data_length: int
    created: int
    modified: int
    num_children: int

class ConnectRequest(Request):
    def __init__(
        self,
        *,
        protocol_version: int,
        last_seen_zxid: int,
        timeout: int,
        session_id: int,
        password: bytes,
        read_only: bool,
    ) -> None: ...

class ConnectResponse(Response):
    timeout: int
    session_id: int
    password: bytes | None

class PingRequest(Request): ...
class CloseRequest(Request): ...

class Create2Request(Request):
    def __init__(self, *, path: str, data: bytes, acl: list[ACL]) -> None: ...
    def set_flags(
        self, ephemeral: bool = False, sequential: bool = False, container: bool = False
    ) -> None: ...

class Create2Response(Response):
    path: str
    stat: Stat

class GetDataRequest(Request):
    def __init__(self, *, path: str, watch: bool) -> None: ...

class GetDataResponse(Response):
    data: bytes | None
    stat: Stat

class SetDataRequest(Request):
    def __init__(self, *, path: str, data: bytes, version: int) -> None: ...

class SetDataResponse(Response):
    stat: Stat

class CheckVersionRequest(Request):
    def __init__(self, *, path: str, version: int) -> None: ...

class CheckVersionResponse(Response): ...

class TransactionRequest(Request):
    def __init__(self) -> None: ...
    def add(self, request: Request) -> None: ...

class TransactionResponse(Response):
    responses: list[SetDataResponse | CheckVersionResponse | ResponseError]

class DeleteRequest(Request):
    def __init__(self, *, path: str, version: int) -> None: ...

class DeleteResponse(Response): ...

class ExistsRequest(Request):
    def __init__(self, *, path: str, watch: bool) -> None: ...

class ExistsResponse(Response):
    stat: Stat

class GetChildrenRequest(Request):
    def __init__(self, *, path: str, watch: bool) -> None: ...

class GetChildrenResponse(Response):
    children: list[str]

class RemoveWatchesRequest(Request):
    def __init__(self, *, path: str, type: int) -> None: ...

class WatchEvent(Response):
    type: int
    state: int
    path: str

PING_XID: int
WATCH_XID: int
response_xref: dict[int | None, type[Response]]
