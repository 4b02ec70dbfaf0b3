"""The admin API: everything over HTTP that is not model traffic, a Quart application on trio.

Invariant: only the data plane reaches it, over a private Unix socket, with heads that it validated
and bodies that it limited. It reads the fleet and requests changes from the configuration store; it
edits no configuration itself.
"""
