"""A small trainer that keeps a fleet's weights in step: the program of docs/weight-sync.md.

It talks to the proxy as real trainers do (two-phase.md 1): over HTTP without a key, and as rank 0
of a process group of its own. It knows nothing of the proxy's code, only of the model's.
"""
