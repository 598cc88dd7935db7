"""The embedded metadata store: one SQLite file, shared by several processes of one machine."""
