"""The status page: a process that looks at a cluster as a client does, and shows it over HTTP. Read-only.

In the order to read them:

- `vitals`, `model`: the cluster as it is known (pure)
- `observer`: reads the metadata, and asks the bookies
- `markup`, `layout`, `cluster_pages`, `ledger_pages`: the model as HTML (pure)
- `server`: HTTP, and live updates by server-sent events

The style sheet and the script are in `static/`. Nothing is loaded from elsewhere.
"""
