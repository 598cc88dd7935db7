"""The bookie's storage: segments that hold every entry once, group commit, index, crash recovery.

Read in this order:

1. `engine`: the storage as the server sees it. `health`: what stops it or makes it read-only.
2. `segment/format`: every byte of a segment. `journal`: group commit into the current segment.
3. `ledgers/`: what is known of each ledger beside its entries. `ledger_states` is the view in memory,
   `checkpoint` and `ledger_table` are the files, `checkpointer` writes them.
4. `segment/`: `segment` and `index` (one segment and where its blocks lie), `segment_set` (all segments),
   `allocator` (the next segment, space), `files` (the order of writes and syncs), `replay` (torn or damaged),
   `witness` (what was durable last).
5. `read/`: `lookup` (which segments, and what damage means), `reader`, `copy_order` (which copy counts).
6. `crash_recovery`: from the directories to the state that the engine starts with. `found_files`: the files
   as it finds them. `data_directory`: the files of a directory.
7. `maintenance/`, in the background: `sealer`, `compactor`, `scrubber`. `background_task` runs them.
8. `repair_writes`: storing what a repair brings. `disk/`: the only modules that touch files.

Imports go one way: `repair_writes` → `engine` → `maintenance` → `read` → `ledgers` → `segment` → `disk` →
`health`. `journal` is between `ledgers` and `segment`.

Pure are `segment/format`, `segment/index`, `ledgers/checkpoint` and `ledgers/ledger_table`.

docs/STORAGE.md describes the format, and the state that a crash at each point leaves.
"""
