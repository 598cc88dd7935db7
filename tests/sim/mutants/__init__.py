"""Planted bugs: what the simulator is worth is how many of them it finds.

Read first: `planting` (how), then the tables: `storage`, `protocol`, `chains`; `__main__` runs them.
"""
