"""One attempt to send a request to a worker, retries, and attempts beside an exchange."""
