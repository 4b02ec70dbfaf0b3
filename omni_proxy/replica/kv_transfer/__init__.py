"""Prefill and decode on different replicas; KV caches are transferred over TCP sockets."""
