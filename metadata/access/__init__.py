"""Typed access to metadata: ledgers, logs and bookies over any `MetadataStore`.

Read `ledgers` first, then `paged_list` (the compare-and-set of a list with pages). `logs` and `fragments`
build on `paged_list`; `bookies` has the records of bookies and of the cluster.
"""
