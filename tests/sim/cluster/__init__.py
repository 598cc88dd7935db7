"""The simulated machine room: event loop, network, disks and metadata store.

Production code runs on these unchanged. Read first: `loop` (virtual time, processes), then `hardware` (the
fault model and the fault budget), `network` and `metadata`. `sequence`, `quiet` and `remembered` keep runs
deterministic and fast.
"""
