"""The bookie's server: connections, requests, identity, registration.

Read first: `bookie` (what is put together, start and end), then `connection` (bytes in and out, limits),
`requests` (what each operation does, and when its answer may leave) and `registration` (rule 6).
"""
