"""The data of one request: the exchange, its trace, its access-log line, and cached requests."""
