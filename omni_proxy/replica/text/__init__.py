"""The text stage: many requests computed at once, one forward pass after another.

It knows a model only through `worker.py` and its neighbours only through messages.
"""
