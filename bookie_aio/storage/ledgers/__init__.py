"""What a bookie remembers of each ledger beside its entries: terms, fences, marks, tombstones."""
