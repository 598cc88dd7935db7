"""The bookie's storage: segments that hold every entry once, group commit, index, restart.

Read first: `engine` (what the server sees), `format` (every byte on disk), `journal` (group commit), then
`index`, `segment`, `replay`. `disk` is the one place that touches files. docs/STORAGE.md describes the
format and what a crash at each point leaves.
"""
