"""Work in the background: sealing, compaction, scrubbing."""
