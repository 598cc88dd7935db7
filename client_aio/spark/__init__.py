"""DataFrames in and out of logs and ledgers, for PySpark."""
