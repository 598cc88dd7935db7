"""The content of metadata: ledgers, logs, paged lists and password records. Pure.

Every value is frozen; each legal change is a method that returns a new value. Read `ledger` first, then
`paged_list` (the theory of lists that outgrow one value), then `log`. `metadata.access` writes the values to
a store.
"""
