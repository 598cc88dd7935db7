"""Where it is stored: ZooKeeper, one SQLite file, or memory. `uri` picks one."""
