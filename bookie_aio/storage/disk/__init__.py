"""The `Disk` seam, and what stands directly on it: fail-stop, open files, atomic replacement."""
