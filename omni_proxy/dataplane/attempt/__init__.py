"""One attempt to send a request to a worker, retries, reports to outlier ejection, and attempts
beside an exchange."""
