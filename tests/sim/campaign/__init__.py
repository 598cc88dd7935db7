"""Many runs: campaigns of seeds, smaller plans that fail alike, and the same seeds on other Pythons.

Read first: `runner` (seeds in several processes), then `shrinking` and `verdicts`. `python -m tests.sim` is
the command.
"""
