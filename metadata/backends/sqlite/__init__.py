"""The embedded metadata store: one SQLite file, shared by several processes of one machine.

Read `store` first. `tables` has every SQL statement, `leases` the sessions, `database` the connections.
"""
