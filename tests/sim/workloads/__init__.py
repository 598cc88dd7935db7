"""Workloads: the roles that simulated client processes play, with the production client.

Read first: `ledger`, which owns the table of roles. The `*_full_api` modules call every public method, in
every state of a handle.
"""
