"""A small trainer that syncs its weights to a fleet: the program of docs/weight-sync.md.

It uses the proxy as real trainers do (note:two-phase 1): over HTTP, and as rank 0 of its own
process group. It imports nothing of the proxy, only the model.
"""
