"""HTTP calls from the proxy itself to workers: client, broadcast, name resolution."""
