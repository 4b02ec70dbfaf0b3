"""Client connections: the PROXY protocol, TLS termination, and reading requests in a loop."""
