"""A long run of the proxy with hostile clients and faults: `python -m tools.soak`."""
