"""The wire protocol, shared by bookie and client. Byte by byte in docs/PROTOCOL.md.

Read first: `frames` (length-prefixed frames), `messages` (requests and answers), `blocks` (entries).
All of it is pure: bytes in, values out, no clock, no sockets, no `async`.
"""
