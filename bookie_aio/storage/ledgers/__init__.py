"""The state of each ledger beside its entries: terms, marks, token hashes, LACs, tombstones."""
