"""Crash states of the storage engine: what a power cut, or a killed process, may leave on the disk.

Read first: `states` (one recording, every way to cut it off), then `chains` (several starts, one after
another). `python -m tests.sim.crash` runs both.
"""
