"""Planted bugs: what the simulator is worth is how many of them it finds.

Read first: `planting` (how), then the tables, each named by the code that its bugs are planted in: `storage`,
`protocol`, `logs_and_terms`, `server_and_recovery`, `crowd`; `__main__` runs them.
"""
