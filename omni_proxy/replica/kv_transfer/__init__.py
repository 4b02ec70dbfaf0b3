"""Prefill and decode on different replicas: the KV cache of a prompt goes over a TCP socket."""
