"""Weights over the fleet. Importing this package imports nothing: the replica uses its checksums.

Invariant: no module in it imports a model runtime.
"""
