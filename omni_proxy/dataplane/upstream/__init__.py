"""Upstream connections: pools, attempts, worker acquisition, retry."""
