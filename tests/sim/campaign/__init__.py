"""Many runs: campaigns of seeds, smaller plans that fail alike, and the same seeds on other Pythons.

Read first: `runner` (seeds in several processes), then `record` (the file of a campaign) and `run_key` (the
code that a record counts for). `python -m tests.sim` is the command.
"""
