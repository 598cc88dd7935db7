"""The status page: a process that looks at a cluster as a client does, and shows it over HTTP. Read-only.

Read in this order: `vitals` and `model` (the cluster as it is known; pure), `observer` (reads the metadata
and asks the bookies), `markup`, `layout` and the pages (HTML; pure), `server` (HTTP, live updates by
server-sent events). The style sheet and the script are in `static/`. Nothing is loaded from elsewhere.
"""
