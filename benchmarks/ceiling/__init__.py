"""The ceiling: the bare hot path of a writing client and three bookies, and nothing else.

One frame goes from the client's memory through three sockets onto three files, each group of frames behind
one fdatasync, and one number comes back. No index, no terms, no identity, no recovery; the answers are
cumulative, which would be unsafe across a reconnect. It is here to be measured beside the product, so that a
figure of the product can be read as a share of what this shape allows on the machine at hand. Nothing
imports it, and nothing is to be built on it.

A frame is `u32 length of the rest, u32 length of the header` (big-endian), a msgpack header `[ledger, first
entry, LAC, count, lengths, digests]` with the arrays as packed u32, and the payloads one after another. An
answer is `u32 length` and the msgpack array `[1, last entry on disk]`.
"""
