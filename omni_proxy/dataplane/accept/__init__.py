"""Listeners: sockets, TLS certificates, PROXY protocol."""
