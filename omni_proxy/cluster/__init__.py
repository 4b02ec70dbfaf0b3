"""What proxies over one fleet know of each other. Pure: no I/O, and time is an argument.

`cluster_member` is its I/O. The same idea inside one machine: `multiprocess.shared_memory`.
"""
