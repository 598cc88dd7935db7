"""The asynchronous client of bookie-aio."""
