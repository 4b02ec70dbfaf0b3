"""The I/O of a cluster: the connection to the store, and the service of this proxy's membership.

`cluster` has the shared state without I/O."""
