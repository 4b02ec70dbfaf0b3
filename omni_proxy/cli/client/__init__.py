"""How commands ask a running proxy: its URL, key and TLS, and the admin API."""
