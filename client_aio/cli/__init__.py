"""The command line, `bookie-aio`: the place where client, server and metadata are put together.

A newcomer reads, in this order:

- `entry` and `main`: how a command begins, the groups of commands, and how a command ends;
- `options`: the options that every command takes, and how its coroutine is run;
- `output` and `exit_codes`: results as tables or JSON, and the exit codes;
- one group of commands, such as `ledger` (with its text forms in `text`).

`cluster` runs bookies as processes of its own; `bench` measures; `spark` needs the extra of the same name.
"""
