"""The ceiling: the bare hot path of a writing client and three bookies, and nothing else.

One frame goes from the client's memory through three sockets onto three files. One fdatasync follows each
group of frames, and one number comes back. No index, no terms, no identity, no recovery. Answers are
cumulative, which would be unsafe across a reconnect. The ceiling is measured beside the product. A figure of
the product is then a share of the limit of this shape on this machine. Nothing imports it, and nothing is to
be built on it.

A frame is `u32 length of the rest, u32 length of the header` (big-endian), a msgpack header `[ledger, first
entry, LAC, count, lengths, digests]` with the arrays as packed u32, and the payloads one after another. An
answer is `u32 length` and the msgpack array `[1, last entry on disk]`.
"""
