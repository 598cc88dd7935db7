"""The product measured from all sides: `python -m benchmarks.suite`.

`parts` says what is measured, `client` is the process that puts the load on, `plots` draws what was found.
"""
