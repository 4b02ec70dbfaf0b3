"""Client of a running proxy's admin API: URL, key, TLS, requests, the types of its feed."""
