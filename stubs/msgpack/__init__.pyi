# What this project uses of msgpack, which ships no types.
from typing_extensions import Buffer

class UnpackException(Exception): ...

def packb(o: object, /) -> bytes: ...
def unpackb(
    packed: Buffer,
    /,
    *,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_ext_len: int = ...,
    strict_map_key: bool = ...,
) -> object: ...
