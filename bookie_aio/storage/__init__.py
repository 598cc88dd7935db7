"""The bookie's storage: segments that hold every entry once, group commit, index, restart.

Read first: `engine` (what the server sees), `format` (every byte on disk), `journal` (group commit), `replay`
(torn or damaged). Then `ledgers` (what is known of each), `lookup` and `reader`, `index` and `segment`;
`restart` (opening a directory), `allocator` (space), `tender` (sealing), `checkpoint`, `directory`. `disk`
is the one place that touches files. `format`, `index`, `checkpoint` and `figures` are pure. docs/STORAGE.md
describes the format and what a crash at each point leaves.
"""
