"""The bookie's server: connections, requests, identity, registration.

Read first:

- `bookie`: the parts of a bookie, its start and its end;
- `connection`: bytes in and out, within the limits;
- `dispatcher`, then `handlers`: each operation, and when its answer may leave;
- `registration`: identity (rule 6).
"""
