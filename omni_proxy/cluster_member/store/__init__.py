"""The store of a cluster: where it is, and a connection to it."""
