"""Versions of weights on this machine: received in place, published at once, kept, found again.

Invariant: a folder that is called `vN` is whole, whatever happened to the program that wrote it.
Nothing here imports a model runtime, waits for a network or knows a worker; every call may block.
"""
