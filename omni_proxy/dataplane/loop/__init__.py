"""The event loop: streams, TLS, tasks, timeouts, and its place in trio's loop."""
