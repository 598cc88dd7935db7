"""Faults: what strikes a run, how faults that overlap stay apart, and how often bookies do their upkeep.

Read first: `kinds`. The fault model of disks is at the top of `tests.sim.cluster.hardware`.
"""
