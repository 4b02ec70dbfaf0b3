"""omni-proxy: one process in front of complete inference replicas.

`docs/design.md` is the plan of the house; each package below is one of its rooms.
"""

__version__ = "0.1.0"
