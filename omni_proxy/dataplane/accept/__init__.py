"""Listeners: bound sockets, TLS certificates, the PROXY protocol, and TLS connections."""
