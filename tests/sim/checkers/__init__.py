"""Checkers: what must hold of a run, seen from outside.

A checker sees the futures of the application, the entries that readers get, the metadata store, and the
frames on the wire. Each module's docstring lists the invariants that it owns, by name. Read first:
`invariants` (the history of a run, and bounded ledgers), then `bookie_promises`, `replicas` and
`after_healing`. Unbounded ledgers: `unbounded`, then `unbounded_lifecycle`. Logs: `log`, then
`log_lifecycle`.
"""
