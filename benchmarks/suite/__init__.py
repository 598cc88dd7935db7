"""The suite that measures the product alone: `python -m benchmarks.suite`.

`parts` has the measurements, `client` is the process that makes the load, `plots` draws the results.
"""
