"""A long run of the proxy among enemies: `python -m tools.soak`."""
