"""Listeners: their sockets, addresses and roles."""
