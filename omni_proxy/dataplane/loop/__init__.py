"""The event loop of the data plane: streams, TLS, tasks, timeouts, and sharing trio's thread."""
