"""A long run of the proxy under hostile clients and faults: `python -m tools.soak`."""
