"""State that the proxies of a cluster share. Pure: time is an argument.

`cluster_member` does the I/O. `multiprocess.shared_memory` does the same for the processes of one
proxy.
"""
